"""Which tokens of a sequence a rank has, and how the parts of all ranks make up the whole.

"contiguous": rank r has the r-th of n parts. "zigzag": the sequence is cut into 2n chunks, and rank r has the chunks r
and 2n - 1 - r, an early and a late one, so that causal attention is as much work on every rank (the split of Llama 3,
§3.3.2, and of Zhu's ring-flash-attention, 2024). A zig-zag split is a contiguous one of a sequence whose chunks have
been put in another order first: 0, 2n - 1, 1, 2n - 2, ...
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from course_lib.collectives.into_tensor import all_gather_into_tensor, reduce_scatter_tensor


def split_by_rank(whole: torch.Tensor, parts: int) -> torch.Tensor:
    """[b, s, ...] as its parts, one after the other: [n, b, s/n, ...], a view. Raises ValueError where n does not
    divide the sequence.
    """
    if whole.shape[1] % parts:
        raise ValueError(f"a sequence of {whole.shape[1]} tokens can't be split into {parts} equal parts")
    return whole.unflatten(1, (parts, -1)).movedim(1, 0)


def join_by_rank(pieces: torch.Tensor) -> torch.Tensor:
    """The parts of all ranks [n, b, s/n, ...] side by side: [b, s, ...]. A copy, but for b = 1."""
    return pieces.movedim(0, 1).flatten(1, 2)


def start_gather(part: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, dist.Work]:
    """All-gather of the ranks' parts [b, s/n, ...], under way: where they arrive, [n, b, s/n, ...], and the work."""
    pieces = part.new_empty(group.size(), *part.shape)
    return pieces, all_gather_into_tensor(pieces.flatten(0, 1), part.contiguous(), group=group, async_op=True)


def start_reduce_scatter(pieces: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, dist.Work]:
    """Reduce-scatter of [n, b, s/n, ...], under way: where the sum over the ranks of this rank's piece arrives, and the
    work.
    """
    own, pieces = pieces.new_empty(pieces.shape[1:]), pieces.contiguous()
    return own, reduce_scatter_tensor(own, pieces.flatten(0, 1), group=group, async_op=True)


ORDERS = ("zigzag", "contiguous")


def chunks_of(rank: int, ranks: int, order: str = "zigzag") -> tuple[int, ...]:
    """The numbers of the chunks that a rank has, ascending. Raises ValueError for an order that is not in ORDERS."""
    if order not in ORDERS:
        raise ValueError(f"order {order!r}: it is one of {', '.join(ORDERS)}")
    return (rank, 2 * ranks - 1 - rank) if order == "zigzag" else (rank,)


# exercise 07.11
def to_zigzag(whole: torch.Tensor, ranks: int) -> torch.Tensor:
    """[b, s, ...] with its 2n chunks in the order 0, 2n - 1, 1, 2n - 2, ...: rank r's are the r-th part."""
    first, second = whole.unflatten(1, (2, ranks, -1)).unbind(1)  # [b, n, chunk, ...] each
    return torch.stack([first, second.flip(1)], dim=2).flatten(1, 3)


# exercise 07.11
def from_zigzag(split: torch.Tensor, ranks: int) -> torch.Tensor:
    """The inverse of to_zigzag."""
    early, late = split.unflatten(1, (ranks, 2, -1)).unbind(2)
    return torch.cat([early, late.flip(1)], dim=1).flatten(1, 2)


def to_order(whole: torch.Tensor, ranks: int, order: str = "zigzag") -> torch.Tensor:
    """[b, s, ...] so that its r-th part is rank r's."""
    return to_zigzag(whole, ranks) if order == "zigzag" else whole


def from_order(split: torch.Tensor, ranks: int, order: str = "zigzag") -> torch.Tensor:
    """The inverse of to_order."""
    return from_zigzag(split, ranks) if order == "zigzag" else split


def shard_sequence(whole: torch.Tensor, group: dist.ProcessGroup | None = None, order: str = "zigzag") -> torch.Tensor:
    """This rank's tokens [b, s/n, ...] of [b, s, ...]. Raises ValueError where the chunks do not divide it."""
    group = group or dist.group.WORLD
    own = chunks_of(group.rank(), group.size(), order)
    chunks = split_by_rank(whole, group.size() * len(own))
    return torch.cat([chunks[number] for number in own], 1)


def unshard_sequence(part: torch.Tensor, group: dist.ProcessGroup | None = None, order: str = "zigzag") -> torch.Tensor:
    """The whole [b, s, ...] of all ranks' parts [b, s/n, ...], on every rank. Collective; lets no gradient through."""
    group = group or dist.group.WORLD
    pieces, work = start_gather(part.detach(), group)
    work.wait()
    return from_order(join_by_rank(pieces), group.size(), order)


def zigzag_shard(whole: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """This rank's tokens of [b, s, ...]: chunks r and 2n - 1 - r of 2n. Raises ValueError where 2n is no divisor."""
    return shard_sequence(whole, group, "zigzag")


def zigzag_unshard(part: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """The whole [b, s, ...] of what zigzag_shard gave to the ranks. Collective; lets no gradient through."""
    return unshard_sequence(part, group, "zigzag")


def local_positions(
    tokens: int, group: dist.ProcessGroup | None = None, order: str = "zigzag", device=None
) -> torch.Tensor:
    """The places in the sequence of this rank's `tokens` tokens: [s/n]."""
    group = group or dist.group.WORLD
    places = torch.arange(tokens * group.size(), device=device)[None]
    return shard_sequence(places, group, order)[0]
