"""course_lib.best_config.answer: the second layout, similar jobs, what no run has tested, and the command. CPU."""

import dataclasses
import json
import shlex
import sys

import numpy as np
import pytest

from course_lib.best_config import question
from course_lib.best_config.answer import (
    answer,
    fastest_tested,
    notes_of,
    similar_jobs,
    with_kernels,
    without_overlap,
)
from course_lib.best_config.answer_text import in_lines
from course_lib.best_config.clusters import CLUSTERS
from course_lib.best_config.launch import launch
from course_lib.best_config.model_files import read_config
from course_lib.best_config.one_layout import time_differences
from course_lib.best_config.planner import estimate, search
from course_lib.best_config.program_features import MISSING
from course_lib.best_config.question import Question, with_program
from course_lib.best_config.simplicity import NEAR, SAME, answer_rows
from course_lib.best_config.tested import untested
from course_lib.checkpoint.hf_files import from_hf_config, read_hf_config
from course_lib.expert_parallel.sizes import moe_options
from course_lib.five_d.layouts import Layout, check_layout
from course_lib.single_gpu.config import ModelConfig
from course_lib.single_gpu.memory import param_count
from course_lib.single_gpu.model import PRESETS
from course_lib.train.sections import Settings
from course_lib.train.settings import read_settings
from launch_nb_torchrun import launcher_options
from launcher import slurm
from launcher.torchrun import arguments, split_notebook

H100, GIB = CLUSTERS["H100"], 2**30
EIGHT = Question("llama3-8B", PRESETS["llama3-8B"], H100, 8, 64)
UNEVEN = Question("llama3-8B", PRESETS["llama3-8B"], CLUSTERS["A100"], 24, 1000)
MOE = {"experts": 8, "top_k": 2, "ffn_hidden": 1024, "shared": 0}
MIXTURE = Question("llama3.2-1B", PRESETS["llama3.2-1B"], H100, 20, 100, 2048, MOE)


def test_the_answer_is_the_searches():
    said, best = answer(EIGHT, 3, tokens=1e12), search(EIGHT.config, H100, 8, 64).best(1)[0]
    first, _, _ = said["layouts"]
    e = estimate(EIGHT.config, H100, Layout.parse(first["layout"]), 64)
    assert first["tokens_per_s_per_gpu"] == pytest.approx(float(e.tokens_per_s)) == pytest.approx(best[1], rel=NEAR)
    assert (first["mfu"], first["causal_mfu"]) == pytest.approx((float(e.mfu), float(e.causal_mfu)))
    assert said["program"] == "this course's program, unfused" and said["notes"] == []
    assert first["tokens_per_s"] == pytest.approx(8 * first["tokens_per_s_per_gpu"])
    assert first["days"] == pytest.approx(1e12 / first["tokens_per_s"] / 86400)
    assert sum(said["time"].values()) == pytest.approx(first["step_s"]) and said["time"].keys() == e.time.keys()
    assert sum(said["memory"].values()) == pytest.approx(float(e.needed_bytes) / GIB)
    assert first["usable_gib"] == pytest.approx(e.usable_bytes / GIB) and first["peak_gib"] <= first["usable_gib"]
    assert "days" not in answer(EIGHT, 1)["layouts"][0]


def test_what_may_run_out_of_memory_stands_apart():
    asked = dataclasses.replace(EIGHT, gpus=64, batch=1024)
    said = answer(asked)
    first = said["layouts"][0]
    assert said["risky"] and all(
        one["risk"] > said["risk"] and one["step_s"] < first["step_s"] for one in said["risky"]
    )
    assert all(0 <= one["risk"] <= said["risk"] for one in said["layouts"])
    fastest = said["risky"][0]
    e = estimate(asked.config, H100, Layout.parse(fastest["layout"]), 1024)
    assert fastest["risk"] == pytest.approx(float(e.risk)) and 0.01 < fastest["risk"] < 1
    assert answer(dataclasses.replace(asked, risk=1.0))["risky"] == []


def test_why_the_second_loses_adds_up():
    found = UNEVEN.search()
    (first, _), *others = answer_rows(UNEVEN, found, 10)
    e, longer = found.estimate, found.estimate.step_s / found.estimate.step_s[first] - 1
    second = next(row for row, _ in others if longer[row] > 2 * SAME)
    why = time_differences(found, first, second)
    assert sum(why.values()) == pytest.approx(longer[second], abs=len(e.time) * SAME)
    assert list(why.values()) == sorted(why.values(), reverse=True) and min(map(abs, why.values())) >= SAME
    for part, share in why.items():
        assert share == pytest.approx((e.time[part][second] - e.time[part][first]) / e.step_s[first])


