"""Attention over a sequence that is split over a group: three ways to the same result, causal or not.

    ring_attention         keys and values travel around the ring, one shard at a time, while the shard at hand is used
    all_gather_attention   all keys and values are gathered, used, and dropped; backward gathers them again
    ulysses_attention      an all-to-all trades tokens for heads: each rank has all tokens of some heads; and back

q: [b, s/n, a, d]; k, v: [b, s/n, kv, d]: local tokens, in `order` (sequence_parallel.shards). With e bytes per element
and T = b s kv d / n elements in a rank's keys, the ring sends 2(n-1)T e bytes in forward and as many in backward, where
it also sends 2(n-1)T float32 elements of gradients; all-gather sends 2(n-1)T e, and in backward 2(n-1)T e and as many
float32 elements. Ulysses sends about (2 + 2 kv/a)(n-1)/n of q's size each way: it falls with n, which must divide the
heads.

Liu et al. 2023 (Ring Attention); Brandon et al. 2023 (Striped Attention: the imbalance of causal rings); Llama 3 2024,
§3.3.2 (all-gather, 2n chunks); Jacobs et al. 2023 (DeepSpeed-Ulysses).
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from course_lib.collectives.groups import group_or_world
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
from course_lib.context_parallel.methods import check_heads
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
    """Start to send `tensor` to the next rank of the group and to receive one of its shape from the previous rank.

    Return the buffer that is being received, and the works to wait for. Do not change `tensor` until then.
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
    """Return out [b, s/n, a, d], in q's dtype, and lse [b, s/n, a], in float32 or more, over all keys."""
    rank, n = group.rank(), group.size()
    local_chunks = chunks_of(rank, n, order)
    chunk, kv, (out, lse) = q.shape[1] // len(local_chunks), torch.stack([k, v]), initial_out_lse(q)
    for step in range(n):
        arriving, works = start_exchange(kv, group) if step < n - 1 else (kv.new_empty(0), [])
        tiles = visible(local_chunks, chunks_of((rank - step) % n, n, order), causal)
        attend(q, kv[0], kv[1], in_tokens(tiles, chunk), attention, out, lse)
        for work in works:
            work.wait()
        kv = arriving
    return out.to(q.dtype), lse


