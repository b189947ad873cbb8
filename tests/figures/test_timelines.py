"""course_kit.figures.timelines: rows, bars and colors of spans. CPU."""

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from course_kit.figures.timelines import draw_spans
from course_lib.recompute.profiling import Span

SHOWN = [
    Span("phases", "forward", 0.0, 4.0),
    Span("CPU", "aten::linear", 0.5, 1.5),
    Span("CPU", "aten::add", 2.0, 2.1),
    Span("GPU stream 7", "gemm", 1.0, 5.0),
]


@pytest.fixture
def axes():
    return Figure().add_subplot()


def bars(axes):
    """(row, start, length, color) of each bar."""
    found = []
    for collection in axes.collections:
        for path in collection.get_paths():
            (left, bottom), (right, top) = path.vertices.min(0), path.vertices.max(0)
            color = to_hex(collection.get_facecolor()[0])
            found.append((round((bottom + top) / 2), round(left, 6), round(right - left, 6), color))
    return sorted(found)


def test_a_row_for_each_lane_and_a_bar_for_each_span(axes):
    draw_spans(axes, SHOWN)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["phases", "CPU", "GPU stream 7"]
    assert [bar[:3] for bar in bars(axes)] == [(0, 0.0, 4.0), (1, 0.5, 1.0), (1, 2.0, 0.1), (2, 1.0, 4.0)]
    assert axes.yaxis_inverted() and axes.get_xlabel() == "ms", "the first lane is on top"


def test_bars_have_the_color_of_the_beginning_of_their_name(axes):
    draw_spans(axes, SHOWN, {"aten::lin": "#ff0000", "ge": "#0000ff"})
    assert [bar[3] for bar in bars(axes)] == ["#bbbbbb", "#ff0000", "#bbbbbb", "#0000ff"]


def test_wide_bars_of_the_labels_are_named_in_their_middle(axes):
    draw_spans(axes, SHOWN, labels=("forward", "aten::add", "gemm"))
    assert [(text.get_text(), text.get_position()) for text in axes.texts] == [
        ("forward", (2.0, 0)),
        ("gemm", (3.0, 2)),
    ]


def test_no_name_unless_asked_and_nothing_to_draw(axes):
    draw_spans(axes, SHOWN)
    assert not axes.texts
    draw_spans(axes, [])
