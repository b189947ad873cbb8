"""The curves and results in the log of a run."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

from course_lib.checkpoint.saved_run import records_up_to


class Curve(NamedTuple):
    """The values of a key, and their steps."""

    steps: np.ndarray
    values: np.ndarray  # float64; NaN for skipped steps


def read_log(log: Path) -> list[dict]:
    """Return the records of a log, one for each step. Raises ValueError, in one line, if it has none."""
    try:
        data = log.read_bytes()
    except OSError as error:
        raise ValueError(f"{log}: {error.strerror}") from None
    lines, _ = records_up_to(data, sys.maxsize)
    records = [record for record in map(json.loads, lines.splitlines()) if isinstance(record.get("loss"), (int, float))]
    if not records:
        problem = "is not a log of a training run" if data.strip() else "is empty: no step is in it yet"
        raise ValueError(f"{log} {problem}")
    return records


def curve(records: list[dict], key: str) -> Curve:
    """Return the values of a key in the records that have a number there."""
    points = [(record["step"], record[key]) for record in records if isinstance(record.get(key), (int, float))]
    steps, values = zip(*points, strict=True) if points else ((), ())
    return Curve(np.array(steps, dtype=int), np.array(values, dtype=float))


def smoothed(values: np.ndarray, width: int) -> np.ndarray:
    """Return for each value [n] the mean of the finite ones up to `width` places away, on both sides as many; NaN if
    none is finite.
    """
    finite, number = np.isfinite(values), np.arange(len(values))
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    side = np.minimum(width, np.minimum(number, number[::-1]))  # at the ends, a mean over one side would be off
    begin, end = number - side, number + side + 1
    count = counts[end] - counts[begin]
    return np.where(count > 0, (sums[end] - sums[begin]) / np.maximum(count, 1), np.nan)


def layout_changes(records: list[dict]) -> list[tuple[int, str]]:
    """Return the layouts of a run, each with its first step."""
    changes: list[tuple[int, str]] = []
    for record in records:
        if not changes or changes[-1][1] != record.get("layout"):
            changes.append((record["step"], str(record.get("layout"))))
    return changes


def results(records: list[dict]) -> dict[str, str]:
    """Return the results of a run by name, each as text."""
    loss, held_out = curve(records, "loss"), curve(records, "eval_loss")
    finite = loss.values[np.isfinite(loss.values)]
    rows = {"steps": f"{records[0]['step']:,} to {records[-1]['step']:,}"}
    if skipped := len(loss.values) - len(finite):
        rows["skipped steps"] = f"{skipped:,}"
    if len(tokens := curve(records, "tokens").values):
        rows["tokens"] = f"{int(tokens[-1]):,}"
    if len(finite):
        rows[f"last loss, mean of {len(finite[-10:])} steps" if len(finite) > 1 else "last loss"] = (
            f"{finite[-10:].mean():.4f}"
        )
    if np.isfinite(held_out.values).any():
        best = int(np.nanargmin(held_out.values))
        rows["best loss on held-out text"] = f"{held_out.values[best]:.4f}, after step {held_out.steps[best]:,}"
    if len(speed := curve(records, "tokens_per_s").values):
        rows["tokens/s per device, median"] = f"{statistics.median(speed):,.0f}"
    if len(mfu := curve(records, "mfu").values):
        rows["MFU, median"] = f"{statistics.median(mfu):.1%}"
    if len(memory := curve(records, "peak_memory").values):
        fullest = records[int(memory.argmax())].get("fullest_rank")
        rows["peak memory"] = f"{memory.max() / 2**30:.2f} GiB, on rank {fullest}"
    changes = layout_changes(records)
    rows["layout"] = changes[0][1] + "".join(f"; from step {step:,} {layout}" for step, layout in changes[1:])
    return rows
