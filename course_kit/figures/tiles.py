"""Figures of FlashAttention's tiles: the kinds of tile, a row of scores by hand, and a walk through them by slider.

    draw_tiles(axes, s_q, s_k, block_q, block_k, causal)    full, partial and skipped tiles, to scale
    draw_online_row(scores, block)                      m, l and the weights after each tile of one row
    draw_walk(steps, number), walk_slider(steps)        a recorded walk (`record_walk`) after a tile, and by slider
    draw_walk_strip(steps, numbers)                     its weights after several tiles, side by side

The color of a key is its weight p = exp(z - m) / l by the present m and l of its row. Watch a column that was visited
early: it fades as tiles further right come in, and fades at once if one of them has a higher score. A row's weights
always add up to 1 over the keys seen so far; only after its last tile are they the softmax.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from matplotlib.artist import Artist

from course_kit.figures.planner import png
from course_kit.figures.tile_walk import WalkStep, rows_that_rose, skipped_tiles, standard_numbers, walk_state
from course_lib.flash_attention.reference import online_step
from course_lib.flash_attention.tiles import Tile, tiles

THIS_TILE, OTHER_TILES = "#D55E00", "#4C72B0"
KIND_COLORS = {"full": "#4C72B0", "partial": "#E69F00", "skipped": "white"}


def tile_patch(tile: Tile, **style):
    """Return a rectangle around a tile; cell (query i, key j) is drawn from j to j + 1 and from i to i + 1."""
    from matplotlib.patches import Rectangle

    return Rectangle((tile.column, tile.row), tile.column_end - tile.column, tile.row_end - tile.row, **style)


def weight_colors():
    """Return the map from weights to colors. Most weights are below 0.2: they get nearly half of the colors."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import PowerNorm

    return ScalarMappable(PowerNorm(0.5, 0, 1), "viridis")


def weight_scale(figure, axes) -> None:
    """Draw the scale of weight_colors to the right of these axes."""
    bar = figure.colorbar(weight_colors(), ax=axes, shrink=0.85, pad=0.02, ticks=(0, 0.05, 0.2, 0.5, 1))
    bar.set_label("p = exp(z − m) / l, for now", fontsize=9.5)
    bar.ax.set_yticklabels(["0", "0.05", "0.2", "0.5", "1"], fontsize=9)


def draw_weights(axes, steps: Sequence[WalkStep], number: int) -> None:
    """Draw the score matrix after `number` tiles: the weights of the visited tiles, and a frame around the last tile.

    Raises ValueError as walk_state does.
    """
    p, shape = walk_state(steps, number).p, steps[0].shape
    seen = ~p.isnan()
    picture = weight_colors().to_rgba(p.nan_to_num(0.0).numpy())
    picture[~seen.numpy()] = 1.0
    if shape.causal:
        picture[(seen & torch.ones_like(seen).triu(1)).numpy(), :3] = 0.82
    axes.imshow(picture, extent=(0, shape.s_k, shape.s_q, 0), interpolation="nearest")
    cut = (shape.s_q, shape.s_k, shape.block_q, shape.block_k, shape.causal)
    for tile in skipped_tiles(*cut):
        axes.add_patch(tile_patch(tile, fill=False, hatch="////", edgecolor="0.7", linewidth=0))
    for tile in tiles(*cut):
        axes.add_patch(tile_patch(tile, fill=False, edgecolor="0.55", linewidth=0.6))
    for color, width in (("white", 4.5), (THIS_TILE, 2.5)):
        frame = tile_patch(steps[number - 1].tile, fill=False, edgecolor=color, linewidth=width, zorder=3)
        frame.set_clip_on(False)
        axes.add_patch(frame)
    axes.set(xlim=(0, shape.s_k), ylim=(shape.s_q, 0), aspect="equal")
    axes.set_xlabel("key", fontsize=9.5)
    axes.tick_params(labelsize=9)


