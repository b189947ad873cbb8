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
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from calls import said
from course_lib.checkpoint import from_hf, to_hf
from course_lib.checkpoint.checkpoints import latest, load, save
from course_lib.checkpoint.files import ABOUT, describe, sealed
from course_lib.checkpoint.hf_files import from_hf_config
from course_lib.collectives.traffic import count_traffic
from course_lib.five_d.layouts import Layout
from course_lib.five_d.meshes import build_mesh
from course_lib.five_d.model import full_weights, parallelize
from course_lib.single_gpu.hugging_face import hf_name
from course_lib.single_gpu.hugging_face import to_hf as model_to_hf
from course_lib.single_gpu.model import ModelConfig, Transformer
from course_lib.train.program import main, options

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
SIZES = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn_hidden": 44, "vocab": 97, "rope_theta": 500.0}


def theirs_of(folder, **options):
    """What transformers makes of a folder. Imported here: it takes seconds, and each rank imports this module."""
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder, **options)


def parallel_of(words: str, tied: bool, seed: int = 0, **sizes):
    layout, config = Layout.parse(words), ModelConfig(**SIZES | sizes, tied=tied)
    return parallelize(config, layout, build_mesh(layout), seed=seed, lr=1e-2)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(97, (8, 17), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1], tokens[:, 1:]


def first_loss(parallel) -> float:
    own = [each.chunk(parallel.layout.dp)[parallel.mesh.dp.rank()] for each in batch()]
    return parallel.step(*own)[0].item()


def trained(ways: list[tuple], root) -> list[dict[str, torch.Tensor]]:
    """On a rank, of each (folder, layout, tied): a checkpoint after a step; its weights."""
    found = []
    for name, words, tied in ways:
        parallel = parallel_of(words, tied)
        first_loss(parallel)
        (root / name).mkdir(exist_ok=True)
        save(parallel, root / name, 1)
        again = parallel_of("dp4", tied, seed=1)
        load(again, root / name / "step-000000001")
        found.append(full_weights(again))
    return found


@pytest.fixture(scope="module")
def checkpoints(ranks, tmp_path_factory):
    """Folders of checkpoints, and for each a Transformer with its weights, by name: tied and untied."""
    root = tmp_path_factory.mktemp("checkpoints")
    ways = [("tied", "dp2,pp2,zero1", True), ("untied", "dp2,tp2,sp,zero3", False)]
    weights = ranks(trained, ways, root)[0]
    models = {}
    for (name, _, tied), state in zip(ways, weights, strict=True):
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


def with_notes(folder: Path, out: Path, **notes) -> Path:
    """A copy of a checkpoint, about which a run has noted more."""
    shutil.copytree(folder, out)
    (out / ABOUT).write_text(sealed(describe(folder) | notes))
    return out


def saved_tokenizer(folder: Path, words: int) -> Path:
    """A tokenizer of so many words; the end token is the sixth."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {f"w{number}": number for number in range(words)} | {"<end>": 5}
    text = Tokenizer(models.WordLevel({name: number for name, number in vocab.items() if name != "w5"}, unk_token="w0"))
    text.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=text, eos_token="<end>").save_pretrained(folder)
    return folder


@pytest.fixture
def alone():
    """A default group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_text_of_an_exported_model_ends(alone, tmp_path, monkeypatch):
    """The program's --seq and --tokenizer are in the model that its checkpoint becomes."""
    from transformers import AutoTokenizer, GenerationConfig

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    saved_tokenizer(tmp_path / "words", 97)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "train.txt").write_text("w1 w2 w3 " * 20)
    main("--preset debug --steps 1 --batch 2 --seq 16 --checkpoints saved --dataset texts --tokenizer words".split())
    monkeypatch.chdir(tmp_path / "texts")
    to_hf(latest(tmp_path / "saved"), tmp_path / "model")
    theirs, text = theirs_of(tmp_path / "model"), AutoTokenizer.from_pretrained(tmp_path / "model")
    settings = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast", "transformers 4 has no TokenizersBackend"
    config = theirs.config
    assert (config.max_position_embeddings, config.bos_token_id, config.eos_token_id) == (16, None, 5)
    assert GenerationConfig.from_pretrained(tmp_path / "model").eos_token_id == 5
    with torch.no_grad():
        for name, weight in theirs.named_parameters():  # a model that ends each text
            weight.fill_(0.0 if name.endswith("_proj.weight") else 0.1 if "embed" in name else 1.0)
        theirs.lm_head.weight[5] = 1.0
    prompt = text("w1 w2", return_tensors="pt")["input_ids"]
    assert theirs.generate(prompt, max_new_tokens=9, do_sample=False).tolist() == [[1, 2, 5]]
    assert text.decode([1, 2, 5], skip_special_tokens=True) == "w1 w2"