def test_a_batch_that_does_not_divide_is_moved():
    said = answer(UNEVEN, 1)
    (best,) = said["near"]
    assert (best["gpus"], best["batch"]) == (24, 1008) and best["gain"] > 0.04
    there = estimate(UNEVEN.config, UNEVEN.cluster, Layout.parse(best["layout"]), 1008)
    assert there.fits and float(there.tokens_per_s) == pytest.approx(best["tokens_per_s_per_gpu"])
    assert best["gain"] == pytest.approx(float(there.tokens_per_s) / said["layouts"][0]["tokens_per_s_per_gpu"] - 1)


def test_jobs_near_by_are_whole_nodes_and_real_gains():
    asked = dataclasses.replace(UNEVEN, gpus=72, batch=1024)
    speed = answer(asked, 1)["layouts"][0]["tokens_per_s_per_gpu"]
    found = similar_jobs(asked, speed)
    assert {one["gpus"] for one in found} <= {64, 72, 80} and len({one["gpus"] for one in found}) == len(found) > 0
    assert all(abs(one["batch"] / 1024 - 1) <= 0.06 and one["gain"] >= 0.02 for one in found)
    assert [one["gain"] for one in found] == sorted((one["gain"] for one in found), reverse=True)
    assert similar_jobs(asked, 1.5 * speed) == []
    for one in found:
        there = dataclasses.replace(asked, gpus=one["gpus"], batch=one["batch"])
        assert one["uncommon"] == [] and Layout.parse(one["layout"]).ranks == there.gpus


def settings_of(line: str) -> tuple[Settings, ModelConfig, dict | None]:
    """Return the settings of a command, and the model's sizes and experts; the layout fits them, as check_layout says,
    and what does not combine is not combined.
    """
    words = shlex.split(line)
    settings = read_settings(words[words.index("--") + 1 :])
    model, moe = settings.model, None
    if model.preset:
        config = PRESETS[model.preset]
    else:
        config, moe = from_hf_config(model.from_hf) if model.from_hf else read_hf_config(model.hf_config)
    moe, layout = moe_options(model, moe), Layout.parse(settings.layout.layout)
    check_layout(config, layout, layout.ranks, settings.run.batch, settings.run.seq, moe)
    assert not (layout.cp > 1 and settings.data.document_masks)
    assert not (layout.sequence_parallel and settings.precision.fp8 != "none")
    return settings, config, moe


@pytest.mark.parametrize("asked", [EIGHT, UNEVEN, MIXTURE], ids=lambda asked: f"{asked.name} {asked.gpus}")
def test_the_command_is_one_that_the_program_takes(asked):
    """By the parsers of the launcher, of torchrun and of the training program."""
    for layout in answer(asked, 4)["layouts"]:
        said = launch(asked, Layout.parse(layout["layout"]), 1e12)
        words = shlex.split(said["command"])
        assert words[:2] == ["python", "scripts/launch_nb_torchrun.py"]
        options, rest = launcher_options().parse_known_args(words[2 : words.index("--")])
        notebook, torchrun = split_notebook(rest)
        chosen, _, moe = settings_of(said["command"])
        run = chosen.run
        assert notebook == "train" and chosen.layout.layout == layout["layout"]
        nodes = int(arguments([*torchrun, "--nproc-per-node", options.nproc_per_node]).nnodes.split(":")[0])
        assert nodes * int(options.nproc_per_node) == asked.gpus
        assert (chosen.model.preset, run.batch, run.seq) == (asked.name, asked.batch, asked.seq)
        assert run.steps == np.ceil(1e12 / asked.batch / asked.seq)
        assert moe == ({"experts": 8, "top_k": 2, "ffn_hidden": 1024} if asked is MIXTURE else None)
        assert (chosen.precision.dtype, chosen.kernels.chunked_loss, chosen.kernels.kernels) == ("bf16", False, False)
        words = shlex.split(said["slurm"])
        options, rest = launcher_options().parse_known_args(words[2 : words.index("--")])
        wanted = slurm.parse(options.slurm)
        assert int(wanted["nodes"]) * int(wanted["gpus"]) == asked.gpus and rest == [notebook]
        assert words[words.index("--") :] == shlex.split(said["command"])[shlex.split(said["command"]).index("--") :]


class Approximated(type(EIGHT.config)):
    """A model that is planned by the sizes of another."""

    notes = ("its windows count as full attention",)


def test_what_is_approximated_and_for_which_program_is_said():
    config = Approximated(**dataclasses.asdict(EIGHT.config))
    said = answer(dataclasses.replace(EIGHT, config=config, cluster=CLUSTERS["H100, EFA"]), 1)
    assert said["notes"] == ["its windows count as full attention"] and said["program"] == "nanotron"


