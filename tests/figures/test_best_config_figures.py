"""The figures of notebook 11 can be read, and show the numbers that they are given."""

import itertools
import math

import numpy as np
import pytest
from matplotlib.colors import to_hex

from course_kit.figures import best_config as figures
from course_kit.figures.best_config.errors import MODELS
from course_kit.figures.best_config.parts import MEMORY_COLORS, TIME, TIME_COLORS
from course_kit.figures.style import BLUE, GRAY, LIGHT, MEMORY
from course_kit.labs.best_config import overlap_ratios
from course_lib.best_config import estimate, search
from course_lib.best_config.clusters import CLUSTERS
from course_lib.best_config.runs import MeasuredRun, Predicted
from course_lib.five_d.layouts import Layout
from course_lib.single_gpu.model import PRESETS
from figure_faults import faults
from test_style import LEAST_DISTANCE, SEEN_WITH
from test_style import lab as color_in_lab

GIB = 2**30
H100 = CLUSTERS["H100"]
SPECS = ["dp64,zero3", "dp8,tp8,sp,zero1", "dp4,pp2,tp8,sp,zero1", "pp8,tp8,sp", "dp4,pp2,tp8,sp,zero1,full"]
ESTIMATES = {spec: estimate(PRESETS["llama3-70B"], H100, Layout.parse(spec), 64, 8192) for spec in SPECS}
BY_NODES = {
    f"8B, {spec}": {
        n: estimate(PRESETS["bench-8B"], CLUSTERS["H100, EFA"], Layout.parse(f"dp{8 * n // ranks},{spec}"), 256)
        for n in (1, 2, 4, 8, 16, 32)
    }
    for spec, ranks in (("tp2,sp,zero1", 2), ("pp4,tp2,sp,zero1", 8))
}
LAYER = {
    tp: {"matrices": 6 / tp, "attention": 2 / tp, "other kernels": 3 / tp, "tensor parallel": 0.2 * tp, "host": 9}
    for tp in (1, 2, 4, 8, 16, 32)
}
SPEEDS = {tp: [6000 - 100 * tp - 50 * i for i in range(5)] for tp in (2, 4, 8, 16, 32)}
SIZES = list(itertools.product(("1B", "3B", "8B", "80B"), (1, 2, 4, 8, 16, 32, 64)))
CELLS = [
    {"model": model, "nodes": nodes, "tokens/s": 0.04 + nodes / 1000, "peak memory": 0.05} for model, nodes in SIZES
][:18]
RATIOS = {
    name: ([0.5, 1.2, 1.7], [0.97, 1.01, 1.05])
    for name in ("llm-foundry", "Megatron-LM", "Megatron-Core", "torchtitan", "DeepSpeed 2021")
}
RANKING = search(PRESETS["llama3-70B"], H100, 128, 1024, 4096)


