"""Measured runs, and the planner's predictions of them.

    runs = load_runs("data/layout_runs_h100.csv")           the runs behind the playbook's heatmap; others: run_files
    predicted = predict(runs, CLUSTERS["H100, EFA"])        step_s, peak_bytes, fits: arrays, one value per run
    accuracy(runs, predicted)                               median errors, share of right predictions of "fits"

The playbook's runs: nodes of 8 H100, 256 sequences of 4,096 tokens per step, nanotron (The Ultra-Scale Playbook, 2025).
"""

from __future__ import annotations

import csv
import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from course_lib.best_config.clusters import Cluster
from course_lib.best_config.planner import RISK, estimate
from course_lib.best_config.tables import LayoutTable
from course_lib.five_d.layouts import Layout
from course_lib.single_gpu.config import PRESETS, ModelConfig

COLUMNS = {"model", "ok", "mfu_pct", "tokens_per_s_per_gpu", "peak_mem_gb"}
COLUMNS |= {"nodes", "dp", "tp", "pp", "zero_stage", "micro_batch", "grad_accum"}
GQA_GFLOP = {"8B": 57, "80B": 480}  # a run with fewer GFLOP per token is of a variant with 8 K/V heads


@dataclass(frozen=True)
class MeasuredRun:
    """The measured step of a job: its model, layout and nodes, its time and its memory."""

    model: str
    config: ModelConfig
    nodes: int
    layout: Layout
    batch: int  # sequences per step, on all GPUs together
    seq: int  # tokens of a sequence
    ok: bool
    step_s: float  # nan for a failed run
    peak_bytes: float  # on the fullest GPU; nan for a failed run, or if it was not measured
    dtype: str = "bf16"  # of the matmuls
    moe: dict | None = None  # arguments of apply_moe
    failure: str = ""  # of a failed run: "oom" (out of GPU memory), "other"; "" if the file does not say
    where: str = field(default="", compare=False)  # such as "runs.csv, line 2"

    @property
    def row(self) -> dict[str, Any]:
        """Return the run's row of a heatmap, with the MFU of the model's own FLOPs on H100s."""
        from course_lib.single_gpu.training import mfu

        speed = self.batch * self.seq / self.step_s / self.layout.ranks
        sizes = {name: getattr(self.layout, name) for name in ("dp", "tp", "pp", "zero_stage", "micro_batch")}
        speeds = {"tokens_per_s_per_gpu": speed, "mfu_pct": 100 * mfu(self.config, self.seq, speed, 989.5e12)}
        job = {"model": self.model, "nodes": self.nodes, "global_batch_seqs": self.batch, "ok": int(self.ok)}
        return job | sizes | speeds


def numbered_rows(file: Path | str) -> list[tuple[str, dict[str, str]]]:
    """Return the rows of a CSV in UTF-8, with or without a byte order mark, each with its location, such as "runs.csv,
    line 2". Raises ValueError for another kind of file, for two columns of the same name, and for a file without rows.
    Skips rows of empty cells, as spreadsheets write them.
    """
    try:
        with open(file, newline="", encoding="utf-8-sig") as stream:
            reader = csv.DictReader(stream, restval="", restkey="")
            names = reader.fieldnames or []
            rows = [(f"{file}, line {reader.line_num}", row) for row in reader if any(row.values())]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{file}: not a CSV in UTF-8: {error}") from None
    if twice := [name for name, count in Counter(names).items() if count > 1 and name]:
        raise ValueError(f"{file}: two columns have the name {twice[0]!r}: rename one")
    if not rows:
        raise ValueError(f"{file} has no rows")
    return rows


def load_runs(file: Path | str) -> list[MeasuredRun]:
    """Return the playbook's runs: the rows whose batch is 256 sequences. The variants with grouped K/V heads are
    recognized by the FLOPs per token that MFU and tokens/s imply; memory is in GiB, whatever the column's name. Raises
    ValueError for a file with other columns, and for an impossible value. `read_runs` is for other files.
    """
    runs = []
    for where, row in numbered_rows(file):
        if not COLUMNS <= set(row):
            raise ValueError(f"{file} lacks the columns of the playbook's runs: read other files by read_runs")
        if "layout" in row:
            raise ValueError(f"{file} is the result of a sweep: read it by sweep_files.read_sweep")
        try:
            run = playbook_run(row)
        except (ValueError, KeyError, ZeroDivisionError) as error:
            raise ValueError(f"{where}: {error}") from None
        if int(row["dp"]) * int(row["micro_batch"]) * int(row["grad_accum"]) == run.batch:
            runs.append(dataclasses.replace(run, where=where))
    if not runs:
        raise ValueError(f"{file}: no row has 256 sequences per step")
    return runs


