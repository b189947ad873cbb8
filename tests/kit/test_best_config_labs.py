"""course_kit.labs.best_config: tables, measured slots and sums on paper of notebook 11. No ranks."""

import dataclasses
import re
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from course_kit.labs import best_config as labs
from course_lib.best_config import calibration
from course_lib.best_config.clusters import CLUSTERS
from course_lib.best_config.planner import estimate
from course_lib.best_config.runs import Predicted, load_runs, loss_of_picks
from course_lib.best_config.software import SOFTWARE
from course_lib.five_d.layouts import Layout
from course_lib.single_gpu.memory import param_count
from course_lib.single_gpu.model import PRESETS

EFA = CLUSTERS["H100, EFA"]
RUNS = load_runs(Path(__file__).resolve().parents[2] / "data" / "layout_runs_h100.csv")


@pytest.mark.parametrize("preset", ["llama3-8B", "llama3-405B", "llama3.2-1B"])
def test_the_scales_of_a_model_add_up_to_its_parameters(preset):
    """All but the norms, which are two vectors per layer and one at the end."""
    config, found = PRESETS[preset], labs.scales(PRESETS[preset])
    norms = (2 * config.layers + 1) * config.hidden
    assert found["all layers"] + found["embedding and head"] + norms == param_count(config)
    assert found["a layer"] * config.layers == found["all layers"]
    parts = ("Q, K, V", "attention output h²", "gate and up 2·h·f", "down h·f")
    assert sum(found[name] for name in parts) == found["a layer"]


def test_a_scale_is_said_in_three_letters():
    assert [labs.rounded(n) for n in (4096, 16_777_216, 8.03e9, 1.5e12)] == ["4,096", "16.8 M", "8.0 B", "1.5 T"]
    lines = labs.scales_table(("llama3-8B", "llama3-70B")).splitlines()
    assert lines[0].split()[-2:] == ["llama3-8B", "llama3-70B"] and len(lines) == 15


def test_ratios_are_times_of_the_bytes_and_of_the_flops():
    tokens, h, peak, bandwidth = 8192, 4096, 1e15, 1e11
    found = labs.overlap_ratios(tokens, h, layers=2, degree=4, peak=peak, bandwidth=bandwidth)
    layer = 16 * h * h
    assert found["DP, ZeRO-3"] == pytest.approx((2 * layer * 3 / 4 / bandwidth) / (2 * tokens * layer / peak))
    assert found["TP"] == pytest.approx((2 * tokens * h * 3 / 4 / bandwidth) / (2 * tokens * h * h / 4 / peak))
    assert found["PP"] == pytest.approx((2 * tokens * h / bandwidth) / (2 * tokens * layer * 2 / peak))


def test_a_slot_is_a_step_over_slots_and_layers():
    run = next(run for run in RUNS if run.ok and run.model == "8B")
    layout = Layout.parse("dp4,pp2,tp4,sp,mb2")  # 32 micro-batches, 33 slots, 16 layers per stage
    made = dataclasses.replace(run, nodes=4, layout=layout, step_s=33 * 16 * 5e-3)
    others = [dataclasses.replace(made, ok=False), dataclasses.replace(made, nodes=8)]
    assert labs.measured_slots([made, *others], "8B", nodes=4, tp=4, pp=2) == [(2, 5.0)]


def test_a_slow_run_takes_over_twice_as_long_as_predicted():
    run = next(run for run in RUNS if run.ok)
    runs = [dataclasses.replace(run, step_s=seconds) for seconds in (1.0, 2.1, 9.0)]
    runs.append(dataclasses.replace(run, ok=False))
    line = labs.errors_line(runs, Predicted(np.ones(4), np.full(4, run.peak_bytes), np.zeros(4)))
    assert line.endswith("slow runs: 2 of the 3 that ran") and "peak memory 0.00%" in line


def test_a_fit_errs_more_on_a_cell_that_it_has_not_seen():
    """By a fit that takes the mean of what it sees as the host's seconds."""
    some = [run for run in RUNS if run.ok and run.model == "8B" and run.nodes in (1, 16)]

    def fit(runs, cluster):
        return cluster.with_software(step_host_s=float(np.mean([run.nodes for run in runs])))

    with mock.patch.object(calibration, "fit", fit):
        found = labs.seen_and_unseen(some, EFA)
    assert set(found) == {"fitted to them", "not seen"} and {each["runs"] for each in found.values()} == {len(some)}
    assert found["fitted to them"]["tokens/s"] != found["not seen"]["tokens/s"]


