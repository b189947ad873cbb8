"""Dispatch and combine: tokens are sent to the ranks that hold their experts, and the experts' outputs are sent back.

    x [t, h], gates [t, E]      local tokens
      dispatch: all-to-all      a token goes once to each rank that holds one or more of its experts
    rows [r, h], gates [r, E/n] received tokens, with the gates of the local experts
      experts                   the sum of the local experts' outputs, weighted by their gates
      combine: all-to-all       back to the rank of the token, where rows are summed in float32
    out [t, h]

A token that chooses two experts of one rank is sent once, and their sum comes back as one row. Bytes in forward: twice
the rows that leave a rank times h, plus their gates. `compute` may be a dispatch_and_combine itself: first between
nodes, then between the ranks of a node; a token then crosses to a node once, however many of its experts are there. The
shared expert overlaps the first dispatch, and its backward overlaps the all-to-all of that dispatch's gradients.
Lepikhin et al. 2020 (GShard); Rajbhandari et al. 2022 (DeepSpeed-MoE: two hops); DeepSeek-V3 2024, §3.2.2.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from course_lib.collectives.simulation import Simulatable
from course_lib.expert_parallel.experts import AddByToken, TakeByToken
from course_lib.tensor_parallel.linear import as_autocast
from course_lib.tensor_parallel.regions import OnceDifferentiable


class AsyncAllToAll:
    """All-to-alls of rows in a group: sends[i] rows to rank i, receives[i] rows from it, or the reverse."""

    def __init__(self, group: dist.ProcessGroup, sends: list[int], receives: list[int]):
        self.group, self.sends, self.receives = group, sends, receives
        self.pending: list[tuple[dist.Work, torch.Tensor]] = []  # for each tensor: the work, and the received rows

    # exercise 08.12
    def start(self, tensors: tuple[torch.Tensor, ...], reverse: bool = False) -> tuple[torch.Tensor, ...]:
        """Start to send the rows of each tensor [sum(sends), ...], the first sends[0] of them to rank 0 and so on.

        Return the rows that each tensor will receive, by rank: [sum(receives), ...], to be read after wait(). reverse:
        swap sends and receives. Collective.
        """
        sends, receives = (self.receives, self.sends) if reverse else (self.sends, self.receives)
        for tensor in tensors:
            rows = tensor.new_empty(sum(receives), *tensor.shape[1:])
            work = dist.all_to_all_single(rows, tensor.contiguous(), receives, sends, group=self.group, async_op=True)
            self.pending.append((work, rows))
        return tuple(rows for _, rows in self.pending)

    # exercise 08.12
    def wait(self) -> tuple[torch.Tensor, ...]:
        """Wait for everything that was started, once each; return the received rows, and empty `pending`."""
        for work, _ in self.pending:
            work.wait()
        received = tuple(rows for _, rows in self.pending)
        self.pending.clear()
        return received


class StartAllToAll(OnceDifferentiable):
    """Start an all-to-all in forward, for WaitAllToAll to wait for; in backward wait for the all-to-all of the
    gradients.
    """

    @staticmethod
    def forward(ctx, all_to_all: AsyncAllToAll, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.all_to_all = all_to_all
        return all_to_all.start(tensors)

    @staticmethod
    def backward(ctx, *_: torch.Tensor) -> tuple:
        return None, *ctx.all_to_all.wait()


class WaitAllToAll(OnceDifferentiable):
    """Wait in forward for the all-to-all that StartAllToAll started; in backward start the gradients' all-to-all."""

    @staticmethod
    def forward(ctx, all_to_all: AsyncAllToAll, *received: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.all_to_all = all_to_all
        all_to_all.wait()
        return received

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor) -> tuple:
        ctx.all_to_all.start(gradients, reverse=True)
        return (
            None,
            *gradients,
        )  # of the shapes that autograd expects here; StartAllToAll returns those received


def send_rows(
    group: dist.ProcessGroup,
    sends: list[int],
    receives: list[int],
    *tensors: torch.Tensor,
    overlap_with: Callable[[], object] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Send the rows of each tensor [sum(sends), ...] to the ranks of the group; return the rows that each receives, by
    rank: [sum(receives), ...].

    overlap_with() is called between start and wait, and its backward between start and wait of the gradients: autograd
    runs the latest step first. Collective; so is backward.
    """
    all_to_all = AsyncAllToAll(group, sends, receives)
    received = StartAllToAll.apply(all_to_all, *tensors)
    if overlap_with is not None:
        overlap_with()
    return WaitAllToAll.apply(all_to_all, *received)


@Simulatable
def read_sizes(rows: torch.Tensor, choices: torch.Tensor, group: dist.ProcessGroup) -> tuple[list[int], list[int], int]:
    """Return the number of rows to send to each rank of the group and to receive from each, and the number of choices
    in all received rows.

    rows, choices: [n], what this rank sends to each. This is the only read on the host: once per mixture and hop, and
    again when forward is recomputed. Collective.
    """
    outgoing = torch.stack([rows, choices], 1)  # [n, 2]
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing, group=group)
    (sends, _), (receives, received_choices) = torch.stack([outgoing, incoming]).transpose(1, 2).tolist()
    return sends, receives, sum(received_choices)


# exercise 08.13
def dispatch_and_combine(
    x: torch.Tensor,
    gates: torch.Tensor,
    choices: int | None,
    group: dist.ProcessGroup,
    compute: Callable[..., torch.Tensor],
    overlap_with: Callable[[], object] | None = None,
) -> torch.Tensor:
    """Return the output of all ranks' experts for the local tokens: [t, h], in autocast's dtype if it is enabled.

    x: [t, h]; gates: [t, E], of which columns i E/n to (i + 1) E/n - 1 belong to rank i's experts; choices: ignored, so
    that one dispatch_and_combine can be the `compute` of another. compute(rows [r, h], gates [r, E/n], choices) -> [r,
    h] is called on the received rows. overlap_with() is called while rows are sent to the experts. Ranks may have
    different numbers of tokens. Collective; so is backward.
    """
    n, (x,) = group.size(), as_autocast(x)
    rank_gates = gates.unflatten(1, (n, -1))  # [t, n, E/n]
    wanted = rank_gates.detach() != 0
    goes = wanted.any(2).t()  # [n, t]
    sends, receives, received_choices = read_sizes(goes.sum(1), wanted.sum((0, 2)), group)
    to, token = torch.nonzero_static(goes, size=sum(sends)).unbind(1)  # by rank
    row_gates = rank_gates.flatten(0, 1).index_select(0, token * n + to)  # [rows, E/n]
    rows = TakeByToken.apply(x, token)
    rows, row_gates = send_rows(group, sends, receives, rows, row_gates, overlap_with=overlap_with)
    out = compute(rows, row_gates, received_choices)
    (returned,) = send_rows(group, receives, sends, out)
    return AddByToken.apply(returned, token, len(x))
