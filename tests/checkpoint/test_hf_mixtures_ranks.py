"""Mixtures of transformers, Mixtral and Qwen3-MoE, to any layout and back; --hf-config and --from-hf. 4 ranks, CPU."""

import contextlib
import io
import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file

from calls import said, short_text
from course_lib.checkpoint import files
from course_lib.checkpoint.checkpoints import save
from course_lib.checkpoint.hf_files import from_hf_config, read_hf_config
from course_lib.checkpoint.hugging_face import from_hf, to_hf
from course_lib.five_d.layouts import Layout
from course_lib.five_d.meshes import build_mesh
from course_lib.five_d.model import parallelize
from course_lib.train.model import named_model
from course_lib.train.program import main, options
from test_hf_checkpoints_ranks import first_loss, quantized

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"vocab_size": 97, "num_experts_per_tok": 2, "initializer_range": 0.1, "tie_word_embeddings": False}
QWEN = {"num_experts": 8, "moe_intermediate_size": 24, "norm_topk_prob": True, "head_dim": 16, "intermediate_size": 44}
KINDS = {"Mixtral": {"num_local_experts": 4, "intermediate_size": 40}, "Qwen3Moe": QWEN}
MOE = {
    "Mixtral": {"experts": 4, "top_k": 2, "ffn_hidden": 40},
    "Qwen3Moe": {"experts": 8, "top_k": 2, "ffn_hidden": 24},
}


def made(folder: Path, kind: str, **changed):
    """A model of transformers from random weights, which is saved in a folder. Imported here: see theirs_of."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **KINDS[kind], **changed})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of a Mixtral and a Qwen3-MoE, the latter tied, and for each its loss of test_hf_checkpoints' batch."""
    from test_hf_checkpoints_ranks import batch

    found, (inputs, targets) = {}, batch()
    for kind in KINDS:
        folder = tmp_path_factory.mktemp("models") / kind
        model = made(folder, kind, tie_word_embeddings=kind == "Qwen3Moe")
        with torch.no_grad():
            found[kind] = folder, F.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten()).item()
    return found


def parallel_from(words: str, folder: Path):
    config, moe = from_hf_config(folder)
    layout = Layout.parse(words)
    parallel = parallelize(config, layout, build_mesh(layout), moe=moe, seed=1, lr=1e-2)
    from_hf(parallel, folder)
    return parallel


def saved_from(ways: list[tuple[str, Path]], root: Path) -> list[float]:
    """On a rank, of each (layout, folder): a checkpoint of what from_hf has read, and the loss of a step."""
    losses = []
    for number, (words, folder) in enumerate(ways):
        parallel = parallel_from(words, folder)
        (root / str(number)).mkdir(exist_ok=True)
        save(parallel, root / str(number), 1)
        losses.append(first_loss(parallel))
    return losses


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


LAYOUTS = {
    "Mixtral": ("dp2,tp2,ep2", "dp4,ep4,zero3", "dp2,pp2,ep2,zero1", "dp4,ep2,zero1"),
    "Qwen3Moe": ("dp4,ep2,zero2", "dp2,tp2,sp,ep2,zero3", "tp2,pp2,zb-v", "dp2,cp2,ep2,zero1"),
}


def test_mixtures_come_from_transformers_to_every_layout_and_back(ranks, models, tmp_path):
    """The first loss is that of transformers, within 1e-5; what goes back has the same names, and is the same in each
    bit; transformers loads all of it, and the sizes are the same.
    """
    from transformers import AutoModelForCausalLM

    ways = [(words, kind) for kind in KINDS for words in LAYOUTS[kind]]
    found = ranks(saved_from, [(words, models[kind][0]) for words, kind in ways], tmp_path)[0]
    assert found == pytest.approx([models[kind][1] for _, kind in ways], rel=1e-5), ways
    for number, (words, kind) in enumerate(ways):
        out, folder = tmp_path / f"hf {number}", models[kind][0]
        to_hf(tmp_path / str(number) / "step-000000001", out, file_bytes=(5e9, 9_000, 20_000, 1)[number % 4])
        expected, back = tensors_of(folder), tensors_of(out)
        assert back.keys() == expected.keys(), words
        assert all(torch.equal(back[name], value) for name, value in expected.items()), words
        (config, moe), (before, _) = from_hf_config(out), from_hf_config(folder)
        assert config == before and config.context == before.context and moe == MOE[kind], words
        assert json.loads((out / "config.json").read_text())["rope_theta"] == config.rope_theta, "for transformers 4"
        if number % 4 == 1:
            info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)[1]
            assert not any(info.values()), info


