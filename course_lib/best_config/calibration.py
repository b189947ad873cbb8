"""Fits of the planner's constants to measured runs: few, physical, and the same for all models and sizes.

    result = calibrate(read_runs("ours.csv", columns), CLUSTERS["H100"])
    print(result)                                 each constant: before, fitted, 90% interval; or why it stays
    search(config, result.cluster, gpus=64, batch=512, seq=8192).best(5)
    result.outside(config, Layout.parse("dp4,tp16,sp"), batch=512, seq=8192)      ["tp 16: fitted on 1 to 8"]

Times are fitted by the logarithm of predicted over measured step time, with least squares in which an outlier counts
less and less (Cauchy's loss): some runs were slow for reasons that no layout explains. Memory is fitted in the same
way. A constant that the runs do not determine keeps the cluster's value: if its 90% interval is wider than a factor of
3 to either side, and its old value fits the runs as well (likelihood ratio, 95%). `cross_validate` leaves a (model,
nodes) cell out of the fit and predicts it: the error for a model on a number of nodes where it was not measured.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from course_lib.best_config.clusters import Cluster
from course_lib.best_config.fit_reports import Calibration, Constant, facts_of, worst_rows
from course_lib.best_config.memory_limit import fit_limit
from course_lib.best_config.run_units import check_units, with_locations
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
REACH = {"step_s": 2, "peak_bytes": 1}  # the largest change of a logarithm per solve
SPREAD = 0.01  # at least: the file's two layouts that ran twice differ by 10 and 13% in time, 1 and 3% in memory


def constants_of(cluster: Cluster, what: str) -> dict[str, float]:
    """Return the constants of the cluster's software that decide "step_s" or "peak_bytes" and are not 0; the two of a
    pair are separate constants.
    """
    other_dtype = "matmul_efficiency" if cluster.software.matmul_dtype == "fp8" else "fp8_efficiency"
    constants: dict[str, float] = {}
    for name in FITTED[what]:
        if name == other_dtype:
            continue
        value = getattr(cluster.software, name)
        several = {f"{name}[{i}]": each for i, each in enumerate(value)} if isinstance(value, tuple) else {name: value}
        constants |= {label: each for label, each in several.items() if each > 0}
    return constants


def with_constants(cluster: Cluster, values: dict[str, float]) -> Cluster:
    """Return the cluster with these constants, named as `constants_of` does."""
    changes: dict[str, Any] = {}
    for label, value in values.items():
        name, _, index = label.partition("[")
        if index:
            pair = changes.get(name, getattr(cluster.software, name))
            changes[name] = tuple(value if f"{i}]" == index else each for i, each in enumerate(pair))
        else:
            changes[name] = value
    return cluster.with_software(**changes)


def log_errors(runs: list[MeasuredRun], cluster: Cluster, what: str) -> np.ndarray:
    """Return log(predicted / measured) of each run."""
    return np.log(getattr(predict(runs, cluster), what)) - np.log([getattr(run, what) for run in runs])


def scale_of(runs: list[MeasuredRun], cluster: Cluster, what: str) -> float:
    """Return the scale of Cauchy's loss: SCALE, or the median error if it is over twice as much. On a noisy machine,
    and before the first fit, most runs are further off than SCALE.
    """
    off = float(np.median(np.abs(log_errors(runs, cluster, what))))
    return off if off > 2 * SCALE[what] else SCALE[what]


def solve(runs: list[MeasuredRun], cluster: Cluster, names: list[str], what: str, scale: float) -> Cluster:
    """Return the cluster with these constants fitted, starting from its own."""
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
    """Return by how many percent a prediction grows per percent of a constant: [runs, names]; 0 for a jump, of a run at
    a threshold.
    """

    def log_predicted(cluster: Cluster) -> np.ndarray:
        return np.log(getattr(predict(runs, cluster), what))

    step, values, start = 1e-4, constants_of(cluster, what), log_predicted(cluster)
    changed = [with_constants(cluster, {name: values[name] * math.exp(step)}) for name in names]
    slope = np.array([log_predicted(each) - start for each in changed]).reshape(len(names), len(runs)).T / step
    return np.where(np.abs(slope) > 3, 0, slope)


def spread_of(errors: np.ndarray, constants: int, scale: float) -> tuple[np.ndarray, float, float]:
    """Return the weights of runs with these errors, their spread, and the degrees of freedom that the fit leaves."""
    weights = 1 / (1 + (errors / scale) ** 2)
    freedom = max(1.0, weights.sum() - constants)
    return weights, max(SPREAD, math.sqrt((weights * errors**2).sum() / freedom)), freedom


def intervals(
    runs: list[MeasuredRun], cluster: Cluster, names: list[str], what: str, scale: float, fixed: Sequence[str] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """Return how far the logarithm of each constant may be off to either side (90%), and the covariance, of `names` and
    then of `fixed`: constants that are not fitted, and assumed to be known to a factor of 3 (90%).
    """
    from scipy.stats import norm, t

    slope = slopes(runs, cluster, [*names, *fixed], what)
    weights, spread, freedom = spread_of(log_errors(runs, cluster, what), len(names), scale)
    known = [1e-12] * len(names) + [(norm.ppf(0.95) / math.log(3)) ** 2] * len(fixed)
    covariance = np.linalg.inv(slope.T * weights @ slope / spread**2 + np.diag(known))
    return t.ppf(0.95, freedom) * np.sqrt(np.diag(covariance)), covariance


def loss(runs: list[MeasuredRun], cluster: Cluster, what: str, scale: float) -> float:
    """Return Cauchy's loss, which `solve` minimizes, in squared logarithms."""
    return scale**2 * np.log1p((log_errors(runs, cluster, what) / scale) ** 2).sum()


