"""Check of exercise 06.3: the gradients of a split MLP against autograd's in one process, and their traffic."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

from course_kit.checks.tensor_parallel.cases import counted
from course_kit.labs.tensor_parallel.models import in_groups, relative_error
from course_kit.ranks import shared
from course_kit.typed import grad_of
from course_lib.collectives.traffic import Traffic, count_traffic
from course_lib.tensor_parallel import by_hand
from course_lib.tensor_parallel.by_hand import cut

TOKENS = {2: 5, 4: 3}  # by number of ranks


def backward_trial(group: dist.ProcessGroup) -> tuple[list[float], Traffic]:
    """Errors of the three gradients against one process's, and the traffic."""
    generator, tokens = torch.Generator().manual_seed(3), TOKENS[group.size()]
    x, a, b, grad_y = (torch.randn(s, generator=generator) for s in ((tokens, 12), (16, 12), (12, 16), (tokens, 12)))
    full = [tensor.clone().requires_grad_() for tensor in (x, a, b)]
    F.linear(F.silu(F.linear(*full[:2])), full[2]).backward(grad_y)
    expected = grad_of(full[0]), cut(grad_of(full[1]), group, 0), cut(grad_of(full[2]), group, 1)
    with count_traffic() as traffic:
        got = by_hand.mlp_backward(x, cut(a, group, 0), cut(b, group, 1), grad_y, group)
    return [relative_error(g, e) for g, e in zip(got, expected, strict=True)], traffic


def check() -> None:
    """Judge mlp_backward on 2 and 4 ranks."""
    ranks = shared(4)
    with ranks.within(20):
        for n in (2, 4):
            for rank, (errors, traffic) in enumerate(ranks(in_groups, n, backward_trial)):
                for name, error in zip(("x", "a", "b"), errors, strict=True):
                    assert error < 1e-5, f"{n} ranks, rank {rank}: the gradient of {name} is not one process's"
                enough = 2 * TOKENS[n] * 12 * 4 * (n - 1) // n
                assert (traffic.calls, traffic.bytes) == (1, enough), (
                    f"{n} ranks, rank {rank}: {counted(traffic.calls, 'collective')}, {traffic.bytes} bytes; "
                    f"one of {enough} is enough"
                )