def loaded(ways: list[tuple[str, Path]], root: Path) -> None:
    """On a rank: checkpoints of what from_hf has read."""
    for number, (words, folder) in enumerate(ways):
        (root / str(number)).mkdir(exist_ok=True)
        save(parallel_from(words, folder), root / str(number), 1)


def test_fp8_mixtures_are_dequantized_expert_by_expert(two, models, tmp_path):
    folder = shutil.copytree(models["Qwen3Moe"][0], tmp_path / "fp8")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    expected = quantized(folder, [12, 20])
    two(loaded, [("dp2,ep2", folder), ("tp2", folder)], tmp_path)
    for number in range(2):
        to_hf(tmp_path / str(number) / "step-000000001", tmp_path / f"out {number}")
        back = tensors_of(tmp_path / f"out {number}")
        assert back.keys() == expected.keys()
        assert all(torch.equal(back[name], value) for name, value in expected.items())


def refused(folder: Path, changes: list[dict]) -> list[str]:
    """On a rank: what from_hf raises for models of another mixture, or of none."""
    (config, moe), layout, found = from_hf_config(folder), Layout.parse("dp2"), []
    for change in changes:
        other = None if change is None else moe | change
        parallel = parallelize(config, layout, build_mesh(layout), moe=other, lr=1e-2)
        found.append(said(lambda: from_hf(parallel, folder)))
    return found


def test_from_hf_refuses_another_mixture(two, models, tmp_path):
    folder, changes = models["Mixtral"][0], [{"experts": 8}, {"top_k": 3}, {"score": "sigmoid"}, None, {"shared": 1}]
    lines = [
        "experts is 4 in the files, 8 here",
        "top_k is 2 in the files, 3 here",
        "score is softmax in the files, sigmoid",
    ]
    lines += ["experts is 4 in the files, None here", "has no model.layers.0.block_sparse_moe.shared.gate_proj.weight"]
    for found in zip(*two(refused, folder, [*changes, {"ffn_hidden": 44}]), [*lines, "is [40, 32] in"], strict=True):
        assert found[0] == found[1] and found[0].startswith("CheckpointError: ") and found[2] in found[0], found


def written(root: Path, moe: dict, bias: float = 0.0) -> None:
    """On a rank: a checkpoint of a mixture whose routers' biases have this value."""
    config, layout = from_hf_config(root)[0], Layout.parse("dp2")
    parallel = parallelize(config, layout, build_mesh(layout), moe=moe, lr=1e-2)
    for stage in parallel.stages.values():
        for name, buffer in stage.named_buffers():
            buffer.fill_(bias) if name.endswith("router.bias") else None
    save(parallel, root, 1)


@pytest.mark.parametrize(
    "moe, bias, expected",
    [
        ({"shared": 1}, 0.0, "no mixture of transformers that the course knows has blocks.0.mlp.shared."),
        ({"score": "sigmoid", "scale": 2.5}, 0.0, "the course knows has score sigmoid, scale 2.5"),
        ({"top_k": 1}, 0.0, "has top_k 1 without norms of q and k"),
        ({}, 0.5, "transformers has no blocks.0.mlp.router.bias, and it is not 0"),
    ],
)
def test_to_hf_refuses_what_no_mixture_of_transformers_has(two, models, tmp_path, moe, bias, expected):
    shutil.copytree(models["Mixtral"][0], tmp_path, dirs_exist_ok=True)
    two(written, tmp_path, MOE["Mixtral"] | moe, bias)
    found = said(lambda: to_hf(tmp_path / "step-000000001", tmp_path / "out"))
    assert found.startswith("CheckpointError: ") and expected in found and "\n" not in found, found
    assert not (tmp_path / "out").exists()


