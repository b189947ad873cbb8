"""The layouts whose runs tell most of the planner's constants, to run before a calibration.

    informative(config, CLUSTERS["H100"], gpus=64, batch=512, seq=8192, n=20)

A run's time and peak tell of each constant by as much as they grow with it. A set of runs narrows all constants
together by the determinant of their information matrix, J^T J / spread^2. The choice is greedy: each time the layout
that makes the determinant largest beside those that are there (D-optimal design: Fedorov 1972).
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

ROOM = 0.8  # of a GPU's memory: of the file's runs that are said to need less 5% failed, up to 0.9 17%, beyond 47%
SLOWEST = 3  # times as long as the fastest: nobody would take slower ones, and there the planner's formulas err most
TRIED = 2000  # of these, evenly from the fastest to the slowest


def layouts_with_room(config: ModelConfig, cluster: Cluster, gpus: int, batch: int, seq: int, moe: dict | None) -> list:
    """Layouts that fit with room to spare, as runs that have not been made."""
    found = search(config, cluster, gpus, batch, seq, moe)
    said, rows = found.estimate, found.order
    rows = rows[(said.needed_bytes < ROOM * said.usable_bytes)[rows]]
    if not len(rows):
        short = f"batch {batch}, seq {seq} on {gpus} GPUs"
        raise ValueError(f"{short}: no layout leaves a fifth of the memory free: more GPUs, or fewer tokens")
    rows = rows[said.step_s[rows] < SLOWEST * said.step_s[rows[0]]]
    rows = rows[np.unique(np.linspace(0, len(rows) - 1, TRIED).astype(int))]
    nodes, about = -(-gpus // cluster.gpus_per_node), (batch, seq, True, np.nan, np.nan, "bf16", moe)
    return [MeasuredRun("", config, nodes, found.table[row], *about) for row in rows]


def informative(
    config: ModelConfig,
    cluster: Cluster,
    gpus: int | Iterable[int],
    batch: int,
    seq: int = 4096,
    n: int = 20,
    moe: dict | None = None,
) -> list[Layout]:
    """The n layouts, or all that fit, of so many GPUs (or of several numbers of them) whose runs tell most of the
    cluster's constants, those that tell most first. Raises ValueError where none fits.
    """
    counts = [gpus] if isinstance(gpus, int) else list(gpus)
    runs = [run for count in counts for run in layouts_with_room(config, cluster, count, batch, seq, moe)]
    slope = {what: slopes(runs, cluster, list(constants_of(cluster, what)), what) / SCALE[what] for what in SCALE}
    known = {what: np.eye(each.shape[1]) for what, each in slope.items()}  # covariance: at first, a factor of e
    left, chosen = np.ones(len(runs), bool), []
    for _ in range(min(n, len(runs))):
        tells = sum(np.log1p(((each @ known[what]) * each).sum(1)) for what, each in slope.items())
        best = int(np.where(left, tells, -1).argmax())
        left[best] = False
        chosen.append(runs[best].layout)
        for what, each in slope.items():
            along = known[what] @ each[best]
            known[what] = known[what] - np.outer(along, along) / (1 + each[best] @ along)
    return chosen
