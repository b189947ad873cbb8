"""course_lib.checkpoint.hugging_face against transformers: to its format from any layout, and back to any. 4 ranks,
CPU.
"""

import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from calls import said
from course_lib.checkpoint.checkpoints import load, save
from course_lib.checkpoint.hugging_face import from_hf, from_hf_config, to_hf
from course_lib.collectives.traffic import count_traffic
from course_lib.five_d.layouts import Layout
from course_lib.five_d.meshes import build_mesh
from course_lib.five_d.model import parallelize, whole_weights
from course_lib.single_gpu.hugging_face import to_hf as model_to_hf
from course_lib.single_gpu.model import ModelConfig, Transformer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
SIZES = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn_hidden": 44, "vocab": 97, "rope_theta": 500.0}
MOE = {"experts": 4, "top_k": 2, "ffn_hidden": 32}


def theirs_of(folder, **options):
    """What transformers makes of a folder. Imported here: it takes seconds, and each rank imports this module."""
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder, **options)


def parallel_of(words: str, tied: bool, moe: dict | None = None, seed: int = 0, **sizes):
    layout, config = Layout.parse(words), ModelConfig(**SIZES | sizes, tied=tied)
    return parallelize(config, layout, build_mesh(layout), moe=moe, seed=seed, lr=1e-2)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(97, (8, 17), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1], tokens[:, 1:]


def first_loss(parallel) -> float:
    own = [each.chunk(parallel.layout.dp)[parallel.mesh.dp.rank()] for each in batch()]
    return parallel.step(*own)[0].item()


def trained(ways: list[tuple], root) -> list[dict[str, torch.Tensor]]:
    """On a rank, of each (folder, layout, tied, moe): a checkpoint after a step; its weights, of dense ones."""
    found = []
    for name, words, tied, moe in ways:
        parallel = parallel_of(words, tied, moe)
        first_loss(parallel)
        (root / name).mkdir(exist_ok=True)
        save(parallel, root / name, 1)
        again = None if moe else parallel_of("dp4", tied, seed=1)
        if again:
            load(again, root / name / "step-000000001")
        found.append(whole_weights(again) if again else {})
    return found


@pytest.fixture(scope="module")
def checkpoints(ranks, tmp_path_factory):
    """Folders of checkpoints, and for each a Transformer with its weights, by name: tied, untied, and of experts."""
    root = tmp_path_factory.mktemp("checkpoints")
    ways = [("tied", "dp2,pp2,zero1", True, None), ("untied", "dp2,tp2,sp,zero3", False, None)]
    weights = ranks(trained, [*ways, ("experts", "dp2,tp2,ep2", True, MOE)], root)[0]
    models = {}
    for (name, _, tied, _), state in zip(ways, weights, strict=False):
        models[name] = Transformer(ModelConfig(**SIZES, tied=tied))
        models[name].load_state_dict(state)
    return {path.name: path / "step-000000001" for path in sorted(root.iterdir())}, models


@pytest.mark.parametrize("name", ["tied", "untied"])
@pytest.mark.parametrize("file_bytes", [5e9, 20_000, 1])
@torch.no_grad()
def test_transformers_reads_what_to_hf_writes(checkpoints, tmp_path, name, file_bytes):
    """As many files as it takes; logits are those of our model, within 1e-5; weights are the same in each bit."""
    (folders, models), out = checkpoints, tmp_path / "model"
    to_hf(folders[name], out, file_bytes=file_bytes)
    theirs, info = theirs_of(out, output_loading_info=True)
    assert not any(info.values()), info
    expected = model_to_hf(models[name]).state_dict()
    assert theirs.dtype == torch.float32 and theirs.config.tie_word_embeddings == (name == "tied")
    assert all(torch.equal(tensor, expected[key]) for key, tensor in theirs.state_dict().items())
    inputs, _ = batch()
    torch.testing.assert_close(theirs(inputs).logits, models[name](inputs), rtol=1e-5, atol=1e-5)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(out.glob("*.safetensors"))
    assert {file.name for file in files} == {*index["weight_map"].values()}
    held = [load_file(file) for file in files]
    assert {key: file.name for file, each in zip(files, held, strict=True) for key in each} == index["weight_map"]
    for each in held:
        assert len(each) == 1 or sum(tensor.nbytes for tensor in each.values()) <= file_bytes
    assert (len(files) == 1) == (file_bytes == 5e9) and (len(files) == len(index["weight_map"])) == (file_bytes == 1)
    assert sorted(tmp_path.iterdir()) == [out]


@torch.no_grad()
def test_to_hf_in_bfloat16(checkpoints, tmp_path):
    """Each weight is rounded once, and the model is loaded as such."""
    folders, models = checkpoints
    to_hf(folders["untied"], tmp_path / "model", torch.bfloat16, file_bytes=20_000)
    theirs, expected = theirs_of(tmp_path / "model"), model_to_hf(models["untied"]).state_dict()
    assert theirs.dtype == torch.bfloat16
    assert all(torch.equal(tensor, expected[name].bfloat16()) for name, tensor in theirs.state_dict().items())


def from_folders(ways: list[tuple]) -> tuple[list[float], list[list[int]]]:
    """On a rank, of each (layout, tied, folder): the first loss of a model that starts from there, and the bytes of the
    three exchanges before: of the config, of what is where, of whether it has been read; of sizes first, each time.
    """
    losses, sent = [], []
    for words, tied, folder in ways:
        parallel = parallel_of(words, tied, seed=1)
        with count_traffic() as traffic:
            from_hf(parallel, folder)
        losses.append(first_loss(parallel))
        sent.append([record.bytes for record in traffic.select("all_gather").records[:6]])
    return losses, sent


