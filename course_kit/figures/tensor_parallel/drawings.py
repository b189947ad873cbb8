"""Drawings: how matmuls, heads and the loss are split, where f and f* are, and when their all-reduces travel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from course_kit.figures.rectangles import GAP, arrow, drawing, frame, lane, rectangle
from course_kit.figures.style import GRAY, LIGHT, PHASES, RANKS, WIDTH, readable, styled

SUM = PHASES["communication"]  # f, f* and their all-reduces
Bar = tuple[str, str, float, float]  # color, text, start, length


def matrix(axes: Axes, corner: tuple[float, float], size: tuple[float, float], text: str, cut: str = "") -> None:
    """Draw a matrix, cut into the shards of four ranks by "columns" or "rows", with a text below it."""
    x, y = corner
    width, height = (size[0] / 4, size[1]) if cut == "columns" else (size[0], size[1] / 4 if cut else size[1])
    for i in range(4 if cut else 1):
        left, foot = (x + i * width, y) if cut == "columns" else (x, y + size[1] - (i + 1) * height)
        color = RANKS[i] if cut else "#BBBBBB"
        axes.add_patch(Rectangle((left, foot), width, height, facecolor=color, edgecolor="white"))
    axes.text(x + size[0] / 2, y - 0.12, text, ha="center", va="top")


@styled
def split_matmul() -> Figure:
    """Return a drawing of the matmul Y = X · W on four GPUs, with W split by columns and by rows."""
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, 2.1))
    for ax, title in zip(
        axes, ("columns: the output is split", "rows: the input is split, outputs summed"), strict=True
    ):
        drawing(ax, (-0.4, 5.9), (-0.7, 1.8))
        ax.set_aspect("equal")
        ax.set_title(f"by {title}")
        ax.text(1.45, 1, "·", ha="center", va="center", fontsize=16)
        ax.text(3.55, 1, "=", ha="center", va="center", fontsize=14)
    by_columns, by_rows = axes
    matrix(by_columns, (0, 0.4), (1, 1.2), "X: full,\non every GPU")
    matrix(by_columns, (1.85, 0.5), (1.4, 1), "W", "columns")
    matrix(by_columns, (4, 0.4), (1.4, 1.2), "Y: N-th of the\ncolumns on each", "columns")
    matrix(by_rows, (0, 0.4), (1, 1.2), "X: N-th of the\ncolumns on each", "columns")
    matrix(by_rows, (1.85, 0.5), (1.4, 1), "W", "rows")
    for i in range(4):
        corner = (3.85 + 0.16 * i, 0.55 - 0.12 * i)
        by_rows.add_patch(Rectangle(corner, 1.4, 1.2, facecolor=RANKS[i], edgecolor="white"))
    by_rows.text(4.8, 0.07, "Y: full, but a summand\non each: all-reduce", ha="center", va="top")
    return figure


@styled
def mlp_between_f_and_f_star() -> Figure:
    """Return a drawing of an MLP on two GPUs, split by columns and then by rows, between f and f*."""
    figure, ax = plt.subplots(figsize=(WIDTH, 2.9))
    drawing(ax, (-0.6, 13.2), (-0.1, 3.4))
    for rank in range(2):
        y, color = 1.5 - 1.3 * rank, RANKS[rank]
        ax.text(0.4, y + 0.35, f"GPU {rank}", ha="right", va="center", weight="bold")
        steps = {"X": (0.6, 1, LIGHT), "A, columns": (2.7, 1.75, color), "silu": (4.8, 1.3, color)}
        steps |= {"B, rows": (6.5, 1.5, color), "a summand": (8.4, 1.75, color), "Y": (11.7, 1, LIGHT)}
        for text, (x, width, fill) in steps.items():
            rectangle(ax, x, y, (width, 0.7), text, fill)
        for start, end in ((4.47, 4.8), (6.12, 6.5), (8.02, 8.4)):
            arrow(ax, (start, y + 0.35), (end, y + 0.35))
    for x, text, below in (
        (1.95, "f", "nothing\nbackward: all-reduce"),
        (10.65, "f*", "all-reduce\nbackward: nothing"),
    ):
        rectangle(ax, x, 0, (0.5, 2.5), text, SUM, fontsize=11, weight="bold")
        ax.text(x + 0.25, 2.62, f"forward: {below}", ha="center", va="bottom")
    return figure


@styled
def heads_of_ranks() -> Figure:
    """Return a drawing of the heads of each of four ranks, with 4 K/V heads and with 2."""
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, 2.7))
    for ax, kv in zip(axes, (4, 2), strict=True):
        drawing(ax, (-0.1, 8.1), (-1.4, 2.4))
        ax.set_title(f"8 query heads, {kv} K/V heads")
        for rank in range(4):
            ax.text(2 * rank + 1, 2.05, f"rank {rank}", ha="center")
            for head in (2 * rank, 2 * rank + 1):
                rectangle(ax, head + 0.05, 1.2, (0.9, 0.7), f"q{head}", RANKS[rank])
            head = rank * kv // 4
            frame(ax, 2 * rank + 0.1, 0.25, (1.8, 0.7), f"k{head}, v{head}", RANKS[rank])
    axes[0].text(4, -0.1, "each K/V head is on one rank", ha="center", va="top")
    for left, head in ((0, 0), (4, 1)):
        axes[1].plot([left + 0.1, left + 3.9], [0, 0], color="black", linewidth=1)
        axes[1].text(left + 2, -0.1, f"two copies of head {head}", ha="center", va="top")
    axes[1].text(4, -0.65, "ranks 0 and 2 together have one copy of each head;\nso have 1 and 3", ha="center", va="top")
    return figure


@styled
def loss_of_a_token() -> Figure:
    """Return a drawing of the loss of one token from the logits of four ranks: three numbers from each."""
    figure, ax = plt.subplots(figsize=(WIDTH, 3))
    drawing(ax, (-3.3, 13.6), (-3.7, 1.3))
    rows = ("logits z, v/4 each", "largest: all-reduce (max)", "sum of exp(z - m)", "target's z - m, or 0")
    for row, text in enumerate(rows):
        ax.text(-0.2, 0.35 - row, text, ha="right", va="center")
    for rank in range(4):
        x = 2.6 * rank
        ax.text(x + 1.2, 0.8, f"rank {rank}", ha="center")
        rectangle(ax, x, 0.1, (2.4, 0.5), "", RANKS[rank])
        if rank == 2:
            rectangle(ax, x + 1.5, 0.1, (0.2, 0.5), "", "white")  # the target
        for row, text in enumerate((f"max {rank}", f"sum {rank}", "z - m" if rank == 2 else "0")):
            frame(ax, x + 0.5, -0.9 - row, (1.4, 0.5), text, RANKS[rank])
    for y, height, text in ((-0.9, 0.5, "m"), (-2.9, 1.5, "both sums,\nin one all-reduce")):
        rectangle(ax, 10.6, y, (0.35, height), "", SUM)
        ax.text(11.1, y + height / 2, text, va="center")
    ax.text(4, -3.5, "loss = log(sum) - (z - m of the target)", ha="center")
    return figure


@styled
def block_and_shapes() -> Figure:
    """Return a drawing of a block with its f, f*, norms and residuals, and the shapes between them."""
    figure, axes = plt.subplots(2, 1, figsize=(WIDTH, 4.2))
    halves = {
        "attention": ("q, k, v\nby columns", "[b, s, h/N]", "attention of\na/N heads", "[b, s, h/N]", "o\nby rows"),
        "MLP": ("gate, up\nby columns", "2 x [b, s, ffn/N]", "silu(gate) x up", "[b, s, ffn/N]", "down\nby rows"),
    }
    for ax, (name, (first, inner, middle, later, last)) in zip(axes, halves.items(), strict=True):
        drawing(ax, (-0.5, 16.1), (-1.25, 2.3))
        ax.add_patch(Rectangle((3.15, -0.75), 9.2, 2.1, color="#EFEFEF"))  # each rank does its own part of it
        ax.text(7.75, -1, f"{name}: an N-th on each rank", ha="center", va="center")
        parts = {0.9: ("norm", 1.2, LIGHT), 2.85: ("f", 0.6, SUM), 4.0: (first, 1.9, RANKS[0])}
        parts |= {6.8: (middle, 2.3, RANKS[0]), 9.95: (last, 1.5, RANKS[0]), 12.05: ("f*", 0.6, SUM)}
        parts |= {13.5: ("+", 0.5, LIGHT)}
        for x, (text, width, color) in parts.items():
            rectangle(ax, x, 0, (width, 0.9), text, color, fontsize=8)
        starts = [-0.3, *(x + width for x, (_, width, _) in parts.items())]
        for start, end in zip(starts, [*parts, 15.0], strict=True):
            arrow(ax, (start, 0.45), (end, 0.45), GRAY)
        ax.plot([0.1, 0.1, 13.75, 13.75], [0.45, 1.75, 1.75, 0.95], color=GRAY, linewidth=1)  # the residual
        ax.text(7.75, 1.8, "residual: [b, s, h], the same on all ranks", ha="center", va="bottom")
        shapes = (0.2, "[b, s, h]"), (6.0, inner), (9.5, later), (11.75, "[b, s, h],\na summand"), (14.9, "[b, s, h]")
        for x, text in shapes:
            ax.text(x, -0.1, text, ha="center", va="top", fontsize=8)
    for x, text in ((3.15, "backward: all-reduce"), (12.35, "forward: all-reduce")):
        axes[0].text(x, 1.0, text, ha="center", va="bottom", color=readable(SUM), fontsize=8)
    return figure


def two_lanes(cases: Mapping[str, tuple[Sequence[Bar], Sequence[Bar]]], height: float) -> Figure:
    """Return a panel per case (compute bars, network bars), one above the other over the same time."""
    figure, axes = plt.subplots(len(cases), 1, figsize=(WIDTH, height), sharex=True)
    for ax, (title, (compute, network)) in zip(axes, cases.items(), strict=True):
        ax.set(xlim=(-GAP, 8.2), ylim=(0, 2), yticks=(0.5, 1.5), yticklabels=("network", "compute"), xticks=[])
        ax.set_title(title, loc="left")
        lane(ax, 1.1, 0.8, compute)
        lane(ax, 0.1, 0.8, network)
        ax.spines["bottom"].set_visible(False)
    return figure


@styled
def backward_of_column_layer() -> Figure:
    """Return a drawing of backward over time, with f after the layer and with ColumnMatmul."""
    color = PHASES["backward"]
    matmuls: list[Bar] = [(color, "dX", 0, 1.5), (color, "dW", 1.5, 1.5)]
    cases: dict[str, tuple[list[Bar], list[Bar]]] = {
        "f, then linear layers": ([*matmuls, (color, "next dX", 5.5, 1.5)], [(SUM, "sum of dX", 3, 2.5)]),
        "ColumnMatmul": ([*matmuls, (color, "next dX", 4, 1.5)], [(SUM, "sum of dX", 1.5, 2.5)]),
    }
    return two_lanes(cases, 2.6)


@styled
def matmul_in_chunks() -> Figure:
    """Return a drawing of a matmul and its sum over time, in one part and in four chunks."""
    cases = {}
    for chunks, title in ((1, "one chunk"), (4, "four chunks")):
        length = 4 / chunks
        names = [""] if chunks == 1 else [f" {i}" for i in range(chunks)]
        compute = [(PHASES["forward"], f"matmul{name}", length * i, length) for i, name in enumerate(names)]
        network = [(SUM, f"sum{name}", length * (i + 1), length) for i, name in enumerate(names)]
        cases[title] = (compute, network)
    return two_lanes(cases, 2.6)