def walk_legend(figure, with_bars: bool) -> None:
    """Draw the legend of a walk."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    marks: list[Artist] = [
        Patch(facecolor="none", edgecolor=THIS_TILE, linewidth=2.5, label="this tile"),
        Patch(facecolor="none", edgecolor="0.55", linewidth=0.6, label="not yet visited"),
        Patch(facecolor="0.82", label="masked pairs of a tile"),
        Patch(facecolor="none", edgecolor="0.7", hatch="////", linewidth=0, label="skipped"),
    ]
    if with_bars:
        marks += [
            Patch(facecolor=THIS_TILE, label="rows of this tile"),
            Patch(facecolor=OTHER_TILES, label="finished rows"),
            Line2D([], [], color="black", marker="|", linestyle="", markersize=9, label="before this tile"),
        ]
    figure.legend(handles=marks, loc="outside lower left", ncols=len(marks), frameon=False, fontsize=9)


def draw_row_values(axes, steps: Sequence[WalkStep], number: int, name: str, title: str) -> None:
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
    axes.axvline(0, color="0.3", linewidth=0.8)
    axes.set_title(title, fontsize=9.5)


def draw_errors(axes, steps: Sequence[WalkStep], number: int) -> None:
    """Draw each row's error if one divided now; the axis covers the entire walk, with an error of 0 at its left end."""
    tile, errors = steps[number - 1].tile, steps[number - 1].errors
    of_all = torch.cat([step.errors for step in steps]).nan_to_num(0.0)
    smallest = min([1e-3, *of_all[of_all > 0].tolist()])
    first = math.floor(math.log10(smallest)) - 1
    for row, error in enumerate(errors.tolist()):
        if not math.isnan(error):
            color = THIS_TILE if tile.row <= row < tile.row_end else OTHER_TILES
            axes.plot(max(error, 10.0**first), row + 0.5, "o", color=color, markersize=4, clip_on=False)
    decades = range(0, first + 2, -3)
    axes.set(xscale="log", xlim=(10.0**first, max(2.0, 2 * of_all.max().item())))
    axes.set_xticks([10.0**first, *(10.0**x for x in decades)], ["0", *(f"1e{x}" if x else "1" for x in decades)])
    axes.minorticks_off()
    axes.grid(axis="x", alpha=0.3)
    axes.set_title("error\nof o / l", fontsize=9.5)


def draw_numbers(axes, steps: Sequence[WalkStep], number: int) -> None:
    """Draw a table of the step: its tile, the elements on chip and the elements moved."""
    step = steps[number - 1]
    chip, tile = step.on_chip, step.tile
    lines = [
        (f"tile {number} of {len(steps)}, {tile.kind}", ""),
        (f"queries {tile.row}–{tile.row_end - 1}, keys {tile.column}–{tile.column_end - 1}", ""),
        ("maximum risen in rows", f"{rows_that_rose(steps, number)} of {tile.row_end - tile.row}"),
        ("largest error", f"{step.largest_error:.1e}"),
        ("elements on chip", f"{sum(chip.values()):,}"),
        ("   q, k, v tiles", f"{chip['q tile'] + chip['k tile'] + chip['v tile']:,}"),
        ("   tile of scores", f"{chip['scores tile']:,}"),
        ("   o, m and l", f"{chip['out'] + chip['highest'] + chip['total']:,}"),
        ("elements moved so far", f"{step.read + step.written:,}"),
        ("   read", f"{step.read:,}"),
        ("   written", f"{step.written:,}"),
        ("   at the end", f"{steps[-1].read + steps[-1].written:,}"),
        ("   standard attention", f"{standard_numbers(step.shape):,}"),
    ]
    for line, (label, value) in enumerate(lines):
        bold = "bold" if line in (0, 4, 8) else "normal"
        axes.text(0, 1 - line / 13, label, fontsize=9.5, va="top", weight=bold, transform=axes.transAxes)
        axes.text(1, 1 - line / 13, value, fontsize=9.5, va="top", ha="right", weight=bold, transform=axes.transAxes)
    axes.axis("off")


def draw_tiles(axes, s_q: int, s_k: int, block_q: int, block_k: int, causal: bool) -> None:
    """Draw the kinds of tiles of s_q queries and s_k keys, ragged ends to scale. Raises ValueError as check_blocks
    does.
    """
    from matplotlib.patches import Patch

    cut = (s_q, s_k, block_q, block_k, causal)
    drawn = [*tiles(*cut), *skipped_tiles(*cut)]
    for tile in drawn:
        skipped = tile.kind == "skipped"
        edge, hatch = ("0.7", "////") if skipped else ("white", None)
        axes.add_patch(tile_patch(tile, facecolor=KIND_COLORS[tile.kind], edgecolor=edge, hatch=hatch))
    if causal:
        axes.plot([0, min(s_q, s_k)], [0, min(s_q, s_k)], color="black", linewidth=1)
    marks = []
    for kind, color in KIND_COLORS.items():
        count = sum(tile.kind == kind for tile in drawn)
        style: dict[str, Any] = {"hatch": "////", "edgecolor": "0.7"} if kind == "skipped" else {}
        marks.append(Patch(facecolor=color, label=f"{count} {kind}", **style))
    axes.legend(handles=marks, loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8.5)
    axes.set(xlim=(0, s_k), ylim=(s_q, 0), aspect="equal", xlabel="key", ylabel="query")
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)


