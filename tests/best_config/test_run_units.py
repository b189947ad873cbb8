"""course_lib.best_config.run_units: runs in other units are refused in one line that says which, before a fit; messy
files of runs are read for what they are.
"""

import collections
import csv
import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from course_lib.best_config.calibration import calibrate
from course_lib.best_config.clusters import CLUSTERS
from course_lib.best_config.fit_reports import Calibration
from course_lib.best_config.planner import estimate
from course_lib.best_config.run_files import read_runs
from course_lib.best_config.run_units import FAR, SLOW, check_units, locations_of
from course_lib.best_config.runs import MeasuredRun, load_runs
from course_lib.five_d.layouts import Layout
from course_lib.single_gpu.model import PRESETS

H100 = CLUSTERS["H100"]
TRUTH = H100.with_software(matmul_efficiency=0.6, network_efficiency=0.35)
COLUMNS = {
    "model": "preset", "nodes": "nodes", "layout": "layout", "batch": "sequences", "seq": 4096, "ok": "status",
    "step_s": {"column": "iter_ms", "factor": 1e-3}, "peak_bytes": {"column": "peak_gib", "factor": 2**30},
}  # fmt: skip


def honest_rows() -> list[dict]:
    """20 runs on up to 64 GPUs, with 3% of noise in time; three of them ran out of memory."""
    chance, rows = np.random.default_rng(0), []
    for model, sizes in {"llama3.2-1B": (16, 64), "llama3-8B": (8, 32)}.items():
        for gpus in sizes:
            words = f"dp{gpus},zero1 dp{gpus // 2},tp2,sp,zero1 dp{gpus // 4},pp4,zero1 dp{gpus // 8},tp8,sp,zero1,mb2"
            for layout in (*words.split(), f"dp{gpus // 8},pp2,tp4,sp,zero1"):
                said = estimate(PRESETS[model], TRUTH, Layout.parse(layout), 256, 4096)
                ok, ms = bool(said.fits), float(said.step_s) * 1e3 * math.exp(0.03 * chance.standard_normal())
                row = {"preset": model, "nodes": gpus // 8, "layout": layout, "sequences": 256, "status": "OOM"}
                peak = f"{float(said.peak_bytes) / 2**30:.3f}"
                measured = {"status": "ok", "iter_ms": f"{ms:.1f}", "peak_gib": peak}
                rows.append(row | (measured if ok else {"iter_ms": "", "peak_gib": ""}))
    return rows


ROWS = honest_rows()


def runs_of(tmp_path: Path, rows: list[dict], columns: dict = COLUMNS) -> list[MeasuredRun]:
    """The runs of a file with these rows."""
    file = tmp_path / "ours.csv"
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, ROWS[0])
        writer.writeheader()
        writer.writerows(rows)
    return read_runs(file, columns)


def every(step: int, change) -> list[dict]:
    """ROWS, each n-th of them changed; those that failed stay."""
    return [row | change(row) if i % step == 0 and row["iter_ms"] else row for i, row in enumerate(ROWS)]


def in_seconds(row: dict) -> dict:
    return {"iter_ms": f"{float(row['iter_ms']) / 1000:.4f}"}


def in_bytes(row: dict) -> dict:
    return {"peak_gib": f"{float(row['peak_gib']) * 2**30:.0f}"}


MESSY = {
    "ms taken as s": (ROWS, {"step_s": "iter_ms"}, r"^step_s looks like milliseconds: the median run takes 1,[012]00 "),
    "GiB taken as bytes": (ROWS, {"peak_bytes": "peak_gib"}, r"^peak_bytes looks like GiB or GB: the .* 1.1e.09 times"),
    "some rows in s": (every(4, in_seconds), {}, r"runs are about \S+ times shorter than the .*csv, lines 2, 6, "),
    "half of the rows in s": (every(2, in_seconds), {}, r"are about \S+ times (shorter|longer) than the others"),
    "one row in s": (every(20, in_seconds), {}, r"1 of 1\d runs is about (9\d0|1,\d00) times shorter .*, line 2$"),
    "some peaks in bytes": (every(4, in_bytes), {}, "peak_bytes: 5 of 1. runs are about 1.1e.09 times larger than "),
    "no number": (every(3, lambda row: {"iter_ms": "1,234.5"}), {}, "ours.csv, line 2: step_s is '1,234.5', which is"),
    "nan": (every(3, lambda row: {"iter_ms": "nan"}), {}, "ours.csv, line 2: step_s is 'nan': it is more than 0"),
    "no batch": (ROWS, {"batch": "global_batch"}, "line 2: no column 'global_batch', where batch should be"),
    "another model's name": ([row | {"preset": "Llama-3-8B"} for row in ROWS], {}, "model 'Llama-3-8B' is none of"),
    "other words": (
        [ROWS[0] | {"layout": "DP8 ZeRO1"}, *ROWS[1:]],
        {},
        "ours.csv, line 2: layout 'DP8 ZeRO1': 'DP8ZeRO1' is",
    ),
    "few runs": (ROWS[:3], {}, "fit: 3 runs that were ok; "),
}


@pytest.mark.parametrize("name", MESSY)
def test_messy_runs_are_one_line(tmp_path, name):
    rows, columns, words = MESSY[name]
    with pytest.raises(ValueError, match=words) as error:
        calibrate(runs_of(tmp_path, rows, COLUMNS | columns), H100)
    assert "\n" not in str(error.value)


