"""course_kit.figures.zero: what is drawn is what was given, and it can be read. CPU."""

import numpy as np
import pytest
from matplotlib.colors import to_hex, to_rgb
from torch import nn

from course_kit.figures import zero as figures
from course_kit.figures.style import KINDS, MEMORY, RANKS
from course_kit.figures.zero.drawings import GATHER, SCATTER
from course_kit.labs.collectives import published
from course_kit.labs.zero import STATES, gather_ratios
from course_kit.widgets.zero import states_widget
from course_lib.recompute.profiling import Span
from course_lib.single_gpu.memory import POLICIES, param_count, state_bytes
from course_lib.single_gpu.model import PRESETS
from course_lib.single_gpu.profile import Allocation, MemoryProfile
from course_lib.zero.full_sharding import gather_ratio
from figure_faults import faults

GiB, MiB = 2**30, 2**20
KEPT = [{part: size * (rank + 4) * MiB for part, size in zip(STATES, (4, 4, 9), strict=True)} for rank in range(4)]
RUN = {"loss": np.linspace(5, 3, 12), "used": np.linspace(0.2, 0.1, 12), "cosine": np.linspace(0.8, 0.6, 12)}
RUNS = [{name: values * (1 + rank / 10) for name, values in RUN.items()} for rank in range(4)]
LEVELS = {1: ([k * MiB for k in range(20)], 19 * MiB), 2: ([(2 + k % 3) * MiB for k in range(20)], 7 * MiB)}
BY_DEPTH = {1: {2: 4 * MiB, 4: 8 * MiB, 8: 16 * MiB}, 2: {2: MiB, 4: MiB, 8: MiB}}
MEASURED = {
    (stage, n): ({**state_bytes(1_000_000, "bf16", stage, n), "buffers": MiB}, 0, 1_000_000)
    for stage in range(4)
    for n in (1, 2, 4)
}


def spans():
    """Three steps of 100 ms."""
    found = []
    for start in (0.0, 100.0, 200.0):
        for name, begin, end, lane in (
            ("forward", 0, 30, "phases"),
            ("gloo:all_gather", 5, 20, "communication 1"),
            ("backward", 32, 80, "phases"),
            ("gloo:all_reduce", 50, 85, "communication 2"),
            ("wait", 80, 92, "phases"),
            ("update", 92, 98, "phases"),
            ("aten::mm", 33, 40, "phases"),
        ):
            found.append(Span(lane, name, start + begin, start + end))
    return found


def profile(sizes):
    """A profile of blocks of these MiB, each of which lives for three births."""
    made = MemoryProfile(nn.Linear(1, 1))
    made.allocations = [
        Allocation(size * MiB, 2 * k, 2 * k + 5, in_backward=k % 2 == 1) for k, size in enumerate(sizes)
    ]
    return made


