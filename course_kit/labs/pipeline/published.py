"""Published numbers beside ours: bandwidths, bubble rates, and the memory of Llama 3 8B by stages."""

from __future__ import annotations

import csv
from pathlib import Path

import torch

import course_lib
from course_kit.labs.collectives import SWEPT, published
from course_lib.pipeline import schedules, simulation
from course_lib.pipeline.stages import split_stages
from course_lib.single_gpu.memory import gpt_activation_bytes, state_bytes
from course_lib.single_gpu.model import ModelConfig, Transformer

GiB = 2**30
MAKERS = {
    "1F1B": schedules.one_f_one_b,
    "1F1B-I": None,  # interleaved, v = 2: by the formula
    "ZB-H1": schedules.zero_bubble_h1,
    "ZB-H2": schedules.zero_bubble_h2,
    "ZB-V": schedules.zero_bubble_v,
}


def published_bandwidth() -> dict[str, list[tuple[float, float]]]:
    """Return (nodes, median GB/s) of each collective."""
    return {name: list(zip(published(name, "nodes"), published(name, "median_gb_s"), strict=True)) for name in SWEPT}


def published_bubble_rates() -> dict[str, list[tuple[float, float]]]:
    """Return (simulated with equal times, published) bubble rates, bubble over cost, by schedule."""
    path = Path(course_lib.__file__).parents[1] / "data" / "schedules.csv"
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in MAKERS}
    for row in csv.DictReader(path.open(encoding="utf-8")):
        if row["source"].endswith("Table 8") and row["quantity"] == "bubble rate" and row["schedule"] in MAKERS:
            p, m, make = int(row["pp"]), int(row["micro_batches"]), MAKERS[row["schedule"]]
            ratio = simulation.simulate(make(p, m)).bubble_ratio if make else (p - 1) / (2 * m)
            rates[row["schedule"]].append((float(ratio / (1 + ratio)), float(row["value"])))
    return rates


def memory_by_stages(config: ModelConfig, stages: tuple[int, ...], seq: int = 4096) -> dict[int, dict[str, float]]:
    """Return GiB of parameters, gradients, optimizer states and activations on the fullest rank of 1F1B, by the number
    of stages. Activations: of micro-batches of one sequence, 34 sbh bytes per layer.
    """
    per_layer = gpt_activation_bytes(config.layers, config.hidden, config.heads, 1, seq, "selective") / config.layers
    fullest = {}
    for p in stages:
        with torch.device("meta"):
            modules = split_stages(Transformer(config), p)
        by_rank = []
        for rank, stage in enumerate(modules):
            sizes = state_bytes(sum(weight.numel() for weight in stage.parameters()))
            sizes["activations"] = (p - rank) * len(stage.blocks) * per_layer
            by_rank.append({kind: size / GiB for kind, size in sizes.items()})
        fullest[p] = max(by_rank, key=lambda sizes: sum(sizes.values()))
    return fullest
