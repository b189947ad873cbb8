"""Fits the planner's constants to measured runs: few, physical, and the same for all models and sizes.

    found = calibrate(read_runs("ours.csv", columns), CLUSTERS["H100"])
    print(found)                                  each constant: before, fitted, 90% interval; or why it stays
    search(config, found.cluster, gpus=64, batch=512, seq=8192).best(5)
    found.outside(config, Layout.parse("dp4,tp16,sp"), batch=512, seq=8192)       ["tp 16: fitted on 1 to 8"]

Times: the logarithm of predicted over measured step time, by least squares in which an outlier counts less and less
(Cauchy's loss): some runs were slow for reasons that no layout explains. Memory the same. A constant that the runs do
not tell stays what the cluster's is: where its 90% interval is wider than a factor of 3 to either side, and its old
value fits them as well (likelihood ratio, 95%). `cross_validate` leaves a whole (model, nodes) cell out of the fit, and
predicts it: the error on a model at a size that it was not measured at.
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from course_lib.best_config.clusters import Cluster
from course_lib.best_config.fit_reports import Calibration, Constant, facts_of, worst_rows
from course_lib.best_config.run_units import check_units, numbered
from course_lib.best_config.runs import MeasuredRun, Predicted, accuracy, cells, predict

TIME = (
    "matmul_efficiency", "fp8_efficiency", "half_rows", "layer_traffic", "head_efficiency", "nvlink_efficiency",
    "network_efficiency", "collective_s", "ring_step_s", "busy_step_s", "gradient_step_s", "layer_host_s",
    "step_host_s", "stall_s",
)  # fmt: skip
MEMORY = ("kept_hidden", "kept_ffn", "reserved_bytes")
MEMORY_PAIRS = ("logit_bytes", "held")
FITTED = {"step_s": TIME, "peak_bytes": MEMORY + MEMORY_PAIRS}
SCALE = {"step_s": 0.07, "peak_bytes": 0.03}  # of Cauchy's loss: a run that is further off counts less
REACH = {"step_s": 2, "peak_bytes": 1}  # how far a logarithm may go at a time
SPREAD = 0.01  # at least: the file's two layouts that ran twice differ by 10 and 13% in time, 1 and 3% in memory


def constants_of(cluster: Cluster, what: str) -> dict[str, float]:
    """Those of its software that decide "step_s" or "peak_bytes", the two of a pair apart; what is 0 stays so."""
    found, other_dtype = {}, "matmul_efficiency" if cluster.software.matmul_dtype == "fp8" else "fp8_efficiency"
    for name in FITTED[what]:
        if name == other_dtype:
            continue
        value = getattr(cluster.software, name)
        several = {f"{name}[{i}]": each for i, each in enumerate(value)} if isinstance(value, tuple) else {name: value}
        found |= {label: each for label, each in several.items() if each > 0}
    return found


def with_constants(cluster: Cluster, values: dict[str, float]) -> Cluster:
    """The cluster with these in their places, named as `constants_of` does."""
    changes = {}
    for label, value in values.items():
        name, _, place = label.partition("[")
        if place:
            pair = changes.get(name, getattr(cluster.software, name))
            value = tuple(value if f"{i}]" == place else each for i, each in enumerate(pair))
        changes[name] = value
    return cluster.with_software(**changes)


def log_errors(runs: list[MeasuredRun], cluster: Cluster, what: str) -> np.ndarray:
    """log(predicted / measured) of each run."""
    return np.log(getattr(predict(runs, cluster), what)) - np.log([getattr(run, what) for run in runs])


def scale_of(runs: list[MeasuredRun], cluster: Cluster, what: str) -> float:
    """The scale of Cauchy's loss: SCALE, or the median error where that is over twice as much. On a noisy machine, or
    before the first fit, runs that are further off than SCALE are the rule.
    """
    off = float(np.median(np.abs(log_errors(runs, cluster, what))))
    return off if off > 2 * SCALE[what] else SCALE[what]


def solve(runs: list[MeasuredRun], cluster: Cluster, names: list[str], what: str, scale: float) -> Cluster:
    """The cluster with these constants fitted, from those it has."""
    from scipy.optimize import least_squares

    def tried(logarithms: np.ndarray) -> Cluster:
        return with_constants(cluster, dict(zip(names, np.exp(logarithms).tolist(), strict=True)))

    at, reach = np.log([constants_of(cluster, what)[name] for name in names]), REACH[what]
    for _ in range(4 if names else 0):
        bounds, before = (at - reach, at + reach), at
        at = least_squares(
            lambda x: log_errors(runs, tried(x), what), at, bounds=bounds, loss="cauchy", f_scale=scale, ftol=1e-5
        ).x
        if np.abs(at - before).max() < 0.99 * reach:
            break
    return tried(at)


def slopes(runs: list[MeasuredRun], cluster: Cluster, names: list[str], what: str) -> np.ndarray:
    """By how many percent a prediction grows with a percent of a constant: [runs, names]. A jump, where a run is at a
    threshold, is no slope: 0.
    """
    log, step, here = lambda cluster: np.log(getattr(predict(runs, cluster), what)), 1e-4, constants_of(cluster, what)
    moved = [with_constants(cluster, {name: here[name] * math.exp(step)}) for name in names]
    found = np.array([log(each) - log(cluster) for each in moved]).reshape(len(names), len(runs)).T / step
    return np.where(np.abs(found) > 3, 0, found)


def spread_of(errors: np.ndarray, constants: int, scale: float) -> tuple[np.ndarray, float, float]:
    """Of runs with such errors: each one's weight, their spread, and the degrees of freedom that the fit leaves."""
    weights = 1 / (1 + (errors / scale) ** 2)
    freedom = max(1.0, weights.sum() - constants)
    return weights, max(SPREAD, math.sqrt((weights * errors**2).sum() / freedom)), freedom


