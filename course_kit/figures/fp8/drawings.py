"""Drawings: blocks of operands, what a linear layer has in 8 bits, and ranks of a layout."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from course_kit.figures.style import GRAY, LIGHT, MEMORY, PHASES, RANKS, WIDTH, ink_on, styled

OPERANDS = [  # name, rows, columns, tall and wide a block is, what it is
    ("x", "tokens", "in", (1, 4), "activations"),
    ("w", "out", "in", (4, 4), "parameters"),
    ("dy", "tokens", "out", (1, 4), "gradients"),
    ("wᵀ", "in", "out", (4, 4), "parameters"),
    ("dyᵀ", "out", "tokens", (1, 4), "gradients"),
    ("xᵀ", "in", "tokens", (1, 4), "activations"),
]
MATMULS = ("Fprop", "Dgrad", "Wgrad")


@styled
def operand_blocks() -> Figure:
    """Return the blocks of the two operands of each of the three matmuls, in DeepSeek-V3's way."""
    figure, axes = plt.subplots(1, 6, figsize=(WIDTH, 2.1))
    for number, (ax, (name, rows, columns, (tall, wide), kind)) in enumerate(zip(axes, OPERANDS, strict=True)):
        for i in range(8 // tall):
            for j in range(8 // wide):
                style = {"facecolor": MEMORY[kind], "edgecolor": "white", "linewidth": 1.5}
                ax.add_patch(plt.Rectangle((j * wide, i * tall), wide, tall, **style))
        title = f"{MATMULS[number // 2]}: {name}" if number % 2 == 0 else f"by {name}"
        ax.set(xlim=(0, 8), ylim=(8, 0), xticks=[], yticks=[], title=title, xlabel=columns, ylabel=rows)
        ax.set_aspect("equal")
        ax.spines[:].set_visible(False)
    return figure


FP8, WIDE, MATMUL = PHASES["communication"], LIGHT, PHASES["forward"]
NODES = {  # name, x, y, color
    "x": ("x, BF16", 0, 3, WIDE),
    "x8": ("x in FP8,\n1 x 128", 2, 3, FP8),
    "fprop": ("Fprop", 4, 3, MATMUL),
    "y": ("y, BF16", 6, 3, WIDE),
    "w8": ("w in FP8,\n128 x 128", 4, 2, FP8),
    "dgrad": ("Dgrad", 4, 1, PHASES["backward"]),
    "dx": ("dx, BF16", 6, 1, WIDE),
    "dy": ("dy, BF16", 0, 1, WIDE),
    "dy8": ("dy in FP8,\n1 x 128", 2, 1, FP8),
    "both": ("dyᵀ and xᵀ in\nFP8, 1 x 128", 2, 0, FP8),
    "wgrad": ("Wgrad", 4, 0, PHASES["weight gradient"]),
    "sum": ("sum of dw,\nfloat32", 6, 0, WIDE),
    "adam": ("Adam: m, v\nin BF16", 8, 0, WIDE),
    "master": ("master w,\nfloat32", 8, 2, WIDE),
}
ARROWS = (
    "x x8, x8 fprop, fprop y, w8 fprop, master w8, w8 dgrad, dy dy8, dy8 dgrad, dgrad dx, dy both, both wgrad, "
    "wgrad sum, sum adam, adam master"
)


@styled
def data_flow() -> Figure:
    """Return what a linear layer has in 8 bits, in BF16 and in float32, in DeepSeek-V3's way, and its matmuls."""
    figure, ax = plt.subplots(figsize=(WIDTH, 4))
    for x, y, text, color in ((x, y, text, color) for text, x, y, color in NODES.values()):
        ax.add_patch(plt.Rectangle((x - 0.72, y - 0.27), 1.44, 0.54, facecolor=color, zorder=2))
        ax.text(x, y, text, ha="center", va="center", color=ink_on(color), zorder=3)
    for pair in ARROWS.split(", "):
        (_, x0, y0, _), (_, x1, y1, _) = (NODES[name] for name in pair.split())
        dx, dy = 0.74 * (x1 > x0) - 0.74 * (x1 < x0), 0.29 * (y1 > y0) - 0.29 * (y1 < y0)
        dx, dy = (dx, 0.0) if y0 == y1 else (0.0, dy) if x0 == x1 else (dx, 0.0)
        arrow = {"arrowstyle": "->", "color": GRAY, "linewidth": 1.3}
        ax.annotate(
            "", (x1 - dx, y1 - (dy if dx == 0 else 0)), (x0 + dx, y0 + (dy if dx == 0 else 0)), arrowprops=arrow
        )
    names = {"8 bits": FP8, "BF16 or float32": WIDE, "forward": MATMUL}
    names |= {"backward": PHASES["backward"], "weight gradient": PHASES["weight gradient"]}
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in names.values()]
    figure.legend(handles, list(names), loc="outside lower center", ncols=5)
    ax.set(xlim=(-0.8, 8.8), ylim=(-0.4, 3.4))
    ax.axis("off")
    return figure


@styled
def ranks_of_a_layout(degrees: Mapping[str, int]) -> Figure:
    """Return the ranks of a 4D layout, a stage per row; degrees: of tp, cp, pp and dp, the innermost first."""
    tp, cp, pp, dp = degrees.values()
    figure, ax = plt.subplots(figsize=(WIDTH, 2.9))
    for rank in range(tp * cp * pp * dp):
        t, c, p, d = rank % tp, rank // tp % cp, rank // (tp * cp) % pp, rank // (tp * cp * pp)
        x, y = d * (tp * cp + 1.6) + c * (tp + 0.2) + t, -p * 1.3
        color = RANKS[c % len(RANKS)]
        hatch = "//" if t % 2 else None
        ax.add_patch(plt.Rectangle((x, y), 0.9, 0.9, facecolor=color, edgecolor="white", hatch=hatch))
        rectangle = {"facecolor": color, "edgecolor": "none", "pad": 1.5}
        ax.text(x + 0.45, y + 0.45, f"{rank}", ha="center", va="center", color=ink_on(color), bbox=rectangle)
        if rank % (tp * cp) == 0:
            ax.text(x - 0.2, y + 0.45, f"stage {p}", ha="right", va="center")
        if p == 0 and c == t == 0:
            ax.text(x + tp * cp / 2, 1.2, f"replica {d} (DP, as FSDP)", ha="center")
    ax.set_title("color: context-parallel shard; hatched: the second tensor-parallel shard", loc="left")
    ax.set(xlim=(-1.2, dp * (tp * cp + 1.6) - 1), ylim=(-(pp - 1) * 1.3 - 0.1, 1.7), aspect="equal")
    ax.axis("off")
    return figure
