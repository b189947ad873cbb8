"""Figures of notebook 12b: the bytes that operations and fused kernels move, their speed on a GPU, and the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from course_kit.figures.kernels import EAGER, OURS, recorded_rates
from course_kit.figures.style import WIDTH, limit_line, styled

MOVED = "bytes moved, in sizes n of one input"


@styled
def operation_bytes(operations: Mapping[str, Sequence[float]], fused: Mapping[str, float]) -> Figure:
    """Show the bytes that each operation of a forward moves, end to end, above those of one fused kernel, in n.

    Both by operator: a segment per operation; inputs once and results once.
    """
    figure, ax = plt.subplots(figsize=(WIDTH, 2.5))
    for row, (name, sizes) in enumerate(operations.items()):
        starts = np.cumsum([0, *sizes[:-1]])
        ax.barh([row - 0.2] * len(sizes), sizes, 0.36, starts, color=EAGER, edgecolor="white", label="each operation")
        ax.barh(row + 0.2, fused[name], 0.36, color=OURS, label="one fused kernel")
        ax.text(sum(sizes) + 0.1, row - 0.2, f"{sum(sizes):.1f}", va="center")
        ax.text(fused[name] + 0.1, row + 0.2, f"{fused[name]:g}", va="center")
    ax.set_yticks(range(len(operations)), operations)
    ax.set(xlabel=f"{MOVED}, forward", xlim=(0, 1.1 * max(map(sum, operations.values()))))
    ax.invert_yaxis()
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles[:2], labels[:2], loc="outside upper center", ncols=2)
    return figure


@styled
def bytes_by_operator(moved: Mapping[str, tuple[float, float]]) -> Figure:
    """Show the bytes of a forward and backward in n: eager operations, our kernels, by operator."""
    figure, ax = plt.subplots(figsize=(WIDTH, 2.6))
    positions = np.arange(len(moved))
    for offset, which, color, label in ((-0.2, 0, EAGER, "eager operations"), (0.2, 1, OURS, "our kernels")):
        bars = ax.barh(positions + offset, [each[which] for each in moved.values()], 0.38, color=color, label=label)
        ax.bar_label(bars, fmt="{:.1f}", padding=3)
    ax.set_yticks(positions, moved)
    ax.set(xlabel=f"{MOVED}, forward and backward", xlim=(0, 1.1 * max(map(max, moved.values()))))
    ax.invert_yaxis()
    ax.legend()
    return figure


@styled
def kernel_rates(record: Mapping, size: str = "65,536 x 4,096") -> Figure:
    """Show TB/s of the bytes that must move, by kernel: ours, eager, compiled and Liger-Kernel, against a copy.

    record: benchmarks/results/kernels_*.json; size: the rows to show.
    """
    panels = {
        f"{which}, {size}, BF16": {
            row["kernel"]: {who: rate / 1e3 for who, rate in row["rates"].items()}
            for row in record["rows"]
            if row["size"] == size and row["pass"] == which
        }
        for which in ("forward", "backward")
    }
    return recorded_rates(panels, "TB/s of the bytes that must move", 5, ("a copy", record["copy_gb_per_s"] / 1e3))


@styled
def loss_memory(tokens: Sequence[int], eager_gib: Sequence[float], chunked_gib: Sequence[float]) -> Figure:
    """Show the peak GiB of a loss by tokens of a micro-batch, both logarithmic: eager, and in chunks of rows."""
    figure, ax = plt.subplots(figsize=(WIDTH, 2.8))
    ax.plot(tokens, eager_gib, "s-", color=EAGER, label="eager: all logits, four times")
    ax.plot(tokens, chunked_gib, "o-", color=OURS, label="in chunks")
    limit_line(ax, 80, "H100")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(tokens, [f"{t // 1024}k" for t in tokens])
    ax.set(xlabel="tokens of a micro-batch", ylabel="GiB")
    ax.legend(loc="center left")
    return figure