def intervals(
    runs: list[MeasuredRun], cluster: Cluster, names: list[str], what: str, scale: float, stay: list[str] = []
) -> tuple[np.ndarray, np.ndarray]:
    """How far the logarithm of each constant may be off to either side (90%), and their covariance, of names and then
    those that stay, which are taken as known to a factor of 3 (90%).
    """
    from scipy.stats import norm, t

    slope = slopes(runs, cluster, [*names, *stay], what)
    weights, spread, freedom = spread_of(log_errors(runs, cluster, what), len(names), scale)
    known = [1e-12] * len(names) + [(norm.ppf(0.95) / math.log(3)) ** 2] * len(stay)
    covariance = np.linalg.inv(slope.T * weights @ slope / spread**2 + np.diag(known))
    return t.ppf(0.95, freedom) * np.sqrt(np.diag(covariance)), covariance


def loss(runs: list[MeasuredRun], cluster: Cluster, what: str, scale: float) -> float:
    """Cauchy's loss, that `solve` makes small, in squared logarithms."""
    return scale**2 * np.log1p((log_errors(runs, cluster, what) / scale) ** 2).sum()


def untold(runs: list[MeasuredRun], free: list[str], covariance: np.ndarray, row: int) -> str:
    """Why the runs do not tell a constant."""
    size = np.sqrt(np.diag(covariance))
    together = np.abs(covariance[row]) / size[row] / size
    together[row] = 0
    if together.max() > 0.9:
        return f"these runs do not tell it from {free[together.argmax()]}"
    if size[row] < 100:
        return "these runs show it too little"
    same = [f"{name} {values[0]}" for name, values in facts_of(runs).items() if len(values) == 1]
    return "these runs do not show it" + (f": all have {', '.join(same)}" if same else "")