def row(model: str, nodes: int, **changes) -> dict:
    """A row of measured runs."""
    sizes = {"dp": 8 * nodes // 4, "pp": 2, "tp": 2, "cp": 1, "zero_stage": 1, "micro_batch": 2}
    numbers = {"ok": True, "tokens_per_s_per_gpu": 6000.0 - 30 * nodes, "mfu_pct": 43.0 - nodes / 2}
    return {"model": model, "nodes": nodes, **sizes, "global_batch_seqs": 256, "seq": 4096, **numbers} | changes


ROWS = [row(model, nodes) for model, nodes in SIZES]
LARGE = {"dp": 128, "pp": 32, "cp": 16, "tp": 16, "zero_stage": 3, "micro_batch": 16}
ROWS[-1] |= {"ok": False, "tokens_per_s_per_gpu": math.nan, "mfu_pct": math.nan}
RUNS = [
    MeasuredRun(model, PRESETS[f"bench-{model}"], nodes, Layout(), 256, 4096, nodes < 64, 2.0 + 9 * nodes, nodes * GIB)
    for model, nodes in SIZES
]
GUESSES = Predicted(*(np.array([guess(run) for run in RUNS]) for guess in (
    lambda run: 1.1 * run.step_s, lambda run: 0.9 * run.peak_bytes, lambda run: 0.1
)))  # fmt: skip

ALL = {
    "heatmap": lambda: figures.heatmap(ROWS, "measured: nanotron on nodes of 8 H100"),
    "heatmap, long specs": lambda: figures.heatmap([each | LARGE for each in ROWS], "H100", predicted=True),
    "heatmap, ranks": lambda: figures.heatmap([row("debug", 1, mfu_pct=math.nan)], "a CPU, 2 cores", across="ranks"),
    "memory": lambda: figures.memory_of_layouts(ESTIMATES),
    "tensor parallel": lambda: figures.tensor_parallel(LAYER, SPEEDS),
    "ratios": lambda: figures.overlap_ratios(overlap_ratios),
    "shares": lambda: figures.step_shares(BY_NODES),
    "held": lambda: figures.predicted_and_measured(RUNS, GUESSES),
    "cells": lambda: figures.cell_errors(CELLS),
    "published": lambda: figures.published_errors(RATIOS),
    "ranking": lambda: figures.ranking(RANKING, title="llama3-70B on 128 H100, 1,024 sequences of 4,096 tokens"),
    "rejections": lambda: figures.rejections(RANKING),
}


@pytest.mark.parametrize("name", ALL)
def test_it_can_be_read(name):
    assert not faults(ALL[name]())


def texts(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def color(patch) -> str:
    return to_hex(patch.get_facecolor()).upper()


@pytest.mark.parametrize("seen_with", SEEN_WITH)
@pytest.mark.parametrize("table", [TIME_COLORS, MEMORY_COLORS], ids=["time", "memory"])
def test_colors_of_parts_are_told_apart(table, seen_with):
    for one, other in itertools.combinations(table.values(), 2):
        distance = np.linalg.norm(color_in_lab(one, seen_with) - color_in_lab(other, seen_with))
        assert distance > LEAST_DISTANCE, (one, other)


def test_a_quantity_has_one_color_in_both_halves_of_a_ranking():
    assert TIME_COLORS["gradient sync"] == MEMORY["gradients"] == MEMORY_COLORS["gradients"]
    assert TIME_COLORS["optimizer"] == MEMORY["optimizer states"] == MEMORY_COLORS["optimizer states"]
    time_axes, memory_axes = figures.ranking(RANKING).axes
    for axes, table in ((time_axes, TIME_COLORS), (memory_axes, MEMORY_COLORS)):
        drawn = {bars.get_label(): color(bars[0]) for bars in axes.containers}
        assert len(drawn) > 3 and drawn.items() <= {name: shade.upper() for name, shade in table.items()}.items()


def test_every_part_of_a_step_is_in_one_group():
    each = next(iter(ESTIMATES.values()))
    assert sorted(name for names in TIME.values() for name in names) == sorted(each.time)


def test_darker_cells_are_faster_and_failed_cells_are_hatched():
    axes, _ = figures.heatmap(ROWS, "measured").axes
    assert texts(axes)[0] == "42.5%\ndp2 pp2 tp2\nzero1 mb2" and texts(axes)[-1] == "did not\nrun"
    (image,) = axes.images
    values = image.get_array()
    assert values[0][0] == 42.5 and values[2][3] == 39 and np.ma.is_masked(values[3][6])
    assert [patch.get_hatch() for patch in axes.patches] == ["//"]
    assert to_hex(image.cmap(1.0)).upper() == BLUE and to_hex(image.cmap(0.0)).upper() == "#FFFFFF"
    predicted, _ = figures.heatmap(ROWS, "H100", predicted=True).axes
    assert texts(predicted)[-1] == "none\nfits" and "runs" not in predicted.get_title()


def test_bars_of_memory_end_at_the_bytes_that_are_needed():
    (axes,) = figures.memory_of_layouts(ESTIMATES).axes
    needed = [float(each.needed_bytes) / GIB for each in ESTIMATES.values()]
    assert [float(text.replace(",", "")) for text in texts(axes)] == [round(gib) for gib in needed]
    for y, gib in enumerate(needed):
        bars = [bar for bar in axes.patches if round(bar.get_y() + bar.get_height() / 2) == y]
        assert sum(bar.get_width() for bar in bars) == pytest.approx(gib)
        assert {color(bar) for bar in bars} <= {shade.upper() for shade in MEMORY_COLORS.values()}
    assert axes.lines[0].get_xdata()[0] == pytest.approx(float(each_usable()) / GIB)


def each_usable() -> float:
    return next(iter(ESTIMATES.values())).usable_bytes


def test_a_layer_by_tp_and_the_fastest_run_of_each():
    left, right = figures.tensor_parallel(LAYER, SPEEDS).axes
    assert [bars.get_label() for bars in left.containers] == ["matmuls", *list(LAYER[1])[1:4]]
    for name, bars in zip(LAYER[1], left.containers, strict=False):
        assert [bar.get_height() for bar in bars] == pytest.approx([parts[name] for parts in LAYER.values()])
    best = [line.get_ydata()[0] for line in right.lines if line.get_marker() == "_"]
    assert best == [max(speeds) for speeds in SPEEDS.values()]
    assert left.lines[0].get_xdata()[0] == 3.5 and right.get_ylim()[0] == 0


def test_ratios_are_those_of_the_function():
    for axes, name in zip(figures.overlap_ratios(overlap_ratios).axes, ("DP, ZeRO-3", "TP", "PP"), strict=True):
        link, network, limit = axes.lines
        assert network.get_ydata() == pytest.approx(9 * np.array(link.get_ydata()))
        x = link.get_xdata()[0]
        sizes = (x, 4096) if name.startswith("DP") else (4096, x)
        assert link.get_ydata()[0] == overlap_ratios(*sizes)[name] and limit.get_ydata()[0] == 1


def test_shares_of_a_step_add_up_to_all_of_it():
    for axes, by_nodes in zip(figures.step_shares(BY_NODES).axes, BY_NODES.values(), strict=True):
        for x, each in enumerate(by_nodes.values()):
            bars = [bars[x] for bars in axes.containers]
            assert sum(bar.get_height() for bar in bars) == pytest.approx(100)
            matmuls = each.time["matrices"] + each.time["output layer"]
            assert bars[0].get_height() == pytest.approx(100 * float(matmuls / each.step_s))


def test_models_are_told_apart_and_only_runs_that_ran_are_shown():
    left, right = figures.predicted_and_measured(RUNS, GUESSES).axes
    for axes, factor in ((left, 1.1), (right, 0.9)):
        (diagonal, *lines) = axes.lines
        assert list(diagonal.get_xdata()) == list(diagonal.get_ydata())
        assert {line.get_label(): (line.get_color(), line.get_marker()) for line in lines} == MODELS
        assert len({marker for _, marker in MODELS.values()}) == 4
        for line in lines:
            assert len(line.get_xdata()) == 6 and line.get_markersize() >= 4
            assert line.get_ydata() == pytest.approx(factor * np.array(line.get_xdata()))


def test_errors_are_in_percent():
    (axes,) = figures.cell_errors(CELLS).axes
    times, memory = axes.containers
    assert [bar.get_height() for bar in times] == pytest.approx([100 * cell["tokens/s"] for cell in CELLS])
    assert [bar.get_height() for bar in memory] == pytest.approx([5] * 18)
    assert axes.get_xticklabels()[8].get_text() == "3B\n2"


def test_a_program_has_a_row_of_gray_and_a_row_of_blue_dots():
    (axes,) = figures.published_errors(RATIOS).axes
    gray, blue = axes.collections[4:6]
    assert [x for x, _ in gray.get_offsets()] == [0.5, 1.2, 1.7] and [x for x, _ in blue.get_offsets()] == [
        0.97,
        1.01,
        1.05,
    ]
    assert color_of(gray) == GRAY and color_of(blue) == BLUE
    assert {round(y) for _, y in [*gray.get_offsets(), *blue.get_offsets()]} == {2}
    assert axes.get_yticklabels()[2].get_text() == "Megatron-Core, 3 runs"


def color_of(collection) -> str:
    return to_hex(collection.get_facecolor()[0]).upper()


def test_what_fits_has_another_color_than_what_is_rejected():
    (axes,) = figures.rejections(RANKING).axes
    counts = dict(zip((label.get_text() for label in axes.get_yticklabels()), axes.patches, strict=True))
    assert counts["fits"].get_width() == len(RANKING.order)
    assert [color(bar) == LIGHT for bar in axes.patches] == [False, *[True] * len(RANKING.rejected)]
