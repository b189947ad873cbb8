"""Attention over a sequence that is split over a group: three ways to the same result, causal or not.

    ring_attention         keys and values go round, a part at a time, beside the work on the part at hand
    all_gather_attention   all keys and values are gathered, used, and dropped; backward gathers them again
    ulysses_attention      an all-to-all trades tokens for heads: each rank has all tokens of some heads; and back

q: [b, s/n, a, d]; k, v: [b, s/n, kv, d]; each rank's own tokens, in `order` (sequence_parallel.shards). With e bytes a
number and T = b s kv d / n numbers in a rank's keys, the ring sends 2(n-1)T e in forward and as much in backward, and
there once more that many gradients in float32; all-gather 2(n-1)T e, and in backward 2(n-1)T e and as many float32
gradients. Ulysses sends about (2 + 2 kv/a)(n-1)/n of q's size each way: it falls with n. Its n must divide the heads.

Liu et al. 2023 (Ring Attention); Brandon et al. 2023 (Striped Attention: the imbalance of causal rings); Llama 3 2024,
§3.3.2 (all-gather, 2n chunks); Jacobs et al. 2023 (DeepSpeed-Ulysses).
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from course_lib.context_parallel.blocks import (
    FUSED_BLOCK,
    AttentionBlock,
    BlockAttention,
    attend,
    attend_backward,
    in_tokens,
    initial_out_lse,
    visible,
)
from course_lib.sequence_parallel.shards import (
    chunks_of,
    from_order,
    join_by_rank,
    split_by_rank,
    start_gather,
    start_reduce_scatter,
    to_order,
)
from course_lib.tensor_parallel.linear import as_autocast


# exercise 07.9
def start_exchange(tensor: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, list[dist.Work]]:
    """Send `tensor` to the next rank of the group, and receive one of its shape from the one before: where it arrives,
    and what to wait for. Leave `tensor` alone until then.
    """
    arriving, rank, n = torch.empty_like(tensor), group.rank(), group.size()
    send = dist.P2POp(dist.isend, tensor, group=group, group_peer=(rank + 1) % n)
    receive = dist.P2POp(dist.irecv, arriving, group=group, group_peer=(rank - 1) % n)
    return arriving, dist.batch_isend_irecv([send, receive])


# exercise 07.9
def ring_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: dist.ProcessGroup,
    causal: bool,
    attention: AttentionBlock,
    order: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [b, s/n, a, d] and lse [b, s/n, a] of this rank's queries over all keys."""
    rank, n = group.rank(), group.size()
    own = chunks_of(rank, n, order)
    chunk, kv, (out, lse) = q.shape[1] // len(own), torch.stack([k, v]), initial_out_lse(q)
    for step in range(n):
        arriving, works = start_exchange(kv, group) if step < n - 1 else (None, [])
        pieces = visible(own, chunks_of((rank - step) % n, n, order), causal)
        attend(q, *kv, in_tokens(pieces, chunk), attention, out, lse)
        for work in works:
            work.wait()
        kv = arriving
    return out.to(q.dtype), lse


# exercise 07.10
def ring_backward(
    gradient, q, k, v, out, lse, group: dist.ProcessGroup, causal: bool, attention: AttentionBlock, order: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of this rank's q, k and v; gradient: of its out [b, s/n, a, d]."""
    rank, n = group.rank(), group.size()
    own = chunks_of(rank, n, order)
    chunk, kv = q.shape[1] // len(own), torch.stack([k, v])
    grad_q, at_home, passing, on_their_way = torch.zeros_like(q, dtype=lse.dtype), None, None, []
    for step in range(n):
        arriving, works = start_exchange(kv, group) if step < n - 1 else (None, [])
        pieces = in_tokens(visible(own, chunks_of((rank - step) % n, n, order), causal), chunk)
        grad_kv = torch.zeros_like(kv, dtype=lse.dtype)
        attend_backward(gradient, q, *kv, out, lse, pieces, attention, grad_q, *grad_kv)
        if step == 0:
            at_home = grad_kv
        else:
            for work in on_their_way:
                work.wait()
            if passing is not None:
                grad_kv += passing
            sent = grad_kv  # it is being read until the next step's wait, and must not go before
            passing, on_their_way = start_exchange(sent, group)
        for work in works:
            work.wait()
        kv = arriving
    for work in on_their_way:
        work.wait()
    if passing is not None:
        at_home += passing
    return grad_q.to(q.dtype), *at_home.to(k.dtype)


def checked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, order: str) -> tuple[torch.Tensor, ...]:
    """q, k and v, in autocast's dtype where it is on. Raises ValueError where a rank's tokens can't be the chunks of
    this order, or q and k can't belong together.
    """
    if q.shape[1] % len(chunks_of(0, 1, order)):
        raise ValueError(f"{q.shape[1]} tokens per rank cannot be cut into two equal chunks, which {order} needs")
    if k.shape[1] != q.shape[1] or q.shape[2] % k.shape[2]:
        (tokens, heads), (keys, kv_heads) = q.shape[1:3], k.shape[1:3]
        raise ValueError(f"q of {tokens} tokens and {heads} heads does not fit k of {keys} and {kv_heads}")
    return as_autocast(q, k, v)