def test_constants_are_spoiled_to_the_worse():
    spoiled = labs.spoiled(EFA).software
    assert spoiled.matmul_efficiency == pytest.approx(EFA.software.matmul_efficiency / 1.5)
    assert spoiled.layer_host_s == pytest.approx(2 * EFA.software.layer_host_s)
    assert spoiled.kept_hidden == EFA.software.kept_hidden
    table = labs.errors_by_model(RUNS, {"before": labs.spoiled(EFA), "fitted": EFA}).splitlines()
    assert len(table) == 5
    for line in table[1:]:
        before, fitted = (float(word.rstrip("%")) for word in line.split()[-2:])
        assert before > 2 * fitted


@pytest.mark.parametrize("letter, gib", [("A", 5), ("B", 31), ("C", 68)])
def test_the_failed_plans_fit_on_paper_alone(letter, gib):
    model, nodes, words = labs.FAILED[letter]
    config, layout = PRESETS[f"bench-{model}"], Layout.parse(words)
    assert layout.ranks == 8 * nodes
    assert labs.on_paper(config, EFA, layout) == pytest.approx(gib, abs=0.5)
    said = estimate(config, EFA, layout, 256)
    assert not said.fits and said.usable_bytes / 2**30 > gib
    assert [run.ok for run in RUNS if (run.model, run.nodes, run.layout) == (model, nodes, layout)] == [False]


def test_a_judgement_names_the_largest_parts_first(capsys):
    labs.judge("A", "dp64")
    first, memory, seconds = capsys.readouterr().out.splitlines()
    assert first.startswith("A: dp64: DOES NOT FIT, risk 100%, ")
    assert memory.startswith("   GiB: optimizer states 90, gradients 30,") and "matrices" in seconds
    with pytest.raises(ValueError, match="64"):
        labs.judge("A", "dp32")


def test_a_judgement_says_where_a_risk_is_above_the_limit(capsys):
    for words, above in (("dp64,zero3", False), ("dp64,zero3,mb2", True)):
        labs.judge("A", words)
        first = capsys.readouterr().out.splitlines()[0]
        assert first.startswith(f"A: {words}: fits, risk ") and ("ABOVE THE 10% LIMIT" in first) == above


def test_the_table_of_the_regret_adds_up():
    """With predictions that rank by micro-batch alone, each row's parts add up to its regret, and cells without one are
    left out.
    """
    order = {"step_s": [1 / run.layout.micro_batch for run in RUNS], "peak_bytes": [1.0] * len(RUNS)}
    recorded = {"predictions": order | {"risk": [0.0 if run.ok else 1.0 for run in RUNS]}}
    losses = loss_of_picks(RUNS, labs.recorded_predictions(recorded))
    head, *lines = labs.regret_table(RUNS, recorded, EFA).splitlines()
    assert head.split() == ["regret", "other", "model", "chance", "caution", "scatter", "avoidable"]
    shown = {line[:21].strip(): [float(each) for each in re.findall(r"([\d.]+)%", line)] for line in lines}
    assert all(row[0] == pytest.approx(sum(row[1:]), abs=0.3) for row in shown.values())
    expected = {f"{model} on {nodes}": 100 * loss for (model, nodes), loss in losses.items() if loss >= 0.01}
    assert {name: row[0] for name, row in shown.items() if " on " in name} == pytest.approx(expected, abs=0.06)
    mean = np.mean([loss for (_, nodes), loss in losses.items() if nodes == 64])
    assert shown["mean, 64 nodes"][0] == pytest.approx(100 * mean, abs=0.06)


def test_the_table_of_programs_has_the_recorded_errors_and_the_librarys_constants():
    rows = [
        ("torchtitan", "A", 3, 0.5, 0.5),
        ("torchtitan", "all", 9, 0.02, 0.031),
        ("DeepSpeed 2021", "all", 6, 0.03, None),
    ]
    recorded = [dict(zip(("program", "source", "runs", "in sample", "left out"), row, strict=True)) for row in rows]
    head, course, torchtitan, deepspeed = labs.programs_table({"programs": recorded}).splitlines()
    assert course.split()[:3] == ["course", f"{SOFTWARE['course'].matmul_efficiency:.0%}", "35%"]
    assert torchtitan.split() == "torchtitan 9 2.0% 3.1% 60% 35% 9.5 h + 4 f".split()
    assert deepspeed.startswith("DeepSpeed 2021") and "scores" in deepspeed and deepspeed.count("%") == 3
