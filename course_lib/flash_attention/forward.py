"""FlashAttention forward in Triton: a program for each tile of queries, which loops over the keys.

    z = scale q k^T        out = softmax(z) v        lse = log Σ exp(z)

A program holds BLOCK_Q rows of q and, in registers, three values for each row: the highest score so far, the sum of
exponentials so far, the sum of values weighted by them (out, not yet divided). For each tile of keys it takes one step
of the online softmax (Milakov and Gimelshein 2018):

    m' = max(m, max_j z_j)      l' = l e^(m - m') + Σ_j e^(z_j - m')      o' = o e^(m - m') + Σ_j e^(z_j - m') v_j

No score leaves the chip: a program writes out and one number per row, lse = m + log l, from which backward recomputes
all probabilities. Loaded: q once, k and v once for each tile of queries (from L2, mostly). Kept: q, k, v, out, lse.

What makes it fast (FlashAttention-2, Dao 2023, §3; FlashAttention, Dao et al. 2022, algorithm 1):
- programs are divided by queries, so that a long sequence fills the GPU at batch 1, and no two write the same row;
- one division for each row, at the end;
- powers of 2, with the scale in the same multiply-add: e^(scale (z - m)) = 2^(c z - c m), c = scale log2(e);
- tiles that no query sees are skipped, and tiles that all queries see in full need no mask: causal costs half;
- v is loaded after the scores: a tile that is not loaded yet takes no registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from course_lib.kernels.matmul import tunable
from course_lib.kernels.rounding import cast, dot

LOG2_E = tl.constexpr(1.4426950408889634)
TUNED_BY = ["HEAD_DIM", "CAUSAL", "LENGTH"]  # the tuner measures again for each combination of these
FOR_TUNER = triton.jit(do_not_specialize=["LENGTH"])  # only the tuner's key: all lengths share one machine code
FORWARD_CONFIGURATIONS = [
    triton.Config({"BLOCK_Q": block_q, "BLOCK_K": block_k}, num_warps=warps, num_stages=stages)
    for block_q, block_k, warps, stages in [
        (64, 32, 4, 3),
        (64, 16, 4, 2),  # float32, if a block has 99 KB of shared memory
        (128, 32, 8, 3),
        (64, 64, 4, 3),
        (128, 64, 4, 3),
        (128, 64, 8, 3),
        (128, 128, 8, 2),
    ]
]


def wide_enough(configurations: list[triton.Config], given: dict, **_) -> list[triton.Config]:
    """Return the configurations worth trying: in 16 bits tiles of 64 or more, as narrower matmuls leave tensor cores
    idle. Only one if runs must be deterministic: a choice by timing may differ next time, and with it the order of
    sums.
    """
    narrowest = 64 if given["q"].itemsize == 2 else 16
    wide = [each for each in configurations if min(each.kwargs["BLOCK_Q"], each.kwargs["BLOCK_K"]) >= narrowest]
    return wide[:1] if torch.are_deterministic_algorithms_enabled() else wide


def length_class(longest: int) -> int:
    """Return the class of lengths that share a configuration: up to 1,024 tokens, 4,096, 16,384, and so on."""
    return max(5, (max(longest, 1) - 1).bit_length() + 1 >> 1)


# exercise 13.5
@triton.jit
def sequence_at(number, cu_seqlens, s_q, s_k):
    """Return where sequence `number` is: its row of the batch, its first token in that row, its queries, its keys.

    cu_seqlens: None for a plain batch: each row is a sequence of s_q queries and s_k keys. For a packed batch, whose
    one row has sequences side by side, it has the first token of each, and the end.
    """
    if cu_seqlens is None:
        return number, 0, s_q, s_k
    else:  # without it, this would be compiled for None too
        start = tl.load(cu_seqlens + number)
        length = tl.load(cu_seqlens + number + 1) - start
        return 0, start, length, length


@triton.jit
def head_at(tensor, batch, start, head, batch_stride, row_stride, head_stride):
    """Return a pointer to the sequence's first row of this head. In 64 bits: a batch may exceed 2^31 elements."""
    wide = tl.cast(batch, tl.int64) * batch_stride + tl.cast(start, tl.int64) * row_stride
    return tensor + wide + tl.cast(head, tl.int64) * head_stride


