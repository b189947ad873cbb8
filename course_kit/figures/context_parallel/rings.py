"""A ring of ranks: the keys and values that each rank has, the part of the causal mask it computes, whose heads."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from course_kit.figures.style import KINDS, RANKS, WIDTH, ink_on, readable, styled
from course_kit.labs.context_parallel import scores_of
from course_lib.context_parallel import blocks
from course_lib.sequence_parallel.shards import chunks_of


def draw_ring(axes: Sequence[Axes], step: int, n: int = 4, order: str = "contiguous") -> None:
    """Draw a step: each rank's keys and values on the first axes, the computed part of the mask on the second."""
    ring, mask = axes
    angles = [math.pi / 2 - 2 * math.pi * rank / n for rank in range(n)]
    for rank, angle in enumerate(angles):
        x, y, owner = math.cos(angle), math.sin(angle), (rank - step) % n
        ring.add_patch(plt.Circle((x, y), 0.33, color=RANKS[rank]))
        ring.text(x, y, f"Q{rank}", color=ink_on(RANKS[rank]), ha="center", va="center", weight="bold")
        ink = readable(RANKS[owner])
        label = f"K{owner}\nV{owner}" if abs(x) > 0.5 else f"K{owner} V{owner}"
        ring.text(1.85 * x, 1.6 * y, label, color=ink, ha="center", va="center", weight="bold")
        if step < n - 1:
            after = angles[(rank + 1) % n]
            start, end = ((math.cos(a), math.sin(a)) for a in (angle - 0.4, after + 0.4))
            style = {"arrowstyle": "->", "connectionstyle": "arc3,rad=-0.2", "color": RANKS[owner]}
            ring.annotate("", end, start, arrowprops=style)
    ring.set(xlim=(-2.3, 2.3), ylim=(-1.9, 1.9), title=f"step {step}")
    ring.set_aspect("equal")
    ring.axis("off")
    draw_mask(mask, n, order, step)


def mask_colors(n: int, order: str, step: int | None, tokens: int) -> np.ndarray:
    """Return the colors of the cells of a causal mask, [tokens, tokens, 3]: white, or the color of the computing
    rank.
    """
    colors = np.ones((tokens, tokens, 3))
    for rank, source in itertools.product(range(n), range(n)):
        local, other = chunks_of(rank, n, order), chunks_of(source, n, order)
        size, when = tokens // n // len(local), (rank - source) % n
        for rows, columns, causal in blocks.in_tokens(blocks.visible(local, other), size):
            for i, j in itertools.product(range(rows.start, rows.stop), range(columns.start, columns.stop)):
                if causal and token(local, i, size) < token(other, j, size) or step is not None and when > step:
                    continue
                color = np.array(to_rgb(RANKS[rank]))
                pale = step is not None and when < step
                colors[token(local, i, size), token(other, j, size)] = 0.3 * color + 0.7 if pale else color
    return colors


def token(chunks: Sequence[int], i: int, size: int) -> int:
    """Return the position in the sequence of element i of these chunks of `size` tokens."""
    return chunks[i // size] * size + i % size


def draw_mask(ax: Axes, n: int, order: str, step: int | None = None, tokens: int = 16) -> None:
    """Draw the causal mask in the colors of the ranks, up to a step of the ring, with earlier steps paler."""
    ax.imshow(mask_colors(n, order, step, tokens))
    ax.set(xticks=range(0, tokens, 4), yticks=range(0, tokens, 4), xlabel="key", ylabel="query")
    ax.tick_params(labelsize=8)
    ax.set_xticks(np.arange(tokens + 1) - 0.5, minor=True)
    ax.set_yticks(np.arange(tokens + 1) - 0.5, minor=True)
    ax.grid(which="minor", color="#EEEEEE", linewidth=0.5)
    ax.tick_params(which="minor", length=0)


def rank_legend(figure: Figure, n: int) -> None:
    """Name the colors of the ranks below a figure."""
    handles = [plt.Rectangle((0, 0), 1, 1, color=RANKS[rank]) for rank in range(n)]
    figure.legend(handles, [f"rank {rank}" for rank in range(n)], loc="outside lower center", ncols=n)


@styled
def ring(n: int = 4) -> Figure:
    """Return the steps of a ring of n ranks: whose K and V each rank has, and which part of the mask is done."""
    figure, axes = plt.subplots(2, n, figsize=(WIDTH, 4.6))
    for step in range(n):
        draw_ring(axes[:, step], step, n)
    for ax in axes[1, 1:]:
        ax.set_ylabel("")
    return figure


@styled
def ring_step(step: int = 0, order: str = "contiguous") -> Figure:
    """Return one step of a ring of four ranks, in an order of the tokens."""
    figure, axes = plt.subplots(1, 2, figsize=(0.9 * WIDTH, 3.4))
    draw_ring(axes, step, order=order)
    return figure


@styled
def masks(n: int = 4, tokens: int = 16) -> Figure:
    """Return which rank computes which scores of a causal mask, contiguous and zig-zag, with their numbers."""
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, 4.4))
    for ax, order in zip(axes, ("contiguous", "zigzag"), strict=True):
        draw_mask(ax, n, order, tokens=tokens)
        counted = [scores_of(rank, n, order, tokens) for rank in range(n)]
        ax.set_title(f"{order}: {', '.join(map(str, counted))} cells")
    rank_legend(figure, n)
    return figure