# exercise 07.10
def ring_backward(
    gradient, q, k, v, out, lse, group: dist.ProcessGroup, causal: bool, attention: AttentionBlock, order: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of the local q, k and v, in their dtypes. gradient: of the local out [b, s/n, a, d]."""
    rank, n = group.rank(), group.size()
    local_chunks = chunks_of(rank, n, order)
    chunk, kv = q.shape[1] // len(local_chunks), torch.stack([k, v])
    grad_q, passing = torch.zeros_like(q, dtype=lse.dtype), None
    grad_works: list[dist.Work] = []
    for step in range(n):
        arriving, works = start_exchange(kv, group) if step < n - 1 else (kv.new_empty(0), [])
        tiles = in_tokens(visible(local_chunks, chunks_of((rank - step) % n, n, order), causal), chunk)
        grad_kv = torch.zeros_like(kv, dtype=lse.dtype)
        attend_backward(gradient, q, kv[0], kv[1], out, lse, tiles, attention, grad_q, grad_kv[0], grad_kv[1])
        if step == 0:
            grad_local = grad_kv
        else:
            for work in grad_works:
                work.wait()
            if passing is not None:
                grad_kv += passing
            outgoing = grad_kv  # is read until the next step waits: it must not be freed before
            passing, grad_works = start_exchange(outgoing, group)
        for work in works:
            work.wait()
        kv = arriving
    for work in grad_works:
        work.wait()
    if passing is not None:
        grad_local += passing
    return grad_q.to(q.dtype), *grad_local.to(k.dtype)


def check_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, order: str) -> tuple[torch.Tensor, ...]:
    """Return q, k and v, in autocast's dtype if it is enabled. Raises ValueError if the local tokens cannot be cut into
    the chunks of this order, or q and k do not fit together.
    """
    if q.shape[1] % len(chunks_of(0, 1, order)):
        raise ValueError(f"{q.shape[1]} tokens per rank cannot be cut into two equal chunks, which {order} needs")
    if k.shape[1] != q.shape[1] or q.shape[2] % k.shape[2]:
        (tokens, heads), (keys, kv_heads) = q.shape[1:3], k.shape[1:3]
        raise ValueError(f"q of {tokens} tokens and {heads} heads does not fit k of {keys} and {kv_heads}")
    return as_autocast(q, k, v)


RING = AttentionBlock(ring_forward, ring_backward)  # itself a block: local queries, keys of all ranks


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    causal: bool = True,
    attention: AttentionBlock = FUSED_BLOCK,
    order: str = "zigzag",
) -> torch.Tensor:
    """Return the attention [b, s/n, a, d] of the local queries to all keys of the sequence, which travel in a ring.

    q: [b, s/n, a, d]; k, v: [b, s/n, kv, d]: local tokens in `order`. A rank holds at most three shards of k and v, and
    in backward also four float32 shards of their gradients; it keeps q, k, v, out and lse. Collective; so is backward.

    Raises ValueError for an unknown order, an odd number of tokens under zigzag, and keys that do not fit the queries.
    """
    settings = group_or_world(group), causal, attention, order
    return BlockAttention.apply(*check_qkv(q, k, v, order), RING, *settings)


# exercise 07.12
def all_gather_forward(q, k, v, group, causal: bool, attention: AttentionBlock, order: str):
    """Return what ring_forward returns, from one all-gather of k and v, which overlaps the local tokens' work."""
    rank, n = group.rank(), group.size()
    local_chunks, (out, lse) = chunks_of(rank, n, order), initial_out_lse(q)
    shards, work = start_gather(torch.cat([k, v]), group)  # [n, 2b, s/n, kv, d]
    for step in range(n):
        source = (rank - step) % n
        if step == 1:
            work.wait()
        keys, values = (k, v) if step == 0 else shards[source].chunk(2)
        tiles = in_tokens(visible(local_chunks, chunks_of(source, n, order), causal), q.shape[1] // len(local_chunks))
        attend(q, keys, values, tiles, attention, out, lse)
    return out.to(q.dtype), lse


# exercise 07.12
def all_gather_backward(gradient, q, k, v, out, lse, group, causal: bool, attention: AttentionBlock, order: str):
    """Return what ring_backward returns; k and v are gathered again, and their gradients reduce-scattered."""
    rank, n = group.rank(), group.size()
    local_chunks, grad_q = chunks_of(rank, n, order), torch.zeros_like(q, dtype=lse.dtype)
    shards, work = start_gather(torch.cat([k, v]), group)
    grads = shards.new_zeros(shards.shape, dtype=lse.dtype)
    for step in range(n):
        source = (rank - step) % n
        if step == 1:
            work.wait()
        keys, values = (k, v) if step == 0 else shards[source].chunk(2)
        tiles = in_tokens(visible(local_chunks, chunks_of(source, n, order), causal), q.shape[1] // len(local_chunks))
        attend_backward(gradient, q, keys, values, out, lse, tiles, attention, grad_q, *grads[source].chunk(2))
    grad_local, work = start_reduce_scatter(grads, group)
    work.wait()
    return grad_q.to(q.dtype), *grad_local.to(k.dtype).chunk(2)


# exercise 07.13
class AllToAll(torch.autograd.Function):
    """Send the i-th of `chunks` [n, ...] to rank i; return the received chunks, by rank: [n, ...]. Keep no tensor."""

    @staticmethod
    def forward(ctx, chunks: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group, chunks = group, chunks.contiguous()
        received = torch.empty_like(chunks)
        dist.all_to_all_single(received, chunks, group=group)
        return received

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        return AllToAll.apply(gradient, ctx.group), None


# exercise 07.13
def ulysses_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: dist.ProcessGroup | None = None, causal: bool = True,
    attention: AttentionBlock = FUSED_BLOCK, order: str = "zigzag",
) -> torch.Tensor:  # fmt: skip
    """Return what ring_attention returns, computed with all tokens of a/n heads on each rank: two all-to-alls, and two
    in backward. Raises ValueError if the ranks do not divide the heads, or if neither of ranks and K/V heads divides
    the other.
    """
    group, (q, k, v) = group_or_world(group), check_qkv(q, k, v, order)
    check_heads(q.shape[2], k.shape[2], group.size())
    n = group.size()
    k, v = (x.repeat_interleave(max(1, n // x.shape[2]), 2) for x in (k, v))  # a K/V head for each rank at least
    heads = [x.shape[2] // n for x in (q, k, v)]
    packed = torch.cat([x.unflatten(2, (n, -1)) for x in (q, k, v)], 3)  # [b, s/n, n, (a + 2kv)/n, d]
    received = AllToAll.apply(packed.movedim(2, 0), group)  # [n, b, s/n, (a + 2kv)/n, d]
    q, k, v = from_order(join_by_rank(received), n, order).split(heads, 2)  # [b, s, ...]
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
    """Return what ring_attention returns; all keys and values of the group are on each rank while it computes."""
    settings = group_or_world(group), causal, attention, order
    return BlockAttention.apply(*check_qkv(q, k, v, order), ALL_GATHER, *settings)
