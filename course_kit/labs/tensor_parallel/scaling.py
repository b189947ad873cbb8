"""Published runs of tensor parallelism, and their speed by the formula of exercise 06.15."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import course_lib
from course_kit.labs.collectives import published
from course_lib.tensor_parallel import model


class Scaling(NamedTuple):
    """A published run: degree of tensor parallelism, tokens/s per GPU, and the largest batch that fits."""

    tp: int
    tokens_per_s: float
    max_batch: int


def published_scaling() -> list[Scaling]:
    """Return the runs of data/tp_scaling.csv without sequence parallelism."""
    path = Path(course_lib.__file__).parents[1] / "data" / "tp_scaling.csv"
    with path.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["sequence_parallel"] == "no"]
    return [Scaling(int(row["tp"]), float(row["tokens_per_s_per_gpu"]), int(row["max_batch"])) for row in rows]


def published_ratios(hidden: int, degrees: Sequence[int], peak: float = 0.5 * 989.5e12) -> list[float]:
    """Return all-reduces over matmuls of a layer's forward by tp, at the published bandwidths of 8 GPUs or more."""
    gpus, speeds = published("all_reduce", "gpus"), published("all_reduce", "median_gb_s")
    bandwidths = {int(n): 1e9 * speed for n, speed in zip(gpus, speeds, strict=True)}
    return [model.all_reduce_ratio(hidden, tp, bandwidths[max(tp, 8)], peak) for tp in degrees]
