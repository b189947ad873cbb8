"""Figures of a walk through FlashAttention's tiles: the state after a tile, and several moments side by side.

    walk_step(steps, number)          a recorded walk (`course_kit.labs.tile_walk.record_walk`) after a tile
    walk_strip(steps, numbers)        its weights after several tiles, side by side

The color of a key is its weight p = exp(z - m) / l by the present m and l of its row. Watch a column that was visited
early: it fades as tiles further right come in, and fades at once if one of them has a higher score. A row's weights
always add up to 1 over the keys seen so far; only after its last tile are they the softmax.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from course_kit.figures.flash_attention.tiles import THIS_TILE, tile_patch, weight_colors
from course_kit.figures.style import GRAY, KINDS, LIGHT, WIDTH, styled
from course_kit.labs.tile_walk import WalkStep, rows_that_rose, skipped_tiles, standard_numbers, walk_state
from course_lib.flash_attention.tiles import tiles

OTHER_TILES, MASKED = KINDS[0], LIGHT


def weight_scale(figure: Figure, axes: Axes | Sequence[Axes]) -> None:
    """Draw the scale of weight_colors to the right of these axes."""
    bar = figure.colorbar(weight_colors(), ax=axes, shrink=0.85, pad=0.02, ticks=(0, 0.05, 0.2, 0.5, 1))
    bar.set_label("p = exp(z − m) / l, for now")
    bar.ax.set_yticklabels(["0", "0.05", "0.2", "0.5", "1"])


def draw_weights(axes: Axes, steps: Sequence[WalkStep], number: int) -> None:
    """Draw the score matrix after `number` tiles: the weights of the visited tiles, and a frame around the last tile.

    Raises ValueError as walk_state does.
    """
    p, shape = walk_state(steps, number).p, steps[0].shape
    seen = ~p.isnan()
    picture = weight_colors().to_rgba(p.nan_to_num(0.0).numpy())
    picture[~seen.numpy()] = 1.0
    if shape.causal:
        picture[(seen & torch.ones_like(seen).triu(1)).numpy(), :3] = to_rgb(MASKED)
    axes.imshow(picture, extent=(0, shape.s_k, shape.s_q, 0), interpolation="nearest")
    cut = (shape.s_q, shape.s_k, shape.block_q, shape.block_k, shape.causal)
    for tile in skipped_tiles(*cut):
        axes.add_patch(tile_patch(tile, fill=False, hatch="////", edgecolor=LIGHT, linewidth=0))
    for tile in tiles(*cut):
        axes.add_patch(tile_patch(tile, fill=False, edgecolor=GRAY, linewidth=0.6))
    for color, width in (("white", 4.5), (THIS_TILE, 2.5)):
        frame = tile_patch(steps[number - 1].tile, fill=False, edgecolor=color, linewidth=width, zorder=3)
        frame.set_clip_on(False)
        axes.add_patch(frame)
    axes.set(xlim=(0, shape.s_k), ylim=(shape.s_q, 0), aspect="equal")
    axes.set_xlabel("key")
    axes.tick_params(labelsize=9)


def walk_legend(figure: Figure, with_bars: bool) -> None:
    """Draw the legend of a walk."""
    marks: list[Artist] = [
        Patch(facecolor="none", edgecolor=THIS_TILE, linewidth=2.5, label="this tile"),
        Patch(facecolor="none", edgecolor=GRAY, linewidth=0.6, label="not yet visited"),
        Patch(facecolor=MASKED, label="masked pairs of a tile"),
        Patch(facecolor="none", edgecolor=LIGHT, hatch="////", linewidth=0, label="skipped"),
    ]
    if with_bars:
        marks += [
            Patch(facecolor=THIS_TILE, label="rows of this tile"),
            Patch(facecolor=OTHER_TILES, label="finished rows"),
            Line2D([], [], color="black", marker="|", linestyle="", markersize=9, label="before this tile"),
        ]
    figure.legend(handles=marks, loc="outside lower left", ncols=4)


def draw_row_values(axes: Axes, steps: Sequence[WalkStep], number: int, name: str, title: str) -> None:
    """Draw the rows' highest or total (`name`) after `number` tiles as bars, with the previous values of the tile's
    rows. The axis covers the entire walk, so that it does not change during the walk.
    """
    now = getattr(walk_state(steps, number), name)
    tile = steps[number - 1].tile
    rows = torch.arange(tile.row, tile.row_end)
    colors = [THIS_TILE if tile.row <= row < tile.row_end else OTHER_TILES for row in range(len(now))]
    axes.barh(torch.arange(len(now)) + 0.5, now.nan_to_num(0.0), height=0.7, color=colors)
    if tile.column:
        before = getattr(steps[number - 2], name)
        axes.plot(before, rows + 0.5, "|", color="black", markersize=120 / max(len(now), 12), markeredgewidth=1.5)
    of_all = torch.cat([getattr(step, name) for step in steps]).double()
    low, high = min(0.0, of_all.min().item()), max(0.0, of_all.max().item())
    axes.set_xlim(low - 0.05 * (high - low) * (low < 0), high + 0.05 * (high - low))
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_title(title)


def draw_errors(axes: Axes, steps: Sequence[WalkStep], number: int) -> None:
    """Draw each row's error if one divided now; the axis covers the entire walk, with an error of 0 at its left end."""
    tile, errors = steps[number - 1].tile, steps[number - 1].errors
    of_all = torch.cat([step.errors for step in steps]).nan_to_num(0.0)
    smallest = min([1e-3, *of_all[of_all > 0].tolist()])
    first = math.floor(math.log10(smallest)) - 1
    for row, error in enumerate(errors.tolist()):
        if not math.isnan(error):
            color = THIS_TILE if tile.row <= row < tile.row_end else OTHER_TILES
            axes.plot(max(error, 10.0**first), row + 0.5, "o", color=color, markersize=4, clip_on=False)
    decades = range(0, first + 3, -5)
    axes.set(xscale="log", xlim=(10.0**first, max(2.0, 2 * of_all.max().item())))
    axes.set_xticks([10.0**first, *(10.0**x for x in decades)], ["0", *(f"1e{x}" if x else "1" for x in decades)])
    axes.minorticks_off()
    axes.grid(axis="x", alpha=0.3)
    axes.set_title("error\nof o / l")


