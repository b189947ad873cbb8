"""course_kit.figures.sequence_parallel, context_parallel: what is drawn is what was given, and can be read. CPU."""

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex

from course_kit.figures import context_parallel, sequence_parallel
from course_kit.figures.style import PHASES, RANKS
from course_kit.labs.context_parallel import scores_of
from course_kit.labs.sequence_parallel import published_scaling
from course_lib.context_parallel.blocks import visible
from course_lib.context_parallel.model import exchange_ratio
from course_lib.sequence_parallel.shards import chunks_of
from course_lib.single_gpu.memory import gpt_activation_bytes, param_count, state_bytes
from course_lib.single_gpu.model import PRESETS
from figure_faults import faults

GiB, MiB = 2**30, 2**20
SMALL, LARGE = PRESETS["llama3-8B"], PRESETS["llama3-70B"]
LAYER = [
    ("phase", "forward", 0.0, 20.0), ("phase", "backward", 20.0, 60.0), ("network", "AG", 2.0, 6.0),
    ("network", "RS", 18.0, 24.0), ("wait", "", 3.0, 6.0),
]  # fmt: skip
RING = [[("attention", "", 10.0 * i, 10.0 * i + 9) for i in range(4)] + [("network", "", 1.0, 12.0)] for _ in range(4)]
LAYOUTS = {
    "no parallelism": (1, False, 1),
    "tp 2": (2, False, 1),
    "tp 2, cp 4": (2, False, 4),
    "tp 8 + SP, cp 4": (8, True, 4),
}
LENGTHS = [2**n for n in (10, 12, 14, 16, 17)]
KEPT = {"TP": [40 * MiB, 30 * MiB, 25 * MiB], "TP + SP": [40 * MiB, 20 * MiB, 10 * MiB]}
DRAWN = {
    "unsharded_activations": lambda: sequence_parallel.unsharded_activations(LARGE, 16384, (1, 2, 4, 8, 16)),
    "regions": sequence_parallel.regions,
    "backward_overlap": sequence_parallel.backward_overlap,
    "swapped_gates": lambda: sequence_parallel.swapped_gates(
        np.linspace(5, 3, 20), np.linspace(5, 3.1, 20), [[1.0, 0.9]] * 4
    ),
    "saved_by_degree": lambda: sequence_parallel.saved_by_degree((1, 2, 4), KEPT, KEPT),
    "layer_over_time": lambda: sequence_parallel.layer_over_time({"TP": LAYER, "TP + SP": LAYER}),
    "published_scaling": lambda: sequence_parallel.published_scaling(published_scaling()),
    "memory_by_degree": lambda: sequence_parallel.memory_by_degree(LARGE, (1, 8, 16), (1024, 4096, 16384)),
    "merged_blocks": lambda: context_parallel.merged_blocks(torch.linspace(-2, 2, 16)),
    "ring": context_parallel.ring,
    "ring_step": lambda: context_parallel.ring_step(2, "zigzag"),
    "masks": context_parallel.masks,
    "visible_blocks": context_parallel.visible_blocks,
    "all_to_all": context_parallel.all_to_all,
    "work_by_rank": lambda: context_parallel.work_by_rank(
        {"contiguous": [40, 90, 150, 200], "zigzag": [120, 121, 119, 122]},
        {order: [scores_of(rank, 4, order, 64) for rank in range(4)] for order in ("contiguous", "zigzag")},
    ),
    "saved_and_peak": lambda: context_parallel.saved_and_peak(
        (1, 2, 4),
        KEPT["TP + SP"],
        KEPT["TP + SP"],
        {"all_gather": [4, 3, 2.5], "ring": [4, 2, 1], "ulysses": [4, 2.2, 1.2]},
    ),
    "layouts_for_long_sequences": lambda: context_parallel.layouts_for_long_sequences(SMALL, LAYOUTS, LENGTHS),
    "overlap": lambda: context_parallel.overlap({"all_gather": RING, "ring": RING}),
    "exchange_ratios": lambda: context_parallel.exchange_ratios([2**n for n in range(10, 18)], 5e14),
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_reader_can_read_it(name):
    assert not faults(DRAWN[name]())


def test_bars_are_what_was_given():
    (axes,) = DRAWN["saved_by_degree"]().axes
    assert [bar.get_height() for bar in axes.patches] == [40, 30, 25, 40, 20, 10]
    left, right = DRAWN["published_scaling"]().axes
    rows = [row for row in published_scaling() if row["sequence_parallel"] == "yes"]
    assert [bar.get_height() for bar in left.containers[1]] == [
        float(row["tokens_per_s_per_gpu"]) / 1e3 for row in rows
    ]
    assert [bar.get_height() for bar in right.containers[1]] == [int(row["max_batch"]) for row in rows]
    left, right = DRAWN["saved_and_peak"]().axes
    assert [bar.get_height() for bar in left.patches] == [40, 20, 10]
    assert [bar.get_height() for bar in right.containers[2]] == [4, 2.2, 1.2]
    axes = DRAWN["work_by_rank"]().axes[0]
    assert [bar.get_height() for bar in axes.patches] == [40, 90, 150, 200]


def test_activations_follow_the_formulas():
    (axes,) = DRAWN["unsharded_activations"]().axes
    unit = 16384 * LARGE.hidden * LARGE.layers / GiB
    assert [bar.get_height() for bar in axes.patches] == pytest.approx(
        [10 * unit] * 5 + [24 * unit / t for t in (1, 2, 4, 8, 16)]
    )
    axes = DRAWN["memory_by_degree"]().axes[1]
    kept = gpt_activation_bytes(LARGE.layers, LARGE.hidden, LARGE.heads, 1, 16384, "selective", tp=8, sp=True)
    assert axes.patches[-1].get_height() == pytest.approx(kept / GiB)
    axes = DRAWN["layouts_for_long_sequences"]().axes[0]
    states = sum(state_bytes(param_count(SMALL, 1), "bf16, no master weights").values()) / GiB
    kept = gpt_activation_bytes(SMALL.layers, SMALL.hidden, SMALL.heads, 1, 2**17, "selective") / GiB
    assert axes.texts[-1].get_text() == f"{states + kept:,.0f}" and axes.get_ylim()[1] < states + kept


def test_weights_of_blocks_make_the_full_softmax():
    z = torch.linspace(-2, 2, 16)
    _, weighted, weights = context_parallel.merged_blocks(z).axes
    assert [bar.get_height() for bar in weighted.patches] == pytest.approx(z.softmax(0).tolist())
    assert sum(bar.get_height() for bar in weights.patches) == pytest.approx(1)


def test_blocks_are_those_that_a_rank_computes():
    """`visible` finds the same: rank 1 of two has chunks 1 and 2, rank 0 has 0 and 3."""
    of_0, of_1 = context_parallel.visible_blocks(rank=1, n=2).axes
    assert [text.get_text() for text in of_0.texts] == ["full", "-", "full", "-"]
    assert [text.get_text() for text in of_1.texts] == ["causal", "-", "full", "causal"]
    (tile,) = visible(chunks_of(1, 2, "zigzag"), chunks_of(0, 2, "zigzag"), True)
    assert (tile.rows, tile.columns, tile.causal) == (slice(0, 2), slice(0, 1), False)


def test_a_ring_hands_keys_on_and_masks_have_the_colors_of_their_ranks():
    words = [text.get_text() for text in context_parallel.ring_step(2).axes[0].texts if text.get_text()]
    assert words[:4] == ["Q0", "K2 V2", "Q1", "K3\nV3"]
    assert "contiguous: 10, 26, 42, 58 cells" == context_parallel.masks().axes[0].get_title()
    left, right = context_parallel.all_to_all().axes
    assert [to_hex(box.get_facecolor()) for box in left.patches[:4]] == [RANKS[0].lower()] * 4
    assert [to_hex(box.get_facecolor()) for box in right.patches[:4]] == [color.lower() for color in RANKS[:4]]


def test_spans_are_where_they_were_measured():
    axes = DRAWN["layer_over_time"]().axes[0]
    assert axes.get_title() == "TP: waits 3.0 of 60.0 ms"
    colors = [to_hex(bars.get_facecolor()[0]) for bars in axes.collections]
    assert colors[:2] == [PHASES["forward"].lower(), PHASES["backward"].lower()] and len(colors) == 5
    axes = DRAWN["overlap"]().axes[1]
    assert [text.get_text() for text in axes.texts][:5] == ["0", "1", "2", "3", "K, V"]
    (axes,) = DRAWN["exchange_ratios"]().axes
    assert axes.lines[0].get_ydata()[0] == exchange_ratio(1024, 32, 8, 450e9, 5e14)
