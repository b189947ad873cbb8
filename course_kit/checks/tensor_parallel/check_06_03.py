"""Check of exercise 06.3: the gradients of a split MLP against autograd's in one process, and their traffic."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

from course_kit.checks.tensor_parallel.cases import CLOSE, counted
from course_kit.checks.tensor_parallel.diary import Diary
from course_kit.labs.tensor_parallel.models import in_groups, relative_error
from course_kit.ranks import shared
from course_kit.typed import grad_of
from course_lib.collectives.traffic import Traffic, count_traffic
from course_lib.tensor_parallel import by_hand
from course_lib.tensor_parallel.by_hand import cut

CASES = {2: (5, torch.float32), 4: (3, torch.bfloat16)}  # tokens and dtype, by number of ranks


def backward_trial(group: dist.ProcessGroup) -> tuple[list[float], set[torch.dtype], bool, int, Traffic]:
    """Return errors of the three gradients against one process's, the dtypes of the gradients and the matmuls, whether
    the arguments are unchanged, the multiplications, and the traffic.
    """
    generator, (tokens, dtype) = torch.Generator().manual_seed(3), CASES[group.size()]
    shapes = (tokens, 12), (16, 12), (12, 16), (tokens, 12)
    x, a, b, grad_y = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    full = [tensor.float().requires_grad_() for tensor in (x, a, b)]
    F.linear(F.silu(F.linear(*full[:2])), full[2]).backward(grad_y.float())
    expected = grad_of(full[0]), cut(grad_of(full[1]), group, 0), cut(grad_of(full[2]), group, 1)
    given = x, cut(a, group, 0), cut(b, group, 1), grad_y
    before = [tensor.clone() for tensor in given]
    with count_traffic() as traffic, Diary() as diary:
        got = by_hand.mlp_backward(*given, group)
    unchanged = all(torch.equal(*pair) for pair in zip(given, before, strict=True))
    errors = [relative_error(g.float(), e) for g, e in zip(got, expected, strict=True)]
    return errors, {*diary.dtypes, *(g.dtype for g in got)}, unchanged, diary.total("matmul"), traffic


def check() -> None:
    """Judge mlp_backward on 2 ranks in float32 and on 4 in BF16."""
    ranks = shared(4)
    with ranks.within(20):
        for n, (tokens, dtype) in CASES.items():
            for rank, (errors, dtypes, unchanged, multiplied, traffic) in enumerate(
                ranks(in_groups, n, backward_trial)
            ):
                where = f"{n} ranks, rank {rank}, {dtype}"
                for name, error in zip(("x", "a", "b"), errors, strict=True):
                    assert error < CLOSE[dtype], f"{where}: the gradient of {name} is not one process's"
                assert unchanged, f"{where}: an argument has changed"
                assert dtypes == {dtype}, f"{where}: matmuls and gradients are in {dtypes}: keep x's dtype"
                enough = 5 * tokens * 12 * 16 // n
                assert multiplied <= enough, (
                    f"{where}: {multiplied} multiplications, {enough} are enough: x · aᵀ again, and the four matmuls"
                )
                enough = 2 * tokens * 12 * dtype.itemsize * (n - 1) // n
                assert (traffic.calls, traffic.bytes) == (1, enough), (
                    f"{where}: {counted(traffic.calls, 'collective')}, {traffic.bytes} bytes; one of {enough} is enough"
                )
