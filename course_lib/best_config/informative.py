"""The layouts whose runs determine the planner's constants best, to run before a calibration.

    informative(config, CLUSTERS["H100"], gpus=64, batch=512, seq=8192, n=20)

A run's time and peak inform about each constant in proportion to their growth with it. A set of runs narrows all
constants together by the determinant of their information matrix, J^T J / spread^2. The choice is greedy: each time,
add the layout that makes the determinant largest (D-optimal design: Fedorov 1972).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from course_lib.best_config.calibration import SCALE, constants_of, slopes
from course_lib.best_config.clusters import Cluster
from course_lib.best_config.planner import search
from course_lib.best_config.runs import MeasuredRun
from course_lib.five_d.layouts import Layout
from course_lib.single_gpu.config import ModelConfig

# Largest share of a GPU's memory: of the file's runs predicted to need less, 5% failed; up to 0.9 17%, beyond 47%.
MEMORY_SHARE = 0.8
SLOWEST = 3  # times the fastest step: slower layouts are of no use, and the planner's formulas err most on them
CANDIDATES = 2000  # layouts, evenly from the fastest to the slowest


def candidate_runs(
    config: ModelConfig, cluster: Cluster, gpus: int, batch: int, seq: int, moe: dict | None
) -> list[MeasuredRun]:
    """Return layouts that fit with memory to spare, as runs without measurements. Raises ValueError if none fits."""
    ranking = search(config, cluster, gpus, batch, seq, moe)
    e, rows = ranking.estimate, ranking.order
    rows = rows[(e.needed_bytes < MEMORY_SHARE * e.usable_bytes)[rows]]
    if not len(rows):
        job = f"batch {batch}, seq {seq} on {gpus} GPUs"
        raise ValueError(f"{job}: no layout leaves a fifth of the memory free: use more GPUs, or fewer tokens")
    rows = rows[e.step_s[rows] < SLOWEST * e.step_s[rows[0]]]
    rows = rows[np.unique(np.linspace(0, len(rows) - 1, CANDIDATES).astype(int))]
    nodes = -(-gpus // cluster.gpus_per_node)
    layouts = (ranking.table[row] for row in rows)
    return [MeasuredRun("", config, nodes, each, batch, seq, True, np.nan, np.nan, "bf16", moe) for each in layouts]


def informative(
    config: ModelConfig,
    cluster: Cluster,
    gpus: int | Iterable[int],
    batch: int,
    seq: int = 4096,
    n: int = 20,
    moe: dict | None = None,
) -> list[Layout]:
    """Return the n layouts (or all that fit) of so many GPUs, or of several numbers of GPUs, whose runs determine the
    cluster's constants best, the most informative first. Raises ValueError if none fits.
    """
    counts = [gpus] if isinstance(gpus, int) else list(gpus)
    runs = [run for count in counts for run in candidate_runs(config, cluster, count, batch, seq, moe)]
    slope = {what: slopes(runs, cluster, list(constants_of(cluster, what)), what) / SCALE[what] for what in SCALE}
    covariance = {what: np.eye(each.shape[1]) for what, each in slope.items()}  # at first, a factor of e
    left, layouts = np.ones(len(runs), bool), []
    for _ in range(min(n, len(runs))):
        gains = [np.log1p(((each @ covariance[what]) * each).sum(1)) for what, each in slope.items()]
        best = int(np.where(left, np.sum(gains, axis=0), -1).argmax())
        left[best] = False
        layouts.append(runs[best].layout)
        for what, each in slope.items():
            along = covariance[what] @ each[best]
            covariance[what] = covariance[what] - np.outer(along, along) / (1 + each[best] @ along)
    return layouts
