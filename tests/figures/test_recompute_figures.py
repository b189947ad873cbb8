"""course_kit.figures.recompute: what is drawn is what was given, and it can be read. CPU."""

import pytest
import torch
from matplotlib.colors import to_hex
from torch.profiler import record_function

from course_kit.figures import recompute as figures
from course_kit.figures.style import MEMORY
from course_kit.labs import recompute as labs
from course_lib.recompute.profiling import profile_step
from course_lib.single_gpu.memory import activation_bytes, gpt_activation_bytes, gpt_param_count
from course_lib.single_gpu.model import PRESETS
from figure_faults import faults

GiB, MiB = 2**30, 2**20
LLAMA, COUNTS = PRESETS["llama3-8B"], [2, 4, 8]
KEPT = dict(zip(labs.mode_styles(), (130, 60, 90, 88, 50, 12), strict=True))
TIMES = dict(zip(labs.mode_styles(), (1.2, 1.35, 1.0, 1.01, 1.1, 1.3), strict=True))


def profiled():
    """Two steps with phases, of a profile."""
    model = torch.nn.Linear(64, 64)

    def step():
        for phase in ("data", "forward", "backward", "optimizer"):
            with record_function(phase):
                model(torch.randn(64, 64)).sum()

    return profile_step(step, active=2)


DRAWN = {
    "activations_by_batch": lambda: figures.activations_by_batch(LLAMA, 4096, [1, 4, 16, 64, 256, 1024]),
    "replay": figures.replay,
    "step_flops": lambda: figures.step_flops(labs.small_flops_by_part(), {"none": 13.4e9, "full": 16.5e9}),
    "time_against_memory": lambda: figures.time_against_memory(
        {name: size * MiB for name, size in KEPT.items()}, TIMES, labs.mode_styles()
    ),
    "utilization": lambda: figures.utilization({"none": (0.52, 0.55), "full": (0.42, 0.57)}, 99e9),
    "accumulation": figures.accumulation,
    "gradient_errors": lambda: figures.gradient_errors(COUNTS, {"usual loop": [1e-1] * 3, "accumulate": [1e-7] * 3}),
    "peaks_by_batch": lambda: figures.peaks_by_batch([1, 2, 4], {"at once": [40, 60, 100], "by one": [40] * 3}, 29),
    "sum_errors": lambda: figures.sum_errors(COUNTS, {"BF16": [1e-3, 3e-3, 9e-3], "FP32": [1e-8] * 3}),
    "gpu_trace": figures.gpu_trace,
    "step_timelines": lambda: figures.step_timelines(slow=profiled(), repaired=profiled()),
    "activations_by_model": figures.activations_by_model,
    "model_memory": lambda: figures.model_memory("8B", "none"),
    "peaks_by_micro_batch": lambda: figures.peaks_by_micro_batch(
        (8, 2, 1), {"none": [110, 60, 50], "matmuls": [80, 55, 48], "full": [60, 50, 47]}, 29
    ),
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_reader_can_read_it(name):
    assert not faults(DRAWN[name]())


def test_lines_are_what_was_given():
    (axes,) = figures.activations_by_batch(LLAMA, 4096, [1, 16]).axes
    assert list(axes.lines[0].get_ydata()) == [activation_bytes(LLAMA, n, 4096) / GiB for n in (1, 16)]
    (axes,) = DRAWN["sum_errors"]().axes
    assert [list(line.get_ydata()) for line in axes.lines] == [[1e-3, 3e-3, 9e-3], [1e-8] * 3]
    (axes,) = DRAWN["peaks_by_batch"]().axes
    assert [line.get_label() for line in axes.lines] == ["at once", "by one", "parameters and gradients"]
    assert axes.lines[2].get_ydata()[0] == 29 and axes.get_ylim()[0] == 0
    (axes,) = DRAWN["gradient_errors"]().axes
    assert axes.xaxis_inverted() and list(axes.lines[1].get_ydata()) == [1e-7] * 3


def test_bars_are_what_was_given():
    (axes,) = DRAWN["step_flops"]().axes
    ends = [axes.patches[last].get_x() + axes.patches[last].get_width() for last in (4, 9)]
    flops = labs.small_flops_by_part()
    assert ends == [pytest.approx(sum(parts.values()) / 1e9) for parts in flops.values()]
    assert flops["full"]["down"] == flops["none"]["down"] and flops["full"]["K, V"] * 3 == flops["none"]["K, V"] * 4
    (axes,) = DRAWN["utilization"]().axes
    assert [text.get_text() for text in axes.texts] == ["MFU 52%", "HFU 55%", "MFU 42%", "HFU 57%"]
    (axes,) = DRAWN["peaks_by_micro_batch"]().axes
    assert [bar.get_height() for bar in axes.patches] == [110, 60, 50, 80, 55, 48, 60, 50, 47]


def test_a_marker_stands_where_its_way_was_measured():
    (axes,) = DRAWN["time_against_memory"]().axes
    places = [(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines[:-1]]
    assert places == list(zip(KEPT.values(), TIMES.values(), strict=True))
    assert [line.get_markerfacecolor() == "white" for line in axes.lines[:-1]] == [True, True] + [False] * 4


def test_the_axis_of_a_model_stays_when_the_mode_changes():
    limits = set()
    for mode in ("none", "selective", "full"):
        (axes,) = figures.model_memory("70B", mode).axes
        limits.add(axes.get_ylim())
        *states, activations = axes.containers
        sizes = [gpt_activation_bytes(80, 8192, 64, 1, seq, mode) / GiB for seq in figures.LENGTHS]
        assert [bar.get_height() for bar in activations] == sizes
        assert states[2][0].get_height() == 8 * gpt_param_count(8192, 80, 128256) / GiB
        assert to_hex(states[1][0].get_facecolor()) == MEMORY["gradients"].lower()
    assert len(limits) == 1
    assert figures.model_memory("8B", "none").axes[0].get_ylim() not in limits


def test_a_timeline_has_the_phases_of_its_first_step():
    for axes in DRAWN["step_timelines"]().axes:
        assert len(axes.get_yticklabels()) >= 2 and "ms, profiler on" in axes.get_title()
    names = [text.get_text() for text in DRAWN["step_timelines"]().legends[0].get_texts()]
    assert names == ["data", "forward", "backward", "clip", "optimizer", "other operators"]