def test_length_and_tokenizer_of_an_exported_model(checkpoints, tmp_path, capsys):
    """The source's length, if that is more; the tokenizer that is named, or none where the run's has moved."""
    saved, words = checkpoints[0]["untied"], saved_tokenizer(tmp_path / "words", 97)
    sizes = describe(saved)["config"] | {"context": 64}
    source = with_notes(saved, tmp_path / "source", seq=16, config=sizes, plan={"tokenizer": str(tmp_path / "moved")})
    to_hf(source, tmp_path / "without")
    assert theirs_of(tmp_path / "without").config.max_position_embeddings == 64
    assert not [*(tmp_path / "without").glob("tokenizer*")]
    assert f"the tokenizer {tmp_path / 'moved'} can't be loaded: " in capsys.readouterr().out
    to_hf(saved, tmp_path / "given", tokenizer=words)
    assert theirs_of(tmp_path / "given").config.eos_token_id == 5
    to_hf(saved, tmp_path / "plain")
    plain = theirs_of(tmp_path / "plain").config
    assert (plain.max_position_embeddings, plain.bos_token_id, plain.eos_token_id) == (8192, None, None)

    large = saved_tokenizer(tmp_path / "large", 98)
    for name, line in ((large, "has 98 tokens, the model's vocabulary 97"), (tmp_path / "no", "can't be loaded: ")):
        message = said(lambda: to_hf(saved, tmp_path / "refused", tokenizer=name))
        assert message.startswith("CheckpointError: ") and line in message and "\n" not in message
    assert not (tmp_path / "refused").exists()


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
        assert from_hf_config(own) == from_hf_config(ours) == (ModelConfig(**SIZES, tied=name == "tied"), None)
    for found, sent in ranks(from_folders, ways):
        assert found == pytest.approx(losses, rel=1e-5), ways
        assert all(looked == read for _, _, _, looked, _, read in sent), sent


def refused(folders: list, tied: bool) -> list[tuple[str, bool]]:
    """On a rank, of each folder: what from_hf raises, and whether all weights are as before."""
    parallel, found = parallel_of("dp2,tp2", tied), []
    for folder in folders:
        before = full_weights(parallel)
        message = said(lambda: from_hf(parallel, folder))
        after = full_weights(parallel)
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
    file = sorted((tmp_path / "model").glob("*.safetensors"))[1].name
    (copied("a file less", f"lacks {file}, which model.safetensors.index.json names") / file).unlink()
    file = sorted(copied("cut short", "safetensors can't be read: ").glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-10])
    for name, value in (("num_hidden_layers", 3), ("vocab_size", 98), ("intermediate_size", 48)):
        file = copied(name, "another model: ") / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))
    file = copied("a tensor less", "has no model.norm.weight") / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    its_file = index["weight_map"]["model.norm.weight"]
    others = {*index["weight_map"].values()} - {its_file}
    index["weight_map"]["model.norm.weight"] = min(others)
    file.write_text(json.dumps(index))
    file = copied("not in the index", "index.json has no model.norm.weight") / "model.safetensors.index.json"
    del index["weight_map"]["model.norm.weight"]
    shutil.copy(file.parent / its_file, file.parent / "model.safetensors")
    file.write_text(json.dumps(index))  # the file beside it, of which the index says nothing, is another model's
    cases[tmp_path / "nowhere"] = "is not a model of transformers: it has no config.json"
    of_ranks = ranks(refused, list(cases), False)
    for (path, expected), *found in zip(cases.items(), *of_ranks, strict=True):
        assert len({message for message, _ in found}) == 1 and all(same for _, same in found), (path, found)
        assert found[0][0].startswith("CheckpointError: ") and expected in found[0][0], (path, found[0])
    of_ranks = ranks(refused, [tmp_path / "model"], True)
    assert all(
        found[0][0] == "CheckpointError: another model: tied is False in the files, True here" for found in of_ranks
    )


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}


