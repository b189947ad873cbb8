"""Nodes and their links, what each collective does, a tree, and steps of ranks that wait for one another."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from course_kit.figures.style import GRAY, KINDS, LIGHT, PHASES, RANKS, WIDTH, ink_on, styled

EMPTY = [""] * 4
FILL = dict(zip("abcdΣ", [*RANKS[:4], KINDS[4]], strict=True))


@styled
def two_nodes() -> Figure:
    """Return two nodes of eight GPUs: the NVLink switch, a network card per GPU, and the network between the nodes."""
    figure, ax = plt.subplots(figsize=(WIDTH, 2.9))
    ax.set(xlim=(-0.1, 16.5), ylim=(-1.5, 2.9))
    ax.axis("off")
    purple, links = PHASES["communication"], {"color": PHASES["communication"], "linewidth": 2}
    for node in range(2):
        left = 8.6 * node
        ax.add_patch(plt.Rectangle((left, -0.45), 7.8, 2.8, fill=False, edgecolor=GRAY))
        ax.text(left + 0.1, 2.5, f"node {node}", color=GRAY)
        ax.add_patch(plt.Rectangle((left + 0.15, 1.75), 7.5, 0.45, color=purple, alpha=0.3))
        ax.text(left + 3.9, 1.97, "NVLink switch: 450 GB/s per GPU, each way", ha="center", va="center")
        for gpu in range(8):
            x = left + 0.2 + 0.94 * gpu
            for low, high in ((1.45, 1.75), (0.25, 0.6), (-0.9, -0.2)):
                ax.plot([x + 0.4, x + 0.4], [low, high], **links)
            ax.add_patch(plt.Rectangle((x, 0.6), 0.8, 0.85, color=RANKS[gpu]))
            label, ink = f"rank\n{8 * node + gpu}", ink_on(RANKS[gpu])
            ax.text(x + 0.4, 1.02, label, ha="center", va="center", fontsize=8, color=ink)
            ax.add_patch(plt.Rectangle((x, -0.3), 0.8, 0.55, color=LIGHT))
            ax.text(x + 0.4, -0.03, "card", ha="center", va="center", fontsize=8)
    ax.add_patch(plt.Rectangle((0.15, -1.4), 16.1, 0.5, color=purple, alpha=0.3))
    ax.text(8.2, -1.15, "network: 50 GB/s for each card, 400 for a node", ha="center", va="center")
    return figure


def full(letter: str) -> list[str]:
    """Return a rank's four shards: a0 a1 a2 a3."""
    return [f"{letter}{shard}" for shard in range(4)]


def only(cells: Sequence[str]) -> list[list[str]]:
    """Return rows of which row r has the r-th of the cells at place r; the rest holds nothing of interest."""
    return [["" if position != row else cell for position in range(4)] for row, cell in enumerate(cells)]


def panels() -> dict[str, tuple[list[list[str]], list[list[str]]]]:
    """Return the ranks' tensors before and after each collective, a row per rank."""
    every, diagonal = [full(letter) for letter in "abcd"], [f"{letter}{i}" for i, letter in enumerate("abcd")]
    return {
        "broadcast": ([full("a"), EMPTY, EMPTY, EMPTY], [full("a")] * 4),
        "scatter": ([full("a"), EMPTY, EMPTY, EMPTY], only(full("a"))),
        "gather": (only(diagonal), [diagonal, EMPTY, EMPTY, EMPTY]),
        "all-gather": (only(diagonal), [diagonal] * 4),
        "reduce": (every, [full("Σ"), EMPTY, EMPTY, EMPTY]),
        "all-reduce": (every, [full("Σ")] * 4),
        "reduce-scatter": (every, only(full("Σ"))),
        "all-to-all": (every, [[f"{letter}{rank}" for letter in "abcd"] for rank in range(4)]),
    }


def draw_ranks(ax: Axes, x: float, rows: list[list[str]]) -> None:
    """Draw the cells of the ranks' tensors, a row per rank, from `x` on."""
    for row, cells in enumerate(rows):
        for column, cell in enumerate(cells):
            color = FILL[cell[0]] if cell else "#EEEEEE"
            ax.add_patch(plt.Rectangle((x + column, -row), 0.92, 0.85, color=color))
            center = x + column + 0.46, 0.42 - row
            ax.text(*center, cell, ha="center", va="center", color=ink_on(color), fontsize=8)


@styled
def collectives() -> Figure:
    """Return the shards on four ranks before and after each of eight collectives."""
    figure, axes = plt.subplots(2, 4, figsize=(WIDTH, 3.8))
    for ax, (name, (before, after)) in zip(axes.flat, panels().items(), strict=True):
        ax.set(xlim=(-0.9, 9.6), ylim=(-3.1, 1.2), title=name)
        ax.axis("off")
        draw_ranks(ax, 0, before)
        draw_ranks(ax, 5.5, after)
        ax.annotate("", (5.3, -1.1), (4.1, -1.1), arrowprops={"arrowstyle": "->"})
        for row in range(4):
            ax.text(-0.3, 0.42 - row, f"{row}", ha="right", va="center", fontsize=8, color=GRAY)
    return figure


@styled
def tree() -> Figure:
    """Return which of eight places have the data after each step of a tree."""
    figure, ax = plt.subplots(figsize=(0.8 * WIDTH, 2.3))
    ax.set(xlim=(-0.6, 7.6), ylim=(-3.3, 0.5), xticks=range(8), xlabel="place, counted from the source")
    ax.set_yticks([0, -1, -2, -3], ["start", "after step 1", "after step 2", "after step 3"])
    ax.spines[["left", "bottom"]].set_visible(False)
    ax.tick_params(length=0)
    for step in range(4):
        for position in range(8):
            ax.plot(position, -step, "o", markersize=13, color=KINDS[0] if position < 2**step else LIGHT)
        for position in range(2**step if step < 3 else 0):
            arrow = {"arrowstyle": "->", "color": GRAY, "shrinkA": 8, "shrinkB": 8}
            ax.annotate("", (position + 2**step, -step - 1), (position, -step), arrowprops=arrow)
    return figure


@styled
def steps_over_time(by_barrier: dict[bool, list[list[tuple[float, float]]]], pauses_ms: dict[bool, float]) -> Figure:
    """Return the steps of four ranks over time, without and with a barrier after each step.

    by_barrier: (start, end) in seconds of each step, by rank; pauses_ms: when the added pauses of all ranks end.
    """
    figure, axes = plt.subplots(2, 1, figsize=(WIDTH, 3.4), sharex=True)
    for ax, (barrier, by_rank) in zip(axes, by_barrier.items(), strict=True):
        for rank, steps in enumerate(by_rank):
            bars = [(1000 * start, 1000 * (end - start)) for start, end in steps]
            ax.broken_barh(bars, (rank - 0.4, 0.8), color=RANKS[rank], edgecolor="white")
        done_ms = 1000 * max(steps[-1][1] for steps in by_rank)
        ax.axvline(pauses_ms[barrier], color="black", linestyle=":", linewidth=1, label="the pauses, added up")
        ax.set(yticks=range(4), ylabel="rank")
        ax.set_title(f"{'a barrier after each step' if barrier else 'no barrier'}: {done_ms:.0f} ms")
    axes[1].set_xlabel("ms")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper right")
    return figure
