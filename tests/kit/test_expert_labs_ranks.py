"""course_kit.labs.expert_parallel: the lab's faults, what crosses between nodes, two hops, layouts. CPU, gloo."""

import math

import numpy as np
import pytest
import torch

from course_kit.labs.expert_parallel import routers, traffic
from course_kit.labs.expert_parallel.experts import by_token, some_choices, some_experts, timed_experts
from course_kit.labs.expert_parallel.models import parallel_trial, process_trial
from course_kit.labs.tensor_parallel.models import on_first, relative_error
from course_lib.expert_parallel.experts import loop_experts


@pytest.mark.parametrize("fault", routers.FAULTS)
def test_each_fault_of_the_lab_shows_in_gradients_or_counts(fault):
    _, counts, norms = routers.counted_training(steps=2, **routers.FAULTS[fault])
    assert (norms.mean() < 1e-6) == (fault in ("detached", "normalized"))
    assert (counts[0, 1].sum() == 1024) == (fault == "normalized")


def test_the_letters_have_each_fault_once():
    assert sorted(routers.LETTERS.values()) == sorted(routers.FAULTS)


def test_dropped_choices_are_those_above_the_capacity():
    counts = np.array([[6, 1, 1, 0], [2, 2, 2, 2]])
    assert routers.dropped(counts, 1.0) == 4 / 16 and routers.dropped(counts, 3.0) == 0
    assert routers.unevenness(counts[None]) == 2.0  # (6 + 2) / 2 over 2


@pytest.mark.parametrize("experts, k, n", [(8, 2, 4), (64, 8, 8)])
def test_random_choices_make_as_many_copies_as_the_formula_says(experts, k, n):
    logits = torch.randn(20_000, experts, generator=torch.Generator().manual_seed(0))
    matrix = traffic.rows_sent(logits, n, k)
    copies = (matrix.sum() - matrix.trace()).item() / len(logits)
    assert math.isclose(copies, traffic.even_copies(experts, k, n), rel_tol=0.02)


def test_a_node_limit_bounds_the_crossings():
    once, each = zip(*(traffic.crossings(limit, 4, 32, 8, 2000) for limit in (1, 2, 4)), strict=True)
    assert once[0] < once[1] < once[2] <= 3 and once[1] <= 2 and max(each) - min(each) < 0.3


def test_two_hops_give_the_same_and_cross_less(ranks):
    for flat, hops, error in ranks(traffic.hops_trial, 32, 64):
        assert hops < flat and error < 1e-5


def test_dispatch_and_gathering_give_the_same(ranks):
    times, sent, worst = ranks(traffic.compare_dispatch, 16, 8, 32, 1)[0]
    assert worst < 1e-5 and sent["all-to-all"] == sent["all-to-all again"] < sent["all-gather"]
    assert set(times) == set(sent)


def test_the_timeline_has_exchanges_in_forward_and_backward(ranks):
    for found in ranks(on_first, 2, traffic.timeline, 0.0, 32, 16, 8, 1)[:2]:
        ((end, middle, spans),) = found
        assert spans[0][1] < middle < spans[-1][0] and spans[-1][1] <= end


def test_the_way_token_by_token_is_that_of_the_loop():
    module, (x, gates, choices) = some_experts(), some_choices()
    assert relative_error(loop_experts(module, x, gates, choices), by_token(module, x, gates)) < 1e-5
    assert set(timed_experts(4, 2, tokens=16, hidden=16, ffn=16)) == {"loop", "batched", "grouped"}


def both(*layout):
    return parallel_trial(*layout, steps=1), process_trial((), 0.0, 1)


@pytest.mark.parametrize("tp", ["sequence", "tokens"])
def test_experts_beside_tensor_parallelism_train_as_one_process(ranks, tp):
    told, one = ranks(both, (1, 1, 2, 2), tp)[0]
    assert max(relative_error(told.gradients[name], right) for name, right in one.gradients.items()) < 2e-5
    assert not told.drifted
