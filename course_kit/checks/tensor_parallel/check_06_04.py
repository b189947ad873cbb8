"""Check of exercise 06.4: ColumnMatmul against one process, and the order of its backward's operations."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from course_kit.checks.tensor_parallel.cases import CLOSE, all_cases, counted, in_case
from course_kit.checks.tensor_parallel.diary import Diary
from course_kit.checks.tensor_parallel.memory import saved_for_backward
from course_kit.labs.tensor_parallel.models import in_groups, relative_error
from course_kit.ranks import shared
from course_kit.typed import grad_of
from course_lib.collectives.traffic import Traffic, count_traffic
from course_lib.tensor_parallel import linear
from course_lib.tensor_parallel.by_hand import cut

CASES = {  # by number of ranks: dtype, x's dimensions but the last, whether x and which weights want a gradient
    2: [(torch.float32, (2, 3), True, (1, 1, 1)), (torch.float32, (6,), False, (1, 1, 1))],
    4: [(torch.bfloat16, (1, 2, 3), True, (0, 1, 0)), (torch.float32, (2, 3), True, (0, 0, 0))],
}


class RankResult(NamedTuple):
    """A rank's report on ColumnMatmul."""

    output_error: float
    sent_forward: int  # collectives
    error: float  # the largest of the gradients
    events: list[tuple[str, int]]  # the diary of backward
    traffic: Traffic  # of backward
    spoiled: bool  # a gradient that was given is changed
    held: int  # bytes for backward, beside x and the weights
    dtypes: set[torch.dtype]  # of matmuls and outputs


def column_trial(
    group: dist.ProcessGroup, dtype: torch.dtype, rows: tuple[int, ...], wants_x: bool, wants: tuple[int, ...]
) -> RankResult:
    """Run ColumnMatmul of three weights on x: [*rows, 8], transposed where it has 3 dimensions or more; wants: which
    of the weights want a gradient.
    """
    generator = torch.Generator().manual_seed(4)
    x, *grads = (torch.randn(*rows[::-1], size, generator=generator).to(dtype) for size in (8, 16, 8, 8))
    x, *grads = (tensor.transpose(0, len(rows) - 1) for tensor in (x, *grads))
    weights = [torch.randn(size, 8, generator=generator).to(dtype) for size in (16, 8, 8)]
    full = [t.clone().requires_grad_() for t in (x, *weights)]
    full_outs = [F.linear(full[0], w) for w in full[1:]]
    torch.autograd.backward(full_outs, grads)
    expected = [grad_of(full[0]), *(cut(grad_of(w), group, 0) for w in full[1:])]
    local = [x.clone(), *(cut(w, group, 0).clone() for w in weights)]
    wanted = [t.requires_grad_() for t, want in zip(local, (wants_x, *wants), strict=True) if want]
    given = [cut(g, group, -1).clone() for g in grads]
    copies = [g.clone() for g in given]
    with in_case(f"x {[*x.shape]}, strides {x.stride()}, {dtype}"):
        with count_traffic() as forward, Diary() as first:
            outs, held = saved_for_backward(lambda: linear.ColumnMatmul.apply(local[0], group, *local[1:]), *local)
        output_error = max(relative_error(o, cut(w, group, -1)) for o, w in zip(outs, full_outs, strict=True))
        with Diary() as diary, count_traffic() as traffic:
            got = iter(torch.autograd.grad(outs, wanted, given))
    errors = [relative_error(next(got), e) for e, want in zip(expected, (wants_x, *wants), strict=True) if want]
    spoiled = not all(torch.equal(g, c) for g, c in zip(given, copies, strict=True))
    dtypes = {*first.dtypes, *diary.dtypes, *(out.dtype for out in outs)}
    return RankResult(output_error, forward.calls, max(errors), diary.events, traffic, spoiled, held, dtypes)


def multiplications(events: list[tuple[str, int]]) -> int:
    """Return the multiplications of some events."""
    return sum(number for word, number in events if word == "matmul")


def check() -> None:
    """Judge ColumnMatmul on 2 and 4 ranks."""
    ranks = shared(4)
    with ranks.within(20):
        for n, cases in CASES.items():
            for rank, trials in enumerate(ranks(in_groups, n, all_cases, column_trial, cases)):
                for case, result in zip(cases, trials, strict=True):
                    judge(n, rank, result, *case)


def judge(
    n: int,
    rank: int,
    result: RankResult,
    dtype: torch.dtype,
    rows: tuple[int, ...],
    wants_x: bool,
    wants: tuple[int, ...],
) -> None:
    """Judge one case of one rank."""
    each = [6 * 8 * size // n for size in (16, 8, 8)]  # multiplications of one matmul
    where = f"{n} ranks, rank {rank}, {len(rows) + 1} dimensions, {dtype}, gradients for "
    where += f"{'x and ' if wants_x else ''}weights {wants}"
    assert result.output_error < CLOSE[dtype], f"{where}: forward returns x · weightᵀ for each weight of this rank"
    assert result.sent_forward == 0, f"{where}: {counted(result.sent_forward, 'collective')} in forward: send nothing"
    events, spec = result.events, [word for word, _ in result.events]
    assert wants_x or not result.traffic.calls, (
        f"{where}: {counted(result.traffic.calls, 'collective')} in backward: x wants no gradient: send nothing"
    )
    assert not wants_x or {"start", "wait"} <= set(spec), (
        f"{where}: start a dist.all_reduce(..., async_op=True) of x's gradient, and wait for it at the end"
    )
    assert result.error < CLOSE[dtype], f"{where}: not one process's gradients"
    assert not result.spoiled, f"{where}: a gradient that was given is changed"
    assert result.held == 0, (
        f"{where}: ctx keeps {result.held} bytes beside x and the weights: save these as they are, no copies"
    )
    assert result.dtypes == {dtype}, f"{where}: matmuls and outputs are in {result.dtypes}: keep the dtype of x"
    enough = wants_x * 2 * 6 * 8 * dtype.itemsize * (n - 1) // n
    assert (result.traffic.calls, result.traffic.bytes) == (wants_x, enough), (
        f"{where}: {result.traffic.bytes} bytes in {counted(result.traffic.calls, 'collective')} of backward; {enough} "
        f"in one are enough: sum over the weights first, and in x's dtype"
    )
    enough = wants_x * sum(each) + sum(e for e, want in zip(each, wants, strict=True) if want)
    assert multiplications(events) == enough, f"{where}: {multiplications(events)} multiplications, {enough} are enough"
    if wants_x:
        start, wait = spec.index("start"), spec.index("wait")
        before, beside = multiplications(events[:start]), multiplications(events[start:wait])
        advice = "start it with async_op=True, before the gradients of the weights, and wait after them"
        assert (before, beside) == (sum(each), enough - sum(each)), (
            f"{where}: {before} multiplications before the all-reduce starts and {beside} while it is in "
            f"flight; {sum(each)} and {enough - sum(each)} would hide it: {advice}"
        )
