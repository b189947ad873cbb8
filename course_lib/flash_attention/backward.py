"""FlashAttention backward in Triton: the probabilities are recomputed, tile by tile, from lse.

    p = e^(z - lse)      dv = p^T do      dp = do v^T      dz = p (dp - delta)     dq = scale dz k     dk = scale dz^T q

delta is the sum of p dp along a row, which the gradient of softmax needs. The row is spread over all tiles; but Σ_j p_j
(do · v_j) = do · Σ_j p_j v_j = do · out: one number per query, computed before the tiles (Dao et al. 2022, §B.2).

Three kernels: delta; dk and dv, by programs that hold a tile of keys and loop over the queries of all query heads that
share its head (so no two programs write to one sum); dq, by programs that hold a tile of queries and loop over the
keys. The second and the third both compute z and dp: seven matmuls instead of five, against forward's two. The same
inputs give the same bits; `one_pass` needs five matmuls, and adds to dq in a different order each time.

If lse and out belong to more keys than these (a ring), the result is this block's contribution to the gradients.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from course_lib.flash_attention.forward import (
    FOR_TUNER,
    LOG2_E,
    TUNED_BY,
    contiguous_rows_at,
    head_at,
    head_sizes,
    length_class,
    load_columns,
    load_rows,
    seen_keys,
    sequence_at,
    sequences_of,
    store_rows,
    strides_of,
    wide_enough,
)
from course_lib.kernels.matmul import tunable
from course_lib.kernels.rounding import cast, dot, widen

KEY_CONFIGURATIONS, QUERY_CONFIGURATIONS = [  # 64 x 16: float32, if a block has 99 KB of shared memory
    [
        triton.Config({"BLOCK_Q": block_q, "BLOCK_K": block_k}, num_warps=warps, num_stages=2)
        for block_q, block_k, warps in shapes
    ]
    for shapes in (
        [(32, 64, 4), (32, 64, 8), (64, 64, 4), (64, 64, 8), (32, 128, 8), (64, 128, 8), (16, 64, 4)],
        [(64, 32, 4), (64, 64, 4), (128, 32, 8), (128, 64, 8), (64, 16, 4), (128, 128, 8)],
    )
]
DELTA_ROWS = 64


@triton.jit
def delta_kernel(
    out, out_grad, delta, cu_seqlens, s_q, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr
):  # fmt: skip
    """Compute delta [b, a, s_q] = row sums of out * out_grad, each [b, s_q, a, d], contiguous: one tile of one head."""
    head, heads = tl.program_id(1), tl.num_programs(1)
    batch, start, queries, _ = sequence_at(tl.program_id(2), cu_seqlens, s_q, s_q)
    first = tl.program_id(0) * BLOCK_Q
    row, count, width = tl.arange(0, BLOCK_Q), queries - first, heads * HEAD_DIM
    out_rows = contiguous_rows_at(out, batch, start + first, head, s_q, heads, HEAD_DIM)
    grad_rows = contiguous_rows_at(out_grad, batch, start + first, head, s_q, heads, HEAD_DIM)
    out_tile = load_rows(out_rows, count, width, HEAD_DIM, BLOCK_Q, BLOCK_D)
    grad_tile = load_rows(grad_rows, count, width, HEAD_DIM, BLOCK_Q, BLOCK_D)
    sums = tl.sum(widen(out_tile) * widen(grad_tile), axis=1)
    tl.store(head_at(delta, batch, start + first, head, s_q * heads, 1, s_q) + row, sums, mask=row < count)


# exercise 13.7
@triton.jit
def gather_query_gradients(
    q_tile, grad_tile, lse, delta, k_rows, v_rows, k_row, v_row, first_query, queries, keys, to_base_2,
    CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Return the contribution of all keys to the gradient of q_tile, not yet scaled: [BLOCK_Q, BLOCK_D], in float32.

    grad_tile: the gradient of out, [BLOCK_Q, BLOCK_D]; lse (natural), delta: [BLOCK_Q]; all others as in attend_tiles.
    p is masked, in partial tiles only: past the last key too, where it may be inf. What meets k_tile is rounded to its
    dtype.
    """
    last_seen = tl.minimum(first_query + tl.arange(0, BLOCK_Q), keys - 1)[:, None] if CAUSAL else keys - 1
    unmasked_end, end = seen_keys(first_query, queries, keys, CAUSAL, BLOCK_Q, BLOCK_K)
    q_sum = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for first_key in range(0, end, BLOCK_K):
        k_tile = load_rows(k_rows, keys - first_key, k_row, HEAD_DIM, BLOCK_K, BLOCK_D)
        v_tile = load_columns(v_rows, keys - first_key, v_row, HEAD_DIM, BLOCK_K, BLOCK_D)
        scores = dot(q_tile, tl.trans(k_tile), tl.zeros((BLOCK_Q, BLOCK_K), tl.float32))
        p = tl.exp2(scores * to_base_2 - (lse * LOG2_E)[:, None])
        if first_key >= unmasked_end:
            key = first_key + tl.arange(0, BLOCK_K)[None, :]
            p = tl.where(key <= last_seen, p, 0.0)
        p_grad = dot(grad_tile, v_tile, tl.zeros((BLOCK_Q, BLOCK_K), tl.float32))
        q_sum = dot(cast(p * (p_grad - delta[:, None]), k_tile.dtype), k_tile, q_sum)
        k_rows += BLOCK_K * k_row
        v_rows += BLOCK_K * v_row
    return q_sum