def test_other_failures_do_not_count(tmp_path):
    """A status in other words, and a crash that is no more than "failed" beside rows that say OOM."""
    rows = [row | {"status": word} for row, word in zip(ROWS[:2], ("Timeout", "failed"), strict=True)] + ROWS[2:]
    oom = sum(row["status"] == "OOM" for row in rows)
    failures = collections.Counter(run.failure for run in runs_of(tmp_path, rows) if not run.ok)
    assert oom > 0 and failures == {"other": 2, "oom": oom}
    (said,) = Calibration(H100, (), 0, {}, {}, failures=failures).failed_lines()
    assert said == f"of the others, 2 failed for other reasons and do not count; {oom} ran out of memory"


def made_runs(step_s=lambda run: 1.0, peak=1.0) -> list[MeasuredRun]:
    """Runs of 64 GPUs, whose times and peaks are these factors of the predicted ones."""
    found = []
    for words in ("dp64,zero1", "dp32,tp2,sp,zero1", "dp16,pp4,zero1", "dp8,tp8,sp,zero1", "dp16,tp4,sp"):
        layout = Layout.parse(words)
        run = MeasuredRun("8B", PRESETS["llama3-8B"], 8, layout, 256, 4096, True, math.nan, math.nan)
        said = estimate(run.config, H100, layout, 256, 4096)
        times = {"step_s": float(said.step_s) * step_s(run), "peak_bytes": float(said.peak_bytes) * peak}
        found.append(dataclasses.replace(run, **times))
    return found


@pytest.mark.parametrize(
    "factor, words",
    [
        (1.2e3, "^step_s looks like milliseconds: the median run takes 1,200 times longer than .* factor = 1e-3}$"),
        (0.9e6, "^step_s looks like microseconds: the median run takes 900,000 times longer than .* factor = 1e-6}$"),
        (1 / 62, "^step_s looks like (minutes|tokens/s of all GPUs), or step_s looks .* name that column tokens_per_s"),
        (64, "^step_s looks like tokens/s per GPU: .* 64 times longer than .*; name that column tokens_per_s_per_gpu$"),
        (
            4096,
            "^step_s looks like sequences/s: .* times longer than predicted; multiply them by seq for tokens_per_s$",
        ),
        (
            1 / 4096,
            "^batch looks like tokens, or step_s looks like hours: .* divide it by seq, or multiply it by 3,600",
        ),
        (1e-9, "^step_s: the median run takes 1.0e.09 times shorter than predicted: check the unit, batch, seq and "),
    ],
)
def test_units_of_time(factor, words):
    with pytest.raises(ValueError, match=words) as error:
        check_units(made_runs(lambda run: factor), H100, "step_s")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "factor, words",
    [
        (2.0**-20, "looks like MiB or MB: .*factor = 1048576}$"),
        (1 / 1000, "looks like KiB or kB: "),
        (2.0**30, "looks like bytes read as GiB: .* leave out its factor$"),
        (2.0**10, "looks like MiB read as GiB, or bytes read as KiB: .* divide its factor by 2.10$"),
        (50, ": the median peak is 50 times larger than predicted: check the unit, or start from a cluster nearer"),
    ],
)
def test_units_of_memory(factor, words):
    with pytest.raises(ValueError, match=f"^peak_bytes ?{words}"):
        check_units(made_runs(peak=factor), H100, "peak_bytes")


def test_a_start_that_is_off_by_less_and_outliers_are_fitted():
    """Up to FAR for all together, and beside the others up to SLOW for a run that stalled."""
    check_units(made_runs(lambda run: 0.9 * FAR), H100, "step_s")
    check_units(made_runs(lambda run: 1 / (0.9 * FAR)), H100, "step_s")
    check_units([], H100, "peak_bytes")
    stalled = lambda by: made_runs(lambda run: by if run.layout.pp > 1 else 1.0)  # noqa: E731
    check_units(stalled(0.9 * SLOW), H100, "step_s")
    for by, way in ((1.1 * SLOW, "longer"), (0.9 / FAR, "shorter")):
        with pytest.raises(ValueError, match=f"step_s: 1 of 5 runs is about .* times {way} than the others"):
            check_units(stalled(by), H100, "step_s")


def test_measured_runs_pass_from_any_preset():
    """Stalls of the network included, from constants of other GPUs and another program."""
    runs = [run for run in load_runs(Path(__file__).parents[2] / "data" / "layout_runs_h100.csv") if run.ok]
    for name in ("H100, EFA", "H100", "A100", "B200", "L40S"):
        for what in ("step_s", "peak_bytes"):
            check_units(runs, CLUSTERS[name], what)


def test_places():
    runs = [dataclasses.replace(run, where=f"a b.csv, line {i}") for i, run in enumerate(made_runs(), 2)]
    assert (
        locations_of(runs) == "a b.csv, lines 2, 3, 4, 5, 6"
        and locations_of(runs, 2) == "a b.csv, lines 2, 3 and 3 more"
    )
    assert locations_of(runs[:1]) == "a b.csv, line 2"
    other = dataclasses.replace(runs[0], where="c.csv, line 9")
    assert locations_of([runs[0], other]) == "a b.csv, line 2, c.csv, line 9"
