"""course_kit.figures.collectives: what is drawn is what was given, and it can be read. CPU."""

import pytest

from course_kit.figures import collectives as figures
from course_kit.figures.collectives.drawings import panels
from course_kit.figures.style import RANKS
from course_kit.labs.collectives import Fit, published, ring_states
from figure_faults import faults

SIZES = [2**n for n in range(12, 25, 2)]
FITS = {
    n: {
        name: Fit(SIZES, [1e9 * size / (size + 1e5) for size in SIZES], 1e-4, 1e9)
        for name in ("all_reduce", "all_gather")
    }
    for n in (2, 4)
}
STEPS = {
    barrier: [[(0.03 * step, 0.03 * step + 0.02 + 0.002 * rank) for step in range(5)] for rank in range(4)]
    for barrier in (False, True)
}
DRAWN = {
    "published_bandwidth": figures.published_bandwidth,
    "elements_sent": lambda: figures.elements_sent({"star": [12, 4, 4, 4], "tree": [8, 4, 8, 4], "ring": [6] * 4}, 6),
    "bus_bandwidths": lambda: figures.bus_bandwidths(FITS),
    "ring_or_tree": lambda: figures.ring_or_tree([2**power for power in range(2, 15)]),
    "two_nodes": figures.two_nodes,
    "collectives": figures.collectives,
    "tree": figures.tree,
    "steps_over_time": lambda: figures.steps_over_time(STEPS, {False: 110.0, True: 130.0}),
    "ring_circles": figures.ring_circles,
    "ring_tables": figures.ring_tables,
    "ring_step": lambda: figures.ring_step(3),
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_reader_can_read_it(name):
    assert not faults(DRAWN[name]())


def test_published_numbers_are_drawn_and_added_up():
    bandwidth, seconds = DRAWN["published_bandwidth"]().axes
    speeds = published("all_reduce", "median_gb_s")
    assert list(bandwidth.lines[0].get_ydata()) == speeds
    assert seconds.lines[0].get_ydata()[0] == pytest.approx(2 * 7 / 8 * 16 / speeds[0])


def test_measured_points_have_their_fits():
    two, four, nodes = DRAWN["bus_bandwidths"]().axes
    points, fitted = two.lines[:2]
    assert list(points.get_ydata()) == [bus / 1e9 for bus in FITS[2]["all_reduce"].busbw]
    size, line = SIZES[-1], fitted.get_ydata()[-1]
    assert line == pytest.approx(size / (1e-4 + size / 1e9) / 1e9), (
        "two ranks: bus and algorithm bandwidth are the same"
    )
    assert four.get_ylim() == two.get_ylim() and len(nodes.lines) == 2


def test_bars_are_what_each_rank_sends():
    (axes,) = DRAWN["elements_sent"]().axes
    assert [bar.get_height() for bar in axes.patches] == [12, 4, 4, 4, 8, 4, 8, 4, 6, 6, 6, 6]
    assert axes.get_legend().get_texts()[1].get_text() == "star: 24 MB in all"


def test_ring_and_tree_take_equally_long_where_the_line_is():
    """A tree of 8: 2 x 3 messages of everything; a ring: 14 of an eighth. In units of alpha and alpha·beta."""
    size = figures.crossing_size(8)
    assert 6 * (1 + size) == pytest.approx(14 * (1 + size / 8))


def test_each_collective_ends_as_its_name_says():
    found = panels()
    assert found["all-gather"][1] == [["a0", "b1", "c2", "d3"]] * 4
    assert found["reduce-scatter"][1][2] == ["", "", "Σ2", ""] and found["all-to-all"][1][1] == ["a1", "b1", "c1", "d1"]
    boxes = figures.collectives().axes[0].patches
    assert len(boxes) == 32 and boxes[0].get_facecolor()[:3] == pytest.approx(rgb(RANKS[0]), abs=0.01)


def rgb(color: str) -> tuple[float, ...]:
    return tuple(int(color[place : place + 2], 16) / 255 for place in (1, 3, 5))


def test_a_table_says_what_each_rank_holds():
    tables = figures.ring_tables().axes
    assert [axes.get_title() for axes in tables][:6] == ["start"] + [f"reduce-scatter, {i}" for i in range(1, 5)] + [
        "all-gather, 1"
    ]
    words = [text.get_text() for text in tables[4].texts]
    assert words.count("all") == 5, "after the last step of reduce-scatter each rank has one full sum"
    assert all(len(holds) == 5 for row in ring_states(5)[8] for holds in row)


def test_pauses_are_marked_and_steps_are_in_ms():
    for barrier, axes in zip((False, True), DRAWN["steps_over_time"]().axes, strict=True):
        assert axes.lines[0].get_xdata()[0] == (130 if barrier else 110) and axes.get_title().endswith(": 146 ms")