def draw_online_row(scores: Sequence[float], block: int):
    """Return a figure of one row of scores: m, l and the weights exp(z - m) / l after each tile of `block` scores.

    Raises ValueError if there are no scores or the block has none.
    """
    from matplotlib.figure import Figure

    if not len(scores) or block < 1:
        raise ValueError(f"{len(scores)} scores in blocks of {block}: expected one or more of each")
    z = torch.tensor(scores, dtype=torch.float64)
    ends = list(range(block, len(z), block)) + [len(z)]
    figure = Figure(figsize=(0.9 * len(z) + 4, 0.55 * len(ends) + 0.9), dpi=72, layout="constrained")
    axes = figure.subplots()
    headings = [f"{'m':^10}", f"{'l':^10}", "l shrinks by"]
    for column, word in enumerate(headings):
        axes.text(len(z) + 0.7 + 1.2 * column, -0.15, word, ha="center", va="bottom", fontsize=9.5, weight="bold")
    for key, score in enumerate(scores):
        axes.text(key + 0.5, -0.15, f"z = {score:g}", ha="center", va="bottom", fontsize=9.5)
    highest, total = torch.tensor(-math.inf, dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64)
    for row, end in enumerate(ends):
        start, before = row * block, highest
        highest, total, _ = online_step(highest[None], total[None], z.new_zeros(1, 1), z[None, start:end],
                                        z.new_zeros(end - start, 1))  # fmt: skip
        highest, total = highest[0], total[0]
        weights = ((z[:end] - highest).exp() / total).tolist()
        for key, color in enumerate(weight_colors().to_rgba(weights)):
            axes.add_patch(tile_patch(Tile(row, row + 1, key, key + 1, ""), facecolor=color, edgecolor="white"))
            dark = sum(color[:3]) < 1.5
            ink = "white" if dark else "black"
            axes.text(key + 0.5, row + 0.5, f"{weights[key]:.2f}", ha="center", va="center", fontsize=9.5, color=ink)
        frame = tile_patch(Tile(row, row + 1, start, end, ""), fill=False, edgecolor=THIS_TILE, linewidth=2.5, zorder=3)
        frame.set_clip_on(False)  # the last one reaches the edge of the axes
        axes.add_patch(frame)
        shrink = "" if row == 0 else f"{(before - highest).exp().item():.3f}"
        for column, word in enumerate((f"{highest.item():g}", f"{total.item():.3f}", shrink)):
            axes.text(len(z) + 0.7 + 1.2 * column, row + 0.5, word, ha="center", va="center", fontsize=9.5)
    axes.set(xlim=(0, len(z) + 4), ylim=(len(ends), -0.6))
    axes.axis("off")
    return figure


def draw_walk(steps: Sequence[WalkStep], number: int):
    """Return a figure of a walk after `number` tiles, 1 to len(steps): weights, each row's m, l and error, and counts.

    All panels share the rows. Raises ValueError as walk_state does.
    """
    from matplotlib.figure import Figure

    walk_state(steps, number)
    shape = steps[0].shape
    figure = Figure(figsize=(11.5, 4.2), dpi=100, layout="constrained")
    matrix, highest, total, error, numbers = figure.subplots(1, 5, width_ratios=(4.2, 1.1, 1.1, 1.4, 2.5))
    draw_weights(matrix, steps, number)
    if shape.s_k > shape.s_q:
        matrix.set_aspect("auto")  # otherwise it would be lower than the panels beside it, which share its rows
    matrix.set_ylabel("query", fontsize=9.5)
    weight_scale(figure, matrix)
    draw_row_values(highest, steps, number, "highest", "m\nhighest score")
    draw_row_values(total, steps, number, "total", "l\nΣ exp(z − m)")
    draw_errors(error, steps, number)
    for axes in (highest, total, error):
        axes.set_ylim(shape.s_q, 0)
        axes.set_yticklabels([])
        axes.tick_params(labelsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    draw_numbers(numbers, steps, number)
    walk_legend(figure, with_bars=True)
    return figure


def draw_walk_strip(steps: Sequence[WalkStep], numbers: Sequence[int]):
    """Return a figure with the weights after each of these numbers of tiles, side by side. Raises ValueError as
    walk_state does, and if there are no numbers.
    """
    from matplotlib.figure import Figure

    if not numbers:
        raise ValueError("name at least one step of the walk")
    figure = Figure(figsize=(1.2 + 2.6 * len(numbers), 3.3), dpi=100, layout="constrained")
    row = figure.subplots(1, len(numbers), squeeze=False)[0]
    for axes, number in zip(row, numbers, strict=True):
        draw_weights(axes, steps, number)
        axes.set_title(f"after tile {number} of {len(steps)}", fontsize=9)
    row[0].set_ylabel("query", fontsize=9.5)
    weight_scale(figure, list(row))
    walk_legend(figure, with_bars=False)
    return figure


def walk_slider(steps: Sequence[WalkStep]):
    """Return a widget: `draw_walk` of the step that a slider selects and a play button advances. Raises ValueError if
    there is no step.
    """
    import ipywidgets as w

    if not steps:
        raise ValueError("a walk needs at least one step")
    slider = w.IntSlider(value=1, min=1, max=len(steps), description="tile", layout=w.Layout(width="420px"))
    play = w.Play(value=1, min=1, max=len(steps), interval=1000, description="walk")
    picture = w.Image(format="png", layout=w.Layout(max_width="100%"))

    def draw(_=None):
        picture.value = png(draw_walk(steps, slider.value))

    w.jslink((play, "value"), (slider, "value"))
    slider.observe(draw, "value")
    draw()
    return w.VBox([w.HBox([play, slider]), picture])
