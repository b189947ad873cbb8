"""Dispatch and combine: tokens go to the ranks that hold their experts, and what these make of them comes back.

    x [t, h], gates [t, E]      each rank's own tokens
      dispatch: all-to-all      a token goes once to each rank that holds one or more of its experts
    rows [r, h], gates [r, E/n] what has come, with the gates of this rank's experts
      experts                   the sum over this rank's experts, times their gates
      combine: all-to-all       back to where it came from, and added up in float32
    out [t, h]

A token that chooses two experts of one rank travels once, and their sum comes back as one row. Bytes in forward: twice
the rows that leave a rank times h, plus their gates. `compute` may be an exchange itself: first among nodes, then among
the ranks of a node; then a token crosses to a node once, however many of its experts are there. The shared expert is
computed while the first dispatch travels, and its backward while that dispatch's gradients do.
Lepikhin et al. 2020 (GShard); Rajbhandari et al. 2022 (DeepSpeed-MoE: two hops); DeepSeek-V3 2024, §3.2.2.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from course_lib.expert_parallel.experts import AddByToken, TakeByToken
from course_lib.tensor_parallel.linear import as_autocast
from course_lib.tensor_parallel.regions import OnceDifferentiable


class AsyncAllToAll:
    """Rows on their way between the ranks of a group: sends[i] of them to rank i, receives[i] from it; or, home, the
    other way round.
    """

    def __init__(self, group: dist.ProcessGroup, sends: list[int], receives: list[int]):
        self.group, self.sends, self.receives = group, sends, receives
        self.under_way = []  # a pair for each tensor: the work, and what comes

    # exercise 08.12
    def start(self, tensors: tuple[torch.Tensor, ...], home: bool = False) -> tuple[torch.Tensor, ...]:
        """Start to send the rows of each tensor [sum(sends), ...], the first sends[0] to rank 0 and so on. Returns of
        each what comes, rank by rank [sum(receives), ...], to be read after wait(). Collective.
        """
        there, here = (self.receives, self.sends) if home else (self.sends, self.receives)
        for tensor in tensors:
            comes = tensor.new_empty(sum(here), *tensor.shape[1:])
            work = dist.all_to_all_single(comes, tensor.contiguous(), here, there, group=self.group, async_op=True)
            self.under_way.append((work, comes))
        return tuple(comes for _, comes in self.under_way)

    # exercise 08.12
    def wait(self) -> tuple[torch.Tensor, ...]:
        """Wait until all is there that was started, each once; returns it, and empties under_way."""
        for work, _ in self.under_way:
            work.wait()
        arrived = tuple(comes for _, comes in self.under_way)
        self.under_way.clear()
        return arrived


class StartAllToAll(OnceDifferentiable):
    """Rows leave: forward starts, for WaitAllToAll to finish. Backward finishes: their gradients are home."""

    @staticmethod
    def forward(ctx, transfer: AsyncAllToAll, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.transfer = transfer
        return transfer.start(tensors)

    @staticmethod
    def backward(ctx, *_: torch.Tensor) -> tuple:
        return None, *ctx.transfer.wait()


class WaitAllToAll(OnceDifferentiable):
    """Rows are here: forward finishes what StartAllToAll has started. Backward starts to send their gradients home."""

    @staticmethod
    def forward(ctx, transfer: AsyncAllToAll, *arrived: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.transfer = transfer
        transfer.wait()
        return arrived

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor) -> tuple:
        ctx.transfer.start(gradients, home=True)
        return None, *gradients  # of the shapes that autograd expects here; StartAllToAll has those that come home


def send_rows(
    group, sends: list[int], receives: list[int], *tensors: torch.Tensor, meanwhile: Callable | None = None
) -> tuple[torch.Tensor, ...]:
    """Rows of each tensor [sum(sends), ...] to the ranks of the group; returns of each what comes, rank by rank
    [sum(receives), ...]. `meanwhile()` is called while all is under way, and its backward while the gradients are:
    autograd runs the latest step first. Collective, backward too.
    """
    transfer = AsyncAllToAll(group, sends, receives)
    arrived = StartAllToAll.apply(transfer, *tensors)
    if meanwhile is not None:
        meanwhile()
    return WaitAllToAll.apply(transfer, *arrived)


def read_sizes(rows: torch.Tensor, choices: torch.Tensor, group) -> tuple[list[int], list[int], int]:
    """How many rows to send to each rank of the group, how many come from each, and how many choices in all of these.

    rows, choices: [n], what this rank sends to each. The one read on the host: once for each mixture and hop, and again
    where forward is replayed. Collective.
    """
    sent = torch.stack([rows, choices], 1)  # [n, 2]
    came = torch.empty_like(sent)
    dist.all_to_all_single(came, sent, group=group)
    (sends, _), (receives, arriving) = torch.stack([sent, came]).transpose(1, 2).tolist()
    return sends, receives, sum(arriving)


# exercise 08.13
def dispatch_and_combine(
    x: torch.Tensor,
    gates: torch.Tensor,
    choices: int | None,
    group: dist.ProcessGroup,
    compute: Callable,
    meanwhile: Callable | None = None,
) -> torch.Tensor:
    """What the experts of all ranks make of this rank's tokens: [t, h], in autocast's dtype where it is on.

    x: [t, h]; gates: [t, E]: those of rank i's experts are the i-th of n equal parts; choices: not needed here, so that
    an exchange can be the `compute` of another. compute(rows [r, h], gates [r, E/n], choices) -> [r, h] is called on
    what has come. meanwhile(), where there is one, is called while rows are on their way there. Ranks may have
    different numbers of tokens. Collective, backward too.
    """
    n, (x,) = group.size(), as_autocast(x)
    parts = gates.unflatten(1, (n, -1))  # [t, n, E/n]
    wanted = parts.detach() != 0
    goes = wanted.any(2).t()  # [n, t]
    sends, receives, arriving = read_sizes(goes.sum(1), wanted.sum((0, 2)), group)
    to, token = torch.nonzero_static(goes, size=sum(sends)).unbind(1)  # by rank
    row_gates = parts.flatten(0, 1).index_select(0, token * n + to)  # [rows, E/n]
    rows = TakeByToken.apply(x, token)
    rows, row_gates = send_rows(group, sends, receives, rows, row_gates, meanwhile=meanwhile)
    out = compute(rows, row_gates, arriving)
    (back,) = send_rows(group, receives, sends, out)
    return AddByToken.apply(back, token, len(x))