@torch.no_grad()
def test_every_layout_starts_from_the_weights_of_transformers(ranks, checkpoints, tmp_path):
    """The first loss is that of transformers, within 1e-5: of a folder of to_hf, and of one that it has saved. What a
    rank has found in the files it keeps to itself.
    """
    (folders, _), ways, losses = checkpoints, [], []
    inputs, targets = batch()
    for name, texts in (
        ("tied", ["dp4,zero3", "dp2,pp2,zero3,keep", "pp2,tp2,zb-v", "dp2,cp2,zero1"]),
        ("untied", ["dp4,zero2", "tp4", "pp4", "dp2,tp2,sp,zero3"]),
    ):
        ours, own = tmp_path / name, tmp_path / f"{name} of theirs"
        to_hf(folders[name], ours, file_bytes=20_000)
        theirs = theirs_of(ours)
        theirs.save_pretrained(own)
        loss = F.cross_entropy(theirs(inputs).logits.flatten(0, 1), targets.flatten()).item()
        ways += [(text, name == "tied", folder) for text, folder in zip(texts, [ours, own] * 2, strict=True)]
        losses += [loss] * len(texts)
        assert from_hf_config(own) == from_hf_config(ours) == ModelConfig(**SIZES, tied=name == "tied")
    for found, sent in ranks(from_folders, ways):
        assert found == pytest.approx(losses, rel=1e-5), ways
        assert all(looked == read for _, _, _, looked, _, read in sent), sent


def refused(folders: list, tied: bool) -> list[tuple[str, bool]]:
    """On a rank, of each folder: what from_hf raises, and whether all weights are as before."""
    parallel, found = parallel_of("dp2,tp2", tied), []
    for folder in folders:
        before = whole_weights(parallel)
        message = said(lambda: from_hf(parallel, folder))  # noqa: B023
        after = whole_weights(parallel)
        found.append((message, all(torch.equal(after[name], before[name]) for name in before)))
    assert first_loss(parallel) > 0
    return found


def test_from_hf_refuses_another_model_and_missing_files_on_all_ranks(ranks, checkpoints, tmp_path):
    (folders, _), cases = checkpoints, {}
    to_hf(folders["untied"], tmp_path / "model", file_bytes=20_000)

    def copied(name: str, message: str) -> Path:
        cases[tmp_path / name] = message
        return shutil.copytree(tmp_path / "model", tmp_path / name)

    (copied("no config", "no config.json") / "config.json").unlink()
    sorted(copied("a file less", "No such file").glob("*.safetensors"))[1].unlink()
    file = sorted(copied("cut short", "SafetensorError").glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-10])
    for name, value in (("num_hidden_layers", 3), ("vocab_size", 98), ("intermediate_size", 48)):
        file = copied(name, "another model: ") / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))
    file = copied("a tensor less", "has no model.norm.weight") / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    others = {name for name in index["weight_map"].values()} - {index["weight_map"]["model.norm.weight"]}
    index["weight_map"]["model.norm.weight"] = min(others)
    file.write_text(json.dumps(index))
    cases[tmp_path / "nowhere"] = "is no model of transformers: it has no config.json"
    of_ranks = ranks(refused, list(cases), False)
    for (path, expected), *found in zip(cases.items(), *of_ranks, strict=True):
        assert len({message for message, _ in found}) == 1 and all(same for _, same in found), (path, found)
        assert found[0][0].startswith("CheckpointError: ") and expected in found[0][0], (path, found[0])
    of_ranks = ranks(refused, [tmp_path / "model"], True)
    assert all(
        found[0][0] == "CheckpointError: another model: tied is False there, and True here" for found in of_ranks
    )


def test_to_hf_refuses_what_it_can_not_write_and_leaves_nothing(checkpoints, tmp_path):
    """Experts, an output that is there, no checkpoint, and damage."""
    (folders, _), out = checkpoints, tmp_path / "model"

    def error(folder: Path) -> str:
        found = said(lambda: to_hf(folder, out))
        assert found.startswith(("CheckpointError: ", "DamagedError: ")) and "\n" not in found
        return found

    assert "no model of Llama's kind: it has blocks.0.mlp." in error(folders["experts"])
    assert error(tmp_path / "nowhere").endswith("nowhere: no such folder")
    for number, file in enumerate(sorted(folders["tied"].iterdir())):
        if file.name == "checkpoint.json":
            continue
        folder = shutil.copytree(folders["tied"], tmp_path / str(number))
        (folder / file.name).write_bytes(file.read_bytes()[:-1])
        assert f"is damaged: {file.name}: " in error(folder)
        shutil.rmtree(folder)
    assert list(tmp_path.iterdir()) == []
    out.mkdir()
    (out / "file").write_text("mine")
    assert error(folders["tied"]).endswith("model is there already")
    assert (out / "file").read_text() == "mine" and list(tmp_path.iterdir()) == [out]


FULL_DISK = """
    import resource, sys
    from course_lib.checkpoint.hugging_face import to_hf
    resource.setrlimit(resource.RLIMIT_FSIZE, (12_300, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    try:
        to_hf(sys.argv[1], sys.argv[2], file_bytes=1)
    except Exception as error:
        print(type(error).__name__)
"""


def test_nothing_is_left_of_what_does_not_fit_on_the_disk(checkpoints, tmp_path):
    """The embedding is larger than any file may be in that process; the shards before it have been written."""
    command = [sys.executable, "-c", textwrap.dedent(FULL_DISK), str(checkpoints[0]["untied"]), str(tmp_path / "model")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0 and ran.stdout.strip(), ran.stderr
    assert list(tmp_path.iterdir()) == []
    to_hf(checkpoints[0]["untied"], tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