def why_undetermined(runs: list[MeasuredRun], free: list[str], covariance: np.ndarray, row: int) -> str:
    """Return the reason why the runs do not determine a constant, `free[row]`."""
    size = np.sqrt(np.diag(covariance))
    correlation = np.abs(covariance[row]) / size[row] / size
    correlation[row] = 0
    if correlation.max() > 0.9:
        return f"these runs do not tell it from {free[correlation.argmax()]}"
    if size[row] < 100:
        return "these runs show it too little"
    same = [f"{name} {values[0]}" for name, values in facts_of(runs).items() if len(values) == 1]
    return "these runs do not show it" + (f": all have {', '.join(same)}" if same else "")


class Fit(NamedTuple):
    """A fit of the constants that the runs determine."""

    cluster: Cluster
    free: list[str]  # the fitted constants
    why: dict[str, str]  # the reason for each constant that keeps its value
    justified: set[str]  # constants with a wide interval that stay fitted, since their old value fits worse
    scale: float  # of Cauchy's loss


def drop_undetermined(
    runs: list[MeasuredRun], cluster: Cluster, start: dict[str, float], free: list[str], what: str
) -> Fit:
    """Fit the constants, and drop one at a time, the one that the runs determine least, until each is determined, or
    its value in `start` fits worse.
    """
    fitted, scale, justified, why = cluster, math.inf, set[str](), dict[str, str]()
    while (smaller := scale_of(runs, fitted, what)) < 0.7 * scale:
        fitted, scale = solve(runs, fitted, free, what, smaller), smaller
    while True:
        reach, covariance = intervals(runs, fitted, free, what, scale)
        wide = [i for i, name in enumerate(free) if reach[i] > math.log(3) and name not in justified]
        if not wide:
            return Fit(fitted, free, why, justified, scale)
        row = max(wide, key=lambda i: reach[i])
        name, others = free[row], free[:row] + free[row + 1 :]
        changed = abs(math.log(constants_of(fitted, what)[name] / start[name])) > 1e-6
        without = with_constants(fitted, {name: start[name]})
        without = solve(runs, without, others, what, scale) if changed else without
        if loss(runs, without, what, scale) > accepted_loss(runs, fitted, len(free), what, scale):
            justified.add(name)
        else:
            why[name] = why_undetermined(runs, free, covariance, row)
            fitted, free = without, others


def determine(runs: list[MeasuredRun], cluster: Cluster, what: str) -> tuple[Cluster, list[Constant]]:
    """Fit the constants that the runs determine; return the cluster, and all constants. A constant of memory that
    changes no prediction at the start is not fitted: a GPU's peak is its fullest stage's, and a constant raised
    far enough would make another stage the fullest.
    """
    start = constants_of(cluster, what)
    shows = np.any(slopes(runs, cluster, list(start), what) != 0, axis=0) | (what == "step_s")
    free = [name for name, shown in zip(start, shows, strict=True) if shown]
    fit = drop_undetermined(runs, cluster, start, free, what)
    why = {name: "no run's peak depends on it" for name in start if name not in free} | fit.why
    fitted, free, scale = fit.cluster, fit.free, fit.scale
    reach, _ = intervals(runs, fitted, free, what, scale, list(why))
    off = dict(zip(free, reach[: len(free)], strict=True))
    for name in fit.justified & {name for name in free if off[name] > math.log(100)}:
        limit = accepted_loss(runs, fitted, len(free), what, scale)
        fitted = nearest_accepted(runs, fitted, name, start[name], limit, what, scale)
    values, constants = constants_of(fitted, what), []
    for name in start:
        low, high = math.nan, math.nan
        if name in off:
            low, high = values[name] * math.exp(-off[name]), values[name] * math.exp(min(700, off[name]))
        constants.append(Constant(name, start[name], values[name], low, high, why.get(name, "")))
    return fitted, constants


