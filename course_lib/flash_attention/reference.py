"""FlashAttention in plain PyTorch: exact attention, a tile of scores at a time.

    z = scale q k^T        p = softmax(z)        out = p v        lse = log sum_j exp(z_j)

Standard attention writes z and p to memory: b a s s' elements each. Here a tile of z is computed, used and freed.

Forward processes, for each block of queries, the keys one block at a time (online softmax). Each row has three running
values: m, the highest score so far; l, the sum of exp(z - m); o, the sum of exp(z - m) v. A tile with a higher score
replaces m by m', and the sums are rescaled:

    m' = max(m, max_j z_j)    l' = l e^(m - m') + sum_j e^(z_j - m')    o' = o e^(m - m') + sum_j e^(z_j - m') v_j

At the end out = o / l, one division per row, and lse = m + log l, the one number per row that is kept for backward.

Backward recomputes the tile, p = exp(z - lse), which needs neither m nor l. The gradient of softmax needs for each row
sum_j p_j dp_j, over all keys; with dp = dout v^T this is the row sum of dout * out, known before any tile (delta):

    dv = p^T dout     dp = dout v^T     ds = p (dp - delta)     dq = scale ds k     dk = scale ds^T q

Five matmuls where forward has two. Kept: q, k, v, out and lse, so memory grows with s, not with s s'. One pass over the
tiles in the order of forward: dq is finished one row of tiles at a time, dk and dv accumulate in float32. (Programs
that run concurrently cannot all add to one dk: for dk and dv, a kernel loops down a column of tiles.)

GQA: the a / kv query heads that share a key head are folded into the rows of its tile. So one matmul serves the group,
k and v are never repeated, and the matmul sums dk and dv over the group.

As on tensor cores, p and ds are rounded to the inputs' dtype before their matmuls, which sum in float32; float64 stays
float64 throughout.

Milakov and Gimelshein 2018 (online softmax); Dao et al. 2022 (FlashAttention: algorithm 1, appendix B.2 for backward);
Dao 2023 (FlashAttention-2, §3.1: the division at the end, and lse in place of m and l).
"""

from __future__ import annotations

import math

import torch

from course_lib.context_parallel.blocks import AttentionBlock, BlockAttention
from course_lib.flash_attention.tiles import Tile, check_blocks, row_of_tiles
from course_lib.tensor_parallel.linear import as_autocast

ATTENTION_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None) -> None:
    """Raise ValueError, in one line, unless q is [b, s, a, d] and k and v are [b, s', kv, d] of one dtype and device,
    kv divides a, and scale is a positive finite number or None.
    """
    tensors = {"q": q, "k": k, "v": v}
    shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in tensors.items())
    if any(x.dim() != 4 for x in tensors.values()):
        raise ValueError(f"{shapes}: expected four dimensions each, [batch, tokens, heads, head_dim]")
    if len({x.dtype for x in tensors.values()}) > 1 or q.dtype not in ATTENTION_DTYPES:
        types = ", ".join(f"{name} {x.dtype}" for name, x in tensors.items())
        raise ValueError(f"{types}: expected one dtype, float64, float32, bfloat16 or float16")
    if len({x.device for x in tensors.values()}) > 1:
        raise ValueError(", ".join(f"{name} on {x.device}" for name, x in tensors.items()) + ": expected one device")
    if len({x.shape[0] for x in tensors.values()}) > 1:
        raise ValueError(f"{shapes}: the batches differ")
    if k.shape[1] != v.shape[1]:
        raise ValueError(f"{shapes}: k has {k.shape[1]} tokens and v {v.shape[1]}")
    if len({x.shape[3] for x in tensors.values()}) > 1 or q.shape[3] == 0:
        raise ValueError(f"{shapes}: expected one head_dim, of 1 or more")
    heads, kv_heads = q.shape[2], k.shape[2]
    if v.shape[2] != kv_heads or kv_heads == 0 or heads == 0 or heads % kv_heads:
        raise ValueError(f"{shapes}: {heads} query heads, {kv_heads} key heads, {v.shape[2]} value heads: expected as "
                         "many value as key heads, in a number that divides the query heads")  # fmt: skip
    if scale is not None and not (isinstance(scale, int | float) and 0 < scale < math.inf):
        raise ValueError(f"scale is {scale!r}: expected a positive finite number, or None for 1 / sqrt(head_dim)")


