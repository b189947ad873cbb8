"""course_kit.figures.fused_kernels: bars, dots and lines are the numbers given, and everything can be read. CPU."""

import pytest

from course_kit.figures import fused_kernels as figures
from course_kit.labs import fused_kernels as labs
from course_kit.labs.recorded import recorded
from course_lib.single_gpu.model import PRESETS
from figure_faults import faults


def test_operations_are_laid_end_to_end_above_the_fused_kernel():
    sizes = {"softmax": [2.0, 1.2, 1.0, 2.0, 1.2], "RMSNorm + residual": [3.0, 2.0, 1.0, 4.0], "SwiGLU": [2.0, 3.0]}
    fused = {"softmax": 2, "RMSNorm + residual": 4, "SwiGLU": 3}
    figure = figures.operation_bytes(sizes, fused)
    assert not faults(figure)
    (axes,) = figure.axes
    for row, name in enumerate(sizes):
        bars = [bar for bar in axes.patches if row - 0.5 < bar.get_y() < row]
        assert [bar.get_width() for bar in bars] == sizes[name]
        assert bars[-1].get_x() + bars[-1].get_width() == pytest.approx(sum(sizes[name]))
    assert [text.get_text() for text in axes.texts][:2] == ["7.4", "2"]
    assert [text.get_text() for text in figure.legends[0].texts] == ["each operation", "one fused kernel"]


def test_eager_and_our_bytes_by_operator():
    moved = {"softmax": (15.1, 5.0), "RMSNorm + residual": (25.2, 9.0), "SwiGLU": (15.0, 8.0), "RoPE": (20.0, 4.1)}
    figure = figures.bytes_by_operator(moved)
    assert not faults(figure)
    (axes,) = figure.axes
    assert [bar.get_width() for bar in axes.patches] == [each[i] for i in (0, 1) for each in moved.values()]
    assert [label.get_text() for label in axes.get_yticklabels()] == list(moved)


def test_recorded_rates_are_dots():
    record = recorded("kernels_h200")
    figure = figures.kernel_rates(record)
    assert not faults(figure)
    for axes, which in zip(figure.axes, ("forward", "backward"), strict=True):
        wanted = [row["rates"] for row in record["rows"] if row["size"] == "65,536 x 4,096" and row["pass"] == which]
        dots = {each.get_label(): each.get_offsets()[:, 0].tolist() for each in axes.collections}
        assert dots["ours"] == [rates["ours"] / 1e3 for rates in wanted]
        assert dots["Liger"] == [rates["Liger"] / 1e3 for rates in wanted if "Liger" in rates]
        assert all(0 < rate < axes.get_xlim()[1] for rates in dots.values() for rate in rates)
        assert axes.lines[-1].get_xdata()[0] == record["copy_gb_per_s"] / 1e3


def test_the_loss_passes_the_limit_in_one_way():
    tokens = [2**power for power in range(11, 18)]
    eager, chunked = (
        [way(PRESETS["llama3-8B"], n) / 2**30 for n in tokens]
        for way in (labs.eager_loss_bytes, labs.chunked_loss_bytes)
    )
    figure = figures.loss_memory(tokens, eager, chunked)
    assert not faults(figure)
    lines = figure.axes[0].lines
    assert [list(line.get_ydata()) for line in lines[:2]] == [eager, chunked]
    assert eager[4] < 80 < eager[5] and max(chunked) < 80 and set(lines[2].get_ydata()) == {80}
