"""Check of exercise 04.2: after `average_gradients` every gradient is the mean over the group."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from course_kit.checks.data_parallel.comparing import TINY, Tensors, check_traffic, farthest, in_group, one_process
from course_kit.labs.data_parallel import batch_of
from course_lib.collectives.traffic import Traffic, count_traffic
from course_lib.data_parallel import naive
from course_lib.single_gpu.model import Transformer, loss


def naive_trial(group: dist.ProcessGroup | None) -> tuple[Tensors, Traffic, list[str]]:
    """Return this rank's averaged gradients, its traffic, and any wrong or missing changes."""
    rank = dist.get_rank(group)
    model, (inputs, targets) = Transformer(TINY), batch_of(rank, TINY)
    norm = model.norm
    assert norm is not None
    norm.weight.requires_grad_(False)
    loss(model(inputs), targets).backward()
    model.bf16 = nn.Parameter(torch.zeros(7, dtype=torch.bfloat16))
    model.bf16.grad = torch.full_like(model.bf16, rank)
    before = [p.detach().clone() for p in model.parameters()]
    local = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with count_traffic() as traffic:
        naive.average_gradients(model, group)
    wrong = [n for (n, p), b in zip(model.named_parameters(), before, strict=True) if not torch.equal(p, b)]
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    if all(torch.equal(g, o) for g, o in zip(grads, local, strict=True)):
        wrong = ["no gradient"]
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, traffic, wrong


def order_trial(group: dist.ProcessGroup | None) -> tuple[list[torch.Tensor | None], Traffic]:
    """Return averaged gradients of one shape, which were 0 to 6 more than the rank, and this rank's traffic.

    Chance differs by rank: gradients of two parameters must never meet. The last parameter has none.
    """
    rank = dist.get_rank(group)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(rank)
    module = nn.ParameterList(torch.zeros(3) for _ in range(8))
    for number, parameter in enumerate(module[:7]):
        parameter.grad = torch.full((3,), float(number + rank))
    with count_traffic() as traffic:
        naive.average_gradients(module, group)
    return [parameter.grad for parameter in module], traffic


def check() -> None:
    """Assert the mean on 4 and on 3 ranks, in one order, that nothing else changes, and what it sends."""
    from course_kit.ranks import shared

    with shared(4).within(20):
        expected = one_process(4)[0] | {"bf16": torch.full((7,), 1.5)}
        for rank, (got, traffic, wrong) in enumerate(in_group(4, naive_trial)):
            assert not wrong, f"rank {rank}: {wrong[0]} has changed: reduce parameter.grad, not the parameter"
            name, error = farthest(got, {name: expected[name] for name in got})
            scale = (got[name].norm() / expected[name].norm()).item()
            assert error < 1e-5, (
                f"rank {rank}: {name} is {scale:.2f} times one process's: mean, of all ranks of the group?"
            )
            check_traffic(rank, traffic, (0, 1, 2, 3), [g.nbytes for g in got.values()])
        for rank, (got, traffic) in enumerate(in_group(3, order_trial), start=1):
            assert got.pop() is None, f"rank {rank}: a parameter without a gradient has got one"
            check_traffic(rank, traffic, (1, 2, 3), [12] * 7)
            assert all(torch.allclose(g, torch.tensor(number + 1.0)) for number, g in enumerate(got)), (
                f"rank {rank}: gradients are {[g[0].item() for g in got]}, not 1 to 7: the mean over the group, and "
                "the same order on all ranks? Gradients of different parameters must not be added up"
            )
