"""course_lib.best_config.runs: the measured runs with their traps, and hand-made cases of what predictions say."""

import csv
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from course_lib.best_config.clusters import CLUSTERS
from course_lib.best_config.planner import estimate
from course_lib.best_config.runs import MeasuredRun, Predicted, accuracy, cells, load_runs, loss_of_picks, predict
from course_lib.five_d.layouts import Layout, check_layout
from course_lib.single_gpu.model import PRESETS
from course_lib.single_gpu.training import flops_per_token

FILE = Path(__file__).parents[2] / "data" / "layout_runs_h100.csv"
RUNS = load_runs(FILE)
ROWS = list(csv.DictReader(FILE.open()))
HEADER = ",".join(ROWS[0])


def file_with(tmp_path: Path, *lines: str) -> Path:
    """A file of runs with these lines."""
    file = tmp_path / "runs.csv"
    file.write_text("\n".join([HEADER, *lines]) + "\n")
    return file


def test_rows_with_another_batch_are_left_out():
    others = [row for row in ROWS if int(row["dp"]) * int(row["micro_batch"]) * int(row["grad_accum"]) != 256]
    assert (len(ROWS), len(others), len(RUNS)) == (1573, 16, 1557)
    assert sum(row["ok"] == "1" for row in ROWS) == 899
    assert sum(run.ok for run in RUNS) == 899 - sum(row["ok"] == "1" for row in others)


def test_what_is_left_is_what_the_file_says():
    kept = [row for row in ROWS if int(row["dp"]) * int(row["micro_batch"]) * int(row["grad_accum"]) == 256]
    for run, row in zip(RUNS, kept, strict=True):
        layout = run.layout
        assert (run.model, str(run.nodes)) == (row["model"], row["nodes"]) and layout.ranks == 8 * run.nodes
        for name in ("dp", "tp", "pp", "zero_stage", "micro_batch"):
            assert str(getattr(layout, name)) == row[name]
        assert layout.sequence_parallel == (layout.tp > 1) and layout.cp == 1 and run.ok == (row["ok"] == "1")
        if run.ok:
            assert run.step_s == pytest.approx(256 * 4096 / (float(row["tokens_per_s_per_gpu"]) * 8 * run.nodes))
            assert run.peak_bytes == pytest.approx(float(row["peak_mem_gb"]) * 2**30), "GiB, whatever the column says"


def test_failed_runs_have_no_numbers():
    failed = [run for run in RUNS if not run.ok]
    assert len(failed) > 600 and all(np.isnan(run.step_s) and np.isnan(run.peak_bytes) for run in failed)
    assert all(run.step_s > 0 and run.peak_bytes > 0 for run in RUNS if run.ok)


def test_peaks_are_gib_of_an_80_gib_gpu():
    """None is above it, and some would be above what 80 GB leave, were they GB."""
    peaks = np.array([run.peak_bytes for run in RUNS if run.ok])
    assert 74 * 2**30 < peaks.max() < 80 * 2**30


def test_variants_with_grouped_heads_are_told_by_their_flops(tmp_path):
    """The same row, with the MFU that 32 and that 8 K/V heads give at its speed."""
    speed = 6000.0
    for kv_heads in (32, 8):
        config = dataclasses.replace(PRESETS["bench-8B"], kv_heads=kv_heads)
        mfu_pct = 100 * flops_per_token(config, 4096) * speed / 989.5e12
        run = load_runs(file_with(tmp_path, f"8B,1,8,1,1,1,2,16,256,1,{mfu_pct:.1f},{speed},60.0"))[0]
        assert run.config == config, kv_heads