def test_what_no_run_has_tested_is_said_with_the_fastest_tested_layout(monkeypatch):
    """Only pipelines with ZeRO-1 at most are tested, say."""

    def is_tested(config, cluster, table, *sizes):
        assert (config, sizes[:2]) == (EIGHT.config, (4096, None))
        return (table.pp > 1) & (table.zero_stage < 2)

    def untested(config, cluster, layout, *sizes):
        return () if is_tested(config, cluster, layout, *sizes) else ("no pipeline", "ZeRO-2")

    monkeypatch.setattr(question, "untested", untested)
    monkeypatch.setattr(question, "is_tested", is_tested)
    said, found = answer(EIGHT), EIGHT.search()
    assert said["untested"] == ["no pipeline", "ZeRO-2"]
    tested = next(row for row in found.order if is_tested(EIGHT.config, H100, found.table[row], 4096, None, 64))
    assert said["tested"]["step_s"] == found.estimate.step_s[tested]
    assert Layout.parse(said["tested"]["layout"]).pp > 1
    monkeypatch.setattr(question, "is_tested", lambda config, cluster, table, *_: np.zeros(len(table), bool))
    assert fastest_tested(EIGHT, found) is None
    monkeypatch.setattr(question, "untested", lambda *_: ())
    said = answer(EIGHT, 1)
    assert said["untested"] == [] and said["tested"] is None


def test_a_tested_layout_is_one_that_runs_cover():
    """32,768 tokens: the fastest layouts combine CP with ZeRO-2 over many micro-batches."""
    asked = dataclasses.replace(EIGHT, gpus=64, batch=1024, seq=32768)
    said = answer(asked)
    first, tested = (Layout.parse(one["layout"]) for one in (said["layouts"][0], said["tested"]))
    sizes = asked.seq, asked.moe, asked.batch
    assert said["untested"] == list(untested(asked.config, H100, first, *sizes)) != []
    assert untested(asked.config, H100, tested, *sizes) == ()
    assert said["tested"]["step_s"] > said["layouts"][0]["step_s"] / 1.03


def test_a_device_that_the_course_does_not_know_has_its_peak_in_the_command():
    unknown = dataclasses.replace(EIGHT, cluster=dataclasses.replace(H100, name="XPU", peak_flops=165.2e12))
    assert "--peak-tflops 165.2" in launch(unknown, Layout(dp=8))["command"]
    other = dataclasses.replace(EIGHT, cluster=dataclasses.replace(H100, peak_flops=800e12))  # a preset's name alone
    assert "--peak-tflops 800" in launch(other, Layout(dp=8))["command"]
    assert "--peak-tflops" not in launch(EIGHT, Layout(dp=8))["command"]
    shared = dataclasses.replace(MIXTURE, moe=MOE | {"shared": 1})
    command = launch(shared, Layout(dp=20))["command"]
    assert "--experts 8 --top-k 2 --expert-hidden 1024 --shared 1" in command
    assert settings_of(command)[2] == MOE | {"shared": 1}


@pytest.mark.parametrize(
    "change, layout, kernels, chunked_loss, fp8",
    [
        ({}, "dp8", False, False, "none"),
        ({}, "dp4,cp2", False, False, "none"),
        ({"kernels": True}, "dp4,tp2,sp", True, True, "none"),
        ({"fused_loss": True}, "dp8", False, True, "none"),
        ({"fp8": True}, "dp4,tp2", False, False, "transformer-engine"),
        ({"kernels": True, "fp8": True}, "dp8,zero3", True, True, "transformer-engine"),
    ],
)
def test_the_command_computes_as_the_answer_counts(change, layout, kernels, chunked_loss, fp8):
    asked = dataclasses.replace(EIGHT, cluster=with_program(H100, **change))
    chosen = settings_of(launch(asked, Layout.parse(layout))["command"])[0]
    assert (chosen.kernels.kernels, chosen.kernels.chunked_loss, chosen.precision.fp8) == (kernels, chunked_loss, fp8)


def test_no_command_is_printed_for_another_program():
    """Its numbers would be others. Experts stay in BF16, and 8-bit layers are not sequence-parallel."""
    other = dataclasses.replace(EIGHT, cluster=with_program(H100, "Llama 3"))
    assert launch(other, Layout(dp=8)) == {"note": "no command: the answer is for Llama 3"}
    fp8 = {"cluster": with_program(H100, fp8=True)}
    said = launch(dataclasses.replace(EIGHT, **fp8), Layout.parse("dp4,tp2,sp"))
    assert "command" not in said and said["note"].endswith("combine them with sequence parallelism (sp)")
    said = launch(dataclasses.replace(MIXTURE, **fp8), Layout(dp=20))
    assert "command" not in said and said["note"].endswith("combine them with experts, which stay in BF16")


