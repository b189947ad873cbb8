"""Pictures of a ring of ranks: the keys and values that each rank has, and the part of the causal mask it computes."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb

from course_kit.figures.style import RANK_INK, RANKS
from course_lib.context_parallel import blocks
from course_lib.sequence_parallel.shards import chunks_of


def draw_ring(axes: Sequence[Axes], step: int, n: int = 4, order: str = "contiguous") -> None:
    """Draw a step: each rank's keys and values on the first axes, the computed part of the mask on the second."""
    ring, mask = axes
    for ax in axes:
        ax.clear()
    angles = [math.pi / 2 - 2 * math.pi * rank / n for rank in range(n)]
    for rank, angle in enumerate(angles):
        x, y, owner = math.cos(angle), math.sin(angle), (rank - step) % n
        ring.add_patch(plt.Circle((x, y), 0.33, color=RANKS[rank]))
        ring.text(x, y, f"Q{rank}", color=RANK_INK[rank], ha="center", va="center", weight="bold")
        ring.text(2.05 * x, 1.5 * y, f"K{owner} V{owner}", color=RANKS[owner], ha="center", va="center", weight="bold")
        if step < n - 1:
            after = angles[(rank + 1) % n]
            start, end = ((math.cos(a), math.sin(a)) for a in (angle - 0.4, after + 0.4))
            style = {"arrowstyle": "->", "connectionstyle": "arc3,rad=-0.2", "color": RANKS[owner]}
            ring.annotate("", end, start, arrowprops=style)
    ring.set(xlim=(-2.8, 2.8), ylim=(-1.8, 1.8), title=f"step {step}")
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
    ax.set(xticks=range(0, tokens, 2), yticks=range(0, tokens, 2), xlabel="key", ylabel="query")
    ax.tick_params(labelsize=7)
    ax.set_xticks(np.arange(tokens + 1) - 0.5, minor=True)
    ax.set_yticks(np.arange(tokens + 1) - 0.5, minor=True)
    ax.grid(which="minor", color="#EEEEEE", linewidth=0.5)
    ax.tick_params(which="minor", length=0)


def ring_png(step: int, order: str) -> bytes:
    """Return a step of the ring as a PNG image."""
    fig, axes = plt.subplots(1, 2, figsize=(7, 3.2))
    draw_ring(axes, step, order=order)
    png = io.BytesIO()
    fig.savefig(png, format="png")
    plt.close(fig)
    return png.getvalue()
