"""The block-scaled matmul as a kernel: `block_matmul`.

    out[i, j] = Σ over blocks p of k:  scale_a[i, p] · scale_b[j, p] · Σ over k in p: a[i, k] b[j, k]

A program computes one tile of out. It walks along k one block at a time, 128 elements: four FP8 instructions of 32 on
Hopper add up to a fresh sum; the sum is multiplied by the two scales and added to a float32 total in ordinary
registers. So the scales cost no pass of their own, and the tensor core's short accumulator never holds more than 128
products (DeepSeek-AI 2024, DeepSeek-V3, §3.3.2; their kernel is DeepGEMM).

The cost: two instructions per element of the tile and iteration, a multiplication and a fused addition, while the
tensor cores need block_n / 8 clocks for the same iteration on the elements that one warp group holds. And every
iteration waits for its four instructions before it can scale their sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from course_lib.fp8.quantization import FULL, Quantized
from course_lib.fp8.rounding import dot_fp8
from course_lib.kernels.matmul import tile_of, tunable
from course_lib.kernels.rounding import cast

BLOCK_MATMUL_CONFIGURATIONS = [
    triton.Config({"block_m": m, "block_n": n, "group": 8}, num_warps=warps, num_stages=stages)
    for m, n, warps, stages in [(64, 64, 4, 4), (128, 128, 8, 3), (128, 128, 8, 4), (64, 128, 4, 3), (128, 64, 4, 3)]
]


# exercise 14.6
@triton.autotune(configs=tunable(BLOCK_MATMUL_CONFIGURATIONS), key=["m", "n", "k", "rows_a", "rows_b"])
@triton.jit
def block_matmul_kernel(
    a, b, out, scale_a, scale_b, m, n, k, scale_a_row, scale_a_block, scale_b_row, scale_b_block,
    rows_a: tl.constexpr, rows_b: tl.constexpr, block_k: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, group: tl.constexpr,
):  # fmt: skip
    """Write one tile of out [m, n] = a times the transpose of b. a: [m, k]; b: [n, k]; all three contiguous.

    A scale of a covers rows_a rows and `block_k` elements of k, one of b rows_b rows; scale_a_row, scale_a_block …:
    their strides. The sum over each block of k starts at 0; times its scales it is added to `total`, in float32.
    """
    tile_m, tile_n = tile_of(tl.program_id(0), tl.cdiv(m, block_m), tl.cdiv(n, block_n), group)
    row = tile_m * block_m + tl.arange(0, block_m)
    column = tile_n * block_n + tl.arange(0, block_n)
    inner = tl.arange(0, block_k)
    a += row[:, None].to(tl.int64) * k + inner[None, :]
    b += column[None, :].to(tl.int64) * k + inner[:, None]
    scale_a += (row // rows_a).to(tl.int64) * scale_a_row
    scale_b += (column // rows_b).to(tl.int64) * scale_b_row
    total = tl.zeros((block_m, block_n), dtype=tl.float32)
    for start in range(0, k, block_k):
        exists = inner < k - start
        tile_a = tl.load(a, (row[:, None] < m) & exists[None, :], other=0.0)
        tile_b = tl.load(b, exists[:, None] & (column[None, :] < n), other=0.0)
        of_a = tl.load(scale_a, row < m, other=0.0)
        of_b = tl.load(scale_b, column < n, other=0.0)
        block_sum = dot_fp8(tile_a, tile_b, tl.zeros((block_m, block_n), tl.float32))
        total += block_sum * of_a[:, None] * of_b[None, :]
        a += block_k
        b += block_k
        scale_a += scale_a_block
        scale_b += scale_b_block
    at = out + row[:, None].to(tl.int64) * n + column[None, :]
    tl.store(at, cast(total, out.dtype.element_ty), (row[:, None] < m) & (column[None, :] < n))


def same_k_blocks(a: Quantized, b: Quantized) -> bool:
    """True if the scales of both change after the same 32, 64 or 128 elements of k, as `block_matmul` needs."""
    return a.block[1] == b.block[1] in (32, 64, 128)


@torch.library.custom_op("course::block_matmul", mutates_args=())
def block_matmul_op(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor,
    rows_a: int, rows_b: int, block_k: int, out_dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """Return `block_matmul` of plain tensors."""
    (m, k), n = a.shape, len(b)
    out = torch.empty((m, n), device=a.device, dtype=out_dtype)
    if out.numel():
        with torch.cuda.device_of(a):
            block_matmul_kernel[lambda meta: (triton.cdiv(m, meta["block_m"]) * triton.cdiv(n, meta["block_n"]),)](
                a, b, out, scale_a, scale_b, m, n, k, *scale_a.stride(), *scale_b.stride(), rows_a, rows_b, block_k
            )  # fmt: skip
    return out


@block_matmul_op.register_fake
def _(a, b, scale_a, scale_b, rows_a, rows_b, block_k, out_dtype):
    return a.new_empty((len(a), len(b)), dtype=out_dtype)


def block_matmul(a: Quantized, b: Quantized, out_dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a [m, k] times the transpose of b [n, k]: [m, n] in out_dtype. Raises ValueError if k differs, or the
    scales do not change after the same 32, 64 or 128 elements of k.
    """
    if a.values.shape[1] != b.values.shape[1]:
        raise ValueError(f"k is last in both and must agree: {list(a.values.shape)} and {list(b.values.shape)}")
    if not same_k_blocks(a, b):
        raise ValueError(
            f"scales of {a.block} and {b.block}: both must change after the same 32, 64 or 128 elements of k"
        )
    rows_a, rows_b = (max(len(q.values), 1) if q.block[0] == FULL else q.block[0] for q in (a, b))
    operands = a.values.contiguous(), b.values.contiguous(), a.scale, b.scale
    return block_matmul_op(*operands, rows_a, rows_b, a.block[1], out_dtype)