def playbook_run(row: dict[str, str], batch: int = 256, seq: int = 4096) -> MeasuredRun:
    """Return the run in a row of the playbook's file."""
    config, ok, nodes = PRESETS[f"bench-{row['model']}"], row["ok"] == "1", int(row["nodes"])
    size: dict[str, Any] = {name: int(row[name]) for name in ("dp", "tp", "pp", "zero_stage", "micro_batch")}
    speed, peak = (float(row[name]) if ok else np.nan for name in ("tokens_per_s_per_gpu", "peak_mem_gb"))
    if ok and float(row["mfu_pct"]) / 100 * 989.5e3 / speed < GQA_GFLOP.get(row["model"], 0):
        config = dataclasses.replace(config, kv_heads=8)
    layout = Layout(**size, sequence_parallel=size["tp"] > 1)
    step_s = batch * seq / (speed * layout.ranks)
    return MeasuredRun(row["model"], config, nodes, layout, batch, seq, ok, step_s, peak * 2**30)


@dataclass(frozen=True)
class Predicted:
    """Predictions of n runs: arrays [n]."""

    step_s: np.ndarray
    peak_bytes: np.ndarray
    risk: np.ndarray  # of running out of memory, 0 to 1

    @property
    def fits(self) -> np.ndarray:
        """True for runs that are more likely to fit than not."""
        return self.risk < 0.5


def alike(runs: list[MeasuredRun]) -> list[list[int]]:
    """Return groups of indices of runs that differ only in their layouts."""
    groups: dict[tuple, list[int]] = {}
    for i, run in enumerate(runs):
        groups.setdefault((run.config, run.batch, run.seq, str(run.moe)), []).append(i)
    return list(groups.values())


def predict(runs: list[MeasuredRun], cluster: Cluster) -> Predicted:
    """Return the planner's estimates of measured runs, in their order."""
    predicted = Predicted(*(np.zeros(len(runs)) for _ in range(3)))
    for rows in alike(runs):
        run, table = runs[rows[0]], LayoutTable.of(runs[i].layout for i in rows)
        e = estimate(run.config, cluster, table, run.batch, run.seq, run.moe)
        predicted.step_s[rows], predicted.peak_bytes[rows], predicted.risk[rows] = e.step_s, e.peak_bytes, e.risk
    return predicted


def accuracy(runs: list[MeasuredRun], predicted: Predicted) -> dict[str, float]:
    """Return the median errors of tokens/s and of peak memory over the runs that were ok (nan without measured peaks),
    and the share of runs for which "fits" was right.
    """
    ok = np.array([run.ok for run in runs])
    step_s, peak = (np.array([getattr(run, name) for run in runs])[ok] for name in ("step_s", "peak_bytes"))
    off = np.abs(predicted.peak_bytes[ok] / peak - 1)[np.isfinite(peak)]
    return {
        "runs": len(runs),
        "tokens/s": float(np.median(np.abs(step_s / predicted.step_s[ok] - 1))),
        "peak memory": float(np.median(off)) if off.size else np.nan,
        "ok or out of memory": float(np.mean(predicted.fits == ok)),
    }


def cells(runs: list[MeasuredRun]) -> dict[tuple[str, int], list[int]]:
    """Return the indices of the runs of each (model, nodes)."""
    rows_of: dict[tuple[str, int], list[int]] = {}
    for i, run in enumerate(runs):
        rows_of.setdefault((run.model, run.nodes), []).append(i)
    return rows_of


def favorite(predicted: Predicted, rows: list[int], risk: float = RISK) -> int | None:
    """Return the row with the shortest predicted step among the rows of at most this risk; None without such rows."""
    allowed = [row for row in rows if predicted.risk[row] <= risk]
    return min(allowed, key=lambda row: predicted.step_s[row], default=None)


def loss_of_pick(runs: list[MeasuredRun], rows: list[int], pick: int | None) -> float:
    """Return the share of the fastest run's speed by which run `pick` is slower, 0 to 1: 1 if it failed or is None, 0
    if no run was ok.
    """
    times = [runs[row].step_s for row in rows if runs[row].ok]
    if not times:
        return 0.0
    return 1.0 if pick is None or not runs[pick].ok else 1 - min(times) / runs[pick].step_s


def loss_of_picks(runs: list[MeasuredRun], predicted: Predicted, risk: float = RISK) -> dict[tuple[str, int], float]:
    """Return `loss_of_pick` of the planner's favorite among the measured layouts of each cell; 1 if no layout has so
    little risk. Leaves out cells in which no run was ok.
    """
    ok_cells = {cell: rows for cell, rows in cells(runs).items() if any(runs[row].ok for row in rows)}
    return {cell: loss_of_pick(runs, rows, favorite(predicted, rows, risk)) for cell, rows in ok_cells.items()}
