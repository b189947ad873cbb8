"""Attention from pieces: each of some queries with some keys, merged exactly.

A piece gives out = softmax(z) v and lse = log sum exp(z), with z = q k^T / sqrt(d). Pieces A and B over other keys
merge to

    lse = log(e^lse_A + e^lse_B)        out = e^(lse_A - lse) out_A + e^(lse_B - lse) out_B

(Milakov and Gimelshein 2018, "Online normalizer calculation for softmax".) Backward takes the pieces apart again: with
the merged lse, p = e^(z - lse) are the right probabilities of any piece, and its gradients are those of an attention
whose other keys are elsewhere (Dao et al. 2022, FlashAttention, appendix B.2). So a block of attention is two
functions:

    forward(q, k, v, causal) -> out, lse
    backward(gradient, q, k, v, out, lse, causal) -> gradients of q, k, v;   out, lse: merged, over all keys

q, out, gradient: [b, s, a, d]; k, v: [b, s', kv, d], where kv divides a; lse: [b, s, a], in float32 or more.
causal: the i-th query sees the first i + 1 keys.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch


# exercise 07.6
def merge(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Put a piece's attention `part` [b, s, a, d], with its logsumexp [b, s, a], into `out` and `lse`, in place.

    Where nothing has been seen yet, out is 0 and lse is -inf. part_lse is finite.
    """
    out.lerp_(part.to(out.dtype), torch.sigmoid(part_lse - lse)[..., None])
    torch.logaddexp(lse, part_lse, out=lse)


def by_group(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """[b, s, a, ...] as [b, s, kv, a/kv, ...]: the heads that share a head of k."""
    return x.unflatten(2, (k.shape[2], -1))


def scores(q: torch.Tensor, k: torch.Tensor, causal: bool) -> torch.Tensor:
    """q · k / sqrt(d) in float32 or more, -inf where a query does not see a key: [b, kv, a/kv, s, s']."""
    q, k = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k))
    z = torch.einsum("bqkgd,bskd->bkgqs", by_group(q, k), k) / math.sqrt(q.shape[-1])
    return z + torch.full_like(z[0, 0, 0], float("-inf")).triu(1) if causal else z


# exercise 07.7
def plain_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """out [b, s, a, d] and lse [b, s, a] of a block, by plain products: all its scores are there at once."""
    z = scores(q, k, causal)
    lse = z.logsumexp(-1)  # [b, kv, g, s]
    p = (z - lse[..., None]).exp().to(v.dtype)
    out = torch.einsum("bkgqs,bskd->bqkgd", p, v).flatten(2, 3)
    return out, lse.permute(0, 3, 1, 2).flatten(2)


