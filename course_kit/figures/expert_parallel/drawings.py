"""A mixture's layer, its sorted rows, the way of the tokens between ranks, and who holds which expert."""

from __future__ import annotations

from collections.abc import Callable

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from course_kit.figures.rectangles import rectangle
from course_kit.figures.style import GRAY, KINDS, MEMORY, RANKS, WIDTH, styled

EXPERTS = RANKS[4:8]  # of four experts, which are no ranks
DENSE = KINDS[4]


def draw_rectangle(ax: Axes, x: float, y: float, width: float, height: float, text: str, color: str) -> None:
    """Draw a rectangle from its lower left corner, with a text in it."""
    rectangle(ax, x, y, (width, height), text, color, fontsize=8)


@styled
def layer(probabilities: tuple[float, ...] = (0.09, 0.56, 0.05, 0.30)) -> Figure:
    """Return one token's way through the router and the two experts with the largest probabilities."""
    figure, ax = plt.subplots(figsize=(WIDTH, 3.1))
    draw_rectangle(ax, 0, 1.1, 1.2, 0.8, "norm", DENSE)
    draw_rectangle(ax, 1.8, 1.1, 1.2, 0.8, "router\n[E, h]", MEMORY["parameters"])
    selected = sorted(range(4), key=probabilities.__getitem__)[-2:]
    for expert, probability in enumerate(probabilities):
        used, y = expert in selected, 2.7 - 0.9 * expert
        draw_rectangle(ax, 4.6, y, 1.5, 0.6, f"expert {expert}", EXPERTS[expert] if used else "#F2F2F2")
        arrow = {"arrowstyle": "->", "color": "black" if used else GRAY, "linewidth": 1.5 if used else 0.8}
        ax.annotate("", (4.55, y + 0.3), (3.05, 1.5), arrowprops=arrow)
        position = 4.45, y + (0.4 if expert < 2 else 0.1)
        ax.text(*position, f"{probability:.2f}", ha="right", va="bottom", color="black" if used else GRAY)
        if used:
            ax.annotate("", (7.35, 1.5), (6.15, y + 0.3), arrowprops={"arrowstyle": "->", "linewidth": 1.5})
            gate = probability / sum(probabilities[each] for each in selected)
            ax.text(6.75, y + 0.3, f"× {gate:.2f}", va="center")
    ax.annotate("", (1.75, 1.5), (1.25, 1.5), arrowprops={"arrowstyle": "->"})
    ax.text(7.5, 1.5, "+", fontsize=16, va="center", ha="center", weight="bold")
    ax.set(xlim=(-0.1, 7.8), ylim=(-0.1, 3.4))
    ax.axis("off")
    return figure


@styled
def sorted_rows(gates: torch.Tensor) -> Figure:
    """Return the gates [t, E] of some tokens, and their rows sorted by expert."""
    tokens, experts = gates.shape
    expert_of, token_of = (each.tolist() for each in gates.detach().t().nonzero().unbind(1))
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, 3.2), width_ratios=(1, 2))
    for e, t in zip(expert_of, token_of, strict=True):
        draw_rectangle(axes[0], e - 0.46, t - 0.44, 0.92, 0.88, f"{float(gates[t, e]):.2f}", EXPERTS[e])
    axes[0].set(xlabel="expert", ylabel="token", title="gates [t, E]", xticks=range(experts), yticks=range(tokens))
    axes[0].set(xlim=(-0.6, experts - 0.4), ylim=(tokens - 0.4, -0.6))
    for row, (e, t) in enumerate(zip(expert_of, token_of, strict=True)):
        draw_rectangle(axes[1], row + 0.05, 1.2, 0.9, 0.8, f"{t}", EXPERTS[e])
    start = 0
    for e in range(experts):
        size = expert_of.count(e)
        if size:
            draw_rectangle(axes[1], start + 0.05, 0.1, size - 0.1, 0.8, f"W{e}", EXPERTS[e])
        start += size
    axes[1].set(xlim=(0, len(expert_of)), ylim=(-0.6, 2.7), title="rows, sorted by expert: the token of each")
    axes[1].axis("off")
    return figure


