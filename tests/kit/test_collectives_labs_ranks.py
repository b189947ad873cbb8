"""course_kit.labs.collectives: what notebook 03 measures and compares. CPU, gloo."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from course_kit.labs import collectives as labs


@pytest.mark.parametrize("n", [2, 4, 5])
def test_a_ring_ends_with_all_values_everywhere_and_each_rank_sends_another_piece(n):
    states = labs.ring_states(n)
    assert len(states) == 2 * n - 1
    assert states[-1] == [[set(range(n))] * n] * n
    halfway = states[n - 1]
    assert all(halfway[rank][rank] == set(range(n)) for rank in range(n)), "a rank owns the piece of its number"
    for step in range(1, 2 * n - 1):
        assert sorted(labs.sent_chunk(n, rank, step) for rank in range(n)) == list(range(n))


def test_a_barrier_a_step_makes_each_rank_pay_for_all():
    assert labs.last_done_ms(False) == pytest.approx(9 * 5 + 3 * 40)
    assert labs.last_done_ms(True) == pytest.approx(12 * 40)
    assert all(sum(labs.pause_s(rank, step) > 0.03 for rank in range(4)) == 1 for step in range(labs.STEPS))


def test_published_bandwidths_fall_with_the_number_of_nodes():
    nodes, speeds = (labs.published("all_reduce", column) for column in ("nodes", "median_gb_s"))
    assert nodes == sorted(nodes) and nodes[0] == 1 and nodes[-1] == 64
    assert speeds[0] == pytest.approx(436, abs=1) and speeds[-1] < speeds[0] / 10


def summed(group: dist.ProcessGroup, function) -> list[float]:
    tensor = torch.full((1000,), dist.get_rank(group) + 1.0)
    function(group, tensor)
    return tensor.unique().tolist()


@pytest.mark.parametrize("n", [2, 3, 4])
def test_star_tree_and_ring_have_the_same_sum_and_send_as_much_in_all(ranks, n):
    for function in (labs.star_all_reduce, labs.tree_all_reduce, labs.ring_all_reduce):
        outcomes = ranks(labs.among, n, summed, function)
        assert outcomes[: 4 - n] == [None] * (4 - n)
        assert [found for found, _ in outcomes[4 - n :]] == [[n * (n + 1) / 2]] * n
        assert sum(sent.bytes for _, sent in outcomes[4 - n :]) == 2 * (n - 1) * 4000


def test_two_levels_send_one_piece_across_the_nodes(ranks):
    assert ranks(labs.two_level_traffic, [[0, 1], [2, 3]], torch.ones(1000)) == [(4000, 2000)] * 4


def sends_to_itself(group: dist.ProcessGroup) -> None:
    dist.send(torch.ones(1), group_dst=dist.get_rank(group), group=group)


def test_a_send_to_oneself_is_told_in_words_for_a_learner(ranks):
    with pytest.raises(AssertionError, match="sends to or receives from itself"):
        ranks(labs.among, 3, sends_to_itself)
    with pytest.raises(AssertionError, match="the group has one rank"):
        ranks(labs.among, 1, sends_to_itself)
