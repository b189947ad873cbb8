"""course_kit.figures.data_parallel: what is drawn is what was given, and it can be read. CPU."""

import numpy as np
import pytest

from course_kit.figures import data_parallel as figures
from course_kit.labs.collectives import published
from course_kit.labs.data_parallel import published_scaling
from course_lib.data_parallel.replicas import overlap_ratio
from course_lib.single_gpu.memory import param_count
from course_lib.single_gpu.model import PRESETS
from figure_faults import faults

STEP = [("forward", 0.0, 30.0), ("backward", 30.0, 60.0), ("all-reduce", 50.0, 20.0), ("wait", 90.0, 25.0)]
RUN = {"loss": np.linspace(5, 3, 12), "averaged": np.linspace(2, 1, 12), "probe": np.linspace(2, 1, 12)}
SHOWN = {"1B": "llama3.2-1B", "8B": "llama3-8B", "70B": "llama3-70B"}
DRAWN = {
    "published_speed": lambda: figures.published_speed(published_scaling()),
    "replicas_of_a_model": figures.replicas_of_a_model,
    "buckets": figures.buckets,
    "one_bucket": figures.one_bucket,
    "drawn_steps": figures.drawn_steps,
    "measured_steps": lambda: figures.measured_steps({"naive": STEP, "overlap": STEP, "bucket": STEP}),
    "step_by_bucket_size": lambda: figures.step_by_bucket_size({0.01: [90, 95], 2: [70, 74], 25: [80, 81]}, [99, 104]),
    "drift": lambda: figures.drift([RUN] * 4, 5),
    "overlap": lambda: figures.overlap(published_scaling()),
    "what_fits": lambda: figures.what_fits(SHOWN, [1024, 2048, 4096, 8192, 16384]),
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_reader_can_read_it(name):
    assert not faults(DRAWN[name]())


def test_published_speeds_are_drawn_with_what_each_doubling_costs():
    (axes,) = DRAWN["published_speed"]().axes
    speed = [row["tokens_per_s_per_gpu"] for row in published_scaling()]
    assert [bar.get_height() for bar in axes.patches] == speed
    assert axes.texts[1].get_text() == f"{speed[1] / 1e3:.1f}k\n{speed[1] / speed[0] - 1:+.1%}"


def test_the_drawn_link_carries_one_transfer_at_a_time():
    naive, overlap, bucket = (figures.drawn_sends(mode) for mode in ("naive", "overlap", "bucket"))
    for sends in (naive, overlap, bucket):
        assert all(
            start + length <= after + 1e-9 for (start, length), (after, _) in zip(sends, sends[1:], strict=False)
        )
    assert naive[0][0] == 9 and overlap[0][0] == 3.5 and len(bucket) == 3
    assert sum(bucket[-1]) < sum(overlap[-1]) < sum(naive[-1])


def test_a_measured_step_counts_its_transfers_and_ends_with_the_last():
    titles = [axes.get_title() for axes in DRAWN["measured_steps"]().axes]
    assert titles[0] == "naive: 1 all-reduces, step 115 ms"


def test_medians_are_drawn_and_a_fault_is_marked():
    (axes,) = DRAWN["step_by_bucket_size"]().axes
    assert list(axes.lines[0].get_ydata()) == [92.5, 72, 80.5] and axes.lines[1].get_ydata()[0] == 101.5
    for axes in figures.drift([RUN] * 4, 3).axes:
        assert axes.lines[-1].get_xdata()[0] == 3 and len(axes.lines) == 5


def test_the_ratio_follows_its_arguments_on_a_fixed_axis():
    rows, limits = published_scaling(), set()
    bandwidths = dict(zip(published("all_reduce", "gpus"), published("all_reduce", "median_gb_s"), strict=True))
    for reached, size, larger in ((0.392, 4, 1), (1.0, 2, 8)):
        right = figures.overlap(rows, reached, size, larger).axes[1]
        last = rows[-1]
        wanted = overlap_ratio(
            int(4096 * last["micro_batch"] * larger), 256, 1e9 * bandwidths[256], 989.5e12 * reached, size
        )
        assert right.lines[0].get_ydata()[-1] == pytest.approx(wanted)
        limits.add(right.get_ylim())
    assert len(limits) == 1


def test_states_are_the_same_at_each_length():
    small, *_ = DRAWN["what_fits"]().axes
    heights = [[bar.get_height() for bar in part] for part in small.containers]
    assert all(len(set(part)) == 1 for part in heights[:3]) and heights[3] == sorted(heights[3])
    assert heights[0][0] == 2 * param_count(PRESETS["llama3.2-1B"]) / 2**30
