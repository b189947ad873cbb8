"""The figures of notebook 09: each can be read, and shows the numbers that it is given."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from course_kit.figures import pipeline as figures
from course_kit.figures.pipeline import gantt
from course_kit.figures.style import KINDS, MEMORY, PHASES, RANKS
from course_kit.widgets import pipeline as widgets
from course_lib.pipeline import schedules, simulate
from course_lib.pipeline.stages import split_layers
from figure_faults import faults, visible_texts

KB = {"TP 16: four all-reduces": 240.0, "PP 16: 15 cuts": 7.62, "PP 2: one cut": 0.508}
SPEEDS = {"all_reduce": (436, 362, 160), "all_gather": (250, 185, 119), "reduce_scatter": (250, 182, 116)}
BANDWIDTH = {name: list(zip((1.0, 8.0, 64.0), each, strict=True)) for name, each in SPEEDS.items()}
MEASURED = {
    p: {"parameters": 15 / p, "gradients": 15 / p, "optimizer states": 90 / p, "activations": 17} for p in (1, 8)
}
RATIOS = {(m, v): 7 / (m * v) for m in (1, 2, 4, 8, 16, 32) for v in (1, 2, 4, 8) if v == 1 or m >= 8}
LOSSES = {letter: [5.6, 5.3, 5.0, 4.9 + k / 100] for k, letter in enumerate("ABCD")}
SPANS = {"F": (0.0, 50.0), "B": (50.0, 150.0)}
ROUNDS = {
    "one after the other": (SPANS, [("F", 10, 20), ("B", 70, 80)]),
    "at the same time": ({"F": (0.0, 70.0), "B": (0.0, 120.0)}, [("F", 10, 20), ("B", 40, 60)]),
}
RATES = {
    "1F1B": [(0.238, 0.267)],
    "1F1B-I": [(0.135, 0.15)],
    "ZB-H1": [(0.094, 0.154)],
    "ZB-H2": [(0.0, 0.08)],
    "ZB-V": [(0.0, 0.07)],
}
NAIVE = [[("F", 10.0 * r, 10.0 * r + 9), ("B", 120 - 20.0 * r, 138 - 20.0 * r)] for r in range(4)]


def run(schedule: schedules.Schedule) -> tuple:
    """A simulation, and spans that a run may have had: each action ends a little late, an F of a pair before its B."""
    found = simulate(schedule, 12, 12, 12)
    shown = gantt.rows_of(found)
    spans = [
        [(*action, 100 + bar.start, 100.9 + bar.end) for action, bar in zip(actions, bars, strict=True)]
        for actions, bars in zip(schedule, shown, strict=True)
    ]
    return found, spans


def bars(figure: Figure, color: str, panel: int = 0) -> list[tuple[float, float]]:
    """The x and the width of the bars and boxes of this color in a panel."""
    axes, found = figure.axes[panel], []
    for collection in axes.collections:
        paths, colors = collection.get_paths(), collection.get_facecolor()
        for path, of in zip(paths, np.resize(colors, (len(paths), 4)) if len(colors) else [], strict=False):
            if to_hex(of) == color.lower():
                found.append((path.vertices[:, 0].min(), np.ptp(path.vertices[:, 0])))
    boxes = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    return found + [(box.get_x(), box.get_width()) for box in boxes if to_hex(box.get_facecolor()) == color.lower()]


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in visible_texts(figure)]


THREE = {
    "ZB-H1": run(schedules.zero_bubble_h1(4, 8)),
    "ZB-V": run(schedules.zero_bubble_v(4, 8)),
}
ONE_F_ONE_B = simulate(schedules.one_f_one_b(4, 8))
CALLS = {
    "links_and_traffic": lambda: figures.links_and_traffic(BANDWIDTH, KB),
    "cut_by_layers": lambda: figures.cut_by_layers({count: split_layers(12, count) for count in (2, 4, 8)}, 12),
    "naive_step": lambda: figures.naive_step(NAIVE),
    "simulated": lambda: figures.simulated(
        {"AFAB": simulate(schedules.afab(4, 8)), "1F1B": simulate(schedules.one_f_one_b(4, 8))}
    ),
    "busy_share": lambda: figures.busy_share({"m = p - 1": {2: 50.0, 32: 50.0}, "m = 32": {2: 97.0, 32: 51.0}}),
    "deadlock": figures.deadlock,
    "p2p_buffers": figures.p2p_buffers,
    "simulated_and_measured": lambda: figures.simulated_and_measured(THREE),
    "peak_memory": lambda: figures.peak_memory((4, 6, 8), {"AFAB": [[4, 6, 8], [5, 7, 9]], "1F1B": [[4] * 3, [5] * 3]}),
    "memory_by_stages": lambda: figures.memory_by_stages(MEASURED),
    "interleaved_order": figures.interleaved_order,
    "delayed_weight_gradients": figures.delayed_weight_gradients,
    "backward_in_two_halves": figures.backward_in_two_halves,
    "bubble_ratios": lambda: figures.bubble_ratios(RATIOS),
    "searched": lambda: figures.searched({2: 900.0, 3: 800.0}, {"1F1B": (4, 850.0)}, 700.0, THREE["ZB-H1"][0]),
    "losses": lambda: figures.losses(LOSSES),
    "two_directions": lambda: figures.two_directions(*run(schedules.dualpipe(4, 10))),
    "pair_overlap": lambda: figures.pair_overlap(ROUNDS),
    "bubble_rates": lambda: figures.bubble_rates(RATES),
    "any_schedule": lambda: figures.any_schedule("1F1B", t_comm=2),
}


@functools.cache
def figure_of(name: str) -> Figure:
    return CALLS[name]()


def test_each_figure_is_here():
    assert set(CALLS) == set(figures.__all__)


@pytest.mark.parametrize("name", CALLS)
def test_a_figure_can_be_read(name):
    assert not faults(figure_of(name))


def test_bars_of_a_schedule_are_its_actions_with_their_micro_batches():
    figure = figure_of("simulated")
    rows = [bar for row in simulate(schedules.afab(4, 8)).timeline for bar in row]
    for kind, phase in (("F", "forward"), ("B", "backward")):
        expected = [(start, end - start) for (of, *_), start, end in rows if of == kind]
        assert bars(figure, PHASES[phase]) == expected
    numbers = [text.get_text() for text in figure.axes[0].texts]
    assert sorted(numbers) == sorted(str(action.micro_batch) for action, _, _ in rows)
    assert min(text.get_fontsize() for text in figure.axes[0].texts) >= 8
    assert figure.axes[0].get_title() == "AFAB: bubble 9 of 33, holds up to 8 micro-batches"


def test_numbers_are_left_out_where_bars_are_narrow():
    bar = gantt.Bar("F", "12", 0, 1)
    for end, shown in ((1, True), (100, False)):
        figure = gantt.charts({"": [[bar, gantt.Bar("B", "12", end - 0.001, end)]]}, "ms")
        assert bool(figure.axes[0].texts) == shown


def test_simulated_and_measured_have_one_axis_of_time():
    figure = figure_of("simulated_and_measured")
    assert len(figure.axes) == 4 and len({axes.get_xlim() for axes in figure.axes}) == 1
    assert figure.axes[0].get_title() == "ZB-H1, simulated: bubble 11% of 324 ms"
    assert figure.axes[3].get_title().startswith("ZB-V, measured: bubble")
    assert not bars(figure, gantt.MARK, 0)  # one stage per rank
    assert len(bars(figure, gantt.MARK, 2)) == len(bars(figure, gantt.MARK, 3)) == 4 * 8 * 3


def test_a_pair_is_its_forward_then_its_backward_in_an_outline():
    found = simulate(schedules.dualpipe(2, 4))
    rows = gantt.rows_of(found, entered=2)
    pairs = [bar for bar in rows[0] if bar.pair]
    for forward, backward in zip(pairs[::2], pairs[1::2], strict=True):
        assert (forward.kind, backward.kind) == ("F", "B") and forward.pair == backward.pair
        assert (forward.start, backward.end) == forward.pair and forward.end == backward.start == forward.start + 1
    assert all(bar.marked == (int(bar.label) < 2) for row in rows for bar in row)
    assert pairs and "pair" in texts(figure_of("two_directions"))


def test_the_second_stage_of_a_rank_is_marked():
    rows = gantt.rows_of(simulate(schedules.interleaved(2, 2, 2)))
    assert [bar.marked for bar in rows[0]] == [False, False, True, True, True, True, False, False]
    assert rows[1][0] == gantt.Bar("F", "0", 1, 2)


@pytest.mark.parametrize("name", ["ZB-V", "naive"])
def test_the_axes_of_any_schedule_are_fixed(name):
    small, large = (figures.any_schedule(name, *sizes) for sizes in ((2, 4, 2, 1, 1, 1), (6, 12, 2, 3, 3, 3)))
    assert small.axes[0].get_xlim() == large.axes[0].get_xlim() == (0, 150)
    heights = [axes.get_ylim()[1] - axes.get_ylim()[0] for (axes,) in (small.axes, large.axes)]
    assert heights == [6, 6] and not faults(small) and not faults(large)


def test_the_widget_says_why_there_is_no_schedule():
    widget = widgets.any_schedule()
    *rows, line, image = widget.children
    controls = {control.description: control for row in rows for control in row.children}
    before = image.value
    controls["schedule"].value = "DualPipe"
    assert image.value != before and line.value == ""
    controls["p"].value = 3
    assert "must be even" in line.value


def test_both_orders_of_a_drawing_are_simulated():
    figure = figure_of("delayed_weight_gradients")
    assert [axes.get_title() for axes in figure.axes] == [
        "1F1B: bubble 6, all done at 18",
        "ZB-H1: bubble 2, all done at 14",
    ]
    labels = [label.get_text() for label in figure.axes[1].get_yticklabels()]
    assert labels[0] == "rank 2: 0 F ahead, W 2 late" and labels[2] == "rank 0: 2 F ahead, W 0 late"
    titles = [axes.get_title() for axes in figure_of("interleaved_order").axes]
    assert titles[1] == "interleaved, v = 2: bubble 3, all done at 21"


def test_drawings_name_what_the_text_names():
    assert {"send F1: not received yet", "send B0: not received yet"} <= set(texts(figures.deadlock()))
    words = {"outgoing", "incoming", 'post_send("F", 1, 2, out)', 'wait_recv("F", 1, 2)'}
    assert words <= set(texts(figures.p2p_buffers()))
    halves = figures.backward_in_two_halves()
    assert {"I of SwiGLU", "W of W₁"} <= set(texts(halves)) and len(bars(halves, PHASES["weight gradient"])) == 2


def test_a_cut_has_one_color_per_stage():
    figure = figure_of("cut_by_layers")
    assert [len(bars(figure, color)) for color in RANKS[:2]] == [7 + 3 + 1, 7 + 4 + 2]


def test_numbers_are_drawn_as_given():
    left, right = figure_of("links_and_traffic").axes
    assert [tuple(line.get_ydata()) for line in left.lines] == list(SPEEDS.values())
    assert [patch.get_width() for patch in right.patches] == list(KB.values()) and right.get_xscale() == "linear"
    left, right = figure_of("peak_memory").axes
    assert [list(line.get_ydata()) for line in left.lines] == [[5, 7, 9], [5, 5, 5]]
    assert [list(line.get_ydata()) for line in right.lines] == [[8, 9], [4, 5]] and left.get_ylim()[0] == 0
    shares = figure_of("busy_share").axes
    assert [[patch.get_height() for patch in axes.patches] for axes in shares] == [[50, 50], [97, 51]]
    top = figure_of("searched").axes[0]
    assert list(top.lines[0].get_ydata()) == [900, 800] and tuple(top.lines[1].get_xydata()[0]) == (4, 850)


def test_memory_is_stacked_in_its_colors():
    (axes,) = figure_of("memory_by_stages").axes
    heights = [[patch.get_height() for patch in bar] for bar in axes.containers]
    assert heights == [[MEASURED[p][kind] for p in MEASURED] for kind in MEASURED[1]]
    assert [to_hex(bar[0].get_facecolor()) for bar in axes.containers] == [MEMORY[kind].lower() for kind in MEASURED[1]]
    assert [patch.get_y() for patch in axes.containers[1]] == [15, 15 / 8]


def test_a_cell_of_the_heat_map_has_its_ratio():
    (axes,) = figure_of("bubble_ratios").axes
    places = {text.get_position(): text.get_text() for text in axes.texts}
    assert len(places) == len(RATIOS) and places[0.5, 0.5] == "7.00" and places[5.5, 3.5] == "0.03"


def test_lines_that_coincide_are_all_seen():
    (axes,) = figure_of("losses").axes
    lines = axes.lines[::2]
    assert [list(line.get_ydata()) for line in lines] == list(LOSSES.values())
    assert len({line._dash_pattern[0] for line in lines}) == 4 and list(lines[0].get_xdata()) == [1, 2, 3, 4]


def test_exchanges_have_the_color_of_communication():
    figure = figure_of("pair_overlap")
    assert [axes.get_title() for axes in figure.axes] == ["one after the other: 150 ms", "at the same time: 120 ms"]
    colors = [to_hex(each.get_facecolor()[0]) for each in figure.axes[0].collections]
    assert colors == [PHASES[k].lower() for k in ("backward", "communication", "forward", "communication")]


def test_published_rates_lie_above_the_diagonal():
    (axes,) = figure_of("bubble_rates").axes
    assert [tuple(line.get_xydata()[0]) for line in axes.lines[:-1]] == [pair for (pair,) in RATES.values()]
    assert axes.lines[0].get_color() == KINDS[0]


def test_a_naive_step_is_busy_for_its_share():
    busy = sum(end - start for row in NAIVE for _, start, end in row) / (4 * 138)
    assert f"busy for {busy:.0%} of the time" in figure_of("naive_step").axes[0].get_title()
