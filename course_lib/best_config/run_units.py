"""Detection of wrong units in measured runs before a fit: a prediction is rarely off by more than a factor of 20, a
value in another unit usually is.

    check_units(runs, CLUSTERS["H100"], "step_s")          ValueError: step_s looks like milliseconds: ...

Two questions, in this order: do some runs have another unit than the others, and does the median run have another unit
than the prediction? A run that is less than 20 times off is an outlier, which Cauchy's loss of the fit handles.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from course_lib.best_config.clusters import Cluster
from course_lib.best_config.runs import MeasuredRun, predict

FAR = 20.0  # times; with ten presets, no run of layout_runs_h100.csv is 8 times faster, and no peak 4 times off
SLOW = 300.0  # times slower: in that file, runs whose network stalled are up to 101 times slower than the median run
NEAR = 4.0  # how far a run of a known unit may be from its factor: a start may be off by as much for other reasons
UNITS = {  # by the unit or column that was mistaken for ours: the factor by which values are too large, and the remedy
    "step_s": {
        "milliseconds": (1e3, 'divide it by 1,000, such as {column = "iter_ms", factor = 1e-3}'),
        "microseconds": (1e6, 'divide it by 1,000,000, such as {column = "iter_us", factor = 1e-6}'),
        "minutes": (1 / 60, 'multiply it by 60, such as {column = "iter_min", factor = 60}'),
        "hours": (1 / 3600, 'multiply it by 3,600, such as {column = "iter_h", factor = 3600}'),
    },
    "peak_bytes": {
        "GiB or GB": (2.0**-30, 'multiply it by 2^30, such as {column = "peak_gib", factor = 1073741824}'),
        "MiB or MB": (2.0**-20, 'multiply it by 2^20, such as {column = "peak_mib", factor = 1048576}'),
        "KiB or kB": (2.0**-10, 'multiply it by 2^10, such as {column = "peak_kib", factor = 1024}'),
        "bytes read as GiB": (2.0**30, "leave out its factor"),
        "KiB read as GiB, or bytes read as MiB": (2.0**20, "divide its factor by 2^20"),
        "MiB read as GiB, or bytes read as KiB": (2.0**10, "divide its factor by 2^10"),
    },
}
COMPARISONS = {
    "step_s": ("the median run takes", "longer", "shorter"),
    "peak_bytes": ("the median peak is", "larger", "smaller"),
}


def format_ratio(ratio: float) -> str:
    """Return a ratio as text, to two digits: "1,000" for 1,044 and for 1 / 1,044."""
    ratio = max(ratio, 1 / ratio)
    return f"{ratio:.1e}" if ratio >= 1e6 else f"{round(ratio, 1 - math.floor(math.log10(ratio))):,.0f}"


def with_locations(runs: list[MeasuredRun]) -> list[MeasuredRun]:
    """Return the runs, with `where` set to "run 3", by their position, for runs that are not from a file."""
    return [run if run.where else dataclasses.replace(run, where=f"run {i}") for i, run in enumerate(runs, 1)]


def locations_of(runs: list[MeasuredRun], most: int = 5) -> str:
    """Return where runs are from, such as "ours.csv, lines 3, 8 and 2 more"."""
    names, numbers = zip(*(run.where.rpartition(" ")[::2] for run in runs), strict=True)
    shown = numbers if len(set(names)) == 1 else [run.where for run in runs]
    start = f"{names[0]}{'s' if len(runs) > 1 else ''} " if len(set(names)) == 1 else ""
    return start + ", ".join(shown[:most]) + (f" and {len(runs) - most} more" if len(runs) > most else "")


def known_units(runs: list[MeasuredRun], off: np.ndarray, what: str) -> list[tuple[str, str]]:
    """Return what values with errors `off`, log(measured / predicted) [runs], look like, and the remedy for each: the
    unit that explains the errors best, and units that explain them as well within a factor of 1.5.
    """
    ranks, seq = (np.log(each) for each in zip(*((run.layout.ranks, run.seq) for run in runs), strict=True))
    known: dict[str, tuple[float | np.ndarray, str]] = {
        f"{what} looks like {name}": (math.log(factor), to_do) for name, (factor, to_do) in UNITS[what].items()
    }
    if what == "step_s":
        known["step_s looks like tokens/s per GPU"] = (ranks, "name that column tokens_per_s_per_gpu")
        known["step_s looks like tokens/s of all GPUs"] = (-ranks, "name that column tokens_per_s")
        known["step_s looks like sequences/s"] = (seq, "multiply them by seq for tokens_per_s")
        known["batch looks like tokens"] = (-seq, "divide it by seq")
    left = {name: float(np.median(np.abs(off - factor))) for name, (factor, _) in known.items()}
    best = min(left.values())
    allowed = min(math.log(NEAR), best + math.log(1.5))
    return [(name, known[name][1]) for name in sorted(left, key=lambda name: left[name]) if left[name] <= allowed]


def check_mixed(runs: list[MeasuredRun], off: np.ndarray, what: str) -> None:
    """Raise ValueError if some runs seem to have another unit than most. off: log(measured / predicted) [runs]."""
    off = off - np.percentile(off, 50, method="lower")  # a value of the larger group, or of one of two equal groups
    slow = SLOW if what == "step_s" else FAR
    low, high = np.flatnonzero(off < -math.log(FAR)), np.flatnonzero(off > math.log(slow))
    rows = max(low, high, key=len)
    if not len(rows):
        return
    ratio = float(np.exp(np.median(off[rows]) - np.median(np.delete(off, rows))))
    is_, way = "is" if len(rows) == 1 else "are", COMPARISONS[what][1 if ratio > 1 else 2]
    some = f"{len(rows)} of {len(runs)} runs {is_} about {format_ratio(ratio)} times {way} than the others"
    where = locations_of([runs[i] for i in rows])
    raise ValueError(f"{what}: {some}, compared with predictions: other units? See {where}")


def check_units(runs: list[MeasuredRun], cluster: Cluster, what: str) -> None:
    """Raise ValueError, in one line, if "step_s" or "peak_bytes" of the runs seems to be in other units than seconds or
    bytes: some runs are more than FAR times faster or smaller than the others, compared with predictions (or larger, or
    SLOW times slower); or the median run is more than FAR times off its prediction.
    """
    off = np.log([getattr(run, what) for run in runs]) - np.log(getattr(predict(runs, cluster), what))
    if not len(off):
        return
    check_mixed(runs, off, what)
    median = float(np.median(off))
    if abs(median) <= math.log(FAR):
        return
    start, longer, shorter = COMPARISONS[what]
    off_by = f"{start} {format_ratio(math.exp(median))} times {longer if median > 0 else shorter} than predicted"
    if not (units := known_units(runs, off, what)):
        wanted = "the unit, batch, seq and layout" if what == "step_s" else "the unit"
        other = f"or start from a cluster nearer to yours than {cluster.name}"
        raise ValueError(f"{what}: {off_by}: check {wanted}, {other}")
    looks, remedies = (", or ".join(each) for each in zip(*units, strict=True))
    raise ValueError(f"{looks}: {off_by}; {remedies}")
