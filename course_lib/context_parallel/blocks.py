"""Blockwise attention: exact attention, merged from blocks of some queries and some keys each.

A block yields out = softmax(z) v and lse = log sum exp(z), with z = q k^T / sqrt(d). Blocks A and B over disjoint keys
merge to

    lse = log(e^lse_A + e^lse_B)        out = e^(lse_A - lse) out_A + e^(lse_B - lse) out_B

(Milakov and Gimelshein 2018, "Online normalizer calculation for softmax".) Backward works block by block as well: with
the merged lse, p = e^(z - lse) are the right probabilities of any block, and its gradients are the gradients of an
attention whose other keys are elsewhere (Dao et al. 2022, FlashAttention, appendix B.2). A block of attention is
therefore two functions:

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
def merge(out: torch.Tensor, lse: torch.Tensor, block_out: torch.Tensor, block_lse: torch.Tensor) -> None:
    """Merge a block's output [b, s, a, d] and logsumexp [b, s, a] into `out` and `lse`, in place.

    Before the first block out is 0 and lse is -inf. block_lse is finite.
    """
    out.lerp_(block_out.to(out.dtype), torch.sigmoid(block_lse - lse)[..., None])
    torch.logaddexp(lse, block_lse, out=lse)


def by_group(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return [b, s, a, ...] as [b, s, kv, a/kv, ...]: grouped by the head of k that the heads share."""
    return x.unflatten(2, (k.shape[2], -1))


def scores(q: torch.Tensor, k: torch.Tensor, causal: bool) -> torch.Tensor:
    """Return q · k / sqrt(d) in float32 or more, -inf where a key is masked: [b, kv, a/kv, s, s']."""
    q, k = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k))
    z = torch.einsum("bqkgd,bskd->bkgqs", by_group(q, k), k) / math.sqrt(q.shape[-1])
    return z + torch.full_like(z[0, 0, 0], float("-inf")).triu(1) if causal else z


# exercise 07.7
def plain_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out [b, s, a, d] and lse [b, s, a] of a block by plain matmuls, which materialize all of its scores."""
    z = scores(q, k, causal)
    lse = z.logsumexp(-1)  # [b, kv, g, s]
    p = (z - lse[..., None]).exp().to(v.dtype)
    out = torch.einsum("bkgqs,bskd->bqkgd", p, v).flatten(2, 3)
    return out, lse.permute(0, 3, 1, 2).flatten(2)


# exercise 07.7
def plain_backward(gradient, q, k, v, out, lse, causal: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k, v through this block. out, lse: merged over all blocks; gradient: of out."""

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
    """The two functions of a block of attention; the module docstring has their arguments and results."""

    forward: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


PLAIN_BLOCK = AttentionBlock(plain_forward, plain_backward)


def operator(name: str) -> Callable:
    """Return PyTorch's operator of this name."""
    from torch import ops  # imported here: a function that is sent to ranks cannot carry it along

    return getattr(ops.aten, name)


def has_kernel(q: torch.Tensor) -> bool:
    """Return True if PyTorch's FlashAttention supports q: any on a CPU; on a GPU 16 bits, heads of 8, 16, ... 256."""
    if q.device.type == "cuda":
        return q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return q.device.type == "cpu"


def contiguous_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x with the elements of a head contiguous. The kernels require that, and the CPU's does not check it."""
    return x if x.stride(-1) == 1 else x.contiguous()


def fused_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what plain_forward returns, computed by PyTorch's FlashAttention if it supports q."""
    if not has_kernel(q):
        return plain_forward(q, k, v, causal)
    kernel = operator("_scaled_dot_product_flash_attention" + "_for_cpu" * (q.device.type == "cpu"))
    out, lse, *_ = kernel(*(contiguous_rows(x).transpose(1, 2) for x in (q, k, v)), 0.0, causal)
    return out.transpose(1, 2), lse.transpose(1, 2)


def fused_backward(gradient, q, k, v, out, lse, causal: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what plain_backward returns, computed by PyTorch's FlashAttention if it supports q."""
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
    """A rectangle of queries (rows) and keys (columns) of the attention matrix."""

    rows: slice
    columns: slice
    causal: bool  # True: the i-th query sees the first i + 1 keys; False: all keys


# exercise 07.8
def visible(query_chunks: tuple[int, ...], key_chunks: tuple[int, ...], causal: bool = True) -> list[AttentionTile]:
    """Return the tiles in which the queries of `query_chunks` see the keys of `key_chunks`, in units of chunks.

    Both tuples ascend; they are equal or disjoint.
    """
    if not causal or query_chunks == key_chunks:
        return [AttentionTile(slice(0, len(query_chunks)), slice(0, len(key_chunks)), causal)]
    tiles, seen = [], [sum(key_chunk < query_chunk for key_chunk in key_chunks) for query_chunk in query_chunks]
    for count, group in itertools.groupby(range(len(query_chunks)), seen.__getitem__):
        rows = list(group)
        if count:
            tiles.append(AttentionTile(slice(rows[0], rows[-1] + 1), slice(0, count), False))
    return tiles


def in_tokens(tiles: list[AttentionTile], chunk: int) -> list[AttentionTile]:
    """Return the tiles in units of tokens, given tiles in units of chunks of `chunk` tokens."""

    def scaled(span: slice) -> slice:
        return slice(span.start * chunk, span.stop * chunk)

    return [AttentionTile(scaled(rows), scaled(columns), causal) for rows, columns, causal in tiles]


# notebook 07, cell attend
def attend(q, k, v, tiles: list[AttentionTile], attention: AttentionBlock, out, lse) -> None:
    """Merge the attention of q to k and v, in `tiles` (of tokens), into out and lse, in place."""
    for rows, columns, causal in tiles:
        merge(out[:, rows], lse[:, rows], *attention.forward(q[:, rows], k[:, columns], v[:, columns], causal))


# notebook 07, cell attend
def attend_backward(gradient, q, k, v, out, lse, tiles, attention: AttentionBlock, grad_q, grad_k, grad_v) -> None:
    """Add the gradients of q, k and v through `tiles` (of tokens) to grad_q, grad_k, grad_v."""
    for rows, columns, causal in tiles:
        of_rows, of_columns = [x[:, rows] for x in (gradient, q, out, lse)], [x[:, columns] for x in (k, v)]
        gradients = attention.backward(*of_rows[:2], *of_columns, *of_rows[2:], causal)
        totals = grad_q[:, rows], grad_k[:, columns], grad_v[:, columns]
        for total, summand in zip(totals, gradients, strict=True):
            total.add_(summand)


def initial_out_lse(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and lse before the first block, in float32 or more."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    return torch.zeros_like(q, dtype=dtype), q.new_full(q.shape[:3], float("-inf"), dtype=dtype)


class BlockAttention(torch.autograd.Function):
    """An autograd Function of a block's two functions. It keeps q, k, v, out and lse, and no scores."""

    @staticmethod
    def forward(ctx, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: AttentionBlock, *settings):
        ctx.block, ctx.settings = block, settings
        with torch.autocast(q.device.type, enabled=False):  # the caller has chosen the dtype
            out, lse = block.forward(q, k, v, *settings)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        if torch.is_grad_enabled():  # create_graph=True: autograd would take lse as a constant, and be wrong
            raise RuntimeError("blockwise attention does not support double backward")
        with torch.autocast(gradient.device.type, enabled=False):  # it is enabled if backward is called inside autocast
            gradients = ctx.block.backward(gradient, *ctx.saved_tensors, *ctx.settings)
        return *gradients, None, *(None for _ in ctx.settings)