def quantized(folder: Path, block: list[int] | None, files: int = 1) -> dict[str, torch.Tensor]:
    """Make a folder of to_hf an FP8 model, as such are released: its projections are codes, beside them the scale of
    each block (None: of the tensor). files: 2: the scales are in a file of their own. Returns the weights, dequantized.
    """
    tensors, scales, whole = load_file(folder / "model-00001-of-00001.safetensors"), {}, {}
    for name, weight in tensors.items():
        whole[name] = weight
        if not name.endswith("_proj.weight"):
            continue
        rows, columns = block or weight.shape
        grid = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
        whole[name] = torch.empty_like(weight)
        codes = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
        for i, j in ((i, j) for i in range(grid.shape[0]) for j in range(grid.shape[1])):
            part = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            grid[i, j] = weight[part].abs().max() / 448
            codes[part] = (weight[part] / grid[i, j]).to(codes.dtype)
            whole[name][part] = codes[part].float() * grid[i, j]
        tensors[name], scales[f"{name}_scale_inv"] = codes, grid if block else grid.reshape(())
    (folder / "model-00001-of-00001.safetensors").unlink()
    parts = [tensors, scales] if files == 2 else [tensors | scales]
    for number, part in enumerate(parts):
        save_file(part, folder / f"part-{number}.safetensors", {"format": "pt"})
    where = {name: f"part-{number}.safetensors" for number, part in enumerate(parts) for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    change_config(folder, quantization_config=FP8 | {"weight_block_size": block})
    return whole


def change_config(folder: Path, **entries) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


def weights_from(ways: list[tuple[str, Path]]) -> list[dict[str, torch.Tensor]]:
    """On a rank, of each (layout, folder): the weights of a model that starts from there."""
    found = []
    for words, folder in ways:
        parallel = parallel_of(words, False, seed=1)
        from_hf(parallel, folder)
        found.append(full_weights(parallel))
    return found


def test_fp8_weights_are_dequantized_by_blocks(ranks, two, checkpoints, tmp_path):
    """Each weight is its code times its block's scale, in every bit; slices of tp2 and zero3 cut through blocks of
    [12, 20], and the last ones of a row or column are cut off.
    """
    blocks = {"published": [128, 128], "odd": [12, 20], "small": [16, 16], "tensor": None}
    expected, file = {}, checkpoints[0]["untied"]
    for name, block in blocks.items():
        to_hf(file, tmp_path / name)
        expected[name] = quantized(tmp_path / name, block, files=2 if name == "odd" else 1)
    ways = [(words, name) for name in blocks for words in ("tp2", "dp2,zero3", "dp2,zero1")]
    of_two = two(weights_from, [(words, tmp_path / name) for words, name in ways])
    more = [("tp2,pp2", "odd"), ("dp2,tp2,sp,zero3", "small")]
    of_four = ranks(weights_from, [(words, tmp_path / name) for words, name in more])
    for (words, name), found in [*zip(ways, of_two[0], strict=True), *zip(more, of_four[0], strict=True)]:
        for key, value in found.items():
            assert torch.equal(value, expected[name][hf_name(key)]), (words, name, key)


def test_from_hf_refuses_other_quantized_models_and_tensors_left_over(ranks, checkpoints, tmp_path):
    """In one line on all ranks, and no weight changes; what is known to be of no use is read over."""
    cases, plain, good = {}, tmp_path / "plain", []
    to_hf(checkpoints[0]["untied"], plain)
    to_hf(checkpoints[0]["untied"], tmp_path / "fp8")
    quantized(tmp_path / "fp8", [16, 16])
    q = "model.layers.1.self_attn.q_proj.weight"

    def copied(name: str, source: Path, message: str, change=lambda tensors: None, **config) -> None:
        cases[tmp_path / name] = message
        folder = shutil.copytree(source, tmp_path / name)
        file = next(folder.glob("*.safetensors"))
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, {"format": "pt"})
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": dict.fromkeys(tensors, file.name)})
        )
        change_config(folder, **config)

    for method in ("bitsandbytes", "gptq", "awq", "compressed-tensors", "new-method"):
        line = f"is quantized (quant_method {method}), not by fp8: use the release of the model in bfloat16"
        copied(method, plain, line, quantization_config={"quant_method": method})
    copied("unnamed", plain, "(quant_method an unnamed method)", quantization_config={"bits": 4})
    copied("block", tmp_path / "fp8", "is 16, not two", quantization_config=FP8 | {"weight_block_size": [16]})
    cases[tmp_path / "block"] = "weight_block_size is [16], not two numbers above 0"
    copied("no scale", tmp_path / "fp8", f"without its scales {q}_scale_inv", lambda t: t.pop(f"{q}_scale_inv"))
    copied("no config", tmp_path / "fp8", "and config.json does not say how", quantization_config=None)
    copied("grid", tmp_path / "fp8", "not blocks of [8, 8]", quantization_config=FP8 | {"weight_block_size": [8, 8]})
    copied("one scale", tmp_path / "fp8", "not one scale for", quantization_config=FP8)
    copied("int8", plain, f"{q} is I8 in ", lambda t: t.update({q: t[q].to(torch.int8)}))
    copied("int8 in fp8", tmp_path / "fp8", f"{q} is I8 in ", lambda t: t.update({q: t[q].to(torch.int8)}))
    copied("e5m2", tmp_path / "fp8", f"{q} is F8_E5M2 in ", lambda t: t.update({q: t[q].float().to(torch.float8_e5m2)}))
    extra = {f"model.layers.{n}.self_attn.q_proj.bias": torch.zeros(32) for n in range(4)}
    line = "1.self_attn.q_proj.bias, model.layers.2.self_attn.q_proj.bias and 1 more, which ours lacks"
    copied("left over", plain, line, lambda t: t.update(extra))
    copied("a layer more", plain, "has model.layers.2.mlp.up_proj.weight, which ours lacks",
           lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.zeros(44, 32)}))  # fmt: skip
    copied("scale alone", plain, f"has {q}_scale, which ours lacks", lambda t: t.update({f"{q}_scale": torch.zeros(1)}))
    copied("shape", plain, f"another model: {q} is [32, 31] in", lambda t: t.update({q: t[q][:, :31].contiguous()}))
    of_ranks = ranks(refused, list(cases), False)
    for (path, expected), *found in zip(cases.items(), *of_ranks, strict=True):
        message = found[0][0]
        assert len({each for each, _ in found}) == 1 and all(same for _, same in found), (path, found)
        assert message.startswith("CheckpointError: ") and expected in message and "\n" not in message, (path, message)

    harmless = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    copied("harmless", plain, "", lambda t: t.update(harmless))
    good = ranks(weights_from, [("dp2,tp2", tmp_path / "harmless"), ("dp2,tp2", plain)])[0]
    assert all(torch.equal(value, good[1][name]) for name, value in good[0].items())


def test_the_program_refuses_a_quantized_model_before_it_starts(checkpoints, tmp_path, capsys):
    to_hf(checkpoints[0]["untied"], tmp_path / "model")
    change_config(tmp_path / "model", quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(SystemExit) as ended:
        options(["--from-hf", str(tmp_path / "model")])
    assert ended.value.code == 2 and "(quant_method gptq), not by fp8" in capsys.readouterr().err.splitlines()[-1]


def test_to_hf_refuses_what_it_can_not_write_and_leaves_nothing(checkpoints, tmp_path):
    """An output that is there, no checkpoint, and damage."""
    (folders, _), out = checkpoints, tmp_path / "model"

    def error(folder: Path) -> str:
        found = said(lambda: to_hf(folder, out))
        assert found.startswith(("CheckpointError: ", "DamagedError: ")) and "\n" not in found
        return found

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
    assert error(folders["tied"]).endswith("model exists already")
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
