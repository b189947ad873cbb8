"""Check of exercise 08.10: counts summed over the ranks by one all-reduce, and biases before and after an update."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from course_kit.checks.expert_parallel.work import Work
from course_kit.labs.expert_parallel.models import TINY
from course_kit.labs.tensor_parallel.models import in_groups
from course_kit.ranks import shared
from course_lib.collectives.traffic import count_traffic
from course_lib.expert_parallel import router
from course_lib.expert_parallel.mixture import apply_moe
from course_lib.expert_parallel.router import routers_of
from course_lib.single_gpu.model import Transformer


class RankResult(NamedTuple):
    """One rank's results."""

    counts: torch.Tensor
    again: torch.Tensor  # of a second call
    sent: list[tuple[str, int]]  # collective, bytes
    moved: list[torch.Tensor]  # how far the biases of each router have moved


def bias_trial(group: dist.ProcessGroup) -> RankResult:
    """On a rank: take counts of two routers, of which the second has none, and update their biases."""
    model = apply_moe(Transformer(TINY), 4, 2)
    for number, each in enumerate(routers_of(model)):
        each.batch_group = group
        each.counts = None if number else torch.tensor([10, 0, 2, 0]) * (group.rank() + 1)
    with count_traffic() as traffic:
        counts = router.take_counts(model)
    again = router.take_counts(model)
    before = [each.bias.clone() for each in routers_of(model)]
    router.update_bias(model, counts, 0.25)
    moved = [each.bias - old for each, old in zip(routers_of(model), before, strict=True)]
    return RankResult(counts, again, [(r.collective, r.bytes) for r in traffic.records], moved)


def check() -> None:
    """Judge take_counts and update_bias on 2 and 4 ranks, and without a group."""
    ranks = shared(4)
    with ranks.within(20):
        for n in (2, 4):
            total = n * (n + 1) // 2
            for rank, result in enumerate(ranks(in_groups, n, bias_trial)):
                where = f"{n} ranks, rank {rank}"
                wanted = [[10 * total, 0, 2 * total, 0], [0] * 4]
                assert result.counts.tolist() == wanted, f"{where}: counts are {result.counts.tolist()}, not {wanted}"
                assert not result.again.any(), f"{where}: a second take_counts finds the same counts again"
                assert len(result.sent) == 1 and result.sent[0][0] == "all_reduce", (
                    f"{where}: one all-reduce is enough, not {result.sent}"
                )
                moved = result.moved[0].tolist()
                assert moved == [-0.25, 0.25, 0.25, 0.25], f"{where}: the biases moved by {moved}"
                assert not result.moved[1].any(), f"{where}: even counts move nothing"
    judge_alone()


def judge_alone() -> None:
    """Judge both without a group: shapes, reads on the host, and that a bias makes no gates."""
    alone = apply_moe(Transformer(TINY), 5, 2)
    assert router.take_counts(alone).dtype == torch.int64, "counts are int64, as those of the routers are"
    try:
        plain = router.take_counts(Transformer(TINY))
    except RuntimeError as error:
        raise AssertionError(f"a model without mixtures, such as a pipeline's stage: [0, 0]; {error}") from None
    assert plain.shape == (0, 0), f"a model without mixtures, such as a pipeline's stage: [0, 0], not {plain.shape}"
    assert router.take_counts(alone).shape == (2, 5), "without a group and without counts: zeros [R, E]"
    with Work() as work:
        router.update_bias(alone, router.take_counts(alone), 0.1)
    assert not work.read, f"{work.read[0]} makes the host wait for the device"
    routers_of(alone)[0].bias.copy_(torch.tensor([9.0, 9.0, 0.0, 0.0, 0.0]))
    gates = routers_of(alone)[0].eval()(torch.randn(3, TINY.hidden))
    assert (gates[:, :2] > 0).all() and torch.allclose(gates.sum(-1), torch.ones(3)), "a bias ranks, it makes no gates"
