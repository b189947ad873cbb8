"""course_kit.figures.flash_attention, tiles and walk: figures say what attention is, and the slider redraws. CPU."""

import math
import re
import warnings

import ipywidgets
import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from course_kit.figures.flash_attention import online_softmax, tile_kinds, walk_step, walk_strip
from course_kit.figures.flash_attention.tiles import THIS_TILE, weight_colors
from course_kit.figures.flash_attention.walk import MASKED
from course_kit.labs.tile_walk import record_walk, rows_that_rose, standard_numbers, walk_state
from course_kit.widgets.flash_attention import walk_slider
from course_kit.widgets.redrawn import png
from figure_faults import faults


def walk(s_q: int = 6, s_k: int = 6, block_q: int = 3, block_k: int = 2, causal: bool = True):
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(s, 4, generator=generator) for s in (s_q, s_k, s_k))
    return record_walk(q, k, v, causal, 1.0, block_q, block_k)


def drawn(figure: Figure) -> bytes:
    """Return the figure as a picture, where every warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return png(figure)


def kinds_by_pairs(s_q: int, s_k: int, block_q: int, block_k: int, causal: bool) -> dict[str, int]:
    """Return how many tiles are full, partial, skipped, by looking at each pair of a query and a key."""
    seen = np.ones((s_q, s_k), dtype=bool)
    if causal:
        seen = np.tril(seen)
    counts = {"full": 0, "partial": 0, "skipped": 0}
    for row in range(0, s_q, block_q):
        for column in range(0, s_k, block_k):
            tile = seen[row : row + block_q, column : column + block_k]
            whole = tile.all() and tile.shape[1] == block_k
            counts["full" if whole else "partial" if tile.any() else "skipped"] += 1
    return counts


@pytest.mark.parametrize(
    "cut", [(512, 512, 128, 64, True), (300, 420, 128, 64, False), (13, 29, 4, 3, True), (29, 13, 4, 5, True)]
)
def test_tiles_are_drawn_to_scale_and_counted(cut):
    figure = tile_kinds({"a cut": cut, "the same": cut})
    assert not faults(figure)
    axes = figure.axes[0]
    words = [text.get_text() for text in axes.get_legend().get_texts()]
    assert words == [f"{count} {kind}" for kind, count in kinds_by_pairs(*cut).items()]
    area = np.zeros(cut[:2], dtype=int)
    for patch in axes.patches:
        column, row = patch.get_xy()
        area[row : row + int(patch.get_height()), column : column + int(patch.get_width())] += 1
        assert row + patch.get_height() <= cut[0] and column + patch.get_width() <= cut[1]
    assert (area == 1).all()


@pytest.mark.parametrize("scores, block", [
    ([1.0, 0.5, 3.0, 2.0, 0.0, 1.5, 4.0, 2.5], 2), ([1.0, 0.5, -3.0, 2.0, 0.0], 2), ([-200.0, 300.0], 1), ([2.0], 4),
])  # fmt: skip
def test_numbers_of_a_row_are_the_softmax_of_the_scores_so_far(scores, block):
    figure = online_softmax(scores, block)
    assert not faults(figure)
    drawn(figure)
    (axes,) = figure.axes
    texts = {(round(x, 2), round(y, 2)): t.get_text() for t in axes.texts for x, y in [t.get_position()]}
    assert [texts[key + 0.5, -0.35] for key in range(len(scores))] == [f"z = {z:g}" for z in scores]
    ends = [*range(block, len(scores), block), len(scores)]
    z, before, of_rows = torch.tensor(scores, dtype=torch.float64), None, 0
    for row, end in enumerate(ends):
        weights = z[:end].softmax(-1)
        assert [texts[key + 0.5, row + 0.5] for key in range(end)] == [f"{p:.2f}" for p in weights.tolist()]
        highest, total = z[:end].max().item(), (z[:end] - z[:end].max()).exp().sum().item()
        beside = [texts[round(len(scores) + 0.9 + 1.3 * place, 2), row + 0.5] for place in range(3)]
        assert beside == [f"{highest:g}", f"{total:.3f}", f"{math.exp(before - highest):.3f}" if row else ""]
        before, of_rows = highest, of_rows + end + 3
    assert len(axes.texts) == of_rows + len(scores) + 3
    frames = [patch.get_bbox().bounds for patch in axes.patches if not patch.get_fill()]
    starts = [0, *ends[:-1]]
    assert frames == [(start, row, end - start, 1) for row, (start, end) in enumerate(zip(starts, ends, strict=False))]


@pytest.mark.parametrize("scores, block", [([], 2), ([1.0], 0), ([1.0], -1)])
def test_a_row_without_scores_or_blocks_is_refused(scores, block):
    with pytest.raises(ValueError, match="expected one or more of each"):
        online_softmax(scores, block)


@pytest.mark.parametrize("cut", [(6, 6, 3, 3, True), (5, 7, 3, 4, False)])
def test_every_step_of_a_walk_is_drawn_as_it_was_recorded(cut):
    steps = walk(*cut)
    for number in (1, 2, len(steps)):
        step, figure = steps[number - 1], walk_step(steps, number)
        assert not faults(figure)
        assert drawn(figure).startswith(b"\x89PNG")
        matrix, highest, total, error, numbers, _ = figure.axes
        state = walk_state(steps, number)
        for axes, values in ((highest, state.highest), (total, state.total)):
            widths = [bar.get_width() for bar in axes.patches]
            assert widths == values.nan_to_num(0.0).tolist()
            low, high = axes.get_xlim()
            assert low <= min(widths) and max(widths) <= high
            marks = [line for line in axes.lines if line.get_marker() == "|"]
            assert len(marks) == (step.tile.column > 0)
            if marks:
                name = "highest" if axes is highest else "total"
                assert marks[0].get_xdata().tolist() == getattr(steps[number - 2], name).tolist()
        errors = [line.get_xdata()[0] for line in error.lines]
        assert len(errors) == int(step.errors.isfinite().sum())
        low, high = error.get_xlim()
        for found, wanted in zip(errors, step.errors.tolist(), strict=False):
            assert low <= found <= high and (found == wanted or wanted == 0 and found == low)
        words = " ".join(text.get_text().strip() for text in numbers.texts)
        rose = f"{rows_that_rose(steps, number)} of {step.tile.row_end - step.tile.row}"
        assert f"tile {number} of {len(steps)}, {step.tile.kind}" in words and f"rows {rose} " in words
        moved = [step.read + step.written, step.read, step.written, steps[-1].read + steps[-1].written]
        pattern = r"(?:so far|read and written|\+|end|standard attention) (\S+)"
        found = [int(x.replace(",", "")) for x in re.findall(pattern, words)]
        assert found == [*moved, standard_numbers(step.shape)]
        frames = [patch for patch in matrix.patches if patch.get_zorder() == 3]
        tile = step.tile
        sizes = tile.column, tile.row, tile.column_end - tile.column, tile.row_end - tile.row
        assert all(frame.get_bbox().bounds == sizes for frame in frames) and len(frames) == 2


def test_colors_are_those_of_the_weights_grey_where_masked_white_where_not_visited():
    steps = walk()
    number = 3  # of 2 + 3 tiles: the first row of tiles, and one tile of the second
    picture = walk_step(steps, number).axes[0].images[0].get_array()
    p = walk_state(steps, number).p
    colors = weight_colors().to_rgba(p.nan_to_num(0.0).numpy())
    for query in range(6):
        for key in range(6):
            visited = key < (4 if query < 3 else 2)
            assert visited != p[query, key].isnan()
            if not visited:
                wanted = [1, 1, 1, 1]
            elif key > query:
                wanted = [*to_rgb(MASKED), 1]
            else:
                wanted = colors[query, key]
            np.testing.assert_allclose(picture[query, key], wanted)
    light = weight_colors().to_rgba([0.0, 0.05, 0.2, 1.0]) @ [0.3, 0.6, 0.1, 0]
    assert (np.diff(light) > 0.05).all()  # a weight that falls is drawn darker


def test_parts_of_a_walk_share_their_rows():
    """Row i of the matrix is as high on the page as its bars, wide matrices included."""
    for steps in (walk(), walk(5, 9, 3, 4, False)):
        figure = walk_step(steps, 1)
        figure.draw_without_rendering()
        heights = [axes.transData.transform((0, row))[1] for axes in figure.axes[:4] for row in (0, steps[0].shape.s_q)]
        np.testing.assert_allclose(heights[2:], heights[:2] * 3, atol=1)


def test_a_strip_shows_the_steps_that_were_named():
    steps = walk()
    figure = walk_strip(steps, (1, 3, 5))
    assert not faults(figure) and not faults(walk_strip(steps, (1, 2, 3, 5)))
    assert [axes.get_title() for axes in figure.axes[:3]] == [f"after tile {number} of 5" for number in (1, 3, 5)]
    for axes, number in zip(figure.axes, (1, 3, 5), strict=False):
        seen = int((~walk_state(steps, number).p.isnan()).sum())
        assert (axes.images[0].get_array() != 1).any(-1).sum() == seen
        frames = [patch for patch in axes.patches if patch.get_zorder() == 3]
        assert {frame.get_xy() for frame in frames} == {(steps[number - 1].tile.column, steps[number - 1].tile.row)}
        assert matched(frames[-1].get_edgecolor(), THIS_TILE)
    with pytest.raises(ValueError, match="at least one step"):
        walk_strip(steps, ())
    with pytest.raises(ValueError, match="step 6 of a walk of 5"):
        walk_strip(steps, (1, 6))


def matched(color, name: str) -> bool:
    from matplotlib.colors import to_rgba

    return to_rgba(color) == to_rgba(name)


@pytest.mark.parametrize("number", [0, 6])
def test_steps_that_are_not_there_are_refused(number):
    with pytest.raises(ValueError, match=f"step {number} of a walk of 5"):
        walk_step(walk(), number)
    with pytest.raises(ValueError, match="step 1 of a walk of 0"):
        walk_step([], 1)


def test_the_slider_redraws_and_the_play_button_moves_it(monkeypatch):
    links, link = [], ipywidgets.jslink
    monkeypatch.setattr(ipywidgets, "jslink", lambda *ends: links.append(ends) or link(*ends))
    steps = walk()
    widget = walk_slider(steps)
    (play,), (slider,), picture = widget.children[0].children, widget.children[1].children, widget.children[-1]
    assert links == [((play, "value"), (slider, "value"))]  # the browser follows it, no kernel does
    assert (slider.min, slider.max, slider.value) == (play.min, play.max, play.value) == (1, 5, 1)
    first = picture.value
    assert first == png(walk_step(steps, 1))
    slider.value = 4
    assert picture.value == png(walk_step(steps, 4)) != first
    with pytest.raises(ValueError, match="at least one step"):
        walk_slider([])
