"""course_kit.figures.flash_attention, measured and masks: bars and lines are the numbers given. CPU."""

import math

import numpy as np
import pytest
import torch

from course_kit.figures import flash_attention as figures
from course_kit.labs import flash_attention as labs
from course_kit.labs.recorded import recorded
from course_lib.kernels.gpus import GPUS
from figure_faults import faults


def test_time_and_memory_by_tokens():
    nothing = (math.nan, math.nan)
    curves = {
        "standard": [(0.003, 1.5), (0.01, 6.0), (0.05, 24.0), (0.22, 101.0)],
        "PyTorch's fused": [(0.002, 0.5), (0.006, 1.0), (0.02, 2.0), (0.05, 4.0)],
        "in tiles, PyTorch": [(0.01, 0.6), (0.02, 1.1), (0.05, 2.1), (0.126, 4.2)],
        "our kernels": [(math.nan, 0.5), (math.nan, 1.0), nothing, nothing],
    }
    figure = figures.time_and_memory(curves, [256, 512, 1024, 2048])
    assert not faults(figure)
    for axes, place in zip(figure.axes, (0, 1), strict=True):
        for line, curve in zip(axes.lines, curves.values(), strict=True):
            np.testing.assert_array_equal(line.get_ydata(), [point[place] for point in curve])
        assert axes.get_ylim()[0] == 0 and axes.get_xscale() == axes.get_yscale() == "linear"
    colors = [line.get_color() for line in figure.axes[0].lines]
    assert len(set(colors)) == 4
    fewer = figures.time_and_memory({"PyTorch's fused": curves["PyTorch's fused"]}, [256, 512, 1024, 2048])
    assert fewer.axes[0].lines[0].get_color() == colors[1]  # a color belongs to a way, not to a place


def test_ratios_of_errors_are_below_one_where_tiles_are_closer():
    errors = {"float32": [(40, 1.8e-7, 2e-7), (300, 3e-7, 3e-7)], "bfloat16": [(64, 2.4e-3, 2.4e-3)]}
    figure = figures.error_ratios(errors)
    assert not faults(figure)
    lines = figure.axes[0].lines
    np.testing.assert_allclose(lines[0].get_ydata(), [0.9, 1.0])
    np.testing.assert_allclose(lines[1].get_xdata(), [64])
    assert set(lines[2].get_ydata()) == {1} and figure.axes[0].texts[0].get_text() == "equal errors"


def test_one_bar_a_version_against_the_matmuls():
    issued = {"yours": 736.0, "all ideas": 736.0, "powers of e": 1012.0, "divided in every step": 938.0}
    figure = figures.issue_clocks(issued, 1024.0)
    assert not faults(figure)
    (axes,) = figure.axes
    assert [bar.get_width() for bar in axes.patches] == list(issued.values())
    assert set(axes.lines[0].get_xdata()) == {1024} and "1,024" in axes.texts[-1].get_text()
    box, limit = axes.texts[2].get_window_extent(), axes.transData.transform((1024, 0))[0]
    assert box.x1 < limit  # the largest number isn't struck through


def test_bytes_of_the_versions_and_what_they_allow():
    traffic, attainable = labs.attention_versions(GPUS["H100"])
    assert attainable["standard, scores in memory"] == pytest.approx(0.1, abs=0.01) and max(attainable.values()) == 1
    figure = figures.traffic_bars(traffic, attainable)
    assert not faults(figure)
    (axes,) = figure.axes
    assert [bar.get_width() for bar in axes.patches] == [size / 1e6 for size in traffic.values()]
    assert axes.texts[0].get_text().endswith("at most 11% of the peak")
    right = axes.get_window_extent().x1
    assert all(text.get_window_extent().x1 <= right for text in axes.texts)


@pytest.mark.parametrize("first_counted", [True, False])
def test_counts_are_rings_around_the_formulas(first_counted):
    sizes = [128, 256, 512, 1024]
    formulas = {
        "standard": [196608.0 * 4**i for i in range(4)],
        "keys outside, 64 x 64": [158720.0 * 3**i for i in range(4)],
        "queries outside, 128 x 64": [66048.0 * 2.5**i for i in range(4)],
    }
    counted = {"standard": {128: 196608, 256: 786432}, "queries outside, 128 x 64": {128: 66048, 256: 165120}}
    if first_counted:
        counted["keys outside, 64 x 64"] = {128: 207872, 256: 649216}
    figure = figures.traffic_by_tokens(sizes, formulas, counted, [1000.0 * s for s in sizes])
    assert not faults(figure)
    lines = figure.axes[0].lines
    drawn = [line for line in lines if line.get_marker() == "o" and len(line.get_xdata())]
    assert len(drawn) == len(counted)
    assert list(lines[0].get_ydata()) == formulas["standard"] and list(drawn[0].get_ydata()) == [196608, 786432]


def test_tiles_of_a_mask_by_the_share_that_is_seen():
    masks = {"causal": lambda b, h, i, j: i >= j, "window of 64": lambda b, h, i, j: (i >= j) & (i - j < 64)}
    shares = {name: labs.mask_shares(mask) for name, mask in masks.items()}
    figure = figures.mask_tiles({**shares, "prefix of 96": shares["causal"], "documents": shares["causal"]})
    assert not faults(figure)
    first, second = figure.axes[:2]
    assert (
        first.get_title() == "causal:\n28 full, 8 partial" and second.get_title() == "window of 64:\n7 full, 14 partial"
    )
    assert (first.images[0].get_array() == 2).sum() == 28


def test_recorded_attention():
    record = recorded("attention_h200")
    figure = figures.attention_rates(record)
    assert not faults(figure)
    dots = {each.get_label(): each.get_offsets()[:, 0].tolist() for each in figure.axes[0].collections}
    assert list(dots) == ["flash", "flex", "cuDNN", "ours"]
    assert dots["ours"] == [row["rates"]["ours"] for row in record["rows"] if row["pass"] == "forward"]


def test_maps_of_errors():
    errors = [torch.full((6, 12), 10.0**-power) for power in (0, 2, 9)]
    rows = ("out, head 0", "out, head 1", "dq, head 0", "dq, head 1", "dk", "dv")
    figure = figures.error_maps([*errors, errors[0]], rows, tokens=16)
    assert not faults(figure)
    assert [axes.images[0].get_array()[0, 0] for axes in figure.axes[:3]] == pytest.approx([0, -2, -8])
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == list(rows)