def determine(runs: list[MeasuredRun], cluster: Cluster, what: str) -> tuple[Cluster, list[Constant]]:
    """Fit what the runs tell, one constant less at a time, the one that they tell least. Of memory, a constant that
    changes no prediction at the start is not fitted: a GPU's peak is that of its fullest stage, and were the constant
    raised far enough, another stage would become the fullest.
    """
    start = constants_of(cluster, what)
    shows = np.any(slopes(runs, cluster, list(start), what) != 0, axis=0) | (what == "step_s")
    free = [name for name, shown in zip(start, shows, strict=True) if shown]
    fitted, scale, settled = cluster, math.inf, set()
    why = {name: "no run's peak depends on it" for name in start if name not in free}
    while (now := scale_of(runs, fitted, what)) < 0.7 * scale:
        fitted, scale = solve(runs, fitted, free, what, now), now
    while True:
        reach, covariance = intervals(runs, fitted, free, what, scale)
        untold_ = [i for i, name in enumerate(free) if reach[i] > math.log(3) and name not in settled]
        if not untold_:
            break
        row = max(untold_, key=lambda i: reach[i])
        name, others = free[row], free[:row] + free[row + 1 :]
        moved = abs(math.log(constants_of(fitted, what)[name] / start[name])) > 1e-6
        without = with_constants(fitted, {name: start[name]})
        without = solve(runs, without, others, what, scale) if moved else without
        if loss(runs, without, what, scale) > accepted(runs, fitted, len(free), what, scale):
            settled.add(name)  # what it was before fits worse
        else:
            why[name] = untold(runs, free, covariance, row)
            fitted, free = without, others
    reach, _ = intervals(runs, fitted, free, what, scale, list(why))
    off = dict(zip(free, reach[: len(free)], strict=True))
    for name in settled & {name for name in free if off[name] > math.log(100)}:
        limit = accepted(runs, fitted, len(free), what, scale)
        fitted = edge(runs, fitted, name, start[name], limit, what, scale)
    now = constants_of(fitted, what)
    ends = {name: (now[name] * math.exp(-off[name]), now[name] * math.exp(min(700, off[name]))) for name in free}
    found = [Constant(name, start[name], now[name], *ends.get(name, ()), why=why.get(name, "")) for name in start]
    return fitted, found


def accepted(runs: list[MeasuredRun], cluster: Cluster, constants: int, what: str, scale: float) -> float:
    """The loss of other constants than the best that still fit the runs as well: likelihood ratio, 95%."""
    _, spread, _ = spread_of(log_errors(runs, cluster, what), constants, scale)
    return loss(runs, cluster, what, scale) + 3.84 * spread**2  # of chi squared, one degree of freedom


def edge(
    runs: list[MeasuredRun], cluster: Cluster, name: str, before: float, limit: float, what: str, scale: float
) -> Cluster:
    """The cluster with a constant that shows no more, such as a latency behind which all hides: as near to what it was
    as the runs let it be.
    """
    now = constants_of(cluster, what)[name]
    tried = [with_constants(cluster, {name: value}) for value in np.geomspace(before, now, 40)[:-1].tolist()]
    return next((each for each in tried if loss(runs, each, what, scale) <= limit), cluster)


def fit_limit(runs: list[MeasuredRun], cluster: Cluster) -> Cluster:
    """The cluster with the limit of its memory, and the spread of needs about it, that make it likeliest which runs
    ended: a logistic curve (`Estimate.risk`), beside a share of runs that failed for other reasons, such as a node.

    Runs whose failure is known to be another ("other") do not count. Both stay where fewer than ten that ended, or that
    failed, need between half and twice the usable bytes.
    """
    from scipy.optimize import minimize

    runs = [run for run in runs if run.failure != "other"]
    software, ok, risk = cluster.software, np.array([run.ok for run in runs]), predict(runs, cluster).risk
    inside = (risk > 0) & (risk < 1)
    ok, odds = ok[inside], np.log(risk[inside] / (1 - risk[inside]))
    log_needed = odds * software.memory_spread  # over the usable bytes
    near = np.abs(log_needed) < math.log(2)
    if min(np.sum(ok & near), np.sum(~ok & near)) < 10:
        return cluster

    def surprise(x: np.ndarray) -> float:
        limit, spread, others = x[0], math.exp(x[1]), 1 / (1 + math.exp(-x[2]))
        fails = others + (1 - others) / (1 + np.exp(np.clip((limit - log_needed) / spread, -30, 30)))
        return -np.log(np.where(ok, 1 - fails, fails) + 1e-12).sum()

    limit, log_spread, _ = minimize(surprise, [0.0, math.log(software.memory_spread), -3.0], method="Nelder-Mead").x
    usable = (cluster.memory_bytes - software.unusable_bytes) * math.exp(limit)
    unusable = max(0.0, cluster.memory_bytes - usable)
    return cluster.with_software(unusable_bytes=unusable, memory_spread=math.exp(log_spread))


