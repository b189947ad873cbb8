"""Figures of FlashAttention's tiles: their kinds, those of other masks, and a row of scores by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, ListedColormap, PowerNorm, to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from course_kit.figures.style import GRAY, KINDS, LIGHT, WIDTH, ink_on, styled
from course_kit.labs.tile_walk import skipped_tiles
from course_lib.flash_attention.reference import online_step
from course_lib.flash_attention.tiles import Tile, tiles

THIS_TILE = KINDS[2]
KIND_COLORS = {"full": KINDS[0], "partial": KINDS[1], "skipped": "white"}
Cut = tuple[int, int, int, int, bool]  # queries, keys, queries and keys of a tile, causal


def tile_patch(tile: Tile, **style: Any) -> Rectangle:
    """Return a rectangle around a tile; cell (query i, key j) is drawn from j to j + 1 and from i to i + 1."""
    return Rectangle((tile.column, tile.row), tile.column_end - tile.column, tile.row_end - tile.row, **style)


def weight_colors() -> ScalarMappable:
    """Return the map from weights to colors. Most weights are below 0.2: they get nearly half of the colors."""
    colors = LinearSegmentedColormap.from_list("weights", ["#222222", KINDS[3], KINDS[0], KINDS[1]])
    return ScalarMappable(PowerNorm(0.5, 0, 1), colors)


@styled
def tile_kinds(cuts: Mapping[str, Cut]) -> Figure:
    """Show the full, partial and skipped tiles of each cut, to scale, ragged ends too: a panel per title.

    Raises ValueError as check_blocks does.
    """
    figure, axes = plt.subplots(1, len(cuts), figsize=(WIDTH, 3.6), squeeze=False)
    for ax, (title, cut) in zip(axes[0], cuts.items(), strict=True):
        drawn = [*tiles(*cut), *skipped_tiles(*cut)]
        styles: dict[str, dict[str, Any]] = {
            kind: {"facecolor": color, "edgecolor": LIGHT if kind == "skipped" else "white"}
            for kind, color in KIND_COLORS.items()
        }
        styles["skipped"]["hatch"] = "////"
        for tile in drawn:
            ax.add_patch(tile_patch(tile, **styles[tile.kind]))
        s_q, s_k, _, _, causal = cut
        if causal:
            ax.plot([0, min(s_q, s_k)], [0, min(s_q, s_k)], color="black", linewidth=1)
        counts = {kind: sum(tile.kind == kind for tile in drawn) for kind in KIND_COLORS}
        marks = [Patch(label=f"{count} {kind}", **styles[kind]) for kind, count in counts.items()]
        ax.legend(handles=marks, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, columnspacing=1)
        ax.set(xlim=(0, s_k), ylim=(s_q, 0), aspect="equal", xlabel="key", ylabel="query", title=title)
        ax.spines[:].set_visible(False)
    return figure


@styled
def mask_tiles(shares: Mapping[str, np.ndarray]) -> Figure:
    """Show the full, partial and skipped tiles of several masks: a panel per mask.

    shares: by the mask's name, the share of each tile's pairs that are seen, 0 to 1: [rows of tiles, columns].
    """
    figure, axes = plt.subplots(1, len(shares), figsize=(WIDTH, 2.6), squeeze=False)
    colors = ListedColormap([KIND_COLORS[kind] for kind in ("skipped", "partial", "full")])
    for ax, (name, share) in zip(axes[0], shares.items(), strict=True):
        kinds = (share > 0).astype(int) + (share == 1)
        ax.imshow(kinds, cmap=colors, vmin=0, vmax=2)
        ax.set_xticks(np.arange(-0.5, share.shape[1]), [])
        ax.set_yticks(np.arange(-0.5, share.shape[0]), [])
        ax.grid(color=LIGHT, linewidth=0.6)
        ax.tick_params(length=0)
        full, partial = int((kinds == 2).sum()), int((kinds == 1).sum())
        ax.set(title=f"{name}:\n{full} full, {partial} partial", xlabel="keys")
    axes[0, 0].set_ylabel("queries")
    return figure


@styled
def online_softmax(scores: Sequence[float], block: int) -> Figure:
    """Show one row of scores: m, l and the weights exp(z - m) / l after each tile of `block` scores.

    Raises ValueError if there are no scores or the block has none.
    """
    if not len(scores) or block < 1:
        raise ValueError(f"{len(scores)} scores in blocks of {block}: expected one or more of each")
    z = torch.tensor(scores, dtype=torch.float64)
    ends = [*range(block, len(z), block), len(z)]
    figure, ax = plt.subplots(figsize=(min(WIDTH, 0.55 * len(z) + 3.6), 0.42 * len(ends) + 0.6))

    def write(x: float, y: float, text: str, **style: Any) -> None:
        ax.text(x, y, text, **{"ha": "center", "va": "center", **style})

    positions = [len(z) + 0.9 + 1.3 * position for position in range(3)]
    for position, word in zip(positions, ("m", "l", "l shrinks by"), strict=True):
        write(position, -0.35, word, weight="bold")
    for key, score in enumerate(scores):
        write(key + 0.5, -0.35, f"z = {score:g}")
    highest, total = torch.tensor([-math.inf], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    for row, end in enumerate(ends):
        start, before = row * block, highest
        nothing = z.new_zeros(1, 1), z.new_zeros(end - start, 1)  # values of head size 1
        highest, total, _ = online_step(highest, total, nothing[0], z[None, start:end], nothing[1])
        weights = ((z[:end] - highest).exp() / total).tolist()
        for key, color in enumerate(weight_colors().to_rgba(np.array(weights))):
            ax.add_patch(tile_patch(Tile(row, row + 1, key, key + 1, ""), facecolor=color, edgecolor="white"))
            write(key + 0.5, row + 0.5, f"{weights[key]:.2f}", color=ink_on(to_hex(color)))
        frame = tile_patch(Tile(row, row + 1, start, end, ""), fill=False, edgecolor=THIS_TILE, linewidth=2.5, zorder=3)
        frame.set_clip_on(False)  # the last one reaches the edge of the axes
        ax.add_patch(frame)
        shrink = f"{(before - highest).exp().item():.3f}" if row else ""
        for position, word in zip(positions, (f"{highest.item():g}", f"{total.item():.3f}", shrink), strict=True):
            write(position, row + 0.5, word)
    ax.set(xlim=(0, len(z) + 4.3), ylim=(len(ends), -0.6))
    ax.axis("off")
    return figure


def error_colors() -> LinearSegmentedColormap:
    """Return colors from white (no error) to nearly black."""
    return LinearSegmentedColormap.from_list("errors", ["white", KINDS[1], KINDS[2], "#222222"])


@styled
def error_maps(errors: Sequence[torch.Tensor], rows: Sequence[str], tokens: int) -> Figure:
    """Show the errors of kernels along the tokens, as colors from 1e-8 to 1: a panel per kernel.

    errors: [rows, blocks of `tokens` tokens] each, relative to the largest element; rows: their names.
    """
    figure, axes = plt.subplots(1, len(errors), figsize=(WIDTH, 2.4), sharey=True, squeeze=False)
    for number, (ax, error) in enumerate(zip(axes[0], errors, strict=True), start=1):
        exponents = error.clamp(min=1e-8).log10()
        picture = ax.imshow(exponents, cmap=error_colors(), vmin=-8, vmax=0, aspect="auto")
        ax.set(title=f"kernel {number}", xlabel=f"tokens / {tokens}")
        ax.set_yticks(range(len(rows)), rows)
    bar = figure.colorbar(picture, ax=axes, label="largest error", fraction=0.02, ticks=(-8, -6, -4, -2, 0))
    bar.ax.set_yticklabels(["1e-8", "1e-6", "1e-4", "0.01", "1"])
    bar.outline.set_edgecolor(GRAY)
    return figure
