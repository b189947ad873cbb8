"""Shards of a sequence: the tokens of each rank, and how to split and to join a sequence.

"contiguous": rank r has the r-th of n chunks. "zigzag": the sequence is cut into 2n chunks, and rank r has the chunks r
and 2n - 1 - r, an early and a late one, so that causal attention is the same work on every rank (the split of Llama 3,
§3.3.2, and of Zhu's ring-flash-attention, 2024). A zig-zag split equals a contiguous split of the sequence after its
chunks are reordered: 0, 2n - 1, 1, 2n - 2, ...
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from course_lib.collectives.groups import group_or_world
from course_lib.collectives.into_tensor import all_gather_into_tensor, reduce_scatter_tensor
from course_lib.sequence_parallel.orders import ORDERS


def split_by_rank(full: torch.Tensor, n: int) -> torch.Tensor:
    """Return a sequence [b, s, ...] split into n shards: [n, b, s/n, ...], a view. Raises ValueError if n does not
    divide the sequence.
    """
    if full.shape[1] % n:
        raise ValueError(f"a sequence of {full.shape[1]} tokens cannot be split into {n} equal shards")
    return full.unflatten(1, (n, -1)).movedim(1, 0)


def join_by_rank(shards: torch.Tensor) -> torch.Tensor:
    """Return the shards of all ranks [n, b, s/n, ...] side by side: [b, s, ...]. A copy, unless b = 1."""
    return shards.movedim(0, 1).flatten(1, 2)


def start_gather(local: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, dist.Work]:
    """Start an all-gather of the ranks' shards [b, s/n, ...]; return its output [n, b, s/n, ...] and the work."""
    shards = local.new_empty(group.size(), *local.shape)
    return shards, all_gather_into_tensor(shards.flatten(0, 1), local.contiguous(), group=group, async_op=True)


def start_reduce_scatter(shards: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, dist.Work]:
    """Start a reduce-scatter of [n, b, s/n, ...]; return its output [b, s/n, ...], this rank's shard summed over the
    ranks, and the work.
    """
    local, shards = shards.new_empty(shards.shape[1:]), shards.contiguous()
    return local, reduce_scatter_tensor(local, shards.flatten(0, 1), group=group, async_op=True)


def chunks_of(rank: int, ranks: int, order: str = "zigzag") -> tuple[int, ...]:
    """Return the indices of a rank's chunks, ascending. Raises ValueError for an order that is not in ORDERS."""
    if order not in ORDERS:
        raise ValueError(f"order {order!r}: it is one of {', '.join(ORDERS)}")
    return (rank, 2 * ranks - 1 - rank) if order == "zigzag" else (rank,)


# exercise 07.11
def to_zigzag(full: torch.Tensor, ranks: int) -> torch.Tensor:
    """Return [b, s, ...] with its 2n chunks in the order 0, 2n - 1, 1, 2n - 2, ...: pair r is rank r's shard."""
    first, second = full.unflatten(1, (2, ranks, -1)).unbind(1)  # [b, n, chunk, ...] each
    return torch.stack([first, second.flip(1)], dim=2).flatten(1, 3)


# exercise 07.11
def from_zigzag(split: torch.Tensor, ranks: int) -> torch.Tensor:
    """Return the sequence in its original order: the inverse of to_zigzag."""
    early, late = split.unflatten(1, (ranks, 2, -1)).unbind(2)
    return torch.cat([early, late.flip(1)], dim=1).flatten(1, 2)


def to_order(full: torch.Tensor, ranks: int, order: str = "zigzag") -> torch.Tensor:
    """Return [b, s, ...] reordered so that its r-th n-th is rank r's shard."""
    return to_zigzag(full, ranks) if order == "zigzag" else full


def from_order(split: torch.Tensor, ranks: int, order: str = "zigzag") -> torch.Tensor:
    """Return the sequence in its original order: the inverse of to_order."""
    return from_zigzag(split, ranks) if order == "zigzag" else split


def shard_sequence(full: torch.Tensor, group: dist.ProcessGroup | None = None, order: str = "zigzag") -> torch.Tensor:
    """Return this rank's tokens [b, s/n, ...] of [b, s, ...]. Raises ValueError if the chunks do not divide it."""
    group = group_or_world(group)
    local_chunks = chunks_of(group.rank(), group.size(), order)
    chunks = split_by_rank(full, group.size() * len(local_chunks))
    return torch.cat([chunks[number] for number in local_chunks], 1)


def unshard_sequence(
    local: torch.Tensor, group: dist.ProcessGroup | None = None, order: str = "zigzag"
) -> torch.Tensor:
    """Return the full [b, s, ...] of all ranks' shards [b, s/n, ...], on every rank. Collective; passes no gradient."""
    group = group_or_world(group)
    shards, work = start_gather(local.detach(), group)
    work.wait()
    return from_order(join_by_rank(shards), group.size(), order)


def zigzag_shard(full: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return this rank's tokens of [b, s, ...]: chunks r and 2n - 1 - r. Raises ValueError if 2n does not divide s."""
    return shard_sequence(full, group, "zigzag")


def zigzag_unshard(local: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return the full [b, s, ...] of the ranks' zigzag_shard results. Collective; passes no gradient."""
    return unshard_sequence(local, group, "zigzag")


def local_positions(
    tokens: int, group: dist.ProcessGroup | None = None, order: str = "zigzag", device=None
) -> torch.Tensor:
    """Return the positions in the full sequence of this rank's `tokens` tokens: [s/n]."""
    group = group_or_world(group)
    positions = torch.arange(tokens * group.size(), device=device)[None]
    return shard_sequence(positions, group, order)[0]