@styled
def visible_blocks(rank: int = 1, n: int = 2) -> Figure:
    """Return the blocks of the mask that a rank's chunks see of each rank's, zig-zag: full, causal, or not at all."""
    figure, axes = plt.subplots(1, n, figsize=(0.75 * WIDTH, 3))
    rows = chunks_of(rank, n, "zigzag")
    for source, ax in enumerate(axes):
        columns = chunks_of(source, n, "zigzag")
        for i, mine in enumerate(rows):
            for j, theirs in enumerate(columns):
                word = "full" if mine > theirs else "causal" if mine == theirs else "-"
                color = "white" if word == "-" else RANKS[rank]
                ax.add_patch(plt.Rectangle((j, i), 1, 1, facecolor=color, edgecolor="black", linewidth=0.8))
                if word == "causal":
                    ax.add_patch(plt.Polygon([(j, i), (j + 1, i), (j + 1, i + 1)], color="white"))
                    ax.add_patch(plt.Rectangle((j, i), 1, 1, fill=False, edgecolor="black", linewidth=0.8))
                position = (j + 0.36, i + 0.72) if word == "causal" else (j + 0.5, i + 0.5)
                ax.text(*position, word, ha="center", va="center", color=ink_on(color))
        ax.set(xlim=(0, len(columns)), ylim=(len(rows), 0), aspect="equal", title=f"keys of rank {source}")
        ax.set_xticks([0.5, 1.5], [f"chunk {chunk}" for chunk in columns])
        ax.set_yticks([0.5, 1.5], [f"chunk {chunk}" for chunk in rows])
        ax.spines[:].set_visible(False)
        ax.tick_params(length=0)
    axes[0].set_ylabel(f"queries of rank {rank}")
    return figure


@styled
def merged_blocks(z: torch.Tensor, blocks_of_keys: int = 4) -> Figure:
    """Return the softmax of scores [keys] in blocks: each by itself, times its weight, and the weights."""
    parts = z.view(blocks_of_keys, -1)
    weights, size = (parts.logsumexp(1) - z.logsumexp(0)).exp(), parts.shape[1]
    figure, axes = plt.subplots(1, 3, figsize=(WIDTH, 2.6), width_ratios=[4, 4, 2])
    for number in range(blocks_of_keys):
        positions = range(size * number, size * (number + 1))
        axes[0].bar(positions, parts[number].softmax(0), color=KINDS[number])
        axes[1].bar(positions, parts[number].softmax(0) * weights[number], color=KINDS[number])
        axes[2].bar(number, float(weights[number]), color=KINDS[number])
    axes[1].plot(range(len(z)), z.softmax(0), "_", color="black", markersize=9, label=f"softmax over all {len(z)}")
    axes[0].set(title="softmax of each block by itself", xlabel="key", xticks=range(0, len(z), 2))
    axes[1].set(title="times the block's weight", xlabel="key", xticks=range(0, len(z), 2))
    axes[1].legend()
    axes[2].set(title="weights\ne^(lse_block - lse)", xlabel="block", xticks=range(blocks_of_keys))
    return figure


@styled
def all_to_all(n: int = 4) -> Figure:
    """Return whose tokens and heads the ranks have before and after the all-to-all of Ulysses."""
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, 2.6))
    for ax, title in zip(axes, ("before: own tokens, all heads", "after: all tokens, own heads"), strict=True):
        for part, head in itertools.product(range(n), range(n)):
            owner = part if ax is axes[0] else head
            ax.add_patch(plt.Rectangle((2 * part, head), 1.94, 0.94, color=RANKS[owner]))
        ax.set(xlim=(0, 2 * n), ylim=(n, 0), title=title)
        ax.set_xticks([2 * part + 1 for part in range(n)], [f"{4 * part}-{4 * part + 3}" for part in range(n)])
        ax.set_yticks([head + 0.5 for head in range(n)], [f"head {head}" for head in range(n)])
        ax.set_xlabel("tokens")
    rank_legend(figure, n)
    return figure