def accepted_loss(runs: list[MeasuredRun], cluster: Cluster, constants: int, what: str, scale: float) -> float:
    """Return the largest loss at which other constants still fit the runs as well: likelihood ratio, 95%."""
    _, spread, _ = spread_of(log_errors(runs, cluster, what), constants, scale)
    return loss(runs, cluster, what, scale) + 3.84 * spread**2  # of chi squared, one degree of freedom


def nearest_accepted(
    runs: list[MeasuredRun], cluster: Cluster, name: str, before: float, limit: float, what: str, scale: float
) -> Cluster:
    """Return the cluster with a constant as near to its old value as the runs allow: a constant that no longer changes
    the predictions, such as a latency that hides everything.
    """
    now = constants_of(cluster, what)[name]
    tried = [with_constants(cluster, {name: value}) for value in np.geomspace(before, now, 40)[:-1].tolist()]
    return next((each for each in tried if loss(runs, each, what, scale) <= limit), cluster)


def check_runs(runs: list[MeasuredRun], cluster: Cluster, what: str) -> None:
    """Raise ValueError if there are fewer different runs than constants that show in them."""
    different = {(run.config, run.layout, run.batch, run.seq, str(run.moe)) for run in runs}
    names = list(constants_of(cluster, what))
    shown = np.any(np.abs(slopes(runs, cluster, names, what)) > 1e-3, axis=0).sum()
    if len(different) < max(1, shown):
        some = f"{len(runs)} runs that were ok" + f", {len(different)} different" * (len(different) < len(runs))
        kind = "time" if what == "step_s" else "memory"
        raise ValueError(f"fit: {some}; {shown} constants of {kind} show in them, so make it {shown} different or more")


def calibrate(runs: list[MeasuredRun], cluster: Cluster) -> Calibration:
    """Fit the software's constants to the runs that were ok, starting from the cluster's. Takes seconds.

    Constants that the runs do not determine are kept, as are all memory constants if too few runs have a peak. Raises
    ValueError if no run was ok, for fewer different runs than constants of time that show in them, for several dtypes,
    and for times or peaks that seem to be in other units than seconds and bytes (`check_units`).
    """
    ok = [run for run in with_locations(runs) if run.ok]
    if not ok:
        raise ValueError(f"fit: none of {len(runs)} runs was ok")
    if len(dtypes := {run.dtype for run in ok}) > 1:
        raise ValueError(f"fit: runs in {' and '.join(sorted(dtypes))}: their constants differ, so fit each by itself")
    with_peak = [run for run in ok if math.isfinite(run.peak_bytes)]
    check_runs(ok, cluster, "step_s")
    check_units(ok, cluster, "step_s")
    check_units(with_peak, cluster, "peak_bytes")
    fitted, constants = determine(ok, cluster, "step_s")
    try:
        check_runs(with_peak, fitted, "peak_bytes")
        fitted, of_memory = determine(with_peak, fitted, "peak_bytes")
    except ValueError:
        why = f"{len(with_peak)} runs have a peak: too few"
        of_memory = [Constant(name, was, was, why=why) for name, was in constants_of(cluster, "peak_bytes").items()]
    fitted = fit_limit(runs, fitted)
    before, after = (accuracy(ok, predict(ok, each)) for each in (cluster, fitted))
    errors = {name: (before[name], after[name]) for name in ("tokens/s", "peak memory")}
    worst = {what: worst_rows(some, fitted, what) for what, some in (("step_s", ok), ("peak_bytes", with_peak))}
    failures = Counter(run.failure for run in runs if not run.ok)
    return Calibration(fitted, (*constants, *of_memory), len(ok), errors, facts_of(ok), worst, dict(failures))


def fit(runs: list[MeasuredRun], cluster: Cluster) -> Cluster:
    """Return the cluster of `calibrate`."""
    return calibrate(runs, cluster).cluster


# exercise 11.6
def cross_validate(runs: list[MeasuredRun], cluster: Cluster) -> Predicted:
    """Return the prediction of each run by constants that were fitted without any run of its cell, (model, nodes).

    Each cell has one fit, to all runs of the other cells, from the constants of `cluster`. The predictions are in the
    order of `runs`, failed ones included. All measured runs take a minute.
    """
    predicted = Predicted(*(np.zeros(len(runs), kind) for kind in (float, float, float)))
    for rows in cells(runs).values():
        left = set(rows)
        fitted = fit([run for i, run in enumerate(runs) if i not in left], cluster)
        held_out = predict([runs[i] for i in rows], fitted)
        for name in ("step_s", "peak_bytes", "risk"):
            getattr(predicted, name)[rows] = getattr(held_out, name)
    return predicted