def test_a_layout_that_the_program_does_not_have_is_noted():
    of_nanotron = dataclasses.replace(EIGHT, cluster=with_program(H100, "nanotron"))
    for layout, missing in (("dp8,zero3", True), ("dp4,pp2,zb-h1", True), ("dp4,pp2,zero1", False)):
        asked = dataclasses.replace(of_nanotron, layout=Layout.parse(layout))
        assert [MISSING in note for note in notes_of(asked)] == [True] * missing


def test_the_step_without_overlap():
    many = dataclasses.replace(EIGHT, gpus=64, batch=1024)
    said, cluster = answer(many), H100.with_software(overlap=0.0, sharded_overlap=0.0)
    layouts = [Layout.parse(one["layout"]) for one in said["layouts"]]
    expected = [float(estimate(many.config, cluster, layout, 1024).step_s) for layout in layouts]
    assert layouts[0].zero_stage == 3 and said["exposed"] == without_overlap(many, layouts)
    assert said["exposed"]["step_s"] == pytest.approx(expected[0]) and expected[0] > 1.5 * said["layouts"][0]["step_s"]
    assert said["exposed"]["fastest"] == str(layouts[int(np.argmin(expected))])
    assert said["exposed"]["fastest_s"] == pytest.approx(min(expected))


def test_what_fused_kernels_gain():
    """A first answer of them, 10% faster or more, and only for the course's program without constants of its own."""
    many = dataclasses.replace(EIGHT, gpus=64, batch=1024)
    first = answer(many, 1)["layouts"][0]
    found, there = with_kernels(many, first), dataclasses.replace(many, cluster=with_program(H100, kernels=True))
    e = estimate(many.config, there.cluster, Layout.parse(found["layout"]), 1024)
    assert found["step_s"] == pytest.approx(float(e.step_s)) and first["step_s"] > 1.1 * found["step_s"]
    assert with_kernels(many, found) is None and with_kernels(there, first) is None
    fitted = dataclasses.replace(many, cluster=H100.with_software(matmul_efficiency=0.6))
    assert with_kernels(fitted, first) is None


DENSE = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4}
DENSE |= {"intermediate_size": 1024, "vocab_size": 1000, "model_type": "llama"}
YARN = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_theta": 1e4}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
MIXTRAL = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
QWEN3_MOE = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
QWEN3_MOE |= {"norm_topk_prob": True}
SAFE, BIN = ("model.safetensors",), ("pytorch_model.bin",)


@pytest.mark.parametrize(
    "change, weights, options, note",
    [
        ({}, SAFE, "--from-hf", "starts from the weights beside"),
        ({"model_type": "qwen2"}, SAFE, "--from-hf", "starts from the weights"),
        ({"model_type": "qwen3", "head_dim": 128, "tie_word_embeddings": True}, SAFE, "--from-hf", "from the weights"),
        ({"model_type": "mistral", "sliding_window": None}, SAFE, "--from-hf", "starts from the weights"),
        ({"rope_scaling": LLAMA3, "rope_theta": 5e5}, SAFE, "--from-hf", "starts from the weights"),
        (FP8, SAFE, "--from-hf", "starts from the weights"),
        ({}, (), "--hf-config", "has no model.safetensors; it starts from random weights"),
        ({"model_type": "qwen3"}, BIN, "--hf-config", "only pytorch_model.bin: load the model with transformers"),
        (YARN, SAFE, None, "rope_type is yarn, not default or llama3"),
        ({"model_type": "mistral", "sliding_window": 64}, (), None, "sliding_window is 64, not None"),
        ({"model_type": "qwen3", "attention_bias": True}, SAFE, None, "attention_bias is True, not False"),
        ({"hidden_act": "gelu"}, (), None, "hidden_act is gelu, not silu"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, (), None, "rotary_factor is 0.5"),
        ({"quantization_config": {"quant_method": "gptq"}}, SAFE, "--hf-config", "gptq), not by fp8"),
        ({"num_attention_heads": 8, "hidden_size": 516, "head_dim": 64}, SAFE, None, "hidden size"),
        (MIXTRAL, SAFE, "--from-hf", "starts from the weights"),
        (MIXTRAL, (), "--hf-config", "starts from random weights"),
        (QWEN3_MOE, SAFE, "--from-hf", "starts from the weights"),
        (QWEN3_MOE, (), "--hf-config", "starts from random weights"),
        (QWEN3_MOE | {"model_type": "qwen2_moe"}, SAFE, None, "model_type is qwen2_moe, not llama"),
        (QWEN3_MOE | {"norm_topk_prob": False}, SAFE, None, "norm_topk_prob is False"),
    ],
)  # fmt: skip
def test_a_command_is_printed_where_the_program_takes_the_model(change, weights, options, note, tmp_path):
    folder = tmp_path / "my model"
    folder.mkdir()
    for name, text in (("config.json", json.dumps(DENSE | change)), *((each, "") for each in weights)):
        (folder / name).write_text(text)
    config, moe = read_config(folder)
    asked = Question(str(folder), config, H100, 8, 64, moe=moe)
    for name in (str(folder), f"{folder}/config.json"):
        said = launch(dataclasses.replace(asked, name=name), Layout(dp=8))
        assert note in said["note"] and "\n" not in said["note"], said
        assert ("command" in said) == ("slurm" in said) == (options is not None), said
    if options is None:
        assert said["note"].startswith("no command: the course's Transformer is not this model (")
        for read in (read_hf_config, from_hf_config):
            with pytest.raises(ValueError):
                read(folder)
        return
    for line in (launch(asked, Layout(dp=8))[name] for name in ("command", "slurm")):
        words = shlex.split(line)
        words = words[words.index("--") + 1 :]
        assert words[:2] == [options, str(folder if options == "--from-hf" else folder / "config.json")]
        _, chosen, experts = settings_of(line)
        assert param_count(chosen) == param_count(config)
        assert (experts or {}) == {name: value for name, value in (moe or {}).items() if name != "shared"}