def test_a_mixture_that_an_earlier_version_has_saved(two, models, tmp_path):
    """Its checkpoint.json has the options of the run, or nothing of the router."""
    shutil.copytree(models["Mixtral"][0], tmp_path, dirs_exist_ok=True)
    two(written, tmp_path, MOE["Mixtral"])
    folder = tmp_path / "step-000000001"
    about = files.describe(folder)
    assert about.pop("routing")["top_k"] == 2
    (folder / "checkpoint.json").write_text(files.sealed(about))
    assert "does not say how many experts a token goes to" in said(lambda: to_hf(folder, tmp_path / "out"))
    (folder / "checkpoint.json").write_text(files.sealed(about | {"moe": MOE["Mixtral"] | {"aux_loss_coeff": 0.01}}))
    to_hf(folder, tmp_path / "out")
    assert from_hf_config(tmp_path / "out")[1] == MOE["Mixtral"]


def config_of(kind: str, **changed) -> dict:
    sizes = {"model_type": {"Mixtral": "mixtral", "Qwen3Moe": "qwen3_moe"}[kind], "rms_norm_eps": 1e-5}
    return SIZES | KINDS[kind] | sizes | changed


@pytest.mark.parametrize(
    "config, expected",
    [
        (config_of("Mixtral", router_jitter_noise=0.1), "router_jitter_noise is 0.1, not 0.0"),
        (config_of("Mixtral", num_experts_per_tok=1), "num_experts_per_tok is 1, and its gate 1, not the score"),
        (config_of("Mixtral", sliding_window=16), "sliding_window is 16, not None"),
        (config_of("Qwen3Moe", norm_topk_prob=False), "norm_topk_prob is False, and the course divides"),
        (config_of("Qwen3Moe", num_experts_per_tok=1), "num_experts_per_tok is 1, and its gate 1"),
        (config_of("Qwen3Moe", mlp_only_layers=[0]), "the course has mixtures in all layers, or in none"),
        (config_of("Qwen3Moe", decoder_sparse_step=2), "decoder_sparse_step is 2: the course has mixtures in all"),
        (config_of("Qwen3Moe", model_type="qwen2_moe"), "model_type is qwen2_moe, not llama, "),
        (config_of("Qwen3Moe", model_type="deepseek_v3"), "model_type is deepseek_v3, not llama, "),
    ],
)
def test_a_mixture_whose_router_ours_is_not_gets_one_line(config, expected, tmp_path):
    file = tmp_path / "any name.json"
    file.write_text(json.dumps(config))
    found = said(lambda: read_hf_config(file))
    assert expected in found and "\n" not in found, found


def test_one_expert_per_token_without_norm_is_the_course_s_gate(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config_of("Qwen3Moe", norm_topk_prob=False, num_experts_per_tok=1)))
    assert read_hf_config(file)[1] == MOE["Qwen3Moe"] | {"top_k": 1}


def test_the_program_takes_experts_from_the_model(models, tmp_path):
    """--hf-config by any name, --from-hf of a folder: a flag may repeat what the model's config.json says."""
    folder, same = models["Qwen3Moe"][0], ["--experts", "8", "--top-k", "2", "--expert-hidden", "24"]
    file = shutil.copy(folder / "config.json", tmp_path / "tiny qwen.json")
    for argv in (["--hf-config", str(file)], ["--hf-config", str(folder), *same], ["--from-hf", str(folder), *same]):
        chosen = options([*argv, "--layout", "dp2,ep2", "--aux-loss-coeff", "0.1"])
        model = named_model(chosen)
        assert model.moe == MOE["Qwen3Moe"] | {"aux_loss_coeff": 0.1} and not model.vocab_fits
        assert (model.config, model.config.qk_norm, model.config.vocab) == (from_hf_config(folder)[0], True, 97)
    assert named_model(options([])).name == "small" and named_model(options(["--experts", "4"])).moe["top_k"] == 2


