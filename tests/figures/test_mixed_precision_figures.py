"""course_kit.figures.mixed_precision: what is drawn is what was given, and it can be read. CPU."""

import math

import numpy as np
import pytest
import torch

from course_kit.figures import mixed_precision as figures
from course_kit.figures.mixed_precision.training import LINES
from course_lib.mixed_precision.formats import E4M3, FORMATS, FP16
from figure_faults import faults

PATHS = {
    "to nearest": [1.0] * 50,
    "by chance (mean of 64)": np.linspace(1, 1.05, 50),
    "float64": np.linspace(1, 1.05, 50),
}
CURVES = {name: np.linspace(5.5, 4 - 0.1 * place, 60) for place, name in enumerate(LINES)} | {
    "all FP16": [5.5, math.nan]
}
DRAWN = {
    "gradient_sizes": lambda: figures.gradient_sizes(torch.logspace(-12, -2, 2000)),
    "bits": lambda: figures.bits(0.1),
    "bits of a long number": lambda: figures.bits(-1.2345678e-38),
    "ranges": figures.ranges,
    "rounding": lambda: figures.rounding(1000),
    "small_updates": lambda: figures.small_updates(PATHS),
    "unmoved_weights": lambda: figures.unmoved_weights({1e-3: (0.5, 0.1), 1e-4: (0.9, 0.4), 1e-5: (0.99, 0.8)}),
    "underflow_by_batch": lambda: figures.underflow_by_batch({2**n: (n / 60, 0.3) for n in range(7, 25)}),
    "losses": lambda: figures.losses(CURVES, CURVES),
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_reader_can_read_it(name):
    assert not faults(DRAWN[name]())


def test_a_format_reaches_from_its_smallest_number_to_its_largest():
    (axes,) = DRAWN["gradient_sizes"]().axes
    assert list(axes.lines[0].get_xdata()) == pytest.approx([-24, math.log2(FP16.largest)])
    assert axes.lines[2].get_xdata()[1] == pytest.approx(math.log2(E4M3.largest))
    axes, _ = figures.ranges().axes
    assert [bar.get_x() for bar in axes.containers[0]] == [next(iter(FORMATS.values())).smallest_subnormal]


def test_a_zero_gradient_has_no_size_and_spoils_no_histogram():
    (axes,) = figures.gradient_sizes(torch.tensor([0.0, 2.0**-10, 2.0**-10])).axes
    assert sum(bar.get_height() for bar in axes.patches) == 2


def test_lines_are_what_was_given():
    (axes,) = DRAWN["small_updates"]().axes
    assert list(axes.lines[0].get_ydata()) == [1.0] * 50 and axes.lines[2].get_linestyle() == ":"
    (axes,) = DRAWN["unmoved_weights"]().axes
    assert [list(line.get_ydata()) for line in axes.lines] == [[0.5, 0.9, 0.99], [0.1, 0.4, 0.8]]
    (axes,) = DRAWN["losses"]().axes
    assert [line.get_label() for line in axes.lines] == [*LINES, "all FP16: NaN"]
    assert list(axes.lines[1].get_ydata()) == list(CURVES["FP16, masters"])


def test_subnormal_shares_stand_on_those_of_zeros():
    (axes,) = DRAWN["underflow_by_batch"]().axes
    zero, subnormal = (collection.get_paths()[0].vertices[:, 1] for collection in axes.collections)
    assert zero.max() == pytest.approx(24 / 60) and subnormal.max() == pytest.approx(24 / 60 + 0.3)
