"""FlashAttention in the loop order of its first paper: keys outside, queries inside. Forward only.

    for each tile of k, v:  for each tile of q:   m' = max(m, max_j z_j)      l' = l e^(m - m') + Σ_j e^(z_j - m')
        out' = (l e^(m - m') out + Σ_j e^(z_j - m') v_j) / l'                  z = scale q k^T

(Dao et al. 2022, algorithm 1.) One program computes a full head. It loads each tile of k and v once; but each tile of
queries is visited once for every tile of keys, and its state, the normalized out and m and l for each row, is kept in
memory in between: read, rescaled, written back, in float32. For n tiles of keys:

    elements moved = k, v once + n (q read + out read + out written + m, l read and written)     causal: about half

With queries outside (FlashAttention-2, Dao 2023, §3.2) out, m and l never leave the registers, out is divided once,
and tiles of queries can be separate programs: this order has only batch x heads programs, for any length.

A program reads values that other threads have written: the layouts of a store and of a load are the compiler's choice,
and if several threads hold a row's value, one stores it and all load it. Triton does not order these accesses, so there
is a barrier between one tile of keys and the next.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from course_lib.flash_attention.reference import check_attention, scale_or_default
from course_lib.kernels.rounding import cast, dot

FIRST_TILES = {"BLOCK_Q": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 2}
FIRST_HEAD_DIMS = (16, 32, 64, 128)
FIRST_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def first_attention_kernel(
    q, k, v, out, highest, total, s_q, s_k, group, scale,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute one head of one sequence. out [b, s_q, a, d] and total [b, a, s_q], filled with zeros, and highest
    [b, a, s_q], filled with -inf, are contiguous and float32; q_row … are strides.
    """
    head, heads = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    batch = tl.program_id(1).to(tl.int64)  # times a stride it may exceed 2^31
    dim = tl.arange(0, HEAD_DIM)[None, :]
    for first_key in range(0, s_k, BLOCK_K):
        key = first_key + tl.arange(0, BLOCK_K).to(tl.int64)
        is_key = key[:, None] < s_k
        k_tile = tl.load(k + batch * k_batch + head // group * k_head + key[:, None] * k_row + dim, is_key, other=0.0)
        v_tile = tl.load(v + batch * v_batch + head // group * v_head + key[:, None] * v_row + dim, is_key, other=0.0)
        start = first_key // BLOCK_Q * BLOCK_Q if CAUSAL else 0  # causal: earlier queries see none of these keys
        for first_query in range(start, s_q, BLOCK_Q):
            query = first_query + tl.arange(0, BLOCK_Q).to(tl.int64)
            row, is_query = (batch * heads + head) * s_q + query, query < s_q
            out_row = ((batch * s_q + query) * heads + head)[:, None] * HEAD_DIM + dim
            q_tile = tl.load(
                q + batch * q_batch + head * q_head + query[:, None] * q_row + dim, is_query[:, None], other=0.0
            )
            scores = dot(q_tile, tl.trans(k_tile), tl.zeros((BLOCK_Q, BLOCK_K), tl.float32)) * scale
            seen = (key < s_k)[None, :]
            if CAUSAL:
                seen = seen & (key[None, :] <= query[:, None])
            scores = tl.where(seen, scores, float("-inf"))

            before, sum_before = tl.load(highest + row, is_query, other=0.0), tl.load(total + row, is_query, other=1.0)
            higher = tl.maximum(before, tl.max(scores, axis=1))
            powers = tl.exp(scores - higher[:, None])
            rescaled = sum_before * tl.exp(before - higher)
            sum_after = rescaled + tl.sum(powers, axis=1)
            weighted = tl.load(out + out_row, is_query[:, None], other=0.0) * rescaled[:, None]
            weighted = dot(cast(powers, v_tile.dtype), v_tile, weighted) / sum_after[:, None]
            tl.store(out + out_row, weighted, is_query[:, None])
            tl.store(highest + row, higher, is_query)
            tl.store(total + row, sum_after, is_query)
        tl.debug_barrier()  # the next tile of keys loads values that other threads have stored


def first_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = True, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return softmax(scale q k^T) v [b, s, a, d], in q's dtype, and the logsumexp of the scores [b, s, a], float32.

    q: [b, s, a, d]; k, v: [b, s', kv, d], where kv divides a; causal: query i sees the keys 0 to i; scale: 1 / sqrt(d)
    if None. A query without keys gets 0. Raises ValueError if shapes, dtypes, devices or the scale do not fit or d is
    not in FIRST_HEAD_DIMS, and for inputs that require a gradient.
    """
    check_first_inputs(q, k, v, scale)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    b, s_q, heads, head_dim = q.shape
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    highest = torch.full((b, heads, s_q), float("-inf"), dtype=torch.float32, device=q.device)
    total = torch.zeros_like(highest)
    if out.numel():
        strides = [stride for x in (q, k, v) for stride in x.stride()[:3]]
        with torch.cuda.device_of(q):
            first_attention_kernel[heads, b](
                q, k, v, out, highest, total, s_q, k.shape[1], heads // k.shape[2],
                scale_or_default(scale, head_dim), *strides, CAUSAL=causal, HEAD_DIM=head_dim, **FIRST_TILES,
            )  # fmt: skip
    return out.to(q.dtype), (highest + total.log()).transpose(1, 2)


def check_first_inputs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> None:
    """Raise ValueError for inputs that `first_attention` does not support."""
    check_attention(q, k, v, scale)
    if q.dtype not in FIRST_DTYPES or q.shape[3] not in FIRST_HEAD_DIMS:
        raise ValueError(
            f"q is {q.dtype} with heads of {q.shape[3]}: first_attention takes float32, bfloat16 or float16 and heads "
            f"of {', '.join(map(str, FIRST_HEAD_DIMS))}"
        )
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise ValueError("first_attention has no backward: its inputs must not require a gradient")