def test_a_config_by_another_name_is_not_the_one_beside_it(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(DENSE | {"num_hidden_layers": 8}))
    file = tmp_path / "small.json"
    file.write_text(json.dumps(DENSE))
    said = launch(Question(str(file), read_config(file)[0], H100, 8, 64), Layout(dp=8))
    assert f"--hf-config {file} --layout dp8" in said["command"]
    assert said["note"].startswith("it starts from random weights")
    assert "No such file" in launch(dataclasses.replace(EIGHT, name="mine"), Layout())["note"]


def test_experts_of_a_dense_config_start_from_random_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    (tmp_path / "model.safetensors").touch()
    said = launch(Question(str(tmp_path), read_config(tmp_path)[0], H100, 8, 64, moe=MOE), Layout(dp=8))
    chosen, _, moe = settings_of(said["command"])
    assert chosen.model.hf_config == str(tmp_path / "config.json")
    assert said["note"].startswith("it starts from random weights")
    assert moe == {"experts": 8, "top_k": 2, "ffn_hidden": 1024}


def test_without_transformers_the_command_has_a_caveat(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    monkeypatch.setitem(sys.modules, "transformers", None)
    said = launch(Question(str(tmp_path), read_config(tmp_path)[0], H100, 8, 64), Layout(dp=8))
    assert "--hf-config" in said["command"] and "whether the program takes this model, is not installed" in said["note"]


def test_where_nothing_fits_the_leanest_is_named():
    said = answer(Question("llama3-405B", PRESETS["llama3-405B"], H100, 8, 64))
    found = search(PRESETS["llama3-405B"], H100, 8, 64).estimate
    assert said["layouts"] == [] and "launch" not in said
    more = said["enough"]
    sizes = PRESETS["llama3-405B"], H100
    assert more["gpus"] == Layout.parse(more["layout"]).ranks == 128 and more["risk"] <= 0.1
    assert [len(search(*sizes, gpus, 64).order) > 0 for gpus in (64, 128)] == [False, True]
    assert said["leanest"]["needed_gib"] == pytest.approx(found.needed_bytes[found.runs].min() / GIB)
    assert answer(Question("debug", PRESETS["debug"], H100, 7, 1, 63))["leanest"] is None
    alone = Question("llama3-70B", PRESETS["llama3-70B"], CLUSTERS["RTX 4090"], 8, 64)
    assert answer(alone)["enough"] is None  # there is no network


def test_a_long_command_is_shown_in_lines_that_the_shell_reads_as_one():
    command = "python launch.py --name 'two words' " + " ".join(f"--option{n} {n}" for n in range(20)) + " -- --last"
    lines = in_lines(command).split("\n")
    assert len(lines) == 3 and all(len(line) <= 112 for line in lines)
    assert [line.endswith(" \\") for line in lines] == [True, True, False]
    assert shlex.split(in_lines(command).replace("\\\n", "")) == shlex.split(command)
    assert in_lines("python x.py") == "python x.py"