def check_runs(runs: list[MeasuredRun], cluster: Cluster, what: str) -> None:
    """Raise ValueError where there are fewer different runs than constants that show in them."""
    different = {(run.config, run.layout, run.batch, run.seq, str(run.moe)) for run in runs}
    names = list(constants_of(cluster, what))
    shown = np.any(np.abs(slopes(runs, cluster, names, what)) > 1e-3, axis=0).sum()
    if len(different) < max(1, shown):
        some = f"{len(runs)} runs that were ok" + f", {len(different)} different" * (len(different) < len(runs))
        kind = "time" if what == "step_s" else "memory"
        raise ValueError(f"fit: {some}; {shown} constants of {kind} show in them, so make it {shown} different or more")


def calibrate(runs: list[MeasuredRun], cluster: Cluster) -> Calibration:
    """The software's constants fitted to the runs that were ok, from those that the cluster has. Takes seconds.

    Those that the runs do not tell stay, and so do all of memory where too few runs have a peak. Raises ValueError
    where no run was ok, for fewer different ones than constants of time that show in them, for several dtypes, and for
    times or peaks that seem to be in other units than seconds and bytes (`check_units`).
    """
    ran = [run for run in numbered(runs) if run.ok]
    if not ran:
        raise ValueError(f"fit: none of {len(runs)} runs was ok")
    if len(dtypes := {run.dtype for run in ran}) > 1:
        raise ValueError(f"fit: runs in {' and '.join(sorted(dtypes))}: their constants differ, so fit each by itself")
    peaked = [run for run in ran if math.isfinite(run.peak_bytes)]
    check_runs(ran, cluster, "step_s")
    check_units(ran, cluster, "step_s")
    check_units(peaked, cluster, "peak_bytes")
    fitted, constants = determine(ran, cluster, "step_s")
    try:
        check_runs(peaked, fitted, "peak_bytes")
        fitted, of_memory = determine(peaked, fitted, "peak_bytes")
    except ValueError:
        why = f"{len(peaked)} runs have a peak: too few"
        of_memory = [Constant(name, was, was, why=why) for name, was in constants_of(cluster, "peak_bytes").items()]
    fitted = fit_limit(runs, fitted)
    before, after = (accuracy(ran, predict(ran, each)) for each in (cluster, fitted))
    errors = {name: (before[name], after[name]) for name in ("tokens/s", "peak memory")}
    worst = {what: worst_rows(some, fitted, what) for what, some in (("step_s", ran), ("peak_bytes", peaked))}
    failures = Counter(run.failure for run in runs if not run.ok)
    return Calibration(fitted, (*constants, *of_memory), len(ran), errors, facts_of(ran), worst, dict(failures))


def fit(runs: list[MeasuredRun], cluster: Cluster) -> Cluster:
    """The cluster of `calibrate`."""
    return calibrate(runs, cluster).cluster


# exercise 11.6
def cross_validate(runs: list[MeasuredRun], cluster: Cluster) -> Predicted:
    """Return what is predicted of each run by constants that were fitted without any run of its cell, (model, nodes).

    Each cell has one fit, to all runs of the other cells, from the constants of `cluster`. The predictions are in the
    order of `runs`, failed ones included. All measured runs take a minute.
    """
    found = Predicted(*(np.zeros(len(runs), kind) for kind in (float, float, float)))
    for rows in cells(runs).values():
        left = set(rows)
        fitted = fit([run for i, run in enumerate(runs) if i not in left], cluster)
        held_out = predict([runs[i] for i in rows], fitted)
        for name in ("step_s", "peak_bytes", "risk"):
            getattr(found, name)[rows] = getattr(held_out, name)
    return found