@triton.jit
def contiguous_rows_at(tensor, batch, start, head, tokens, heads, HEAD_DIM: tl.constexpr):
    """Return `head_at` of a contiguous tensor [b, tokens, heads, HEAD_DIM], in 64 bits from the first product on."""
    return tensor + ((tl.cast(batch, tl.int64) * tokens + start) * heads + head) * HEAD_DIM


@triton.jit
def load_rows(rows, count, stride, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load the next BLOCK rows of a head, from `rows` on: [BLOCK, BLOCK_D], zeros from row `count` on."""
    row, dim = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK_D)[None, :]
    inside = row < count if HEAD_DIM == BLOCK_D else (row < count) & (dim < HEAD_DIM)
    return tl.load(rows + row * stride + dim, mask=inside, other=0.0)


@triton.jit
def load_columns(rows, count, stride, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load the same rows as columns, [BLOCK_D, BLOCK]: the right operand of a matmul. Not load_rows and then tl.trans:
    before Hopper, Triton searches from one matmul for the next to divide the work among warps in the same way, and it
    does not look past a transposition, nor into an `if`. If it finds none, warps get parts of a row of scores, and each
    maximum and sum goes through shared memory. (In attend_tiles the path goes through `keys - first_key`, the count of
    both loads.)
    """
    row, dim = tl.arange(0, BLOCK)[None, :], tl.arange(0, BLOCK_D)[:, None]
    inside = row < count if HEAD_DIM == BLOCK_D else (row < count) & (dim < HEAD_DIM)
    return tl.load(rows + row * stride + dim, mask=inside, other=0.0)


@triton.jit
def store_rows(rows, value, count, stride, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store float32 [BLOCK, BLOCK_D] to the next rows of a head, up to row `count`."""
    row, dim = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK_D)[None, :]
    inside = row < count if HEAD_DIM == BLOCK_D else (row < count) & (dim < HEAD_DIM)
    tl.store(rows + row * stride + dim, cast(value, rows.dtype.element_ty), mask=inside)


@triton.jit
def seen_keys(first_query, queries, keys, CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return `tiles.key_bounds`: tiles of keys up to the first bound need no mask, those up to the second do."""
    if CAUSAL:
        last = tl.minimum(first_query + BLOCK_Q, queries)
        return tl.minimum(keys, first_query + 1) // BLOCK_K * BLOCK_K, tl.minimum(keys, last)
    else:
        return keys // BLOCK_K * BLOCK_K, keys


# exercise 13.6
@triton.jit
def attend_tiles(
    q_tile, k_rows, v_rows, k_row, v_row, first_query, queries, keys, to_base_2,
    CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Return highest and total, [BLOCK_Q], and weighted, [BLOCK_Q, BLOCK_D], in float32, over all keys that are seen.

    highest: the highest score of a query, as q k^T gives it, not scaled; total: the sum of 2^(to_base_2 (score -
    highest)); weighted: that sum with each term times its value, not divided. Terms are rounded to v's dtype for the
    product. Only partial tiles are masked; others that no query sees are not visited.

    q_tile: [BLOCK_Q, BLOCK_D], the queries from first_query on. k_rows, v_rows: pointers to the first key of the
    sequence and its value; k_row, v_row: their strides, elements from one row to the next. queries, keys: how many the
    sequence has. to_base_2: scale times log2(e). HEAD_DIM: the head's size; BLOCK_D: rounded up to a power of 2,
    columns beyond are 0. Offsets may need 64 bits. One loop, since a second one after it would make each product wait
    for the one before.
    """
    last_seen = tl.minimum(first_query + tl.arange(0, BLOCK_Q), keys - 1)[:, None] if CAUSAL else keys - 1
    unmasked_end, end = seen_keys(first_query, queries, keys, CAUSAL, BLOCK_Q, BLOCK_K)
    highest = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    weighted = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for first_key in range(0, end, BLOCK_K):
        k_tile = load_columns(k_rows, keys - first_key, k_row, HEAD_DIM, BLOCK_K, BLOCK_D)
        scores = dot(q_tile, k_tile, tl.zeros((BLOCK_Q, BLOCK_K), tl.float32))
        if first_key >= unmasked_end:
            key = first_key + tl.arange(0, BLOCK_K)[None, :]
            scores = tl.where(key <= last_seen, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        powers = tl.exp2(scores * to_base_2 - (higher * to_base_2)[:, None])
        shrink = tl.exp2((highest - higher) * to_base_2)
        total = total * shrink + tl.sum(powers, axis=1)
        v_tile = load_rows(v_rows, keys - first_key, v_row, HEAD_DIM, BLOCK_K, BLOCK_D)
        weighted = dot(cast(powers, v_tile.dtype), v_tile, weighted * shrink[:, None])
        highest = higher
        k_rows += BLOCK_K * k_row
        v_rows += BLOCK_K * v_row
    return highest, total, weighted


@triton.autotune(tunable(FORWARD_CONFIGURATIONS), TUNED_BY, prune_configs_by={"early_config_prune": wide_enough})
@FOR_TUNER
def flash_forward_kernel(
    q, k, v, out, lse, cu_seqlens, s_q, s_k, group, scale,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, LENGTH=0,
):  # fmt: skip
    """Compute one tile of queries of one head. out [b, s_q, a, d] and lse [b, a, s_q] are contiguous; q_row … are
    strides.
    """
    head, heads = tl.program_id(1), tl.num_programs(1)
    batch, start, queries, keys = sequence_at(tl.program_id(2), cu_seqlens, s_q, s_k)
    first_query = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_Q  # causal: those with the most keys start first
    if first_query < queries:
        q_rows = head_at(q, batch, start + first_query, head, q_batch, q_row, q_head)
        k_rows = head_at(k, batch, start, head // group, k_batch, k_row, k_head)
        v_rows = head_at(v, batch, start, head // group, v_batch, v_row, v_head)
        out_rows = contiguous_rows_at(out, batch, start + first_query, head, s_q, heads, HEAD_DIM)
        count = queries - first_query

        q_tile = load_rows(q_rows, count, q_row, HEAD_DIM, BLOCK_Q, BLOCK_D)
        highest, total, weighted = attend_tiles(
            q_tile, k_rows, v_rows, k_row, v_row, first_query, queries, keys, scale * LOG2_E,
            CAUSAL, HEAD_DIM, BLOCK_Q, BLOCK_K, BLOCK_D,
        )  # fmt: skip
        total = tl.where(total == 0.0, 1.0, total)  # no keys: out is 0, and lse is -inf, its maximum
        store_rows(out_rows, weighted / total[:, None], count, heads * HEAD_DIM, HEAD_DIM, BLOCK_Q, BLOCK_D)
        row, lse_rows = tl.arange(0, BLOCK_Q), head_at(lse, batch, start + first_query, head, s_q * heads, 1, s_q)
        tl.store(lse_rows + row, highest * scale + tl.log(total), mask=row < count)


def sequences_of(q: torch.Tensor, cu_seqlens: torch.Tensor | None) -> int:
    """Return the number of sequences."""
    return q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1


def strides_of(*tensors: torch.Tensor) -> list[int]:
    """Return the strides of b, s and a of each tensor [b, s, a, d]."""
    return [stride for tensor in tensors for stride in tensor.stride()[:3]]


def head_sizes(head_dim: int) -> dict[str, int]:
    """Return the size of a head, and of the tiles that hold it: a power of 2, at least 16, as tensor cores need."""
    return {"HEAD_DIM": head_dim, "BLOCK_D": max(16, triton.next_power_of_2(head_dim))}


def launch_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | None, longest: int,
    causal: bool, scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return out [b, s, a, d] and lse [b, a, s]. q: [b, s, a, d]; k, v: [b, s', kv, d]; longest: most tokens of a
    sequence.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32, device=q.device)
    longest = min(longest, q.shape[1])
    if out.numel():
        with torch.cuda.device_of(q):
            flash_forward_kernel[
                lambda meta: (triton.cdiv(longest, meta["BLOCK_Q"]), q.shape[2], sequences_of(q, cu_seqlens))
            ](
                q, k, v, out, lse, cu_seqlens, q.shape[1], k.shape[1], q.shape[2] // k.shape[2], scale,
                *strides_of(q, k, v), causal, **head_sizes(q.shape[3]), LENGTH=length_class(longest),
            )  # fmt: skip
    return out, lse