@pytest.mark.parametrize(
    "argv, expected",
    [
        (["--hf-config", "FILE", "--preset", "debug"], "preset and hf_config both name a model: leave one out"),
        (["--hf-config", "FILE", "--from-hf", "FOLDER"], "hf_config and from_hf both name a model: leave one out"),
        (["--preset", "small", "--from-hf", "FOLDER"], "preset and from_hf both name a model: leave one out"),
        (["--from-hf", "FOLDER", "--experts", "4"], "--experts is 4, and the model's config.json says 8"),
        (["--hf-config", "FILE", "--top-k", "1"], "--top-k is 1, and the model's config.json says 2"),
        (["--hf-config", "FILE", "--expert-hidden", "8"], "--expert-hidden is 8, and the model's config.json says 24"),
        (["--from-hf", "FOLDER", "--shared", "1"], "--shared is 1, and the model's config.json says 0"),
        (["--preset", "debug", "--top-k", "1"], "--top-k, --expert-hidden and --shared go with --experts"),
        (["--hf-config", "FILE", "--layout", "dp16,ep16"], "ep 16 does not divide experts, which is 8"),
        (["--from-hf", "FILE"], "FILE is not a model of transformers: it has no config.json"),
        (["--hf-config", "nowhere.json"], "nowhere.json: No such file or directory"),
    ],
)
def test_what_contradicts_the_model_gets_one_line(argv, expected, models, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(models["Qwen3Moe"][0], "FOLDER")
    shutil.copy("FOLDER/config.json", "FILE")
    with pytest.raises(SystemExit) as ended:
        options(argv)
    assert ended.value.code == 2 and expected in capsys.readouterr().err.splitlines()[-1]


def test_from_hf_of_a_dense_model_takes_no_experts_and_hf_config_does(tmp_path, capsys):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {name: value for name, value in SIZES.items() if name != "num_experts_per_tok"}
    LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=44)).save_pretrained(tmp_path)
    with pytest.raises(SystemExit):
        options(["--from-hf", str(tmp_path), "--experts", "4"])
    assert "experts is 4, and the model of from_hf" in capsys.readouterr().err.splitlines()[-1]
    assert named_model(options(["--hf-config", str(tmp_path), "--experts", "4"])).moe["experts"] == 4


def printed(*argv: str) -> str:
    """On a rank: what the program prints, or the line that it raises, on a short text."""
    with short_text():
        return printed_with_text(*argv)


def printed_with_text(*argv: str) -> str:
    """On a rank: the same on the text that it has."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        raised = said(lambda: main([*argv, "--log-every", "1", "--steps", "1", "--batch", "4", "--seq", "16"]))
    return out.getvalue() or raised


def test_the_program_s_first_line_names_the_model_that_runs(two, models, tmp_path):
    folder = shutil.copytree(models["Mixtral"][0], tmp_path / "tiny mixtral")
    assert "vocabulary of 256, and the model of" in two(printed, "--from-hf", str(folder), "--layout", "dp2")[0]
    made(folder, "Mixtral", vocab_size=256)
    file, count = shutil.copy(folder / "config.json", tmp_path / "tiny.json"), 256 * 32 * 2 + 32
    count += 2 * (32 * (32 + 16 + 16 + 32 + 2) + 4 * 32 + 4 * 3 * 32 * 40)
    rest = f" with 4 experts, {count:,} parameters, {count - 2 * 2 * 3 * 32 * 40:,} active, layout dp2,ep2: 2 ranks, "
    for option, path in (("--from-hf", folder), ("--hf-config", file)):
        lines = two(printed, option, str(path), "--layout", "dp2,ep2")[0].splitlines()
        assert lines[0].startswith(f"{path}{rest}") and lines[1].startswith("step     1 | loss"), lines
    lines = two(printed, "--preset", "debug", "--layout", "dp2")[0].splitlines()
    assert lines[0].startswith("debug, 108,864 parameters, layout dp2: 2 ranks, "), lines[0]


def printed_with_own_text() -> str:
    """On a rank: what the program prints, or the line that it raises, where each rank has another text."""
    with short_text(400 + 4 * dist.get_rank()):
        return printed_with_text("--preset", "debug", "--layout", "tp2")


def test_the_program_refuses_ranks_with_another_text(two):
    line = "rank 1 has another text than rank 0 (404 tokens of a vocabulary of 256; rank 0 has 400 tokens of a "
    assert all(found.startswith(f"ValueError: {line}") for found in two(printed_with_own_text))
