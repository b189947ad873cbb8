"""course_kit.labs.sequence_parallel and context_parallel: evidence of the faults, bytes kept, scores. CPU, gloo."""

import pytest
import torch
import torch.distributed as dist

from course_kit.figures.context_parallel.rings import mask_colors
from course_kit.labs import context_parallel as cp_labs
from course_kit.labs.sequence_parallel import drift, memory
from course_kit.labs.sequence_parallel.models import batch_of, process_trial
from course_kit.labs.tensor_parallel.models import TINY, in_groups, on_first, relative_error
from course_lib.context_parallel.blocks import FUSED_BLOCK
from course_lib.sequence_parallel.shards import ORDERS, chunks_of, shard_sequence


def faults_and_one(group):
    return drift.all_faults(group), process_trial(TINY, 1, 0.1).gradients


@pytest.mark.parametrize("n", [2, 4])
def test_each_fault_of_the_lab_leaves_its_own_evidence(ranks, n):
    runs, one = ranks(in_groups, n, faults_and_one)[0]
    for fault, (names, norms) in zip(drift.FAULTS, runs, strict=True):
        ratios = {name: norm / one[name].norm().item() for name, norm in norms.items()}
        off = {name for name, ratio in ratios.items() if abs(ratio - 1) > 1e-3}
        of_norms = {name for name in one if name.endswith("norm.weight")}
        assert bool(names) == (fault == "norms left out") and set(names) <= of_norms
        if fault == "norms averaged":
            assert off == of_norms and all(abs(ratios[name] - 1 / n) < 1e-3 for name in off)
        if fault in ("right", "g"):
            assert bool(off - of_norms) == (fault == "g")


def test_swapped_gates_keep_the_first_loss_and_let_norms_drift(ranks):
    losses, names, norms = ranks(drift.drift_trial, 3)[0]
    assert abs(losses[0] - ranks(process_trial, TINY, 1, 0.1)[0].losses[0]) < 1e-5
    assert len(names) == 5 and norms.shape == (3, TINY.hidden)


def test_a_gpt_layer_keeps_34_sbh_and_the_norms_statistics(ranks):
    for n, sequence_parallel, expected in ((2, True, 34 / 2), (2, False, 10 + 24 / 2)):
        statistics = 2 * 2 * 2 / 64 / (n if sequence_parallel else 1)
        assert abs(ranks(on_first, n, memory.gpt_saved_bytes, sequence_parallel)[0] - expected - statistics) < 0.01


def test_scores_are_counted_as_in_the_picture():
    for order, counts in (("contiguous", [10, 26, 42, 58]), ("zigzag", [34] * 4)):
        assert [cp_labs.scores_of(rank, 4, order, 16) for rank in range(4)] == counts
        colors = mask_colors(4, order, None, 16).reshape(-1, 3)
        assert sorted((colors == color).all(1).sum() for color in {tuple(c) for c in colors} - {(1.0,) * 3}) == counts


def rival(group, order):
    q, k, v, gradient = cp_labs.some_heads(16)
    expected, *_ = cp_labs.full_attention(q, k, v, gradient, True)
    size = 16 // group.size() // len(chunks_of(0, 1, order))
    masks = {end: torch.ones(size, end, dtype=torch.bool).tril(end - size) for end in range(size, 17, size)}
    own = (shard_sequence(x, group, order) for x in (q, k, v))
    got = cp_labs.gathered_sdpa(masks, *own, group, True, FUSED_BLOCK, order)
    return relative_error(got, shard_sequence(expected, group, order))


@pytest.mark.parametrize("order", ORDERS)
def test_pytorchs_attention_on_gathered_keys_is_exact(ranks, order):
    assert max(ranks(in_groups, 4, rival, order)) < 1e-9


def test_the_duel_compares_equal_results(ranks):
    times, worst = ranks(on_first, 2, cp_labs.compare_with_torch, 64)[0]
    assert set(times) == {"ring", "all_gather", "ulysses", "PyTorch", "PyTorch again"} and worst < 1e-5


def test_the_shortest_round_is_that_of_the_slowest_rank():
    of_ranks = [[(1.0, "a"), (3.0, "b")], [(9.0, "c"), (4.0, "d")]]
    assert cp_labs.shortest(of_ranks) == ["b", "d"]


def kept(n):
    def forward():
        group = dist.new_subgroups(group_size=n)[0]
        return cp_labs.saved_by_sequence_shard(group, config=TINY, seq=32)

    return forward


def test_a_rank_keeps_its_part_of_the_sequence(ranks):
    assert batch_of().shape == (2, 2, 16)
    two, four = (ranks(kept(n))[0] for n in (2, 4))
    assert 1.9 < two / four < 2.1


def test_all_three_splits_together_train_as_one_process(ranks):
    (losses, gradients), one = ranks(cp_labs.together_trial, TINY, 1)[0], ranks(process_trial, TINY, 1, 0.5)[0]
    assert abs(losses[0] - one.losses[0]) < 1e-5 and set(gradients) == set(one.gradients)
    assert max(relative_error(gradients[name], right) for name, right in one.gradients.items()) < 1e-5
