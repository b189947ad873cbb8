"""course_kit.labs.zero, and what the checks of notebook 05 compare with. CPU, gloo."""

from __future__ import annotations

import numpy as np
import pytest

from course_kit.checks.zero import check_05_13
from course_kit.labs import zero as labs
from course_kit.labs.zero.models import MiB
from course_lib.recompute.profiling import Span
from course_lib.single_gpu.memory import param_count
from course_lib.single_gpu.model import PRESETS


def test_stage_1_by_hand_sends_what_an_all_reduce_does_but_for_the_padding(ranks):
    for sent, all_reduce in ranks(labs.sent_by_hand):
        assert 0 <= sent - all_reduce < 2 * 4 * 4


def test_data_parallel_ranks_keep_the_same_and_all_of_it(ranks):
    params = param_count(PRESETS["debug"])
    for kept, differ in ranks(labs.data_parallel_memory, PRESETS["debug"]):
        assert not differ
        assert kept["parameters"] == 4 * params
        assert kept["optimizer states"] == pytest.approx(8 * params, rel=1e-2)
        assert kept["gradients"] == pytest.approx(4 * params, rel=1e-2)


def test_only_the_right_run_of_the_clipping_lab_updates_along_the_gradient(ranks):
    runs = labs.clipped_runs(ranks)
    assert labs.clipped_runs(ranks) is runs, "the same runs every time"
    for fault, run in zip(labs.FAULTS, runs, strict=True):
        pieces, used, cosine = (np.array([told[name] for told, _ in run]) for name in ("shard", "used", "cosine"))
        whole = np.sqrt((pieces**2).sum(axis=0))
        expected = {None: whole[None], "own part": pieces, "sum of norms": pieces.sum(axis=0)[None]}[fault]
        np.testing.assert_allclose(used, np.broadcast_to(expected, used.shape), rtol=1e-5)
        assert (cosine.min() > 0.9999) == (fault != "own part")
        assert not any(differ for _, differ in run), "the replicas agree, whatever is wrong"


def test_stage_3_sends_three_times_the_parameters_less_its_last_unit(ranks):
    (calls, sent), (_, replicated) = (ranks(labs.sent_per_step, stage, labs.EIGHT_UNITS)[0] for stage in (3, 0))
    assert calls == 15 and sent / replicated == pytest.approx(1.5, rel=0.02)


def test_replicas_divide_the_states_less_and_send_an_all_reduce_of_pieces(ranks):
    (kept, gathered, scattered, reduced), (twice, less, _, pieces) = (
        ranks(labs.sent_with_replicas, replicas, labs.EIGHT_UNITS)[0] for replicas in (1, 2)
    )
    assert reduced == 0 and twice == pytest.approx(2 * kept, rel=1e-2)
    assert less / gathered == pytest.approx(2 / 3, rel=1e-2) and pieces == pytest.approx(4 * twice, rel=1e-2)


def test_a_state_of_four_ranks_goes_on_with_two(ranks):
    four = ranks(labs.in_group, 4, labs.train_on, None, None, 4)[0]
    halfway = ranks(labs.in_group, 4, labs.train_on, None, None, 2)[0]
    two = ranks(labs.in_group, 2, labs.train_on, *halfway, 2)[0]
    assert labs.farthest(two[1], four[1])[1] < 1e-4


def test_offload_moves_two_bytes_per_owned_parameter_each_way(ranks):
    owned = param_count(PRESETS["debug"]) / 4
    values, states, *moved = ranks(labs.offloaded, PRESETS["debug"], True)[0]
    assert moved == pytest.approx([2 * owned] * 2, rel=1e-2)
    assert values == pytest.approx(8 * owned, rel=1e-2) and states == pytest.approx(12 * owned, rel=1e-2)


def test_the_memory_table_says_how_far_each_part_is_from_the_formula(ranks):
    measured = {(stage, 2): ranks(labs.in_group, 2, labs.memory_by_stage, stage, labs.WIDE)[0] for stage in (0, 2, 3)}
    head, *lines, last = labs.memory_table(measured).splitlines()
    assert head.split()[:2] == ["stage", "ranks"] and [line[0] for line in lines] == ["0", "2", "3"]
    assert last.startswith("MiB, and how far from the formula: at most 0.")
    kept, rest, params = measured[2, 2]
    assert f"{kept['parameters'] / MiB:.2f}" in lines[1] and rest < 0.01 * params
    measured[0, 2] = measured[3, 2]
    with pytest.raises(AssertionError, match="the formulas do not hold"):
        labs.memory_table(measured)


def test_stage_2_keeps_pieces_and_two_buffers_and_stage_1_all_gradients(ranks):
    (levels, reserved, pieces), (levels_2, reserved_2, pieces_2) = (
        ranks(labs.gradient_bytes, stage, PRESETS["debug"], 0.02)[0] for stage in (1, 2)
    )
    assert levels == sorted(levels) and pieces == 0 and reserved >= levels[-1]
    assert max(levels_2) <= reserved_2 < reserved and pieces_2 == pytest.approx(reserved / 4, rel=0.02)


def test_the_spans_of_a_step_begin_at_its_forward():
    found = [Span("phases", "forward", 10.0 * i, 10.0 * i + 4) for i in range(3)]
    found += [Span("communication 2", "gloo:all_gather", 9.0, 12.0), Span("CPU", "aten::mm", 11.0, 12.0)]
    shown, length = labs.step_spans(found, {"forward", "gloo:all_gather"}, with_next_forward=True)
    assert length == 14.0 and [(s.lane, s.name, s.start_ms, s.end_ms) for s in shown] == [
        ("compute", "forward", 0.0, 4.0),
        ("compute", "forward", 10.0, 14.0),
        ("network 2", "gloo:all_gather", 0, 2.0),
    ]
    assert labs.step_spans(found, {"forward"}, with_next_forward=False)[1] == 10.0


def test_the_replay_loses_what_the_check_says():
    alive, arena = labs.arena_gib(labs.recorded())
    assert 100 * (arena / alive - 1) == pytest.approx(check_05_13.PERCENT, abs=0.05)
    assert f"{alive:6.2f} GiB, arena {arena:6.2f} GiB: +13.24%" in labs.arena_line("1B", labs.recorded())
