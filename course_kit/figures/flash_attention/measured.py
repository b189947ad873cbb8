"""Figures of FlashAttention's measurements: time and memory, errors, instructions, traffic, and speed on a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from course_kit.figures.kernels import OURS, recorded_rates
from course_kit.figures.style import GRAY, KINDS, LIMIT, WIDTH, ink_on, styled

STANDARD, FUSED, TILED = KINDS[1], KINDS[3], KINDS[2]
WAYS = {"standard": STANDARD, "PyTorch's fused": FUSED, "in tiles, PyTorch": TILED, "our kernels": OURS}
RING: dict[str, Any] = {"markerfacecolor": "none", "markeredgewidth": 1.5}
Curve = Sequence[tuple[float, float]]  # seconds and peak MiB, by length; NaN: not measured


@styled
def time_and_memory(curves: Mapping[str, Curve], lengths: Sequence[int]) -> Figure:
    """Show seconds and peak MiB by tokens, on linear axes: a line per way of attention (`WAYS`)."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 3))
    for name, curve in curves.items():
        marker = "s" if name == "our kernels" else "o"
        hollow = {**RING, "markersize": 9} if marker == "s" else {}
        for ax, values in zip((left, right), zip(*curve, strict=True), strict=True):
            ax.plot(lengths, values, f"{marker}-", color=WAYS[name], label=name, **hollow)
    left.set(ylabel="seconds", title="forward and backward, causal, 2 heads of 64", ylim=0)
    right.set(ylabel="peak MiB", title="memory on top of q, k, v", ylim=0)
    for ax in (left, right):
        ax.set_xticks(lengths, [f"{s:,}" for s in lengths])
        ax.set_xlabel("tokens")
    right.legend()
    return figure


@styled
def error_ratios(errors: Mapping[str, Sequence[tuple[int, float, float]]]) -> Figure:
    """Show the error in tiles over the error of PyTorch's attention, both against float64: a dot per shape.

    errors: by dtype, (tokens, error in tiles, PyTorch's error) of each shape.
    """
    figure, ax = plt.subplots(figsize=(WIDTH, 2.8))
    for (dtype, points), color, marker in zip(errors.items(), KINDS, "os", strict=False):
        tokens, mine, theirs = (np.array(each) for each in zip(*points, strict=True))
        ax.plot(tokens, mine / theirs, marker, color=color, label=dtype, markersize=6)
    ax.axhline(1, color=GRAY, linestyle="--", linewidth=1, zorder=0)
    ratios = [mine / theirs for points in errors.values() for _, mine, theirs in points]
    ax.set(ylim=(min(0.9, *ratios) - 0.1, max(1, *ratios) + 0.1), xlabel="tokens")
    ax.set_ylabel("error in tiles / PyTorch's error")
    ax.text(1, 1.02, "equal errors", va="bottom", ha="right", color=GRAY, transform=ax.get_yaxis_transform())
    figure.legend(loc="outside upper center", ncols=2)
    return figure


@styled
def issue_clocks(issued: Mapping[str, float], matmul_clocks: float) -> Figure:
    """Show the clocks in which an SM issues the instructions of one iteration, by version of the kernel.

    matmul_clocks: those that the iteration's matmuls take on the tensor cores.
    """
    figure, ax = plt.subplots(figsize=(WIDTH, 0.9 + 0.28 * len(issued)))
    ax.barh(list(issued), list(issued.values()), 0.65, color=OURS)
    for position, clocks in enumerate(issued.values()):
        ax.text(clocks - 8, position, f"{clocks:,.0f}", ha="right", va="center", color=ink_on(OURS))
    ax.axvline(matmul_clocks, color=LIMIT, linestyle="--", linewidth=1)
    ax.annotate(
        f"the tensor cores' matmuls: {matmul_clocks:,.0f}",
        (matmul_clocks, -0.6),
        textcoords="offset points",
        xytext=(-4, 2),
        color=LIMIT,
        ha="right",
    )
    ax.invert_yaxis()
    ax.set(xlim=(0, 1.12 * max(matmul_clocks, *issued.values())))
    ax.set_xlabel("clocks of an H100's SM to issue one iteration (128 queries x 64 keys, heads of 128)")
    return figure


@styled
def traffic_bars(traffic: Mapping[str, float], attainable: Mapping[str, float]) -> Figure:
    """Show the bytes that versions of attention move, and the share of the GPU's peak that each can reach (0 to 1)."""
    figure, ax = plt.subplots(figsize=(WIDTH, 0.8 + 0.35 * len(traffic)))
    bars = ax.barh(list(traffic), [size / 1e6 for size in traffic.values()], 0.6, color=KINDS[3])
    labels = [f"{size / 1e6:,.0f} MB: at most {attainable[name]:.0%} of the peak" for name, size in traffic.items()]
    ax.bar_label(bars, labels, padding=3)
    ax.invert_yaxis()
    ax.set(xlim=(0, 1.6 * max(traffic.values()) / 1e6), xlabel="MB moved to and from memory, forward")
    return figure


@styled
def traffic_by_tokens(
    sizes: Sequence[int],
    formulas: Mapping[str, Sequence[float]],
    counted: Mapping[str, Mapping[int, float]],
    least: Sequence[float],
) -> Figure:
    """Show the bytes of a forward by tokens: formulas as lines, counts as rings, k and v from the L2 cache dashed.

    formulas, least: bytes by size; counted: bytes by tokens, for some of the sizes.
    """
    figure, ax = plt.subplots(figsize=(WIDTH, 3.2))
    for (name, values), color in zip(formulas.items(), (STANDARD, TILED, OURS), strict=True):
        ax.plot(sizes, values, color=color, label=f"{name}: formula")
        rings = {**RING, "markersize": 11 if color == STANDARD else 7}
        if name in counted:
            ax.plot(list(counted[name]), list(counted[name].values()), "o", color=color, **rings)
    ax.plot([], [], "o", color="black", markerfacecolor="none", markersize=8, label="counted")
    ax.plot(sizes, least, "--", color=OURS, label="queries outside, k and v from the L2 cache")
    ax.set(xscale="log", yscale="log", xlabel="tokens", ylabel="bytes, forward")
    ax.set_xticks(sizes, [f"{s:,}" for s in sizes])
    ax.minorticks_off()
    ax.legend()
    return figure


@styled
def attention_rates(record: Mapping) -> Figure:
    """Show TFLOP/s of attention by size: ours, PyTorch's FlashAttention-2 (flash), cuDNN and FlexAttention.

    record: benchmarks/results/attention_*.json.
    """
    panels = {
        which: {row["size"]: row["rates"] for row in record["rows"] if row["pass"] == which}
        for which in ("forward", "backward")
    }
    return recorded_rates(panels, "TFLOP/s", 750, None)