@styled
def dispatch() -> Figure:
    """Return a drawing of where the tokens of four ranks go, and how they come back."""
    figure, ax = plt.subplots(figsize=(WIDTH, 3.2))
    tokens_to = {0: (1, 0), 1: (2, 3), 2: (0, 1), 3: (3, 2)}  # where each rank's two tokens go
    for rank in range(4):
        draw_rectangle(ax, 2.5 * rank, 3, 2.1, 0.5, f"rank {rank}: its tokens", RANKS[rank])
        draw_rectangle(ax, 2.5 * rank, 1.5, 2.1, 0.5, f"experts {2 * rank}, {2 * rank + 1}", DENSE)
        draw_rectangle(ax, 2.5 * rank, 0, 2.1, 0.5, f"rank {rank}: its tokens", RANKS[rank])
        for position, to in enumerate(tokens_to[rank]):
            arrow, shift = {"arrowstyle": "->", "color": RANKS[rank], "linewidth": 1.8}, 0.25 * rank
            ax.annotate("", (2.5 * to + 0.5 + shift, 2.02), (2.5 * rank + 0.7 + 0.6 * position, 2.98), arrowprops=arrow)
            ax.annotate("", (2.5 * rank + 0.7 + 0.6 * position, 0.52), (2.5 * to + 0.5 + shift, 1.48), arrowprops=arrow)
    ax.text(-0.2, 2.5, "dispatch\nall-to-all", ha="right", va="center")
    ax.text(-0.2, 1.0, "combine\nall-to-all", ha="right", va="center")
    ax.set(xlim=(-1.4, 9.7), ylim=(-0.1, 3.6))
    ax.axis("off")
    return figure


@styled
def gradient_groups() -> Figure:
    """Return dense weights and experts on eight ranks, and the groups that sum gradients and exchange tokens."""
    figure, ax = plt.subplots(figsize=(WIDTH, 3.4))
    for rank in range(8):
        draw_rectangle(ax, rank, 1.2, 0.92, 0.6, "dense", DENSE)
        draw_rectangle(ax, rank, 0.4, 0.92, 0.7, f"experts\n{2 * (rank % 4)}, {2 * (rank % 4) + 1}", EXPERTS[rank % 4])
        ax.text(rank + 0.46, 1.95, f"rank {rank}", ha="center")
    ax.plot([0, 7.9], [2.45] * 2, color=DENSE, linewidth=3)
    ax.text(3.95, 2.55, "dp = 8: dense gradients are summed over all", ha="center")
    for first in (0, 4):
        ax.plot([first, first + 3.9], [0.2] * 2, color="black", linewidth=1.5)
        ax.text(first + 1.95, -0.2, "ep = 4: tokens are exchanged", ha="center")
    for position in range(4):
        y = -0.5 - 0.2 * position
        ax.plot([position + 0.45, position + 4.45], [y, y], "o-", color=EXPERTS[position], linewidth=2, markersize=5)
    ax.text(8.05, -0.8, "dp/ep = 2:\nexpert gradients", va="center")
    ax.set(xlim=(-0.1, 9.5), ylim=(-1.2, 2.9))
    ax.axis("off")
    return figure


@styled
def mesh_layouts() -> Figure:
    """Return the dense weights and experts of eight ranks, in four ways to combine EP with others."""
    ways: list[tuple[str, Callable, Callable]] = [  # title; by rank: the dense shard, the experts and their number
        ("(a) DP + EP: dp 8, ep 4 in it", lambda r: "all", lambda r: (f"{r % 4} of 4", r % 4)),
        (
            "(b) DP + EP + TP: dp 4, ep 4 in it, tp 2",
            lambda r: f"half {r % 2}",
            lambda r: (f"{r // 2} of 4,\nhalf {r % 2}", r // 2),
        ),
        (
            "(c) DP + EP + PP: 2 stages, in each dp 4, ep 4",
            lambda r: f"stage {r // 4}",
            lambda r: (f"{r % 4} of 4,\nstage {r // 4}", r),
        ),
        ("(d) EP + TP: tp 8, and ep over the same ranks", lambda r: f"{r} of 8", lambda r: (f"{r} of 8", r)),
    ]
    figure, axes = plt.subplots(2, 2, figsize=(WIDTH, 5))
    for ax, (title, dense, experts) in zip(axes.flat, ways, strict=True):
        for rank in range(8):
            name, number = experts(rank)
            text = f"rank {rank}\ndense: {dense(rank)}\nexperts:\n{name}"
            draw_rectangle(ax, rank % 4 + 0.03, 1.03 - rank // 4, 0.94, 0.94, text, RANKS[number])
        ax.set(xlim=(0, 4), ylim=(0, 2), title=title)
        ax.axis("off")
    return figure
