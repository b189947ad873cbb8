"""Check of exercise 06.12: a row layer in chunks against one process, what it does in which order, and its memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course_kit.checks.tensor_parallel.cases import CLOSE, all_cases, counted, in_case
from course_kit.checks.tensor_parallel.diary import Diary
from course_kit.labs.tensor_parallel.models import in_groups, relative_error
from course_kit.ranks import shared
from course_kit.typed import grad_of
from course_lib.collectives.traffic import count_traffic
from course_lib.tensor_parallel import linear
from course_lib.tensor_parallel.by_hand import cut

CASES = {  # by number of ranks: chunks, dtype, x's dimensions but the last, whether x wants a gradient
    2: [(2, torch.float32, (2, 7), True), (5, torch.float32, (14,), False)],
    4: [(3, torch.bfloat16, (1, 2, 7), True)],
}


class Told(NamedTuple):
    """What a rank tells of a row layer in chunks."""

    errors: dict[str, float]
    dtype: torch.dtype  # of the output
    events: list[tuple[str, int]]  # of forward
    sent: int  # bytes, by forward
    made: int  # bytes of the tensors that forward makes
    enough: int  # bytes that are enough for it
    later: list[tuple[str, int]]  # events of backward


def chunk_trial(
    group: dist.ProcessGroup, chunks: int, dtype: torch.dtype, rows: tuple[int, ...], wants_x: bool
) -> Told:
    """Run a row layer on x: [*rows, 24], transposed where it has 3 dimensions or more."""
    torch.manual_seed(12)
    full, given = nn.Linear(24, 10, False, dtype=dtype), torch.randn(*rows, 10).to(dtype)
    x = torch.randn(*rows[::-1], 24).to(dtype).transpose(0, len(rows) - 1)
    layer, whole = linear.RowParallelLinear(full, group, chunks), x.clone().requires_grad_()
    own = cut(x, group, -1).clone().requires_grad_(wants_x)
    with in_case(f"x {[*own.shape]}, strides {own.stride()}, {dtype}"):
        with Diary() as diary, count_traffic() as traffic:
            out = layer(own)
        with Diary() as later:
            out.backward(given)
    full(whole).backward(given)
    pairs = {"the output": (out, F.linear(x, full.weight))}
    if wants_x:
        pairs["x's gradient"] = (grad_of(own), cut(grad_of(whole), group, -1))
    pairs["the weight's gradient"] = (grad_of(layer.weight), cut(grad_of(full.weight), group, 1))
    errors = {name: relative_error(*pair) for name, pair in pairs.items()}
    enough = out.nbytes + (0 if own.is_contiguous() else own.nbytes)
    return Told(errors, out.dtype, diary.events, traffic.bytes, sum(diary.sizes()), enough, later.events)


def check() -> None:
    """Judge RowMatmul on 2 and 4 ranks."""
    ranks = shared(4)
    with ranks.within(20):
        for n, cases in CASES.items():
            for rank, trials in enumerate(ranks(in_groups, n, all_cases, chunk_trial, cases)):
                for case, told in zip(cases, trials, strict=True):
                    judge(n, rank, told, *case)


def judge(n: int, rank: int, told: Told, chunks: int, dtype: torch.dtype, rows: tuple[int, ...], wants_x: bool) -> None:
    """Judge one case on one rank."""
    where = f"{n} ranks, rank {rank}, {chunks} chunks of 14 rows, {len(rows) + 1} dimensions, {dtype}"
    for name, error in told.errors.items():
        assert error < CLOSE[dtype], f"{where}: {name} is not one process's"
    assert told.dtype == dtype, f"{where}: the output is {told.dtype}"
    words = [word for word, _ in told.events]
    assert words.count("start") == chunks, f"{where}: {counted(words.count('start'), 'all-reduce')}, not one for each"
    assert words == ["product", "start"] * chunks + ["wait"] * chunks, (
        f"{where}: {' '.join(words)}: it is to be product, start, product, start, ..., and a wait for each"
    )
    multiplied = sum(number for word, number in told.events if word == "product")
    assert multiplied == 14 * 24 * 10 // n, f"{where}: {multiplied} multiplications: each row once"
    enough_sent = 2 * 14 * 10 * dtype.itemsize * (n - 1) / n + chunks * n
    assert told.sent <= enough_sent, f"{where}: {told.sent} bytes sent: each row once"
    assert told.made <= told.enough, (
        f"{where}: forward makes tensors of {told.made} bytes, {told.enough} are enough: multiply into the output's "
        "rows"
    )
    later = [word for word, _ in told.later]
    assert "start" not in later, f"{where}: backward sends: send nothing"
    wanted = "x and the weight" if wants_x else "the weight alone"
    assert later == ["product"] * (1 + wants_x), (
        f"{where}: backward makes {counted(len(later), 'product')} for gradients of {wanted}; "
        "ctx.needs_input_grad says whose gradient is wanted"
    )
