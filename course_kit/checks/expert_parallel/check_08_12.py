"""Check of exercise 08.12: rows that are exchanged, their gradients, bytes, and the order of starts and waits."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.distributed as dist

from course_kit.checks.expert_parallel.work import noted_exchanges
from course_kit.labs.tensor_parallel.models import in_groups, relative_error
from course_kit.ranks import shared
from course_lib.collectives.traffic import count_traffic
from course_lib.expert_parallel import exchange

SIZES = [[1, 2, 0, 3], [0, 0, 4, 1], [2, 0, 0, 0], [0, 5, 1, 2]]  # rows from i to j
ORDER = ["start", "start", "overlap_with", "wait", "wait"]
WORDS = ("tensor 0", "tensor 1", "the gradient of tensor 0", "the gradient of tensor 1")


class Noted(torch.autograd.Function):
    """Notes "overlap_with" among the events of "forward", and of "backward"."""

    @staticmethod
    def forward(ctx, x, events):
        ctx.events = events
        events["forward"].append("overlap_with")
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.events["backward"].append("overlap_with")
        return gradient, None


class RankResult(NamedTuple):
    """One rank's results of an exchange."""

    errors: list[float]  # of what arrives, and of gradients: see WORDS
    sent: list[list[tuple[str, int]]]  # (collective, bytes) in forward, and in backward
    enough: list[int]  # bytes
    events: dict[str, list[str]]  # of "forward" and "backward"


def rows_of(sizes: list[list[int]], source: int, to: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of two tensors from a rank to another: the same on both."""
    generator = torch.Generator().manual_seed(100 * seed + 10 * source + to)
    rows = sizes[source][to]
    return torch.randn(rows, 3, generator=generator), torch.randn(rows, generator=generator)


def stacked(pairs) -> list[torch.Tensor]:
    """Return both tensors of some pairs, each concatenated."""
    return [torch.cat(parts) for parts in zip(*pairs, strict=True)]


def exchange_trial(group: dist.ProcessGroup, sizes: list[list[int]], dtype: torch.dtype = torch.float32) -> RankResult:
    """Exchange two tensors, of which one is not contiguous, with a function to call overlap_with."""
    rank, n = group.rank(), group.size()
    sends, receives = sizes[rank][:n], [sizes[other][rank] for other in range(n)]
    local = [part.to(dtype).requires_grad_() for part in stacked(rows_of(sizes, rank, to, 1) for to in range(n))]
    back = [part.to(dtype) for part in stacked(rows_of(sizes, source, rank, 2) for source in range(n))]  # gradients
    other, beside, events = torch.ones(2, requires_grad=True), [], {}
    word = "forward"
    try:
        with count_traffic() as forward, noted_exchanges() as events["forward"]:
            rows = local[0].t().contiguous().t(), local[1]
            overlap_with = lambda: beside.append(Noted.apply(other, events))  # noqa: E731
            got = exchange.send_rows(group, sends, receives, *rows, overlap_with=overlap_with)
        word = "backward"
        with count_traffic() as backward, noted_exchanges() as events["backward"]:
            gradients = torch.autograd.grad([*got, *beside], [*local, other], [*back, torch.ones(2)])[:2]
    except NotImplementedError:  # still blank
        raise
    except (RuntimeError, IndexError) as error:
        raise AssertionError(f"{word} of sends {sends}, receives {receives}: {error}") from None
    arrive = stacked(rows_of(sizes, source, rank, 1) for source in range(n))
    home = stacked(rows_of(sizes, rank, to, 2) for to in range(n))
    pairs = zip((*got, *gradients), (*arrive, *home), strict=True)
    errors = [relative_error(a.float(), b.to(dtype).float()) if a.dtype == dtype else math.inf for a, b in pairs]
    enough = [dtype.itemsize * 4 * (sum(each) - each[rank]) for each in (sends, receives)]
    sent = [[(r.collective, r.bytes) for r in t.records] for t in (forward, backward)]
    return RankResult(errors, sent, enough, events)


def check() -> None:
    """Judge start and finish of AsyncAllToAll on 2 and 4 ranks."""
    ranks = shared(4)
    with ranks.within(20):
        for n, sizes, dtype in (
            (2, SIZES, torch.float32),
            (4, SIZES, torch.bfloat16),
            (4, [[0, 0, 3, 0]] * 4, torch.float32),
        ):
            for rank, result in enumerate(ranks(in_groups, n, exchange_trial, sizes, dtype)):
                judge(f"{n} ranks, rank {rank}, {dtype}", result)


def judge(where: str, result: RankResult) -> None:
    """Judge one rank."""
    for error, word in zip(result.errors, WORDS, strict=True):
        assert error == 0, (
            f"{where}: {word} is not what this rank should get, in its dtype: are sends and receives swapped?"
        )
    for records, least, (word, noted) in zip(result.sent, result.enough, result.events.items(), strict=True):
        assert {name for name, _ in records} == {"all_to_all"}, (
            f"{where}, {word}: sends by {records}: one all_to_all for each tensor does"
        )
        total = sum(size for _, size in records)
        assert total == least, f"{where}, {word}: {total} bytes are sent, {least} are enough"
        assert noted == ORDER, f"{where}, {word}: start() starts both, finish() waits once for each: not {noted}"
