"""How fast collectives are, published and measured, and how much each rank sends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from course_kit.figures.style import GRAY, KINDS, WIDTH, styled
from course_kit.labs.collectives import Fit, published
from course_lib.collectives.bandwidth import bandwidths

LINES: dict[str, dict[str, Any]] = {  # two that coincide: a broad line under a thin one
    "all_reduce": {"color": KINDS[0], "marker": "o"},
    "all_gather": {"color": KINDS[1], "linewidth": 5, "marker": "s"},
    "reduce_scatter": {"color": KINDS[2], "marker": "D"},
}


def on_nodes(ax: Axes, nodes: Sequence[float]) -> None:
    """Give an axis ticks at these numbers of nodes."""
    ax.set(xscale="log", xlabel="nodes of 8 H100")
    ax.set_xticks(nodes, [f"{count:.0f}" for count in nodes])
    ax.minorticks_off()


@styled
def published_bandwidth(gigabytes: float = 16) -> Figure:
    """Return published bus bandwidths by nodes, and the seconds that an all-reduce of so many GB takes with them."""
    nodes, speeds = published("all_reduce", "nodes"), published("all_reduce", "median_gb_s")
    seconds = [2 * (n - 1) / n * gigabytes / speed for n, speed in zip([8 * c for c in nodes], speeds, strict=True)]
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, 3))
    for collective, line in LINES.items():
        axes[0].plot(nodes, published(collective, "median_gb_s"), label=collective, markersize=4, **line)
    low, high = (published("all_reduce", name) for name in ("p5_gb_s", "p95_gb_s"))
    axes[0].fill_between(nodes, low, high, color=KINDS[0], alpha=0.15, label="all_reduce, 5 to 95%")
    axes[0].set(ylabel="GB/s", ylim=0, title="bandwidth, 256 MB messages")
    axes[0].legend()
    axes[1].plot(nodes, seconds, "o-", color=KINDS[4], markersize=4)
    for position, side in ((0, "left"), (-1, "center")):
        label = f"{1000 * seconds[position]:.0f} ms"
        axes[1].annotate(label, (nodes[position], seconds[position]), (0, 6), textcoords="offset points", ha=side)
    axes[1].set(ylabel="seconds", ylim=(0, 1.2 * max(seconds)), title=f"to add up {gigabytes:g} GB of gradients")
    for ax in axes:
        on_nodes(ax, nodes)
    return figure


@styled
def elements_sent(sent_mb: dict[str, Sequence[float]], least_mb: float) -> Figure:
    """Return the MB that each rank sends in an all-reduce, a bar per algorithm; a line: what a rank must send."""
    figure, ax = plt.subplots(figsize=(0.85 * WIDTH, 2.7))
    for position, (color, (name, sent)) in enumerate(zip(KINDS, sent_mb.items(), strict=False)):
        label = f"{name}: {sum(sent):.0f} MB in all"
        ax.bar([rank + 0.27 * (position - 1) for rank in range(len(sent))], sent, width=0.25, color=color, label=label)
    ax.axhline(least_mb, color="black", linestyle=":", linewidth=1, label="2(N-1)/N · K")
    ax.set_xticks(range(4), [f"rank {r}" for r in range(4)])
    ax.set(ylabel="MB sent")
    ax.legend()
    return figure


@styled
def bus_bandwidths(fits: dict[int, dict[str, Fit]]) -> Figure:
    """Return bus bandwidths by message size with fits, a panel per number of ranks, and published ones by nodes."""
    figure, axes = plt.subplots(1, len(fits) + 1, figsize=(WIDTH, 3))
    for ax, (n, by_collective) in zip(axes, fits.items(), strict=False):
        for collective, fit in by_collective.items():
            color, marker = LINES[collective]["color"], LINES[collective]["marker"]
            ax.plot(fit.sizes, [b / 1e9 for b in fit.busbw], marker, color=color, markersize=4, label=collective)
            fine = np.geomspace(fit.sizes[0], fit.sizes[-1])
            fitted = [bandwidths(collective, k, fit.alpha + k / fit.beta, n)[1] / 1e9 for k in fine]
            ax.plot(fine, fitted, color=color, linewidth=1)
        ax.set(xscale="log", yscale="log", xlabel="bytes", title=f"here: {n} ranks")
        ax.sharey(axes[0])
    last = axes[-1]
    for collective in next(iter(fits.values())):
        last.plot(
            published(collective, "nodes"), published(collective, "median_gb_s"), markersize=4, **LINES[collective]
        )
    last.set(yscale="log", title="published: 256 MB")
    on_nodes(last, published("all_reduce", "nodes"))
    axes[0].set_ylabel("bus bandwidth, GB/s")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure


def crossing_size(n: int) -> float:
    """Return the tensor size at which ring and tree of n ranks take equally long, in units of alpha·beta."""
    steps = math.ceil(math.log2(n))
    return (n - 1 - steps) / (steps - (n - 1) / n)


@styled
def ring_or_tree(group_sizes: Sequence[int]) -> Figure:
    """Return the size at which a ring begins to be faster than a tree, by number of ranks."""
    sizes = [crossing_size(n) for n in group_sizes]
    figure, ax = plt.subplots(figsize=(0.75 * WIDTH, 2.9))
    ax.plot(group_sizes, sizes, "o-", color=GRAY, markersize=4)
    ax.fill_between(group_sizes, sizes, 1e-1, color=KINDS[2], alpha=0.15)
    ax.fill_between(group_sizes, sizes, 3e3, color=KINDS[0], alpha=0.15)
    ax.text(1500, 1, "tree is faster")
    ax.text(6, 300, "ring is faster")
    ax.set(xscale="log", yscale="log", xlabel="ranks", ylabel="K / (α·β)", ylim=(1e-1, 3e3))
    return figure