@triton.autotune(tunable(QUERY_CONFIGURATIONS), TUNED_BY, prune_configs_by={"early_config_prune": wide_enough})
@FOR_TUNER
def query_gradient_kernel(
    q, k, v, out_grad, lse, delta, q_grad, cu_seqlens, s_q, s_k, group, scale,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, LENGTH=0,
):  # fmt: skip
    """Compute the gradients of one tile of queries; out_grad and q_grad: [b, s_q, a, d], contiguous."""
    head, heads = tl.program_id(1), tl.num_programs(1)
    batch, start, queries, keys = sequence_at(tl.program_id(2), cu_seqlens, s_q, s_k)
    first_query = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_Q
    if first_query < queries:
        width = heads * HEAD_DIM
        q_rows = head_at(q, batch, start + first_query, head, q_batch, q_row, q_head)
        k_rows = head_at(k, batch, start, head // group, k_batch, k_row, k_head)
        v_rows = head_at(v, batch, start, head // group, v_batch, v_row, v_head)
        grad_rows = contiguous_rows_at(out_grad, batch, start + first_query, head, s_q, heads, HEAD_DIM)
        q_grad_rows = contiguous_rows_at(q_grad, batch, start + first_query, head, s_q, heads, HEAD_DIM)
        row, count = tl.arange(0, BLOCK_Q), queries - first_query
        lse_rows = head_at(lse, batch, start + first_query, head, s_q * heads, 1, s_q)
        delta_rows = head_at(delta, batch, start + first_query, head, s_q * heads, 1, s_q)
        lse_tile = tl.load(lse_rows + row, mask=row < count, other=0.0)
        delta_tile = tl.load(delta_rows + row, mask=row < count, other=0.0)
        q_tile = load_rows(q_rows, count, q_row, HEAD_DIM, BLOCK_Q, BLOCK_D)
        grad_tile = load_rows(grad_rows, count, width, HEAD_DIM, BLOCK_Q, BLOCK_D)
        q_sum = gather_query_gradients(
            q_tile, grad_tile, lse_tile, delta_tile, k_rows, v_rows, k_row, v_row, first_query, queries, keys,
            scale * LOG2_E, CAUSAL, HEAD_DIM, BLOCK_Q, BLOCK_K, BLOCK_D,
        )  # fmt: skip
        store_rows(q_grad_rows, q_sum * scale, count, width, HEAD_DIM, BLOCK_Q, BLOCK_D)


# exercise 13.8
@triton.jit
def gather_key_gradients(
    k_sum, v_sum, k_tile, v_tile, q_rows, grad_rows, lse_rows, delta_rows, q_row, grad_row,
    first_key, queries, to_base_2,
    CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Return k_sum (not yet scaled) and v_sum, [BLOCK_K, BLOCK_D], with what one head's queries give to them.

    k_tile, v_tile: the keys from first_key on, and their values. q_rows, grad_rows: pointers to the head's first query
    and its gradient of out; q_row, grad_row: their strides, elements from one row to the next; lse_rows (natural),
    delta_rows: pointers to its first elements. Offsets may need 64 bits.

    Scores are worked out transposed, [BLOCK_K, BLOCK_Q]: so both sums take them as they are in registers. Queries past
    the end need no mask: their rows of q and of out's gradient are 0, and with them their part of either sum. Causal:
    tiles of queries that see none of these keys are not visited, and those that see all are not masked.

    Each tile is loaded where it is first used, and v_sum comes after p_grad: of all orders the one that spills least.
    """
    key = first_key + tl.arange(0, BLOCK_K)[:, None]
    start = first_key // BLOCK_Q * BLOCK_Q if CAUSAL else 0  # queries before it see none of these keys
    row = tl.arange(0, BLOCK_Q)
    q_rows += tl.cast(start, tl.int64) * q_row
    grad_rows += tl.cast(start, tl.int64) * grad_row
    for first in range(start, queries, BLOCK_Q):
        q_tile = load_rows(q_rows, queries - first, q_row, HEAD_DIM, BLOCK_Q, BLOCK_D)
        lse = tl.load(lse_rows + first + row, mask=row < queries - first, other=0.0)
        scores = dot(k_tile, tl.trans(q_tile), tl.zeros((BLOCK_K, BLOCK_Q), tl.float32))
        p = tl.exp2(scores * to_base_2 - (lse * LOG2_E)[None, :])
        if CAUSAL:
            if first < first_key + BLOCK_K - 1:  # from there on all of these queries see all of these keys
                p = tl.where(key <= first + row[None, :], p, 0.0)
        grad_tile = load_rows(grad_rows, queries - first, grad_row, HEAD_DIM, BLOCK_Q, BLOCK_D)
        delta = tl.load(delta_rows + first + row, mask=row < queries - first, other=0.0)
        p_grad = dot(v_tile, tl.trans(grad_tile), tl.zeros((BLOCK_K, BLOCK_Q), tl.float32))
        v_sum = dot(cast(p, grad_tile.dtype), grad_tile, v_sum)
        k_sum = dot(cast(p * (p_grad - delta[None, :]), q_tile.dtype), q_tile, k_sum)
        q_rows += BLOCK_Q * q_row
        grad_rows += BLOCK_Q * grad_row
    return k_sum, v_sum


@triton.autotune(tunable(KEY_CONFIGURATIONS), TUNED_BY, prune_configs_by={"early_config_prune": wide_enough})
@FOR_TUNER
def key_gradient_kernel(
    q, k, v, out_grad, lse, delta, k_grad, v_grad, cu_seqlens, s_q, s_k, group, scale,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, LENGTH=0,
):  # fmt: skip
    """Compute the gradients of one tile of keys and values. out_grad [b, s_q, a, d], k_grad, v_grad [b, s_k, kv, d],
    lse, delta [b, a, s_q] are contiguous.
    """
    kv_head, kv_heads = tl.program_id(1), tl.num_programs(1)
    heads, width = kv_heads * group, kv_heads * group * HEAD_DIM
    batch, start, queries, keys = sequence_at(tl.program_id(2), cu_seqlens, s_q, s_k)
    first_key = tl.program_id(0) * BLOCK_K
    if first_key < keys:
        k_rows = head_at(k, batch, start + first_key, kv_head, k_batch, k_row, k_head)
        v_rows = head_at(v, batch, start + first_key, kv_head, v_batch, v_row, v_head)
        k_tile = load_rows(k_rows, keys - first_key, k_row, HEAD_DIM, BLOCK_K, BLOCK_D)
        v_tile = load_rows(v_rows, keys - first_key, v_row, HEAD_DIM, BLOCK_K, BLOCK_D)
        k_sum = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
        v_sum = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
        for head in range(kv_head * group, (kv_head + 1) * group):
            q_rows = head_at(q, batch, start, head, q_batch, q_row, q_head)
            grad_rows = contiguous_rows_at(out_grad, batch, start, head, s_q, heads, HEAD_DIM)
            lse_rows = head_at(lse, batch, start, head, s_q * heads, 1, s_q)
            delta_rows = head_at(delta, batch, start, head, s_q * heads, 1, s_q)
            k_sum, v_sum = gather_key_gradients(
                k_sum, v_sum, k_tile, v_tile, q_rows, grad_rows, lse_rows, delta_rows, q_row, width,
                first_key, queries, scale * LOG2_E, CAUSAL, HEAD_DIM, BLOCK_Q, BLOCK_K, BLOCK_D,
            )  # fmt: skip
        k_grad_rows = contiguous_rows_at(k_grad, batch, start + first_key, kv_head, s_k, kv_heads, HEAD_DIM)
        v_grad_rows = contiguous_rows_at(v_grad, batch, start + first_key, kv_head, s_k, kv_heads, HEAD_DIM)
        store_rows(k_grad_rows, k_sum * scale, keys - first_key, kv_heads * HEAD_DIM, HEAD_DIM, BLOCK_K, BLOCK_D)
        store_rows(v_grad_rows, v_sum, keys - first_key, kv_heads * HEAD_DIM, HEAD_DIM, BLOCK_K, BLOCK_D)


def launch_delta(
    out: torch.Tensor, out_grad: torch.Tensor, cu_seqlens: torch.Tensor | None, longest: int
) -> torch.Tensor:
    """Return delta [b, a, s] of out, out_grad [b, s, a, d], contiguous."""
    batch, s_q, heads, head_dim = out.shape
    delta = torch.empty(batch, heads, s_q, dtype=torch.float32, device=out.device)
    if out.numel():
        tiles = triton.cdiv(min(longest, s_q), DELTA_ROWS)
        delta_kernel[tiles, heads, sequences_of(out, cu_seqlens)](
            out, out_grad, delta, cu_seqlens, s_q, BLOCK_Q=DELTA_ROWS, **head_sizes(head_dim)
        )
    return delta


def launch_backward(
    out_grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    cu_seqlens: torch.Tensor | None, longest: int, causal: bool, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return gradients of q, k, v, contiguous. out_grad, out: [b, s, a, d]; lse: [b, a, s]; longest: most tokens of a
    sequence.
    """
    q_grad, k_grad, v_grad = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    out_grad, out, lse = out_grad.contiguous(), out.contiguous(), lse.contiguous()
    (s_q, heads), (s_k, kv_heads), count = q.shape[1:3], k.shape[1:3], sequences_of(q, cu_seqlens)
    tuned = {**head_sizes(q.shape[3]), "LENGTH": length_class(longest)}
    shared = cu_seqlens, s_q, s_k, heads // kv_heads, scale, *strides_of(q, k, v), causal
    with torch.cuda.device_of(q):
        delta = launch_delta(out, out_grad, cu_seqlens, longest)
        if q_grad.numel():
            query_gradient_kernel[lambda meta: (triton.cdiv(min(longest, s_q), meta["BLOCK_Q"]), heads, count)](
                q, k, v, out_grad, lse, delta, q_grad, *shared, **tuned
            )
        if k_grad.numel():
            key_gradient_kernel[lambda meta: (triton.cdiv(min(longest, s_k), meta["BLOCK_K"]), kv_heads, count)](
                q, k, v, out_grad, lse, delta, k_grad, v_grad, *shared, **tuned
            )
    return q_grad, k_grad, v_grad
