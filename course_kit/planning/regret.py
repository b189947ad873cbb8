"""The regret of the planner's favorites, split into what a planner could avoid and what it could not.

    parts = split_regret(runs, predict(runs, cluster), cluster)
    parts["8B", 64]        regret = other_model + unexplained + caution + scatter + avoidable

Each of the first three parts is the amount by which the regret of a (model, nodes) cell falls when some of its runs are
left out and the planner picks again from the rest:

    other_model    runs of another variant of the model than the favorite's, such as a variant with 8 K/V heads
    unexplained    runs that are slow or fast by chance: off by more than FACTOR from the prediction and from comparable
                   runs, in the same direction; and runs that failed with memory to spare
    caution        runs that the limit on risk refuses and that left too little memory: the price of the limit
    scatter        the mean regret of a planner that knows the usual time of each layout exactly, while single runs
                   scatter about it (`loss_by_scatter`); at most the regret that is left
    avoidable      the regret that is left

A layout that the planner always predicts badly stays avoidable: its comparable runs are off by the same factor.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from course_lib.best_config.clusters import Cluster
from course_lib.best_config.planner import RISK
from course_lib.best_config.runs import MeasuredRun, Predicted, cells, favorite, loss_of_pick

# Five standard deviations of the playbook's equal runs (8%, `scatter_of_equals`). The regret splits alike with factors
# from 1.25 to 2; with more, the runs on 64 nodes that escaped the network's stalls no longer count as unexplained.
FACTOR = 1.5
ENOUGH = 3  # comparable runs for a median
SAMPLES = 2000  # of `loss_by_scatter`


@dataclass(frozen=True)
class RegretSplit:
    """The regret of a cell, by part, each a share of the fastest run's speed, 0 to 1; they add up to the regret."""

    pick: int | None  # the favorite's row in the list of runs; None if the limit on risk refuses all runs
    fastest: int  # the row of the fastest run
    other_model: float
    unexplained: float
    caution: float
    scatter: float
    avoidable: float
    differ: float  # by how much comparable runs of the cell differ, the median; nan where there are too few
    reason: str  # of the largest part, in a few words; "" for a regret of 0

    @property
    def unavoidable(self) -> float:
        """The regret that no planner could avoid, whatever risk it takes."""
        return self.other_model + self.unexplained + self.scatter

    @property
    def regret(self) -> float:
        """The sum of the parts; equal to the loss in `loss_of_picks`."""
        return self.unavoidable + self.caution + self.avoidable


def scatter_of_equals(runs: list[MeasuredRun]) -> float:
    """Return the standard deviation of log(step time) among runs of the same job and layout; nan if none ran twice."""
    equal: dict[tuple, list[float]] = {}
    for run in runs:
        if run.ok:
            key = (run.config, run.nodes, run.layout, run.batch, run.seq, run.dtype, str(run.moe))
            equal.setdefault(key, []).append(math.log(run.step_s))
    several = [times for times in equal.values() if len(times) > 1]
    freedom = sum(len(times) - 1 for times in several)
    return math.sqrt(sum(len(times) * np.var(times) for times in several) / freedom) if freedom else math.nan


def log_ratios(runs: list[MeasuredRun], predicted: Predicted) -> np.ndarray:
    """Return log(measured / predicted step time) of each run, nan for a failed run: [n]."""
    return np.log([run.step_s for run in runs]) - np.log(predicted.step_s)


def median_of_comparable(runs: list[MeasuredRun], ratios: np.ndarray) -> np.ndarray:
    """Return the median of `ratios` over each run's comparable runs, nan if fewer than ENOUGH of them were ok: [n].

    Comparable runs are all other runs with the same number of nodes and the same degrees, and so the same groups of
    ranks. Model, ZeRO stage and micro-batch may differ, since the prediction accounts for them.
    """
    medians, families = np.full(len(runs), np.nan), dict[tuple, list[int]]()
    for row, run in enumerate(runs):
        layout = run.layout
        families.setdefault((run.nodes, layout.dp, layout.tp, layout.pp, layout.cp, layout.ep), []).append(row)
    for rows in families.values():
        for row in rows:
            others = [ratios[other] for other in rows if other != row and runs[other].ok]
            if len(others) >= ENOUGH:
                medians[row] = np.median(others)
    return medians


def most_bytes(cluster: Cluster, risk: float) -> float:
    """Return the bytes at which `Estimate.risk` equals `risk`."""
    usable = cluster.memory_bytes - cluster.software.unusable_bytes
    return usable * (risk / (1 - risk)) ** cluster.software.memory_spread