def draw_numbers(axes: Axes, steps: Sequence[WalkStep], number: int) -> None:
    """Write the step's tile, the elements on chip and the elements moved, in three columns."""
    step = steps[number - 1]
    chip, tile, moved = step.on_chip, step.tile, step.read + step.written
    columns = [
        [
            (f"tile {number} of {len(steps)}, {tile.kind}", ""),
            (f"queries {tile.row}–{tile.row_end - 1}, keys {tile.column}–{tile.column_end - 1}", ""),
            ("maximum risen in rows", f"{rows_that_rose(steps, number)} of {tile.row_end - tile.row}"),
            ("largest error", f"{step.largest_error:.1e}"),
        ],
        [
            ("elements on chip", f"{sum(chip.values()):,}"),
            ("q, k, v tiles", f"{chip['q tile'] + chip['k tile'] + chip['v tile']:,}"),
            ("tile of scores", f"{chip['scores tile']:,}"),
            ("o, m and l", f"{chip['out'] + chip['highest'] + chip['total']:,}"),
        ],
        [
            ("elements moved so far", f"{moved:,}"),
            ("read and written", f"{step.read:,} + {step.written:,}"),
            ("at the end", f"{steps[-1].read + steps[-1].written:,}"),
            ("standard attention", f"{standard_numbers(step.shape):,}"),
        ],
    ]
    for column, lines in enumerate(columns):
        for line, (label, value) in enumerate(lines):
            weight, height = "normal" if line else "bold", 1 - line / 4
            left = 0.35 * column
            axes.text(left, height, label, va="top", weight=weight, transform=axes.transAxes)
            axes.text(left + 0.3, height, value, va="top", ha="right", weight=weight, transform=axes.transAxes)
    axes.axis("off")


@styled
def walk_step(steps: Sequence[WalkStep], number: int) -> Figure:
    """Show a walk after `number` tiles, 1 to len(steps): weights, each row's m, l and error, and counts.

    All panels share the rows. Raises ValueError as walk_state does.
    """
    walk_state(steps, number)
    shape = steps[0].shape
    figure = plt.figure(figsize=(WIDTH, 5.2))
    layout: list[Any] = [["matrix", "highest", "total", "error"], ["numbers"] * 4]
    panels = figure.subplot_mosaic(layout, width_ratios=(7, 1.1, 1.1, 1.7), height_ratios=(3.6, 0.9))
    draw_weights(panels["matrix"], steps, number)
    panels["matrix"].set_aspect("auto")  # otherwise it would be lower than the panels beside it
    panels["matrix"].set_ylabel("query")
    weight_scale(figure, panels["matrix"])
    draw_row_values(panels["highest"], steps, number, "highest", "m\nhighest\nscore")
    draw_row_values(panels["total"], steps, number, "total", "l\nΣ exp(z − m)")
    draw_errors(panels["error"], steps, number)
    for name in ("highest", "total", "error"):
        panels[name].set_ylim(shape.s_q, 0)
        panels[name].set_yticklabels([])
    draw_numbers(panels["numbers"], steps, number)
    walk_legend(figure, with_bars=True)
    return figure


@styled
def walk_strip(steps: Sequence[WalkStep], numbers: Sequence[int]) -> Figure:
    """Show the weights after each of these numbers of tiles, side by side.

    Raises ValueError as walk_state does, and if there are no numbers.
    """
    if not numbers:
        raise ValueError("name at least one step of the walk")
    columns = len(numbers) if len(numbers) < 4 else 2
    rows = math.ceil(len(numbers) / columns)
    figure = plt.figure(figsize=(WIDTH, 0.8 + 2.7 * rows))
    panels = [figure.add_subplot(rows, columns, position) for position in range(1, len(numbers) + 1)]
    for axes, number in zip(panels, numbers, strict=True):
        draw_weights(axes, steps, number)
        axes.set(title=f"after tile {number} of {len(steps)}", ylabel="query")
    weight_scale(figure, panels)
    walk_legend(figure, with_bars=False)
    return figure
