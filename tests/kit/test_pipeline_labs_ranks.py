"""course_kit.labs.pipeline, the replay of notebook 09's checks. CPU, gloo."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from course_kit.checks.pipeline import check_09_09, lists
from course_kit.labs import pipeline as labs
from course_kit.labs.pipeline import faults, halves, training
from course_lib.pipeline import simulate, validate
from course_lib.pipeline.actions import Action
from course_lib.pipeline.schedules import SCHEDULES, afab, interleaved, num_stages, one_f_one_b, schedule_by_name
from course_lib.pipeline.stages import split_stages
from course_lib.single_gpu.model import ModelConfig, Transformer

NAMES = [name for name in SCHEDULES if name != "dualpipe"] + ["interleaved"]


@pytest.mark.parametrize("name", NAMES)
def test_the_replay_of_the_checks_is_the_simulator(name):
    for p, m in ((2, 4), (4, 8)):
        schedule = schedule_by_name(name, p, m)
        assert lists.fault(schedule, num_stages(schedule), m) == ""
        assert lists.held(schedule) == validate(schedule, m)
        for times in ((1, 1, 1), (3, Fraction(2, 7), 5)):
            found = simulate(schedule, *times)
            assert (lists.bubble(schedule, *times), lists.cost(schedule, *times)) == (found.bubble, found.cost)


def test_the_replay_finds_what_is_wrong():
    good = one_f_one_b(2, 2)
    late = [good[0], sorted(good[1], key=lambda action: action.kind)]  # both B's first
    assert "deadlock" in lists.fault(late, 2, 2)
    assert "has F" in lists.fault([good[0][:-1], good[1]], 2, 2)
    assert "no micro-batch 1" in lists.fault(good, 2, 1)
    apart = [[Action("F", 0, 0)], [Action("B", 0, 0)]]
    assert "more than one rank" in lists.fault(apart, 1, 1)


def test_the_list_of_the_check_is_1f1b():
    assert check_09_09.one_f_one_b(4, 6) == one_f_one_b(4, 6)


def test_the_naive_step_has_the_gradients_of_one_process_but_for_the_tied_matrix(ranks):
    results, (loss, expected) = ranks(labs.naive_step, 8, labs.TINY), labs.one_process()
    assert results[-1][0] == pytest.approx(loss, abs=1e-5)
    off = {name for _, own, _ in results for name, g in own.items() if labs.relative_error(g, expected[name]) > 1e-5}
    assert off == {"embedding.weight", "head.weight"}
    for _, _, spans in results:
        assert [kind for kind, *_ in spans] == ["F", "B"] and all(start < end for _, start, end in spans)
    for (_, _, before), (_, _, after) in zip(results, results[1:], strict=False):  # one zero: what is sent comes later
        assert before[0][2] <= after[0][1] and after[1][2] <= before[1][1]


def test_ranks_on_the_pretend_device_do_their_lists(ranks):
    schedule = interleaved(4, 4, 2)
    found, real = labs.timed(ranks, schedule, (2, 2, 2))
    assert found.busy == [4 * 6] * 4
    assert [[span[:3] for span in row] for row in real] == [[tuple(action) for action in row] for row in schedule]
    shortest = {"F": 1, "B": 2}  # ms, two stages a rank
    assert all(end - start >= shortest[kind] for row in real for kind, _, _, start, end in row)
    ended = {(kind, stage, i): end for row in real for kind, stage, i, _, end in row}
    for kind, stage, i, start, _ in (span for row in real for span in row):
        assert ended.get((kind, stage + (1 if kind == "B" else -1), i), 0) <= start


def test_each_fault_of_the_lab_shows_where_the_hints_say(ranks):
    runs = {kind: beside for kind, (_, beside) in zip(faults.RUNS, labs.lab_runs(ranks, 2).values(), strict=True)}
    right = pytest.approx(1, abs=1e-4)
    assert [ratio for ratio, _ in runs["sound"]] == [right] * 4
    ratios, cosines = zip(*runs["scaled"], strict=True)
    assert ratios[:3] == (right,) * 3 and ratios[3] == pytest.approx(1 / 8, rel=1e-3) and cosines == (right,) * 4
    assert [ratio == right for ratio, _ in runs["lost"]] == [True, True, False, True]
    assert [ratio == right for ratio, _ in runs["cut"]] == [False, False, True, True]


def test_both_halves_have_the_flops_of_a_backward():
    stage, x = split_stages(Transformer(labs.TINY), 4)[1], torch.randn(1, 8, 32)
    assert labs.flops_of_halves(stage, x) == (0.5, 0.5)
    assert len(labs.ms_of_halves(stage, x, 3)) == 5
    out, spans = halves.split_ms(stage, x, lambda out: out)
    assert out.shape == x.shape and len(spans) == 3


def test_times_are_by_kind_and_stage():
    times = labs.times_of(split_stages(Transformer(labs.TINY), 4), *labs.batch_of(1), repeats=1)
    assert list(times) == ["F", "I", "W"] and all(len(spans) == 4 for spans in times.values())


def test_a_run_that_is_off_one_process_is_an_error():
    numbers, weights = training.three_alone()
    assert "losses and norms 0.0e+00, weights 0.0e+00" in labs.beside_one_process("the same", [(numbers, weights)])
    with pytest.raises(AssertionError, match="other"):
        labs.beside_one_process("other", [(numbers, {name: 2 * weight for name, weight in weights.items()})])


def test_a_step_of_1f1b_takes_less_memory_than_afab(ranks):
    for of_afab, of_1f1b in ranks(labs.peaks_of_steps, [afab(4, 8), one_f_one_b(4, 8)], labs.TINY)[2:]:
        assert of_1f1b < of_afab


def test_a_pair_has_its_exchanges_by_thread(ranks):
    found = ranks(labs.forward_and_backward, ModelConfig(4, 32, 4, 2, 64, 64), 32, 0.0, 1)[0]
    assert list(found) == ["one after the other", "at the same time"]
    for ((ends, exchanges),) in found.values():
        assert set(ends) == {"F", "B"} == {lane for lane, *_ in exchanges}
        assert all(end <= ends[lane] for lane, _, end in exchanges)


def test_the_median_repeat_is_by_the_slowest_rank():
    fast, slow, middle = (({"F": 1.0, "B": end}, [("F", 0.5, 1.0)]) for end in (2.0, 9.0, 4.0))
    ways = ("one after the other", "at the same time")
    results = [{way: [fast, fast, fast] for way in ways}, {way: [fast, slow, middle] for way in ways}]
    medians = labs.median_repeats(results[::-1])
    assert medians[ways[0]] == ({"F": (0, 1), "B": (1, 4)}, [("F", 0.5, 1.0)])
    assert medians[ways[1]][0] == {"F": (0, 1), "B": (0, 4)}
    text = labs.overlap_saves(medians)
    assert "t_F + t_B 4 ms, t_FB 4 ms: 1.00" in text and "cost 66.0 without overlap, 66.0 at this t_FB" in text


def test_published_numbers_are_beside_ours():
    assert labs.published_bandwidth()["all_reduce"][0] == (1, 436)
    rates = labs.published_bubble_rates()
    assert all(len(points) == 9 for points in rates.values())
    assert rates["1F1B"][0] == pytest.approx((15 / 63, 0.2668)) and {ours for ours, _ in rates["ZB-V"]} == {0}


def test_depth_divides_states_and_not_activations():
    config = ModelConfig(14, 32, 4, 2, 64, 97)
    memory = labs.memory_by_stages(config, (1, 4), 16)
    assert list(memory[1]) == ["parameters", "gradients", "optimizer states", "activations"]
    assert memory[4]["optimizer states"] < 0.4 * memory[1]["optimizer states"]
    assert memory[4]["activations"] == pytest.approx(memory[1]["activations"] * 4 * 3 / 14)


def test_a_plan_has_a_line_per_rank():
    lines = labs.transfer_plan(one_f_one_b(2, 1)).splitlines()
    assert lines == ["rank 0: F0 (send F0) (recv B0) B0", "rank 1: (recv F0) F0 B0 (send B0)"]


def test_first_gradients_are_a_table():
    lines = labs.first_gradients({"A": ([5.0], [(1.0, 1.0), (0.125, 0.5)])}).splitlines()
    assert lines[1] == "A:   1.000 | 1.0000     0.125 | 0.5000" and len(lines) == 2