def needs_no_less(one: MeasuredRun, other: MeasuredRun) -> bool:
    """Return True if run `one` needs at least the memory of run `other`, by no formula: its micro-batch is as large, as
    many micro-batches are in flight, and ZeRO (stage 0 to 2) shards no more. All else must be the same.
    """
    a, b = one.layout, other.layout
    in_flight = [min(run.batch // (run.layout.dp * run.layout.micro_batch), run.layout.pp) for run in (one, other)]
    sharded_less = a.zero_stage == 0 or (a.zero_stage <= b.zero_stage and a.dp <= b.dp)
    return sharded_less and a.micro_batch >= b.micro_batch and in_flight[0] >= in_flight[1]


def failed_with_memory_to_spare(runs: list[MeasuredRun], limit: float) -> np.ndarray:
    """Return a mask [n] of the runs that failed although another run, which needs at least as much memory, was ok with
    a peak of at most `limit` bytes.
    """
    mask, alike = np.zeros(len(runs), bool), dict[tuple, list[int]]()
    for row, run in enumerate(runs):
        rest = dataclasses.replace(run.layout, dp=1, micro_batch=1, zero_stage=0)
        gathers = run.layout.zero_stage == 3
        alike.setdefault((run.config, run.seq, run.dtype, str(run.moe), rest, gathers), []).append(row)
    for rows in alike.values():
        roomy = [runs[row] for row in rows if runs[row].ok and runs[row].peak_bytes <= limit]
        for row in rows:
            mask[row] = not runs[row].ok and any(needs_no_less(run, runs[row]) for run in roomy)
    return mask


def unexplained(runs: list[MeasuredRun], predicted: Predicted, limit: float) -> np.ndarray:
    """Return a mask [n] of the runs that no layout explains: slower by more than FACTOR than both the prediction and
    comparable runs, or faster than both, or failed with memory to spare.
    """
    ratios, far = log_ratios(runs, predicted), math.log(FACTOR)
    beside_others = ratios - median_of_comparable(runs, ratios)
    slow = (ratios > far) & (beside_others > far)
    fast = (ratios < -far) & (beside_others < -far)
    return slow | fast | failed_with_memory_to_spare(runs, limit)


def loss_by_scatter(step_s: np.ndarray, scatter: float) -> float:
    """Return the mean regret of picking the layout with the shortest usual time, if the logarithms of the measured
    times `step_s` [n] differ from the logarithms of the usual times by normal errors with standard deviation `scatter`.
    Return 0 without runs or if `scatter` is nan.
    """
    if not len(step_s) or not scatter > 0:
        return 0.0
    errors = scatter * np.random.default_rng(0).normal(size=(SAMPLES, len(step_s)))
    picks = np.argmin(np.log(step_s) - errors, axis=1)
    return float(np.mean(1 - np.min(step_s) / step_s[picks]))


def chance_of(runs: list[MeasuredRun], predicted: Predicted, pick: int, fastest: int, chance: np.ndarray) -> str:
    """Describe the unexplained part in a few words."""
    if not runs[pick].ok:
        return "the pick failed with memory to spare"
    slow = chance[pick] and runs[pick].step_s > predicted.step_s[pick]
    if slow and chance[fastest]:
        return "by chance a slow pick, a fast fastest"
    return "the pick was slow by chance" if slow else "the fastest was fast by chance"


def reason_of(
    runs: list[MeasuredRun],
    predicted: Predicted,
    pick: int | None,
    fastest: int,
    chance: np.ndarray,
    parts: dict[str, float],
) -> str:
    """Describe the largest part in a few words."""
    if not any(parts.values()):
        return ""
    if pick is None:
        return "the limit on risk refuses every layout"
    part = max(parts, key=lambda name: parts[name])
    if part == "unexplained":
        return chance_of(runs, predicted, pick, fastest, chance)
    return {
        "other_model": "the fastest is of another variant",
        "caution": "the fastest left little memory",
        "scatter": "within the scatter of equal runs",
        "avoidable": "predicted badly",
    }[part]


def split_cell(
    runs: list[MeasuredRun],
    predicted: Predicted,
    rows: list[int],
    chance: np.ndarray,
    limit: float,
    risk: float,
    scatter: float,
) -> dict[str, float]:
    """Return the parts of one cell's regret. Runs that one step leaves out stay out in the next steps. A step that
    would raise the regret counts as 0.
    """
    pick = favorite(predicted, rows, risk)
    losses = [loss_of_pick(runs, rows, pick)]
    config = runs[rows[0] if pick is None else pick].config
    steps = (
        lambda row: runs[row].config == config,
        lambda row: not chance[row],
        lambda row: not (predicted.risk[row] > risk and runs[row].peak_bytes > limit),
    )
    for stays in steps:
        rows = [row for row in rows if stays(row)]
        losses.append(loss_of_pick(runs, rows, favorite(predicted, rows, risk)))
    falling = np.minimum.accumulate(losses)
    parts = dict(zip(("other_model", "unexplained", "caution"), (falling[:-1] - falling[1:]).tolist(), strict=True))
    by_scatter = loss_by_scatter(np.array([runs[row].step_s for row in rows if runs[row].ok]), scatter)
    left = float(falling[-1])
    return parts | {"scatter": min(left, by_scatter), "avoidable": max(0.0, left - by_scatter)}


def split_regret(
    runs: list[MeasuredRun], predicted: Predicted, cluster: Cluster, risk: float = RISK
) -> dict[tuple[str, int], RegretSplit]:
    """Return the regret of each cell in which a run was ok, by part.

    cluster: provides a GPU's usable memory and the spread of `Estimate.risk`; risk: the favorites' limit.
    """
    limit, scatter = most_bytes(cluster, risk), scatter_of_equals(runs)
    chance, ratios = unexplained(runs, predicted, limit), log_ratios(runs, predicted)
    off, splits = np.abs(ratios - median_of_comparable(runs, ratios)), {}
    for cell, rows in cells(runs).items():
        ok = [row for row in rows if runs[row].ok]
        if not ok:
            continue
        pick, fastest = favorite(predicted, rows, risk), min(ok, key=lambda row: runs[row].step_s)
        parts = split_cell(runs, predicted, rows, chance, limit, risk, scatter)
        known = off[rows][np.isfinite(off[rows])]
        differ = float(np.median(known)) if known.size else math.nan
        reason = reason_of(runs, predicted, pick, fastest, chance, parts)
        splits[cell] = RegretSplit(pick, fastest, **parts, differ=differ, reason=reason)
    return splits