def scale_or_default(scale: float | None, head_dim: int) -> float:
    """Return scale, or 1 / sqrt(head_dim) if it is None."""
    return 1 / math.sqrt(head_dim) if scale is None else scale


def wide_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype of sums of x: float64 for float64, otherwise float32."""
    return torch.promote_types(x.dtype, torch.float32)


def rounded_matmul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return x @ y as on a tensor core: x rounded to the dtype of y, then exact products summed in wide_dtype(y)."""
    wide = wide_dtype(y)
    return x.to(y.dtype).to(wide) @ y.to(wide)


def fold_heads(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Return [b, n, a, d] as [b, kv, a/kv * n, d]: the rows of each key head, ordered by query head. For k and v, a =
    kv.
    """
    b, n, heads, d = x.shape
    return x.transpose(1, 2).reshape(b, kv_heads, heads // kv_heads * n, d)


def unfold_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo fold_heads: return [b, n, a, d], with a = heads."""
    b, kv_heads, rows, d = x.shape
    return x.reshape(b, heads, kv_heads * rows // heads, d).transpose(1, 2)


# exercise 13.1
def online_step(
    highest: torch.Tensor, total: torch.Tensor, out: torch.Tensor, scores: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return highest, total and out with the keys of a tile included. Changes none of its arguments.

    highest: [..., q], the highest score of each row so far, -inf before the first tile; total: [..., q], the sum of
    exp(score - highest) so far; out: [..., q, d], the same sum with each term times its value: not yet divided.
    scores: [..., q, k], of the tile, scaled, -inf where masked; values: [..., k, d]. A row may be masked throughout:
    its total and out are 0, not NaN. All but values are float32 (float64 for float64), as are the results. The
    exponentials are rounded to the dtype of the values for the matmul only; total sums them unrounded.
    """
    higher = torch.maximum(highest, scores.amax(-1))
    base = higher.masked_fill(higher == -math.inf, 0.0)  # nothing but -inf so far: exp(-inf - 0) is 0, not NaN
    rescale = torch.exp(highest - base)
    p = torch.exp(scores - base[..., None])
    return higher, total * rescale + p.sum(-1), out * rescale[..., None] + rounded_matmul(p, values)


def tile_scores(q_tile: torch.Tensor, k_tile: torch.Tensor, tile: Tile, scale: float, causal: bool) -> torch.Tensor:
    """Return scale q k^T of one tile, in float32 or more, -inf where a query does not see a key.

    q_tile: [b, kv, a/kv * rows of the tile, d], from fold_heads; k_tile: [b, kv, columns of the tile, d]. Only partial
    tiles are masked, and only at the diagonal: the last block of keys ends where the keys end.
    """
    z = rounded_matmul(q_tile, k_tile.mT) * scale
    if not causal or tile.kind == "full":
        return z
    query = torch.arange(tile.row, tile.row_end, device=z.device)
    key = torch.arange(tile.column, tile.column_end, device=z.device)
    by_head = z.unflatten(2, (-1, len(query)))  # [b, kv, a/kv, rows, columns]
    return by_head.masked_fill(key > query[:, None], -math.inf).flatten(2, 3)


# exercise 13.3
def tiled_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None = None,
    block_q: int = 64, block_k: int = 64,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return out [b, s, a, d], in q's dtype, and lse [b, s, a], in float32 (float64 for float64).

    q: [b, s, a, d]; k, v: [b, s', kv, d]; query head i has key head i // (a / kv). scale None: 1 / sqrt(d). If there
    are no keys, out is 0 and lse is -inf. Takes one `online_step` for each tile of `row_of_tiles`, sums in
    `wide_dtype(q)`. Makes no tensor of more elements than q, k or a tile of scores has.
    """
    (s_q, heads, d), (s_k, kv_heads) = q.shape[1:], k.shape[1:3]
    scale = scale_or_default(scale, d)
    out, lse = q.new_zeros(q.shape), q.new_full(q.shape[:3], -math.inf, dtype=wide_dtype(q))
    if s_k == 0:
        return out, lse
    for first_row in range(0, s_q, block_q):
        rows = slice(first_row, first_row + block_q)
        q_tile = fold_heads(q[:, rows], kv_heads)
        highest = torch.full_like(q_tile[..., 0], -math.inf, dtype=lse.dtype)
        total, sums = torch.zeros_like(highest), torch.zeros_like(q_tile, dtype=lse.dtype)
        for tile in row_of_tiles(first_row, s_q, s_k, block_q, block_k, causal):
            k_tile, v_tile = (fold_heads(x[:, tile.column : tile.column_end], kv_heads) for x in (k, v))
            z = tile_scores(q_tile, k_tile, tile, scale, causal)
            highest, total, sums = online_step(highest, total, sums, z, v_tile)
        out[:, rows] = unfold_heads(sums / total[..., None], heads)
        lse[:, rows] = unfold_heads((highest + total.log())[..., None], heads)[..., 0]
    return out, lse


# exercise 13.4
def tiled_backward(
    gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    causal: bool, scale: float | None = None, block_q: int = 64, block_k: int = 64,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the gradients of q, k and v, in their shapes and dtypes. gradient, out: [b, s, a, d]; lse: [b, s, a].

    out and lse may cover more keys than k, as in ring attention; the returned dq is then the contribution of these keys
    alone. scale None: 1 / sqrt(d). Matmuls use `rounded_matmul`; sums, including delta, are in `wide_dtype(q)`. No
    tensor has more elements than q, k or a tile of scores.
    """
    (s_q, heads, d), (s_k, kv_heads) = q.shape[1:], k.shape[1:3]
    scale = scale_or_default(scale, d)
    dq = q.new_zeros(q.shape)
    dk, dv = (x.new_zeros(x.shape, dtype=wide_dtype(x)).transpose(1, 2) for x in (k, v))  # [b, kv, s', d]
    for first_row in range(0, s_q, block_q):
        rows = slice(first_row, first_row + block_q)
        of_rows = (q, gradient, out, lse[..., None])
        q_tile, upper, out_tile, lse_tile = (fold_heads(x[:, rows], kv_heads) for x in of_rows)
        delta = (upper.to(dk.dtype) * out_tile).sum(-1, keepdim=True)
        dq_tile = torch.zeros_like(q_tile, dtype=dk.dtype)
        for tile in row_of_tiles(first_row, s_q, s_k, block_q, block_k, causal):
            columns = slice(tile.column, tile.column_end)
            k_tile, v_tile = (fold_heads(x[:, columns], kv_heads) for x in (k, v))
            p = torch.exp(tile_scores(q_tile, k_tile, tile, scale, causal) - lse_tile)
            ds = p * (rounded_matmul(upper, v_tile.mT) - delta)
            dq_tile += rounded_matmul(ds, k_tile)
            dk[:, :, columns] += rounded_matmul(ds.mT, q_tile)
            dv[:, :, columns] += rounded_matmul(p.mT, upper)
        dq[:, rows] = unfold_heads(dq_tile * scale, heads)
    return dq, dk.mul_(scale).transpose(1, 2).to(k.dtype), dv.transpose(1, 2).to(v.dtype)


TILED_BLOCK = AttentionBlock(tiled_forward, tiled_backward)


def flash_attention_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = True, scale: float | None = None,
    block_q: int = 64, block_k: int = 64,
) -> torch.Tensor:  # fmt: skip
    """Return softmax(scale q k^T) v: [b, s, a, d], with gradients. q: [b, s, a, d]; k, v: [b, s', kv, d], kv divides a.

    causal: query i sees keys 0..i. scale: 1 / sqrt(d) if None. Keeps q, k, v, out and lse for backward, and no scores.
    Under autocast the result has its dtype, as PyTorch's own. Raises ValueError as check_attention and check_blocks do;
    RuntimeError for second derivatives.
    """
    q, k, v = as_autocast(q, k, v)
    check_attention(q, k, v, scale)
    check_blocks(q.shape[1], k.shape[1], block_q, block_k)
    return BlockAttention.apply(q, k, v, TILED_BLOCK, causal, scale, block_q, block_k)