RING = AttentionBlock(ring_forward, ring_backward)  # a block itself: of this rank's queries and everybody's keys


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    causal: bool = True,
    attention: AttentionBlock = FUSED_BLOCK,
    order: str = "zigzag",
) -> torch.Tensor:
    """Attention [b, s/n, a, d] of this rank's queries to the keys of the whole sequence, which go round.

    q: [b, s/n, a, d]; k, v: [b, s/n, kv, d]: this rank's tokens in `order`. A rank holds three parts of k and v at
    most, in backward four float32 parts of their gradients too; it keeps q, k, v, out and lse. Collective, both times.

    Raises ValueError for another order, an odd number of tokens under zigzag, and keys that do not fit the queries.
    """
    settings = group or dist.group.WORLD, causal, attention, order
    return BlockAttention.apply(*checked(q, k, v, order), RING, *settings)


# exercise 07.12
def all_gather_forward(q, k, v, group, causal: bool, attention: AttentionBlock, order: str):
    """As ring_forward, from one all-gather of k and v, beside the work on the own ones."""
    rank, n = group.rank(), group.size()
    own, (out, lse) = chunks_of(rank, n, order), initial_out_lse(q)
    parts, work = start_gather(torch.cat([k, v]), group)  # [n, 2b, s/n, kv, d]
    for step in range(n):
        source = (rank - step) % n
        if step == 1:
            work.wait()
        keys, values = (k, v) if step == 0 else parts[source].chunk(2)
        pieces = in_tokens(visible(own, chunks_of(source, n, order), causal), q.shape[1] // len(own))
        attend(q, keys, values, pieces, attention, out, lse)
    return out.to(q.dtype), lse


# exercise 07.12
def all_gather_backward(gradient, q, k, v, out, lse, group, causal: bool, attention: AttentionBlock, order: str):
    """As ring_backward: gathers k and v again; the gradients of all ranks' k and v are reduce-scattered."""
    rank, n = group.rank(), group.size()
    own, grad_q = chunks_of(rank, n, order), torch.zeros_like(q, dtype=lse.dtype)
    parts, work = start_gather(torch.cat([k, v]), group)
    grads = parts.new_zeros(parts.shape, dtype=lse.dtype)
    for step in range(n):
        source = (rank - step) % n
        if step == 1:
            work.wait()
        keys, values = (k, v) if step == 0 else parts[source].chunk(2)
        pieces = in_tokens(visible(own, chunks_of(source, n, order), causal), q.shape[1] // len(own))
        attend_backward(gradient, q, keys, values, out, lse, pieces, attention, grad_q, *grads[source].chunk(2))
    of_own, work = start_reduce_scatter(grads, group)
    work.wait()
    return grad_q.to(q.dtype), *of_own.to(k.dtype).chunk(2)


def check_heads(heads: int, kv_heads: int, ranks: int) -> None:
    """Raise ValueError where Ulysses can't give each rank as many heads."""
    if heads % ranks or kv_heads % ranks and ranks % kv_heads:
        raise ValueError(f"ulysses: {ranks} ranks can't share {heads} heads and {kv_heads} K/V heads")


# exercise 07.13
class AllToAll(torch.autograd.Function):
    """pieces [n, ...]: the i-th goes to rank i of the group; returns what has come, rank by rank: [n, ...]."""

    @staticmethod
    def forward(ctx, pieces: torch.Tensor, group) -> torch.Tensor:
        ctx.group, pieces = group, pieces.contiguous()
        arrived = torch.empty_like(pieces)
        dist.all_to_all_single(arrived, pieces, group=group)
        return arrived

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        return AllToAll.apply(gradient, ctx.group), None


# exercise 07.13
def ulysses_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: dist.ProcessGroup | None = None, causal: bool = True,
    attention: AttentionBlock = FUSED_BLOCK, order: str = "zigzag",
) -> torch.Tensor:  # fmt: skip
    """As ring_attention, with all tokens of a/n heads on each rank in between: two all-to-alls, two more in backward.
    Raises ValueError where the ranks do not divide the heads, or neither of ranks and K/V heads divides the other.
    """
    group, (q, k, v) = group or dist.group.WORLD, checked(q, k, v, order)
    check_heads(q.shape[2], k.shape[2], group.size())
    n = group.size()
    k, v = (x.repeat_interleave(max(1, n // x.shape[2]), 2) for x in (k, v))  # a K/V head for each rank at least
    heads = [x.shape[2] // n for x in (q, k, v)]
    packed = torch.cat([x.unflatten(2, (n, -1)) for x in (q, k, v)], 3)  # [b, s/n, n, (a + 2kv)/n, d]
    arrived = AllToAll.apply(packed.movedim(2, 0), group)  # [n, b, s/n, (a + 2kv)/n, d]
    q, k, v = from_order(join_by_rank(arrived), n, order).split(heads, 2)  # [b, s, ...]
    out = BlockAttention.apply(q, k, v, attention, causal)  # [b, s, a/n, d]
    back = AllToAll.apply(split_by_rank(to_order(out, n, order), n), group)  # [n, b, s/n, a/n, d]
    return back.movedim(0, 2).flatten(2, 3)


ALL_GATHER = AttentionBlock(all_gather_forward, all_gather_backward)


def all_gather_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    causal: bool = True,
    attention: AttentionBlock = FUSED_BLOCK,
    order: str = "zigzag",
) -> torch.Tensor:
    """As ring_attention, with all keys and values of the group at hand while it computes."""
    settings = group or dist.group.WORLD, causal, attention, order
    return BlockAttention.apply(*checked(q, k, v, order), ALL_GATHER, *settings)
