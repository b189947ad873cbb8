"""course_kit.planning.published_runs: rows used or left out for a reason, step times that agree with what else was
published, layouts that could run, and predictions near what was measured. Needs no GPU.
"""

import collections
import csv
import dataclasses
import re
from pathlib import Path

import pytest

from course_kit.planning.published_errors import errors_by, time_ratios
from course_kit.planning.published_runs import (
    left_out,
    load_published,
    predicted_step,
    published_run,
    reason_left_out,
)
from course_lib.best_config.clusters import CLUSTERS
from course_lib.best_config.planner import estimate
from course_lib.best_config.software import SOFTWARE
from course_lib.five_d.layouts import Layout, check_layout
from course_lib.single_gpu.memory import param_count

DATA = Path(__file__).parents[2] / "data"
FILE, FSDP_FILE = DATA / "published_throughput.csv", DATA / "fsdp_runs_llm_foundry.csv"


def rows_of(file: Path) -> list[dict[str, str]]:
    with open(file, newline="") as stream:
        return list(csv.DictReader(stream))


ROWS, FSDP_ROWS = rows_of(FILE), rows_of(FSDP_FILE)
USED = [row for row in ROWS if reason_left_out(row) is None]
RUNS, FSDP_RUNS = load_published(FILE), load_published(FSDP_FILE)


def ids(run) -> str:
    return f"{run.source}, {run.model}, {run.gpus}"


def first(model: str, **columns: str) -> dict[str, str]:
    """Return the first used row of a model, some columns changed."""
    return next(row for row in USED if row["model"] == model) | columns


