"""Check of exercise 06.12: a row layer in chunks against one process, the order of its operations, and its memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course_kit.checks.tensor_parallel.cases import CLOSE, all_cases, counted, in_case
from course_kit.checks.tensor_parallel.diary import Diary
from course_kit.checks.tensor_parallel.memory import saved_for_backward
from course_kit.labs.tensor_parallel.models import in_groups, relative_error
from course_kit.ranks import shared
from course_kit.typed import grad_of
from course_lib.collectives.traffic import count_traffic
from course_lib.tensor_parallel import linear
from course_lib.tensor_parallel.by_hand import cut

CASES: dict[
    int, list[tuple]
] = {  # by number of ranks: chunks, dtype, x's dimensions but the last, whether x and the weight want a gradient
    2: [(2, torch.float32, (2, 7), True, True), (5, torch.float32, (14,), False, True)],
    4: [(3, torch.bfloat16, (1, 2, 7), True, True), (2, torch.float32, (2, 7), True, False)],
}


class RankResult(NamedTuple):
    """A rank's report on a row layer in chunks."""

    errors: dict[str, float]
    dtype: torch.dtype  # of the output
    events: list[tuple[str, int]]  # of forward
    sent: int  # bytes, by forward
    made: int  # bytes of the tensors that forward makes
    enough: int  # bytes that are enough for it
    later: list[tuple[str, int]]  # events of backward
    held: int  # bytes for backward, beside x and the weight
    dtypes: set[torch.dtype]  # of the matmuls


def chunk_trial(
    group: dist.ProcessGroup, chunks: int, dtype: torch.dtype, rows: tuple[int, ...], wants_x: bool, wants_weight: bool
) -> RankResult:
    """Run a row layer on x: [*rows, 24], transposed where it has 3 dimensions or more."""
    torch.manual_seed(12)
    full, given = nn.Linear(24, 10, False, dtype=dtype), torch.randn(*rows, 10).to(dtype)
    x = torch.randn(*rows[::-1], 24).to(dtype).transpose(0, len(rows) - 1)
    layer, complete = linear.RowParallelLinear(full, group, chunks), x.clone().requires_grad_()
    layer.weight.requires_grad_(wants_weight)
    local = cut(x, group, -1).clone().requires_grad_(wants_x)
    with in_case(f"x {[*local.shape]}, strides {local.stride()}, {dtype}"):
        with Diary() as diary, count_traffic() as traffic:
            out, held = saved_for_backward(lambda: layer(local), local, layer.weight)
        with Diary() as later:
            out.backward(given)
    full(complete).backward(given)
    pairs = {"the output": (out, F.linear(x, full.weight))}
    if wants_x:
        pairs["x's gradient"] = (grad_of(local), cut(grad_of(complete), group, -1))
    if wants_weight:
        pairs["the weight's gradient"] = (grad_of(layer.weight), cut(grad_of(full.weight), group, 1))
    errors = {name: relative_error(*pair) for name, pair in pairs.items()}
    enough = out.nbytes + (0 if local.is_contiguous() else local.nbytes)
    dtypes, made = diary.dtypes | later.dtypes, sum(diary.sizes())
    return RankResult(errors, out.dtype, diary.events, traffic.bytes, made, enough, later.events, held, dtypes)


def check() -> None:
    """Judge RowMatmul on 2 and 4 ranks."""
    ranks = shared(4)
    with ranks.within(20):
        for n, cases in CASES.items():
            for rank, trials in enumerate(ranks(in_groups, n, all_cases, chunk_trial, cases)):
                for case, result in zip(cases, trials, strict=True):
                    judge(n, rank, result, *case)


def judge(
    n: int,
    rank: int,
    result: RankResult,
    chunks: int,
    dtype: torch.dtype,
    rows: tuple[int, ...],
    wants_x: bool,
    wants_weight: bool,
) -> None:
    """Judge one case on one rank."""
    where = f"{n} ranks, rank {rank}, {chunks} chunks of 14 rows, {len(rows) + 1} dimensions, {dtype}"
    for name, error in result.errors.items():
        assert error < CLOSE[dtype], f"{where}: {name} is not one process's"
    assert result.dtype == dtype, f"{where}: the output is {result.dtype}"
    assert result.dtypes == {dtype}, f"{where}: matmuls are in {result.dtypes}: keep x's dtype"
    assert result.held == 0, (
        f"{where}: ctx keeps {result.held} bytes beside x and the weight: save these as they are, no copies"
    )
    spec = [word for word, _ in result.events]
    assert spec.count("start") == chunks, f"{where}: {counted(spec.count('start'), 'all-reduce')}, not one for each"
    assert spec == ["matmul", "start"] * chunks + ["wait"] * chunks, (
        f"{where}: {' '.join(spec)}: it should be matmul, start, matmul, start, ..., and a wait for each"
    )
    multiplied = sum(number for word, number in result.events if word == "matmul")
    assert multiplied == 14 * 24 * 10 // n, f"{where}: {multiplied} multiplications: each row once"
    enough_sent = 2 * 14 * 10 * dtype.itemsize * (n - 1) / n + chunks * n
    assert result.sent <= enough_sent, f"{where}: {result.sent} bytes sent: each row once"
    assert result.made <= result.enough, (
        f"{where}: forward makes tensors of {result.made} bytes, {result.enough} are enough: matmul into the output's "
        "rows"
    )
    later = [word for word, _ in result.later]
    assert "start" not in later, f"{where}: backward sends: send nothing"
    wanted = " and ".join(name for name, wants in (("x", wants_x), ("the weight", wants_weight)) if wants)
    assert later == ["matmul"] * (wants_x + wants_weight), (
        f"{where}: backward makes {counted(len(later), 'matmul')} for gradients of {wanted}; "
        "ctx.needs_input_grad says whose gradient is wanted"
    )
