"""course_kit.figures.tensor_parallel: what is drawn is what was given, and it can be read. CPU."""

import numpy as np
import pytest
import torch

from course_kit.figures import tensor_parallel as figures
from course_kit.labs.tensor_parallel import published_ratios, published_scaling
from course_kit.widgets.tensor_parallel import layer_widget
from course_lib.recompute.profiling import Span
from course_lib.single_gpu.memory import activation_bytes, param_count, state_bytes
from course_lib.single_gpu.model import PRESETS
from course_lib.tensor_parallel.model import all_reduce_ratio
from figure_faults import faults

GiB, MiB = 2**30, 2**20
SMALL = PRESETS["small"]
DEGREES = (1, 2, 4)
SAVED = {tp: activation_bytes(SMALL, 4, 128, 4, fused_norm=False, tp=tp) for tp in DEGREES}
KEPT = {tp: (4 * param_count(SMALL, tp), SAVED[tp]) for tp in DEGREES}
RUNS = [np.linspace(4.6, 1.8, 10) + 0.01 * k for k in range(4)]
SPEED = published_scaling()
WIDTHS = {hidden: published_ratios(hidden, [row.tp for row in SPEED]) for hidden in (3072, 8192, 16384)}


def profile(waits=5.0):
    """Two steps of rank 0, forward 40 ms and backward 60, each with one all-reduce of 10 ms."""
    found = []
    for start in (0.0, 120.0):
        found += [Span("phases", "forward", start, start + 40), Span("phases", "backward", start + 40, start + 100)]
        for at in (10.0, 70.0):
            found += [Span("phases", "link 0 10", start + at, start + at + 1)]
            found += [Span("phases", "wait", start + at + 10 - waits, start + at + 10)]
    return sorted(found, key=lambda span: span.start_ms)