def test_both_variants_are_among_the_runs():
    heads = {}
    for run in RUNS:
        heads.setdefault(run.model, set()).add(run.config.kv_heads)
    assert heads["8B"] == {8, 32} and heads["80B"] == {8, 64} and heads["1B"] == heads["3B"] == {32}
    for run, row in zip(RUNS, (row for row in ROWS if accumulates_to_256(row)), strict=True):
        if run.ok and run.model in ("8B", "80B"):
            per_token = float(row["mfu_pct"]) / 100 * 989.5e12 / float(row["tokens_per_s_per_gpu"])
            few, all_heads = (
                abs(per_token - flops_per_token(dataclasses.replace(run.config, kv_heads=n), 4096))
                for n in (8, run.config.heads)
            )
            if max(few, all_heads) > 2 * min(few, all_heads):  # MFU has one decimal: at low speeds both are near
                assert (few < all_heads) == (run.config.kv_heads == 8), row


def accumulates_to_256(row: dict) -> bool:
    return int(row["dp"]) * int(row["micro_batch"]) * int(row["grad_accum"]) == 256


def test_a_runs_row_has_the_files_columns():
    """The file's MFU is that of the variant that was told, nearly; but nanotron counts a tied embedding
    twice where it is on two stages.
    """
    for run, row in zip(RUNS, (row for row in ROWS if accumulates_to_256(row)), strict=True):
        assert set(run.row) <= set(row)
        for name in ("model", "nodes", "dp", "tp", "pp", "zero_stage", "micro_batch", "ok"):
            assert str(run.row[name]) == row[name]
        if run.ok:
            assert run.row["tokens_per_s_per_gpu"] == pytest.approx(float(row["tokens_per_s_per_gpu"]))
            counted = dataclasses.replace(run.config, tied=run.config.tied and run.layout.pp == 1)
            again = flops_per_token(counted, 4096) / flops_per_token(run.config, 4096)
            assert run.row["mfu_pct"] * again == pytest.approx(float(row["mfu_pct"]), rel=0.02, abs=0.06)


def test_every_layout_that_ran_can_be():
    """Their stages are cut by another rule (stage_loads): as many as there are blocks."""
    for run in RUNS:
        if run.ok:
            check_layout(dataclasses.replace(run.config, layers=10**4), run.layout, 8 * run.nodes, 256, 4096)


@pytest.mark.parametrize(
    "lines, words",
    [
        (["a,b", "1,2"], "lacks the columns of the playbook's runs"),
        (["model,nodes"], "has no rows"),
        ([], "has no rows"),
        ([HEADER], "has no rows"),
        ([HEADER, "8B,1,8,1,1,1,2,8,128,1,40.0,6000.0,60.0"], "no row has 256 sequences per step"),
        ([HEADER, "7B,1,8,1,1,1,2,16,256,1,40.0,6000.0,60.0"], "line 2: 'bench-7B'"),
        ([HEADER, "8B,1,8,1,1,1,2,16,256,1,40.0,fast,60.0"], "line 2: could not convert string to float: 'fast'"),
        ([HEADER + ",layout", "debug,1,2,1,1,0,1,4,8,1,40.0,6000.0,60.0,dp2"], "result of a sweep: .*read_sweep"),
    ],
)
def test_a_file_that_is_none_is_one_line(tmp_path, lines, words):
    file = tmp_path / "other.csv"
    file.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=words) as error:
        load_runs(file)
    assert str(file) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("column", ["tp", "pp", "zero_stage", "grad_accum", "ok", "mfu_pct", "peak_mem_gb"])
def test_a_file_without_one_of_the_columns_is_one_line(tmp_path, column):
    file = tmp_path / "other.csv"
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, [name for name in ROWS[0] if name != column], extrasaction="ignore")
        writer.writeheader()
        writer.writerow(ROWS[0])
    with pytest.raises(ValueError, match="lacks the columns"):
        load_runs(file)


# What is said of predictions, by hand.


def run_of(model: str, nodes: int, step_s: float | None, peak_bytes: float = 40e9) -> MeasuredRun:
    """A run that took so long, or failed."""
    ok = step_s is not None
    times = (step_s, peak_bytes) if ok else (np.nan, np.nan)
    return MeasuredRun(model, PRESETS["bench-1B"], nodes, Layout(dp=8 * nodes), 256, 4096, ok, *times)


