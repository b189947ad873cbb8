"""course_kit.figures.fp8: what is drawn is what was given, and it can be read. CPU."""

import numpy as np
import pytest
from matplotlib.colors import to_hex

from course_kit.figures import fp8 as figures
from course_kit.figures.fp8.drawings import ARROWS, NODES, OPERANDS
from course_kit.figures.style import MEMORY
from course_kit.labs.fp8 import ERROR_COLUMNS, ScaleErrors, fp8_speedup
from figure_faults import faults

FACTORS = [2.0**k for k in range(-8, 9)]
FOUND = ScaleErrors(FACTORS, [0.03 + 0.02 * abs(np.log2(factor)) for factor in FACTORS], (100.0, 0.03))
SCALES = {kind: {"E4M3": FOUND, "E5M2": FOUND} for kind in ("normal numbers", "a model's gradients")}
WAYS = ("int8, tensor", "E4M3, tensor", "E4M3, row", "E4M3, 1 x 128")
LENGTHS = [128, 256, 512, 1024, 2048, 4096]
SUMS = {
    kind: {name: np.linspace(1e-4, 1e-2, 6) for name in ("14 bits", "14 bits, float32 every 128", "24 bits")}
    for kind in ("numbers from 0 to 1", "normal numbers")
}
CURVES = {
    name: np.linspace(5, 3, 20) + 0.01 * place
    for place, name in enumerate(("BF16", "Transformer Engine", "nanotron", "DeepSeek-V3", "tensor, e4m3"))
}
ROWS = [
    {"recipe": name, "lr": lr, "seed": seed, "end": 3 + 0.01 * place + 0.001 * seed}
    for place, name in enumerate(CURVES) for lr in (3e-4, 1e-3, 1e-2) for seed in range(3)
]  # fmt: skip
TABLES = {way: {f"{layer}.{name}": [0.01, 0.02, 0.05, 0.03, 0.026, 0.06] for layer in range(2) for name in ("q", "up")}
          for way in ("tensor, dy in e5m2", "blocks, all e4m3")}  # fmt: skip
STORED = {f"storage {number}": np.linspace(5, 3, 30) for number in range(4)}
DRAWN = {
    "errors_by_scale": lambda: figures.errors_by_scale(SCALES),
    "outlier_errors": lambda: figures.outlier_errors(FACTORS, dict.fromkeys(WAYS, FOUND.errors)),
    "sum_errors": lambda: figures.sum_errors(LENGTHS, SUMS, dict.fromkeys(SUMS, 0.03)),
    "operand_blocks": figures.operand_blocks,
    "data_flow": figures.data_flow,
    "recorded_curves": lambda: figures.recorded_curves(range(5, 205, 10), CURVES),
    "gaps_by_learning_rate": lambda: figures.gaps_by_learning_rate(ROWS),
    "layer_errors": lambda: figures.layer_errors(TABLES, ERROR_COLUMNS),
    "losses_with_outliers": lambda: figures.losses_with_outliers(FACTORS, dict.fromkeys(WAYS, FOUND.errors)),
    "second_moment_losses": lambda: figures.second_moment_losses({3e-3: STORED, 1e-2: STORED}),
    "spike_gaps": lambda: figures.spike_gaps(dict.fromkeys(("delayed, 16 steps", "current", "tiles"), [0.0, 0.1] * 10)),
    "speedups": lambda: figures.speedups(LENGTHS, {"delayed or blocks, fused": 4, "tensor": 6, "operators": 105}),
    "ranks_of_a_layout": lambda: figures.ranks_of_a_layout({"tp": 2, "cp": 2, "pp": 2, "dp": 2}),
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_reader_can_read_it(name):
    assert not faults(DRAWN[name]())


def test_lines_are_what_was_given():
    axes = DRAWN["errors_by_scale"]().axes[1]
    assert list(axes.lines[1].get_ydata()) == FOUND.errors and list(axes.lines[2].get_xdata()) == [100.0]
    axes = DRAWN["sum_errors"]().axes[0]
    assert list(axes.lines[0].get_ydata()) == list(np.linspace(1e-4, 1e-2, 6)) and axes.lines[3].get_ydata()[0] == 0.03
    right = DRAWN["recorded_curves"]().axes[1]
    assert (
        list(right.lines[2].get_ydata()) == pytest.approx([0.03] * 20) and right.lines[2].get_label() == "DeepSeek-V3"
    )
    (axes,) = DRAWN["speedups"]().axes
    assert axes.lines[1].get_ydata()[0] == fp8_speedup(128, 128, 128, 6)


def test_gaps_are_to_the_same_seed():
    axes = DRAWN["gaps_by_learning_rate"]().axes
    assert [ax.get_title() for ax in axes] == [f"learning rate {rate}" for rate in ("0.0003", "0.001", "0.01")]
    dots = axes[0].lines[1]
    assert list(dots.get_xdata()) == [1, 1, 1] and list(dots.get_ydata()) == pytest.approx([0.02] * 3)


def test_the_same_shape_takes_half_the_time_where_casts_cost_nothing():
    assert fp8_speedup(4096, 4096, 4096, 0) == pytest.approx(1979 / 989)
    assert fp8_speedup(512, 512, 512, 105) < 1 < fp8_speedup(8192, 8192, 8192, 4)


def test_blocks_have_the_colors_of_their_operands():
    for axes, (name, _, _, (tall, wide), kind) in zip(DRAWN["operand_blocks"]().axes, OPERANDS, strict=True):
        assert len(axes.patches) == 64 // (tall * wide) and axes.get_title().endswith(name)
        assert to_hex(axes.patches[0].get_facecolor()) == MEMORY[kind].lower()


def test_arrows_join_boxes_that_are_there_and_cross_none():
    for pair in ARROWS.split(", "):
        (_, x0, y0, _), (_, x1, y1, _) = (NODES[name] for name in pair.split())
        between = [(x, y) for _, x, y, _ in NODES.values() if (x, y) not in ((x0, y0), (x1, y1))]
        if x0 == x1:
            assert not [y for x, y in between if x == x0 and min(y0, y1) < y < max(y0, y1)], pair
        if y0 == y1:
            assert not [x for x, y in between if y == y0 and min(x0, x1) < x < max(x0, x1)], pair


def test_errors_and_ranks_are_written_where_they_belong():
    left, _ = DRAWN["layer_errors"]().axes
    assert [text.get_text() for text in left.texts][:6] == ["1.0%", "2.0%", "5.0%", "3.0%", "2.6%", "6.0%"]
    assert [label.get_text() for label in left.get_yticklabels()] == ["0.q", "0.up", "1.q", "1.up"]
    (axes,) = DRAWN["ranks_of_a_layout"]().axes
    numbers = {text.get_text(): text.get_position() for text in axes.texts}
    assert numbers["4"][1] < numbers["0"][1] and numbers["8"][0] > numbers["3"][0]