PROFILES = {"f, then linear layers": profile(), "ColumnMatmul": profile(2)}
MASKS = [(torch.rand(8, 8) > 0.4, torch.rand(8, 4) > 0.4) for _ in range(4)]
TRIALS = {"one seed: wrong inside": MASKS, "own seed: wrong outside": MASKS}
HELD = {"none": 30 * MiB, "full": 4 * MiB, "in parts": 2 * MiB}
SENT = {"none": 9 * MiB, "full": 12 * MiB, "in parts": 13 * MiB}
PREDICTED = [13923, 12089, 9568, 6065, 1900]
DRAWN = {
    "split_matmul": figures.split_matmul,
    "mlp_between_f_and_f_star": figures.mlp_between_f_and_f_star,
    "heads_of_ranks": figures.heads_of_ranks,
    "loss_of_a_token": figures.loss_of_a_token,
    "block_and_shapes": figures.block_and_shapes,
    "backward_of_column_layer": figures.backward_of_column_layer,
    "matmul_in_chunks": figures.matmul_in_chunks,
    "memory_of_stage_3": lambda: figures.memory_of_stage_3("llama3-70B", (1024, 4096, 16384), 512),
    "memory_by_tp": lambda: figures.memory_by_tp(KEPT, SMALL),
    "losses": lambda: figures.losses(RUNS),
    "steps_over_time": lambda: figures.steps_over_time(PROFILES),
    "dropout_masks": lambda: figures.dropout_masks(TRIALS),
    "checkpoints": lambda: figures.checkpoints(HELD, SENT),
    "published_speed": lambda: figures.published_speed(SPEED),
    "speed_by_ratio": lambda: figures.speed_by_ratio(SPEED, PREDICTED, WIDTHS),
    "layer_on_the_clock": figures.layer_on_the_clock,
    "fits_by_tp": lambda: figures.fits_by_tp("llama3-70B", (1024, 4096, 16384), (1, 8, 16)),
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_reader_can_read_it(name):
    assert not faults(DRAWN[name]())


def edges(axes):
    """(left, right) of each box by its text."""
    at = {round(box.get_x() + box.get_width() / 2, 3): box for box in axes.patches}
    found = {}
    for text in axes.texts:
        if (box := at.get(round(text.get_position()[0], 3))) is not None:
            found[text.get_text()] = (box.get_x(), box.get_x() + box.get_width())
    return found


def test_shards_are_drawn_side_by_side_or_one_below_another():
    by_columns, by_rows = figures.split_matmul().axes
    assert len({box.get_y() for box in by_columns.patches[1:5]}) == 1
    assert len({box.get_x() for box in by_columns.patches[1:5]}) == 4
    assert len({box.get_x() for box in by_rows.patches[4:8]}) == 1


@pytest.mark.parametrize("draw", [figures.mlp_between_f_and_f_star, figures.block_and_shapes, figures.heads_of_ranks])
def test_texts_stay_in_their_boxes(draw):
    for axes in draw().axes:
        for text in axes.texts:
            words = text.get_window_extent()
            for box in axes.patches:
                extent = box.get_window_extent()
                middle = (words.x0 + words.x1) / 2, (words.y0 + words.y1) / 2
                if extent.contains(*middle) and extent.width < 150:
                    assert extent.x0 + 1 < words.x0 and words.x1 < extent.x1 - 1, text.get_text()


def test_f_precedes_the_columns_and_f_star_follows_the_rows():
    (axes,) = figures.mlp_between_f_and_f_star().axes
    at = edges(axes)
    assert at["f"][1] < at["A, columns"][0] and at["B, rows"][1] < at["f*"][0]
    first, second = figures.block_and_shapes().axes
    assert edges(first)["f"] == edges(second)["f"]


def test_two_ranks_have_a_copy_of_each_of_two_heads():
    four, two = (
        [text.get_text() for text in axes.texts if text.get_text()[0] == "k"] for axes in figures.heads_of_ranks().axes
    )
    assert four == ["k0, v0", "k1, v1", "k2, v2", "k3, v3"]
    assert two == ["k0, v0", "k0, v0", "k1, v1", "k1, v1"]


def test_only_the_rank_of_the_target_adds_its_logit():
    (axes,) = figures.loss_of_a_token().axes
    texts = [text.get_text() for text in axes.texts]
    assert texts.count("0") == 3 and texts.count("z - m") == 1 and {f"max {rank}" for rank in range(4)} < set(texts)


def test_sums_travel_while_the_next_matmul_is_computed():
    apart, together = map(edges, figures.backward_of_column_layer().axes)
    assert apart["sum of dX"][0] >= apart["dW"][1] and together["sum of dX"][0] == pytest.approx(together["dW"][0])
    one, four = map(edges, figures.matmul_in_chunks().axes)
    assert one["sum"][0] >= one["matmul"][1] and four["sum 0"][0] == pytest.approx(four["matmul 1"][0])


def lengths(axes, part=0):
    """The bars of one part."""
    bars = axes.containers[part]
    return [bar.get_height() if bars.orientation == "vertical" else bar.get_width() for bar in bars]


def test_bars_of_memory_are_what_was_measured():
    weights, activations = DRAWN["memory_by_tp"]().axes
    assert lengths(weights) == [size / MiB for size, _ in KEPT.values()]
    assert lengths(activations) == [size / MiB for _, size in KEPT.values()]
    drawn = activations.collections[0].get_segments()
    assert [line[0][1] for line in drawn] == pytest.approx([SAVED[tp] / MiB for tp in DEGREES])
    held, sent = DRAWN["checkpoints"]().axes
    assert lengths(held) == [30, 4, 2] and lengths(sent) == [9, 12, 13]
    (axes,) = DRAWN["memory_of_stage_3"]().axes
    assert [round(size) for size in lengths(axes, 3)] == [21, 85, 340]


def test_states_shrink_with_tp_and_activations_less():
    panels = DRAWN["fits_by_tp"]().axes
    for axes, tp in zip(panels, (1, 8, 16), strict=True):
        states = state_bytes(param_count(PRESETS["llama3-70B"], tp), "bf16")
        assert lengths(axes, 0) == pytest.approx([states["parameters"] / GiB] * 3)
    assert lengths(panels[2], 3)[1] == pytest.approx(28.75)


def test_lines_are_the_losses_of_the_runs():
    left, right = DRAWN["losses"]().axes
    assert [list(line.get_ydata()) for line in left.lines] == [list(run) for run in RUNS]
    assert right.lines[3].get_ydata()[0] == pytest.approx(0.03)
    assert all(tick == int(tick) for tick in left.get_xticks())


def test_a_step_is_titled_with_its_phases_and_their_waits():
    first, second = DRAWN["steps_over_time"]().axes
    assert (
        first.get_title() == "f, then linear layers: forward 40 ms, 12% of it waiting; backward 60 ms, 8% of it waiting"
    )
    assert "5% of it" in second.get_title()
    (alone, _) = figures.steps_over_time({"one": profile(), "two": profile()}, phases=("forward",)).axes
    assert "backward" not in alone.get_title() and alone.get_xlim()[1] < 60


def test_each_rank_has_its_masks_in_its_color():
    figure = DRAWN["dropout_masks"]()
    assert len(figure.axes) == 16
    drawn = [masks[kind] for kind in (0, 1) for masks in MASKS]
    for axes, mask in zip(figure.axes[:8], drawn, strict=True):
        assert torch.equal(torch.tensor(axes.images[0].get_array()), mask)


def test_published_and_predicted_speeds_are_drawn():
    left, right = DRAWN["published_speed"]().axes
    assert lengths(left) == [row.tokens_per_s for row in SPEED] and lengths(right) == [row.max_batch for row in SPEED]
    left, right = DRAWN["speed_by_ratio"]().axes
    assert list(left.lines[1].get_ydata()) == PREDICTED
    assert [list(line.get_ydata()) for line in right.lines[:3]] == list(WIDTHS.values())


def test_a_layer_on_the_clock_follows_its_arguments_on_fixed_axes():
    limits = set()
    for hidden, gb_s, tp in ((1024, 12, 64), (16384, 900, 2)):
        left, right = figures.layer_on_the_clock(hidden, gb_s, tp).axes
        ratio = all_reduce_ratio(hidden, tp, gb_s * 1e9, 0.5 * 989.5e12)
        bars = [bar.get_width() for bar in left.patches]
        assert sum(bars[1::2]) / sum(bars[::2]) == pytest.approx(ratio)
        assert right.get_ylim()[0] < ratio < right.get_ylim()[1] and right.lines[1].get_ydata()[0] == ratio
        limits.add((left.get_xlim(), right.get_ylim(), right.get_xlim()))
    assert len(limits) == 1


def test_the_widget_draws_again():
    widget = layer_widget()
    image, before = widget.children[-1], widget.children[-1].value
    widget.children[0].children[2].value = 64
    assert image.value != before