def test_accuracy_by_hand():
    runs = [
        run_of("1B", 1, 10.0, 10e9),
        run_of("1B", 1, 10.0, 20e9),
        run_of("1B", 2, 10.0, 40e9),
        run_of("1B", 2, None),
    ]
    predicted = Predicted(
        np.array([8.0, 10.0, 12.5, 1.0]), np.array([11e9, 30e9, 40e9, 1.0]), np.array([0.1, 0.9, 0.4, 0.5])
    )
    found = accuracy(runs, predicted)
    assert found["runs"] == 4
    assert found["tokens/s"] == pytest.approx(0.2), "of errors 0.25, 0, 0.2"
    assert found["peak memory"] == pytest.approx(0.1), "of errors 0.1, 0.5, 0"
    assert found["ok or out of memory"] == 0.75, "one that ran was said not to fit"


def test_loss_of_picks_by_hand():
    runs = [
        run_of("1B", 1, 10.0), run_of("1B", 1, 8.0), run_of("1B", 1, None), run_of("1B", 1, 7.0),
        run_of("1B", 2, 4.0), run_of("3B", 1, 5.0), run_of("1B", 2, 5.0),
    ]  # fmt: skip
    step_s = np.array([2.0, 3.0, 1.0, 1.5, 6.0, 9.0, 7.0])
    risk = np.array([0.05, 0.01, 0.3, 0.2, 0.1, 0.0, 0.0])
    assert cells(runs) == {("1B", 1): [0, 1, 2, 3], ("1B", 2): [4, 6], ("3B", 1): [5]}
    found = loss_of_picks(runs, Predicted(step_s, np.ones(7), risk))
    assert found[("1B", 1)] == pytest.approx(1 - 7 / 10), "it picks run 0: runs 2 and 3 are too risky"
    assert found[("1B", 2)] == 0 and found[("3B", 1)] == 0
    assert loss_of_picks(runs, Predicted(step_s, np.ones(7), risk), 0.3)[("1B", 1)] == 1, "run 2 failed"
    assert loss_of_picks(runs, Predicted(step_s, np.ones(7), risk), 0.25)[("1B", 1)] == 0, "run 3 is the fastest"


@pytest.mark.parametrize("step_s, risk", [(None, 0.0), (5.0, 0.6)])
def test_a_cell_without_a_pick_does_not_hide_the_others(step_s, risk):
    """Nothing ran, which is no loss; or all that ran is too risky, which is a whole one."""
    runs = [run_of("1B", 1, 4.0), run_of("3B", 1, step_s)]
    found = loss_of_picks(runs, Predicted(np.ones(2), np.ones(2), np.array([0.0, risk])))
    assert found == {("1B", 1): 0} | ({("3B", 1): 1} if step_s else {})


def test_predictions_are_the_estimates_in_the_runs_order():
    cluster = CLUSTERS["H100, EFA"]
    some = [RUNS[i] for i in np.random.default_rng(0).permutation(len(RUNS))[:60]]
    found = predict(some, cluster)
    for i, run in enumerate(some):
        one = estimate(run.config, cluster, run.layout, 256, 4096)
        assert (found.step_s[i], found.peak_bytes[i]) == pytest.approx((float(one.step_s), float(one.peak_bytes)))
        assert found.fits[i] == one.fits


def test_the_planner_is_near_the_runs():
    """Its constants are fitted to these; cross-validation in notebook 11 says how near it is to others."""
    found = accuracy(RUNS, predict(RUNS, CLUSTERS["H100, EFA"]))
    assert found["tokens/s"] < 0.1 and found["peak memory"] < 0.08 and found["ok or out of memory"] > 0.9
    step_s, peak, ok = (np.array([getattr(run, name) for run in RUNS]) for name in ("step_s", "peak_bytes", "ok"))
    perfect = Predicted(step_s, peak, np.where(ok, 0.0, 1.0))
    assert accuracy(RUNS, perfect) == {"runs": 1557, "tokens/s": 0, "peak memory": 0, "ok or out of memory": 1}
    assert set(loss_of_picks(RUNS, perfect).values()) == {0}
