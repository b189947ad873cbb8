"""FlashAttention backward in one pass and five matmuls, as in FlashAttention-2 (Dao 2023, §3.1.2, algorithm 2).

Programs hold a tile of keys and loop over the queries, as for dk and dv in `backward`. Each adds its contribution to dq
to float32 sums in memory, by atomic additions: their order, and with it the last bits, changes from run to run. A
program that meets the diagonal first has the most queries, and starts first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from course_lib.flash_attention.backward import launch_delta
from course_lib.flash_attention.forward import (
    FOR_TUNER,
    LOG2_E,
    TUNED_BY,
    contiguous_rows_at,
    head_at,
    head_sizes,
    length_class,
    load_rows,
    sequence_at,
    sequences_of,
    store_rows,
    strides_of,
)
from course_lib.kernels.matmul import tunable
from course_lib.kernels.rounding import cast, dot

ONE_PASS_CONFIGURATIONS = [
    triton.Config({"BLOCK_Q": block_q, "BLOCK_K": block_k}, num_warps=warps, num_stages=2)
    for block_q, block_k, warps in [(64, 64, 4), (64, 64, 8), (64, 128, 8)]
]
ROUNDED_BLOCK = 2048  # elements per program


@triton.jit
def gather_gradients(
    k_sum, v_sum, k_tile, v_tile, q_rows, grad_rows, q_sum_rows, lse_rows, delta_rows, q_row, grad_row,
    first_key, queries, keys, to_base_2,
    CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Compute what gather_key_gradients does, and add these keys' contribution to dq, not yet scaled, to memory, from
    q_sum_rows on.

    Keys past the end get p = 0: with scores of 0 it may be infinite, and infinity times their zeros in k_tile is NaN.
    (k_sum and v_sum would not be affected: their rows do not mix, and rows past the end are not stored.) Addresses are
    recomputed for each tile: incremented pointers would take registers, which are scarce here.
    """
    key = first_key + tl.arange(0, BLOCK_K)[:, None]
    row, column = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_D)
    masked_end = first_key + BLOCK_K - 1 if CAUSAL else 0  # from this query on, all queries see all of these keys
    for first in range(first_key // BLOCK_Q * BLOCK_Q if CAUSAL else 0, queries, BLOCK_Q):
        exists = row < queries - first
        first_row = tl.cast(first, tl.int64)
        q_tile = load_rows(q_rows + first_row * q_row, queries - first, q_row, HEAD_DIM, BLOCK_Q, BLOCK_D)
        lse = tl.load(lse_rows + first + row, mask=exists, other=0.0)
        scores = dot(k_tile, tl.trans(q_tile), tl.zeros((BLOCK_K, BLOCK_Q), tl.float32))
        p = tl.exp2(scores * to_base_2 - (lse * LOG2_E)[None, :])
        if (first < masked_end) | (first_key + BLOCK_K > keys):
            last_seen = tl.minimum(first + row, keys - 1)[None, :] if CAUSAL else keys - 1
            p = tl.where(key <= last_seen, p, 0.0)
        grad_tile = load_rows(grad_rows + first_row * grad_row, queries - first, grad_row, HEAD_DIM, BLOCK_Q, BLOCK_D)
        delta = tl.load(delta_rows + first + row, mask=exists, other=0.0)
        p_grad = dot(v_tile, tl.trans(grad_tile), tl.zeros((BLOCK_K, BLOCK_Q), tl.float32))
        v_sum = dot(cast(p, grad_tile.dtype), grad_tile, v_sum)
        z_grad = cast(p * (p_grad - delta[None, :]), q_tile.dtype)
        k_sum = dot(z_grad, q_tile, k_sum)
        q_term = dot(tl.trans(z_grad), k_tile, tl.zeros((BLOCK_Q, BLOCK_D), tl.float32))
        q_sum = q_sum_rows + first_row * grad_row + row[:, None] * grad_row + column[None, :]
        tl.atomic_add(q_sum, q_term, exists[:, None] & (column < HEAD_DIM)[None, :], sem="relaxed")
    return k_sum, v_sum


@triton.autotune(tunable(ONE_PASS_CONFIGURATIONS), TUNED_BY, reset_to_zero=["q_sum"])
@FOR_TUNER
def gradient_kernel(
    q, k, v, out_grad, lse, delta, q_sum, k_grad, v_grad, cu_seqlens, s_q, s_k, group, scale,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, LENGTH=0,
):  # fmt: skip
    """Compute what key_gradient_kernel does, and add dq, not yet scaled, to q_sum [b, s_q, a, d], float32, zeros at
    first.
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
            q_sum_rows = contiguous_rows_at(q_sum, batch, start, head, s_q, heads, HEAD_DIM)
            lse_rows = head_at(lse, batch, start, head, s_q * heads, 1, s_q)
            delta_rows = head_at(delta, batch, start, head, s_q * heads, 1, s_q)
            k_sum, v_sum = gather_gradients(
                k_sum, v_sum, k_tile, v_tile, q_rows, grad_rows, q_sum_rows, lse_rows, delta_rows, q_row, width,
                first_key, queries, keys, scale * LOG2_E, CAUSAL, HEAD_DIM, BLOCK_Q, BLOCK_K, BLOCK_D,
            )  # fmt: skip
        k_grad_rows = contiguous_rows_at(k_grad, batch, start + first_key, kv_head, s_k, kv_heads, HEAD_DIM)
        v_grad_rows = contiguous_rows_at(v_grad, batch, start + first_key, kv_head, s_k, kv_heads, HEAD_DIM)
        store_rows(k_grad_rows, k_sum * scale, keys - first_key, kv_heads * HEAD_DIM, HEAD_DIM, BLOCK_K, BLOCK_D)
        store_rows(v_grad_rows, v_sum, keys - first_key, kv_heads * HEAD_DIM, HEAD_DIM, BLOCK_K, BLOCK_D)


@triton.jit
def round_sums_kernel(sums, out, numel, scale, BLOCK: tl.constexpr):
    """Write scale * sums to out, in out's dtype. Both [numel]; BLOCK elements per program."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, cast(tl.load(sums + at, at < numel) * scale, out.dtype.element_ty), at < numel)


def launch_one_pass(
    out_grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    cu_seqlens: torch.Tensor | None, longest: int, causal: bool, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return what launch_backward does. For 16 bits: float32 matmuls would have to keep their tiles in memory."""
    q_grad, k_grad, v_grad = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    q_sum = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    out_grad, out, lse = out_grad.contiguous(), out.contiguous(), lse.contiguous()
    (s_q, heads), (s_k, kv_heads) = q.shape[1:3], k.shape[1:3]
    keys, count = min(longest, s_k), sequences_of(q, cu_seqlens)
    with torch.cuda.device_of(q):
        delta = launch_delta(out, out_grad, cu_seqlens, longest)
        if k_grad.numel():
            gradient_kernel[lambda meta: (triton.cdiv(keys, meta["BLOCK_K"]), kv_heads, count)](
                q, k, v, out_grad, lse, delta, q_sum, k_grad, v_grad, cu_seqlens, s_q, s_k, heads // kv_heads, scale,
                *strides_of(q, k, v), causal, **head_sizes(q.shape[3]), LENGTH=length_class(longest),
            )  # fmt: skip
        if q_grad.numel():
            programs = triton.cdiv(q_grad.numel(), ROUNDED_BLOCK)
            round_sums_kernel[programs,](q_sum, q_grad, q_grad.numel(), scale, BLOCK=ROUNDED_BLOCK)
    return q_grad, k_grad, v_grad