DRAWN = {
    "stages": figures.stages,
    "flat_buffer": figures.flat_buffer,
    "stage_1_step": figures.stage_1_step,
    "two_buffers": figures.two_buffers,
    "hidden_gather": figures.hidden_gather,
    "stage_3_step": figures.stage_3_step,
    "memory_by_rank": lambda: figures.memory_by_rank(KEPT),
    "memory_by_stage": lambda: figures.memory_by_stage(7_000_000_000),
    "clipping": lambda: figures.clipping(RUNS),
    "step_over_time": lambda: figures.step_over_time(spans(), "stage 1, measured", with_next_forward=True),
    "gradient_memory": lambda: figures.gradient_memory(LEVELS, BY_DEPTH),
    "measured_by_stage": lambda: figures.measured_by_stage(MEASURED),
    "arenas": lambda: figures.arenas({name: profile([16, 64, 8, 32]) for name in ("nothing", "checkpoints", "both")}),
    "fits_by_stage": lambda: figures.fits_by_stage("llama3-8B", (1024, 4096, 16384)),
    "states_by_stage": figures.states_by_stage,
    "gather_over_forward": lambda: figures.gather_over_forward(
        {tokens: gather_ratios(tokens) for tokens in (4096, 8192, 16384)}
    ),
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_reader_can_read_it(name):
    assert not faults(DRAWN[name]())


def lengths(axes, part=0):
    """The bars of one part, from left to right or from the top."""
    bars = axes.containers[part]
    return [bar.get_height() if bars.orientation == "vertical" else bar.get_width() for bar in bars]


def test_stages_keep_two_two_and_twelve_bytes_in_full_or_a_fourth():
    for stage, axes in enumerate(figures.stages().axes):
        filled = sum(box.get_width() for box in axes.patches[1::2])  # each lies on a white box: all that there is
        each = (2, 2, 12)
        assert filled == sum(
            4 * size / (4 if stage >= first else 1) for size, first in zip(each, (3, 2, 1), strict=True)
        )


def test_shards_of_the_buffer_are_equal_and_tensors_lie_end_to_end():
    (axes,) = figures.flat_buffer().axes
    tensors, shards = axes.patches[:5], axes.patches[5:]
    assert [box.get_x() for box in tensors] == [0, 15, 18, 34, 37]
    assert [box.get_x() for box in shards] == [0, 10, 20, 30]


def test_each_rank_ends_a_step_of_stage_1_with_all_shards():
    (axes,) = figures.stage_1_step().axes
    last = [to_hex(box.get_facecolor()).upper() for box in axes.patches if box.get_x() > 14.3]
    assert last == [color.upper() for color in RANKS[:4]] * 4


def starts(axes, word):
    """Where the boxes whose text begins with `word` are, from their left edges."""
    at = {round(box.get_x() + box.get_width() / 2, 3): box.get_x() for box in axes.patches}
    return [at[round(text.get_position()[0], 3)] for text in axes.texts if text.get_text().startswith(word)]


def test_drawn_transfers_travel_under_the_next_compute():
    (axes,) = figures.two_buffers().axes
    assert starts(axes, "scatter")[:3] == starts(axes, "backward")[1:]
    plain, hidden = figures.hidden_gather().axes
    assert min(starts(plain, "F")) > max(starts(plain, "all-gather"))
    assert min(starts(hidden, "F")) < max(starts(hidden, "AG"))
    (axes,) = figures.stage_3_step().axes
    assert starts(axes, "RS")[0] == pytest.approx(starts(axes, "B1")[0])


def test_bars_of_memory_are_what_was_measured():
    (axes,) = DRAWN["memory_by_rank"]().axes
    assert lengths(axes, 2) == [rank["optimizer states"] / MiB for rank in KEPT]
    left, right = DRAWN["memory_by_stage"]().axes
    assert [float(text.get_text()) for text in left.texts] == [112, 38.5, 26.25, 14]
    assert right.lines[3].get_ydata()[3] == pytest.approx(14)
    for axes, n in zip(DRAWN["measured_by_stage"]().axes, (1, 2, 4), strict=True):
        assert lengths(axes, 3) == [1] * 4 and lengths(axes, 0)[3] == pytest.approx(2e6 / n / MiB)
        assert axes.lines[1].get_xdata()[0] == pytest.approx((4 + 12 / n) * 1e6 / MiB)


def test_lines_are_what_was_measured_on_axes_of_whole_steps():
    for axes, name in zip(DRAWN["clipping"]().axes, RUN, strict=True):
        assert [list(line.get_ydata()) for line in axes.lines] == [list(run[name]) for run in RUNS]
        assert all(tick == int(tick) for tick in axes.get_xticks())
    left, right = DRAWN["gradient_memory"]().axes
    assert list(left.lines[0].get_ydata()) == list(range(20)) and left.lines[3].get_ydata()[0] == 7
    assert list(right.lines[0].get_ydata()) == [4, 8, 16] and right.lines[1].get_color() == KINDS[2]


def test_a_step_shows_its_transfers_on_rows_of_their_own():
    (axes,) = DRAWN["step_over_time"]().axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["compute", "network 1", "network 2"]
    assert axes.get_xlim() == (0, 130)
    (alone,) = figures.step_over_time(spans(), "stage 3, measured").axes
    assert alone.get_xlim() == (0, 100) and GATHER != SCATTER


def test_an_arena_is_compared_with_what_is_alive():
    first, _, bars = DRAWN["arenas"]().axes
    assert lengths(bars, 1) == [104 / 1024] * 3 and first.lines[0].get_ydata()[0] == 104 / 1024
    assert len(first.collections) == 4


def test_models_fit_by_their_formulas_on_axes_that_stay():
    panels = DRAWN["fits_by_stage"]().axes
    assert all(lengths(axes, 3) == lengths(panels[0], 3) for axes in panels)
    limits = set()
    for gpus, policy, gib in ((1, "fp32", 16), (1024, "bf16", 192)):
        (axes,) = figures.states_by_stage("llama3-8B", gpus, policy, gib).axes
        params = param_count(PRESETS["llama3-8B"])
        wanted = [state_bytes(params, policy, stage, gpus)["parameters"] / GiB for stage in range(4)]
        assert lengths(axes) == pytest.approx(wanted) and axes.lines[0].get_xdata()[0] == gib
        assert axes.containers[0][0].get_facecolor()[:3] == pytest.approx(to_rgb(MEMORY["parameters"]))
        limits.add(axes.get_xlim())
    assert len(limits) == 1 and policy in POLICIES


def test_the_ratio_of_gather_and_forward_is_the_formula():
    (axes,) = DRAWN["gather_over_forward"]().axes
    bandwidth = 1e9 * published("all_gather", "median_gb_s")[0]
    assert axes.lines[1].get_ydata()[0] == pytest.approx(gather_ratio(8192, 8, bandwidth, 0.4 * 989.5e12))


def test_the_widget_draws_again():
    widget = states_widget()
    image, before = widget.children[-1], widget.children[-1].value
    widget.children[0].children[1].value = 64
    assert image.value != before