# exercise 07.7
def plain_backward(gradient, q, k, v, out, lse, causal: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k, v through this block; out and lse are those of all blocks together, gradient is out's."""

    def of_rows(x: torch.Tensor) -> torch.Tensor:  # [b, s, a] as [b, kv, g, s]
        return by_group(x, k).permute(0, 2, 3, 1)

    p = (scores(q, k, causal) - of_rows(lse)[..., None]).exp()
    grad = by_group(gradient, k)
    grad_v = torch.einsum("bkgqs,bqkgd->bskd", p.to(grad.dtype), grad)
    grad_p = torch.einsum("bqkgd,bskd->bkgqs", grad.to(p.dtype), v.to(p.dtype))
    row_sums = of_rows((gradient.to(p.dtype) * out).sum(-1))  # D
    grad_z = (p * (grad_p - row_sums[..., None]) / math.sqrt(q.shape[-1])).to(q.dtype)
    grad_q = torch.einsum("bkgqs,bskd->bqkgd", grad_z, k).flatten(2, 3)
    grad_k = torch.einsum("bkgqs,bqkgd->bskd", grad_z, by_group(q, k))
    return grad_q, grad_k, grad_v


class AttentionBlock(NamedTuple):
    """The two functions of a block of attention; what they take and return stands at the top of this module."""

    forward: Callable
    backward: Callable


PLAIN_BLOCK = AttentionBlock(plain_forward, plain_backward)


def operator(name: str) -> Callable:
    """PyTorch's own operator of this name."""
    from torch import ops  # in here, because a function that goes to ranks can't carry it along

    return getattr(ops.aten, name)


def has_kernel(q: torch.Tensor) -> bool:
    """Whether PyTorch's FlashAttention takes it: on a CPU any, on a GPU 16 bits and heads of 8, 16, ... 256."""
    if q.device.type == "cuda":
        return q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return q.device.type == "cpu"


def contiguous_rows(x: torch.Tensor) -> torch.Tensor:
    """x, the numbers of a head side by side: the kernels take that for granted, and the CPU's does not check."""
    return x if x.stride(-1) == 1 else x.contiguous()


def fused_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """As plain_forward, by PyTorch's FlashAttention where it has one."""
    if not has_kernel(q):
        return plain_forward(q, k, v, causal)
    kernel = operator("_scaled_dot_product_flash_attention" + "_for_cpu" * (q.device.type == "cpu"))
    out, lse, *_ = kernel(*(contiguous_rows(x).transpose(1, 2) for x in (q, k, v)), 0.0, causal)
    return out.transpose(1, 2), lse.transpose(1, 2)


def fused_backward(gradient, q, k, v, out, lse, causal: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As plain_backward, by PyTorch's FlashAttention where it has one."""
    if not has_kernel(q):
        return plain_backward(gradient, q, k, v, out, lse, causal)
    tensors = [contiguous_rows(x).transpose(1, 2) for x in (gradient, q, k, v, out)] + [
        lse.transpose(1, 2).contiguous()
    ]
    if q.device.type == "cpu":
        gradients = operator("_scaled_dot_product_flash_attention_for_cpu_backward")(*tensors, 0.0, causal)
    else:
        no_lengths = None, None, q.shape[1], k.shape[1]
        no_seed = [torch.empty(0, dtype=torch.uint64, device=q.device)] * 2
        kernel = operator("_scaled_dot_product_flash_attention_backward")
        gradients = kernel(*tensors, *no_lengths, 0.0, causal, *no_seed)
    return tuple(x.transpose(1, 2) for x in gradients)


FUSED_BLOCK = AttentionBlock(fused_forward, fused_backward)


class AttentionTile(NamedTuple):
    """A rectangle of some queries (rows) and some keys (columns)."""

    rows: slice
    columns: slice
    causal: bool  # the i-th query sees the first i + 1 keys; else all of them


# exercise 07.8
def visible(own: tuple[int, ...], other: tuple[int, ...], causal: bool = True) -> list[AttentionTile]:
    """What the queries of chunks `own` see of the keys of chunks `other`, in places of chunks.

    Both ascend; they are the same, or have none in common.
    """
    if not causal or own == other:
        return [AttentionTile(slice(0, len(own)), slice(0, len(other)), causal)]
    pieces, below = [], [sum(chunk < mine for chunk in other) for mine in own]
    for count, rows in itertools.groupby(range(len(own)), below.__getitem__):
        rows = list(rows)
        if count:
            pieces.append(AttentionTile(slice(rows[0], rows[-1] + 1), slice(0, count), False))
    return pieces


def in_tokens(pieces: list[AttentionTile], chunk: int) -> list[AttentionTile]:
    """Pieces in places of tokens, of pieces in places of chunks of so many tokens."""
    return [
        AttentionTile(*(slice(part.start * chunk, part.stop * chunk) for part in (rows, columns)), causal)
        for rows, columns, causal in pieces
    ]


# notebook 07, cell attend
def attend(
    q, k, v, pieces: list[AttentionTile], attention: AttentionBlock, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Merge the attention of q to k and v, in `pieces` (of tokens), into out and lse."""
    for rows, columns, causal in pieces:
        merge(out[:, rows], lse[:, rows], *attention.forward(q[:, rows], k[:, columns], v[:, columns], causal))


# notebook 07, cell attend
def attend_backward(gradient, q, k, v, out, lse, pieces, attention: AttentionBlock, grad_q, grad_k, grad_v) -> None:
    """Add the gradients of q, k and v through `pieces` (of tokens) to grad_q, grad_k, grad_v."""
    for rows, columns, causal in pieces:
        of_rows, of_columns = [x[:, rows] for x in (gradient, q, out, lse)], [x[:, columns] for x in (k, v)]
        found = attention.backward(*of_rows[:2], *of_columns, *of_rows[2:], causal)
        for total, part in zip((grad_q[:, rows], grad_k[:, columns], grad_v[:, columns]), found, strict=True):
            total += part


def initial_out_lse(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse to begin with, in float32 or more."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    return torch.zeros_like(q, dtype=dtype), q.new_full(q.shape[:3], float("-inf"), dtype=dtype)


class BlockAttention(torch.autograd.Function):
    """Attention as autograd knows it, from a block's two functions. Keeps q, k, v, out and lse, and no scores."""

    @staticmethod
    def forward(ctx, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: AttentionBlock, *settings):
        ctx.block, ctx.settings = block, settings
        with torch.autocast(q.device.type, enabled=False):  # the caller has decided on the dtype
            out, lse = block.forward(q, k, v, *settings)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        if torch.is_grad_enabled():  # create_graph=True: lse is a constant to autograd, and would give wrong numbers
            raise RuntimeError("blockwise attention does not support double backward")
        with torch.autocast(gradient.device.type, enabled=False):  # on here where backward is called inside of it
            gradients = ctx.block.backward(gradient, *ctx.saved_tensors, *ctx.settings)
        return *gradients, None, *(None for _ in ctx.settings)
