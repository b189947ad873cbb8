"""Gradients, updates and losses in 16 bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure

from course_kit.figures.style import KINDS, LIGHT, WIDTH, ink_on, readable, styled
from course_lib.mixed_precision.formats import E4M3, E5M2, FP16

COLORS = {"FP16": KINDS[2], "E5M2": KINDS[1], "E4M3": KINDS[3], "BF16": KINDS[0]}  # of formats
LINES = {  # of ways to train
    "FP32": ("black", ":"),
    "FP16, masters": (KINDS[1], "-"),
    "FP16, masters, loss scale": (KINDS[2], "-"),
    "all BF16": (KINDS[0], "-"),
    "BF16, masters": (KINDS[3], "--"),
}


@styled
def gradient_sizes(gradients: torch.Tensor) -> Figure:
    """Return a histogram of log2 |gradient|, and the range of three formats above it."""
    figure, ax = plt.subplots(figsize=(WIDTH, 2.8))
    ax.hist(gradients[gradients != 0].abs().log2(), bins=90, color=LIGHT)
    for row, (name, fmt) in enumerate({"FP16": FP16, "E5M2": E5M2, "E4M3": E4M3}.items()):
        low, high = (float(torch.tensor(number).log2()) for number in (fmt.smallest_subnormal, fmt.largest))
        height = ax.get_ylim()[1] * (0.92 - 0.16 * row)
        ax.plot([low, high], [height, height], color=COLORS[name], linewidth=5, solid_capstyle="butt")
        ax.text(high + 0.5, height, name, color=readable(COLORS[name]), va="center")
    ax.set(xlabel="log2 of |gradient|; a bar reaches from a format's smallest number to its largest", xlim=(-45, 22))
    ax.set_yticks([])
    return figure


@styled
def small_updates(paths: Mapping[str, Sequence[float]]) -> Figure:
    """Return the value of a weight by number of updates of 0.001, a line per way to round; the last one is exact."""
    figure, ax = plt.subplots(figsize=(0.85 * WIDTH, 2.8))
    for (name, path), color in zip(paths.items(), (KINDS[2], KINDS[0], "black"), strict=True):
        exact = color == "black"
        ax.plot(path, color=color, label=name, linewidth=1 if exact else 2.5, linestyle=":" if exact else "-")
    ax.set(xlabel="updates of 0.001", ylabel="a weight in BF16")
    ax.legend()
    return figure


@styled
def unmoved_weights(unmoved: Mapping[float, tuple[float, float]]) -> Figure:
    """Return the shares of weights that a step leaves where they are, in BF16 and FP16, by learning rate."""
    figure, ax = plt.subplots(figsize=(0.85 * WIDTH, 2.8))
    for name, mark, column in (("BF16", "o", 0), ("FP16", "s", 1)):
        shares = [both[column] for both in unmoved.values()]
        ax.plot(list(unmoved), shares, f"{mark}-", color=COLORS[name], label=name)
    ax.set(xscale="log", xlabel="learning rate", ylabel="share of the weights that do not move", ylim=(0, 1))
    ax.legend()
    return figure


@styled
def underflow_by_batch(shares: Mapping[int, tuple[float, float]]) -> Figure:
    """Return the shares of FP16 gradients that are zero and subnormal, by tokens in the batch."""
    figure, ax = plt.subplots(figsize=(0.85 * WIDTH, 2.8))
    sizes, zero, either = list(shares), [share[0] for share in shares.values()], [sum(s) for s in shares.values()]
    ax.fill_between(sizes, zero, color=KINDS[2])
    ax.fill_between(sizes, zero, either, color=KINDS[1])
    ax.text(2**21, 0.3, "zero", color=ink_on(KINDS[2]))
    ax.text(2**12, 0.5, "subnormal: precision lost", ha="center")
    ax.set(xlabel="tokens in the whole batch", ylabel="share of a micro-batch's gradients", ylim=(0, 1))
    ax.set_xscale("log", base=2)
    ax.set_xlim(sizes[0], sizes[-1])
    return figure


@styled
def losses(curves: Mapping[str, Sequence[float]], smoothed: Mapping[str, Sequence[float]]) -> Figure:
    """Return the loss by step, mean of ten, of each way to train; one that became NaN at once is a cross."""
    figure, ax = plt.subplots(figsize=(WIDTH, 3.3))
    for name, (color, style) in LINES.items():
        ax.plot(smoothed[name], color=color, linestyle=style, label=name, linewidth=2)
    ax.plot([1], [curves["all FP16"][0]], "x", color=KINDS[4], markersize=10, label="all FP16: NaN", linestyle="")
    ax.set(xlabel="step", ylabel="loss, mean of ten steps")
    ax.legend(ncols=2)
    return figure
