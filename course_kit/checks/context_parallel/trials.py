"""Attention over a sequence in parts, on a rank: its results against one process's, a diary of it, and its traffic."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from course_kit.checks.sequence_parallel.diary import Diary, Event
from course_kit.checks.tensor_parallel.memory import AtOnce
from course_kit.labs.context_parallel import full_attention, some_heads
from course_kit.labs.tensor_parallel.models import relative_error
from course_lib.collectives.traffic import Traffic, count_traffic
from course_lib.context_parallel import attention, blocks
from course_lib.sequence_parallel.shards import chunks_of

SEQ = 16  # tokens of the sequence


def local_tokens(full: torch.Tensor, group: dist.ProcessGroup, order: str) -> torch.Tensor:
    """Return this rank's tokens of a tensor [b, s, ...]."""
    local = chunks_of(group.rank(), group.size(), order)
    parts = full.chunk(len(local) * group.size(), 1)
    return torch.cat([parts[c] for c in local], 1)


def logsumexp(q: torch.Tensor, k: torch.Tensor, causal: bool) -> torch.Tensor:
    """lse [b, s, a] of all scores."""
    return blocks.scores(q, k, causal).logsumexp(-1).permute(0, 3, 1, 2).flatten(2)


class NotedBlock:
    """PyTorch's kernels as a block, which notes in a diary how many scores it makes."""

    def __init__(self, diary: Diary):
        self.diary = diary

    def note(self, q: torch.Tensor, k: torch.Tensor, causal: bool) -> None:
        rows, columns = q.shape[1], k.shape[1]
        made = sum(min(i + 1, columns) for i in range(rows)) if causal else rows * columns
        self.diary.events.append(("attention", made))

    def forward(self, q, k, v, causal):
        self.note(q, k, causal)
        return blocks.fused_forward(q, k, v, causal)

    def backward(self, gradient, q, k, v, out, lse, causal):
        self.note(q, k, causal)
        return blocks.fused_backward(gradient, q, k, v, out, lse, causal)


class UnequalBlock:
    """A block whose second backward on a rank returns 1 everywhere, and each other one 2^-9: a sum that is kept in BF16
    loses every 2^-9 that is added to the 1.
    """

    def __init__(self):
        self.calls = 0

    def forward(self, q, k, v, causal):
        return blocks.fused_forward(q, k, v, causal)

    def backward(self, gradient, q, k, v, out, lse, causal):
        self.calls += 1
        return tuple(torch.full_like(x, 1 if self.calls == 2 else 2**-9) for x in (q, k, v))


class Forward(NamedTuple):
    """One rank's results of a forward."""

    errors: tuple[float, float]  # of out and lse
    events: list[Event]
    traffic: Traffic
    same: bool  # inputs are as before
    dtypes: list[torch.dtype]  # of out and lse


class Backward(NamedTuple):
    """One rank's results of a backward."""

    errors: list[float]  # of the gradients of q, k, v
    events: list[Event]
    traffic: Traffic
    same: bool  # inputs are as before
    dtypes: list[torch.dtype]  # of the gradients


def forward_trial(
    group: dist.ProcessGroup,
    function: str,
    order: str,
    causal: bool,
    seq: int = SEQ,
    dtype: torch.dtype = torch.float64,
) -> Forward:
    """Try a function of course_lib.context_parallel.attention, of this name."""
    q, k, v, gradient = some_heads(seq, dtype=dtype)
    q64, k64, v64, gradient64 = (x.double() for x in (q, k, v, gradient))
    expected = full_attention(q64, k64, v64, gradient64, causal)[0], logsumexp(q64, k64, causal)
    local = [local_tokens(x, group, order) for x in (q, k, v)]
    copies = [x.clone() for x in local]
    with Diary() as diary, count_traffic() as traffic:
        got = getattr(attention, function)(*local, group, causal, NotedBlock(diary), order)
    out_error, lse_error = (
        relative_error(mine.double(), local_tokens(x, group, order)) for mine, x in zip(got, expected, strict=True)
    )
    same = all(map(torch.equal, local, copies))
    return Forward((out_error, lse_error), diary.events, traffic, same, [x.dtype for x in got])