def written(tmp_path: Path, rows: list[dict[str, str]]) -> Path:
    file = tmp_path / "runs.csv"
    with open(file, "w", newline="") as stream:
        writer = csv.DictWriter(stream, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return file


# Which rows.


def test_every_row_is_used_or_left_out_for_a_reason():
    assert len(RUNS) + sum(left_out(FILE).values()) == len(ROWS)
    assert collections.Counter(run.source for run in RUNS) == {
        "Narayanan et al. 2021, Megatron-LM": 16,
        "Narayanan et al. 2021, DeepSpeed": 6,
        "Korthikanti et al. 2022": 9,
        "MegaScale, Megatron-LM": 8,
        "Megatron-Core 0.8": 4,
        "Llama 3": 3,
        "torchtitan, Llama 3.1 405B on H100": 1,
        "torchtitan, Llama 3.1 405B on H100, FP8": 2,
        "torchtitan, Llama 3.1 8B on A100": 2,
        "torchtitan, Llama 3.1 70B on A100": 1,
        "torchtitan, Llama 2 13B on A100": 3,
        "torchtitan, Llama 2 70B on A100": 2,
        "NVIDIA 24.11, Llama 3.1 8B": 5,
        "NVIDIA 24.11, Llama 3.1 8B, FP8": 5,
        "NVIDIA 24.11, Llama 3.1 70B": 6,
        "NVIDIA 24.11, Llama 3.1 70B, FP8": 6,
        "NVIDIA 24.11, Llama 3.1 405B": 6,
        "NVIDIA 24.11, Llama 3.1 405B, FP8": 6,
        "NVIDIA 24.11, Nemotron-4 340B": 5,
        "NVIDIA 24.11, Nemotron-4 340B, FP8": 5,
    }
    assert [reason.split()[0] for reason in left_out(FILE)] == ["chunks", "another", "a"]


def test_every_run_of_llm_foundry_is_used():
    assert not left_out(FSDP_FILE)
    assert collections.Counter(run.source for run in FSDP_RUNS) == {
        "llm-foundry, H100 80GB BF16, large scale": 18,
        "llm-foundry, H100 80GB BF16": 52,
        "llm-foundry, H100 80GB FP8": 7,
        "llm-foundry, A100 80GB": 61,
        "llm-foundry, A100 40GB": 78,
    }
    assert {run.gpu for run in FSDP_RUNS} == {"H100", "A100", "A100-40GB"}
    assert {run.layout.zero_stage: run.model for run in FSDP_RUNS if run.layout.zero_stage == 2} == {2: "MPT-1b"}


@pytest.mark.parametrize(
    "columns, used",
    [
        ({}, True),
        ({"dtype": "fp16"}, True),
        ({"dtype": ""}, True),
        ({"tier": "B"}, True),
        ({"tier": "C"}, False),
        ({"dtype": "fp8"}, True),
        ({"status": "oom"}, False),
    ],
)
def test_what_leaves_a_row_out(tmp_path, columns, used):
    file = written(tmp_path, [first("Llama 3.1 8B", **columns)])
    assert len(load_published(file)) == used and sum(left_out(file).values()) == 1 - used


# What they say.


@pytest.mark.parametrize("run", [*RUNS, *FSDP_RUNS], ids=ids)
def test_layouts_could_run_and_make_up_the_gpus(run):
    check_layout(run.config, run.layout, run.gpus, run.batch, run.seq)
    assert run.gpu in CLUSTERS


@pytest.mark.parametrize("row, run", zip(USED, RUNS, strict=True), ids=map(ids, RUNS))
def test_models_have_the_published_number_of_parameters(row, run):
    if row["n_params_b"]:
        assert param_count(run.config) == pytest.approx(float(row["n_params_b"]) * 1e9, rel=0.04)
    else:
        assert "PROXY" in row["model"]  # a part of the layers


def test_fsdp_models_have_the_published_number_of_parameters():
    """With MPT's learned positions, which the course's model has not."""
    for row, run in zip(FSDP_ROWS, FSDP_RUNS, strict=True):
        found = param_count(run.config) + run.seq * run.config.hidden
        assert found == pytest.approx(float(row["n_params_b"]) * 1e9, rel=0.01), ids(run)


def test_fsdp_steps_are_the_published_flops():
    """MFU counts 6 N + 12 L h s a token, which follows from tokens/s."""
    for row, run in zip(FSDP_ROWS, FSDP_RUNS, strict=True):
        a_token = 6 * float(row["n_params_b"]) * 1e9 + 12 * run.config.layers * run.config.hidden * run.seq
        tflops = a_token * run.batch * run.seq / run.step_s / run.gpus / 1e12
        assert tflops == pytest.approx(float(row["tflops_per_gpu"]), rel=0.03), ids(run)


def test_megatron_core_steps_are_the_published_flops():
    """Its count: 6 N a token, the head included, and 12 L h s; without a pipeline a step is one micro-batch."""
    for row, run in zip(USED, RUNS, strict=True):
        if run.source == "Megatron-Core 0.8":
            h = run.config.hidden
            a_token = 6 * (param_count(run.config) - run.config.vocab * h) + 12 * run.config.layers * h * run.seq
            tflops = a_token * run.batch * run.seq / run.step_s / run.gpus / 1e12
            assert tflops == pytest.approx(float(row["tflops_per_gpu"]), rel=0.01)
            assert run.batch == run.layout.dp * run.layout.micro_batch


def test_two_matrices_are_three_of_two_thirds_the_width():
    run = published_run(first("GPT-18B"))
    h, f = 6144, 24576
    assert 3 * h * run.config.ffn_hidden == 2 * h * f and run.config.tied
    assert any("2/3" in each for each in run.assumed)


def test_step_times_are_the_published_training_times():
    """Narayanan et al., table 2: TFLOP/s, and days for 300B tokens. Both were rounded, the second to a day."""
    found = 0
    for row, run in zip(USED, RUNS, strict=True):
        if days := re.search(r"300B tokens: (\d+) days", row["notes"]):
            found += 1
            steps = 300e9 / (run.batch * run.seq)
            assert steps * run.step_s / 86400 == pytest.approx(int(days[1]), abs=0.5 + 0.012 * int(days[1]))
    assert found == 12


def test_step_times_are_the_published_tokens_a_second():
    """Where both were published, the step's time is taken; without it, tokens/s say the same."""
    both = [row for row in USED if row["iter_time_s"] and row["tokens_per_s_per_gpu"]]
    assert len(both) == 52
    for row in both:
        seconds = published_run(row).step_s
        assert seconds == float(row["iter_time_s"])
        assert published_run(row | {"iter_time_s": ""}).step_s == pytest.approx(seconds, rel=0.015)


def test_llama_3_counts_the_models_flops():
    """6N FLOPs a token are less than 5% from its count with 8K tokens, and far from it with 131K."""
    short, *_, long = (run for run in RUNS if run.source == "Llama 3")
    for run, tflops, share in ((short, 430, 0.96), (long, 380, 0.6)):
        alone = 6 * 405.9e9 * run.batch * run.seq / (run.gpus * tflops * 1e12)
        assert alone / run.step_s == pytest.approx(share, abs=0.01)


def test_what_was_assumed_is_said():
    assumed = {(run.source, run.model): run.assumed for run in RUNS}
    assert assumed["NVIDIA 24.11, Llama 3.1 70B", "Llama 3.1 70B"] == ()
    of_llama = set(assumed["Llama 3", "Llama 3 405B"])
    assert {"micro-batch 1", "8 stages per rank, interleaved", "no recomputation"} < of_llama
    assert "not interleaved" in next(run.assumed for run in RUNS if run.model == "GPT-3 175B" and run.layout.pp > 1)
    assert any("matmul" in each for run in RUNS if run.program == "torchtitan" for each in run.assumed)
    assert any("other layer" in each for run in RUNS if run.program == "torchtitan" for each in run.assumed)
    assert any("an H100 SXM" in each for each in published_run(first("Llama 3.1 405B")).assumed)


@pytest.mark.parametrize(
    "words, stage",
    [
        ("0 (DDP)", 0),
        ("1 (distributed_fused_adam)", 1),
        ("3 (DeepSpeed ZeRO-3)", 3),
        ("fsdp2 (ZeRO-3)", 3),
        ("fsdp SHARD_GRAD_OP (ZeRO-2)", 2),
        ("", 1),
        ("fsdp (optimizer+gradient sharded; params not resharded after forward)", 1),
    ],
)
def test_words_for_zero_stages(words, stage):
    assert published_run(first("Llama 3.1 8B", zero_stage_or_fsdp=words)).layout.zero_stage == stage


@pytest.mark.parametrize(
    "model, layout",
    [
        ("Nemotron-4 340B", "dp2,pp8,tp8,sp,zero1,interleaved,v12,selective"),
        ("GPT-18B", "dp32,tp8,mb8,full"),
        ("GPT-1T", "dp6,pp64,tp8,full"),
        ("Llama 3 405B", "dp64,pp16,tp8,sp,zero1,interleaved,v8"),
        ("Llama 3.1 70B", "dp64,zero3,full"),
        ("Llama 3.1 8B", "dp64,zero3,selective"),
    ],
)
def test_layouts_are_read(model, layout):
    assert published_run(first(model)).layout == Layout.parse(layout)


def test_sizes_are_read():
    run = published_run(first("Nemotron-4 340B"))
    assert (run.gpu, run.gpus, run.batch, run.seq, run.step_s) == ("H100", 128, 32, 4096, 4.61)


# Bad input.


@pytest.mark.parametrize("text", ["", "model,nodes\n1B,1\n"])
def test_a_file_of_other_columns_is_one_line(tmp_path, text):
    file = tmp_path / "other.csv"
    file.write_text(text)
    for read in (load_published, left_out):
        with pytest.raises(ValueError, match="lacks columns of the published runs$"):
            read(file)


def test_an_unknown_word_for_a_zero_stage_is_one_line(tmp_path):
    file = written(tmp_path, [first("Llama 3.1 8B", zero_stage_or_fsdp="hybrid")])
    with pytest.raises(ValueError, match="^zero_stage_or_fsdp 'hybrid': not a known text for a ZeRO stage$"):
        load_published(file)


# Predictions.


def test_predictions_use_the_runs_own_gpu():
    run = published_run(first("GPT 22B"))
    assert run.gpu == "A100"
    on_h100 = dataclasses.replace(run, gpu="H100")
    assert 1.5 < float(predicted_step(run).step_s / predicted_step(on_h100).step_s) < 989 / 312


def test_predictions_use_the_runs_own_program_and_dtype():
    run = published_run(first("Llama 3.1 8B", source="torchtitan docs", gpu="A100", recompute="selective"))
    for name in ("torchtitan", "Megatron-LM"):
        cluster = dataclasses.replace(CLUSTERS[run.gpu], software=SOFTWARE[name])
        expected = estimate(run.config, cluster, run.layout, run.batch, run.seq)
        found = predicted_step(dataclasses.replace(run, program=name))
        assert (found.step_s, found.needed_bytes) == (expected.step_s, expected.needed_bytes)
    h100 = dataclasses.replace(run, gpu="H100")
    assert 1 < float(predicted_step(h100).step_s / predicted_step(dataclasses.replace(h100, dtype="fp8")).step_s) < 2
    with pytest.raises(ValueError, match="A100.*no FP8"):
        predicted_step(dataclasses.replace(run, gpu="A100", dtype="fp8"))


@pytest.mark.parametrize("program", sorted({run.program for run in [*RUNS, *FSDP_RUNS]}))
def test_predictions_are_near_what_was_measured(program):
    """With the program's own constants: each run within 30%, and half of them within 12% (Llama 3's are not fitted)."""
    runs = [run for run in [*RUNS, *FSDP_RUNS] if run.program == program]
    assert all(0.7 < float(predicted_step(run).step_s) / run.step_s < 1.3 for run in runs)
    assert errors_by("program", runs)[program][2] < 0.12


def test_errors_are_medians_of_each_source():
    source = "Llama 3"
    ratios = sorted(float(predicted_step(run).step_s) / run.step_s for run in RUNS if run.source == source)
    errors = sorted(abs(ratio - 1) for ratio in ratios)
    assert errors_by("source", RUNS)[source] == (3, ratios[1], errors[1])
    twice = [dataclasses.replace(run, step_s=run.step_s / 2) for run in RUNS]
    once = errors_by("source", RUNS)
    for name, (n, ratio, _) in errors_by("source", twice).items():
        assert (n, ratio) == (once[name][0], pytest.approx(2 * once[name][1]))


def test_time_ratios_have_every_run_twice():
    """With the course's constants, and with its program's own."""
    ratios = time_ratios(RUNS)
    assert list(ratios) == list(errors_by("program", RUNS))
    for program, (course, own) in ratios.items():
        of_program = [run for run in RUNS if run.program == program]
        assert own == [pytest.approx(float(predicted_step(run).step_s) / run.step_s) for run in of_program]
        others = [predicted_step(dataclasses.replace(run, program="course")) for run in of_program]
        assert course == [
            pytest.approx(float(each.step_s) / run.step_s) for each, run in zip(others, of_program, strict=True)
        ]
        assert (course == own) == (program == "course")
