"""course_kit.figures.checkpoint: what is drawn is what was given, and it can be read. CPU."""

import pytest
from matplotlib.colors import to_hex

from course_kit.figures import checkpoint as figures
from course_kit.figures.style import RANKS
from course_kit.labs.checkpoint import published_interruptions
from course_lib.checkpoint.save_interval import lost_share, save_interval
from figure_faults import faults

MTBF_S = 2e9
FULL = (24, 48)
HALVES = [((0, 24 * side), (24, 24), FULL) for side in range(2)]
HELD = {
    "dp2,tp2,pp2": [([HALVES[rank % 2]], [HALVES[rank % 2]]) for rank in range(8)],
    "dp2,tp2,pp2,zero1": [([HALVES[rank % 2]], [((6 * (rank // 2), 0), (6, 48), FULL)]) for rank in range(8)],
    "dp8,zero1": [([((0, 0), FULL, FULL)], [((3 * rank, 0), (3, 48), FULL)]) for rank in range(8)],
}
TIMES = [0.02 + 0.08 * (step % 8 == 3) for step in range(20)]
BEFORE = [{"step": step, "loss": 5 - 0.1 * step} for step in range(1, 14)]
AFTER = [{"step": step, "loss": 5 - 0.1 * step} for step in range(11, 21)]
RUNS = {name: [(4 - 0.05 * step - apart, 1e-3 / (step + 1)) for step in range(20)] for name, apart in
        {"whole": 0.0, "A": 0.1, "B": 0.2, "C": -0.1}.items()}  # fmt: skip
DRAWN = {
    "interruptions": lambda: figures.interruptions(published_interruptions()),
    "save_intervals": lambda: figures.save_intervals([2**k for k in range(3, 15)], MTBF_S),
    "shard_owners": lambda: figures.shard_owners(HELD),
    "stalls": lambda: figures.stalls(TIMES),
    "restart": lambda: figures.restart([5 - 0.1 * step for step in range(1, 21)], BEFORE, AFTER),
    "forgetful_restarts": lambda: figures.forgetful_restarts(RUNS),
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_reader_can_read_it(name):
    assert not faults(DRAWN[name]())


def test_each_component_has_its_count_and_its_categorys_color():
    (axes,) = DRAWN["interruptions"]().axes
    rows = published_interruptions()
    assert [bar.get_width() for bar in axes.patches] == [int(row["interruptions"]) for row in rows]
    colors = [figures.CAUSE_COLORS[row["category"]].lower() for row in rows]
    assert [to_hex(bar.get_facecolor()) for bar in axes.patches] == colors
    assert sum(int(row["interruptions"]) for row in rows) == 419


def test_lines_are_the_formulas():
    left, right = DRAWN["save_intervals"]().axes
    best = save_interval(10, MTBF_S / 8)
    assert left.lines[1].get_ydata()[0] == pytest.approx(best / 60)
    assert right.lines[1].get_ydata()[0] == pytest.approx(100 * lost_share(best, 10, MTBF_S / 8, 600))
    assert right.lines[-1].get_label() == "60 s, once per day"


def test_each_box_stands_where_its_shard_is_and_names_all_owners():
    weight, moment = (DRAWN["shard_owners"]().axes[place] for place in (0, 3))
    assert (
        [text.get_text() for text in weight.texts]
        == ["0, 2, 4, 6", "1, 3, 5, 7"]
        == [text.get_text() for text in moment.texts]
    )
    assert [(box.get_x(), box.get_width()) for box in weight.patches] == [(0, 24), (24, 24)]
    assert to_hex(weight.patches[1].get_facecolor()) == RANKS[1].lower()
    last = DRAWN["shard_owners"]().axes[2]
    assert [text.get_text() for text in last.texts] == ["0 … 7"]


def test_saves_and_restarts_are_at_their_steps():
    (axes,) = DRAWN["stalls"]().axes
    assert list(axes.lines[1].get_xdata()) == [3, 11] and list(axes.lines[1].get_ydata()) == [100.0, 100.0]
    assert list(axes.lines[2].get_xdata()) == [7, 15]
    (axes,) = DRAWN["restart"]().axes
    assert list(axes.lines[1].get_xdata()) == list(range(11, 21)) and axes.lines[3].get_xdata()[0] == 13.3
    left, right = DRAWN["forgetful_restarts"]().axes
    assert list(left.lines[0].get_ydata()) == [0.0] * 20 and left.lines[2].get_ydata()[5] == pytest.approx(-0.2)
    assert right.lines[1].get_ydata()[0] == pytest.approx(1.0) and all(
        tick == round(tick) for tick in left.get_xticks()
    )