def backward_trial(
    group: dist.ProcessGroup,
    function: str,
    order: str,
    causal: bool,
    seq: int = SEQ,
    dtype: torch.dtype = torch.float64,
) -> Backward:
    """Try a function of course_lib.context_parallel.attention, of this name. out and lse are one process's."""
    q, k, v, gradient = some_heads(seq, dtype=dtype)
    q64, k64, v64, gradient64 = (x.double() for x in (q, k, v, gradient))
    out, *expected = full_attention(q64, k64, v64, gradient64, causal)
    given = [
        local_tokens(x, group, order).contiguous() for x in (gradient, q, k, v, out.to(dtype), logsumexp(q, k, causal))
    ]
    copies = [x.clone() for x in given]
    with Diary() as diary, count_traffic() as traffic:
        got = getattr(attention, function)(*given, group, causal, NotedBlock(diary), order)
    same = all(map(torch.equal, given, copies))
    errors = [relative_error(m.double(), local_tokens(x, group, order)) for m, x in zip(got, expected, strict=True)]
    return Backward(errors, diary.events, traffic, same, [x.dtype for x in got])


def lossy_trial(group: dist.ProcessGroup, function: str) -> list[float]:
    """On 4 ranks, in BF16: the largest difference of each gradient from a float32 sum of what UnequalBlock returns."""
    q, k, v, gradient = (local_tokens(x, group, "contiguous") for x in some_heads(SEQ, dtype=torch.bfloat16))
    lse = logsumexp(q, k, False)
    got = getattr(attention, function)(gradient, q, k, v, q, lse, group, False, UnequalBlock(), "contiguous")
    right = torch.tensor(1 + 3 * 2**-9).bfloat16()
    return [(x - right).abs().max().item() for x in got]


def shards_alive(group: dist.ProcessGroup) -> tuple[int, int]:
    """On a rank: how many shards of k and v, or of their gradients, the ring makes and holds at once, in forward and in
    backward.
    """
    q, k, v, gradient = (local_tokens(x, group, "contiguous") for x in some_heads(SEQ, kv=4))
    size, settings = 2 * k.nbytes, (group, False, blocks.FUSED_BLOCK, "contiguous")
    with AtOnce(size) as forward:
        out, lse = attention.ring_forward(q, k, v, *settings)
    with AtOnce(size) as backward:
        attention.ring_backward(gradient, q, k, v, out, lse, *settings)
    return forward.most, backward.most


class Both(NamedTuple):
    """One rank's results of a differentiable method."""

    errors: list[float]  # of out and the gradients of q, k, v
    forward: Traffic
    backward: Traffic
    blocks: int  # that forward computes
    dtypes: list[torch.dtype]  # of out and the gradients


def method_trial(
    group: dist.ProcessGroup,
    method: Callable,
    order: str,
    causal: bool,
    heads: int = 4,
    kv: int = 2,
    dtype: torch.dtype = torch.float64,
) -> Both:
    """Try a function that takes (q, k, v, group, causal, attention, order) and returns out."""
    q, k, v, gradient = some_heads(SEQ, heads, kv, dtype=dtype)
    q64, k64, v64, gradient64 = (x.double() for x in (q, k, v, gradient))
    expected = full_attention(q64, k64, v64, gradient64, causal)
    local = [local_tokens(x, group, order).contiguous().requires_grad_() for x in (q, k, v)]
    diary = Diary()
    with count_traffic() as forward:
        out = method(*local, group, causal, NotedBlock(diary), order)
    made = len(diary.events)
    with count_traffic() as backward:
        got = out.detach(), *torch.autograd.grad(out, local, local_tokens(gradient, group, order))
    errors = [relative_error(m.double(), local_tokens(x, group, order)) for m, x in zip(got, expected, strict=True)]
    return Both(errors, forward, backward, made, [x.dtype for x in got])


def part_bytes(n: int) -> int:
    """Return the bytes of a rank's k and v in float64, [b, s/n, kv, d] each."""
    return 2 * 2 * SEQ // n * 2 * 8 * 8


def hidden(events: list[Event], word: str) -> int:
    """Return the number of transfers of this name that have attention between their start and the first wait for
    them.
    """
    count = 0
    for position, (what, _) in enumerate(events):
        if what == f"start {word}":
            wait = f"wait {word}", position
            end = [*events, wait].index(wait)
            count += any(name == "attention" for name, _ in events[position:end])
    return count
