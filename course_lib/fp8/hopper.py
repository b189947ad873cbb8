"""The block-scaled matmul again, for Hopper: `hopper_block_matmul`.

    out[i, j] = Σ_p  scale_a[i, p] scale_b[j, p]  Σ_(k in block p) a[i, k] b[j, k]

The inner sum runs on FP8 tensor cores, into an accumulator that starts at zero; the outer sum, the promotion, on the
ordinary float32 units (`kernels`). For a tile of 128 x 128 and a block of 128 an H100 needs 512 clocks of tensor cores,
and 128 clocks of float32 units if a row has one factor, 256 if rows and columns have their own. Done in sequence,
tensor cores idle for a fifth or a third of the time. Therefore (1 is DeepSeek's: DeepSeek-V3 2024, §3.3.2)

1. Two groups of four warps have half of the rows each: while one promotes, the other multiplies. A third group only
   requests tiles, by TMA (`warp_specialize`): no addresses, no masks in the others' loop. (Scales and results use a row
   index of their own, `scale_row`: for the second group Triton offsets the index by which tiles are requested in
   place.)
2. Scales are requested before the matmul, and have arrived when it is done.
3. A square has one scale, and a row of the tile one product of both: 1 float32 instruction per element, not 2.

The remaining cost is registers. Sums and partial sums of 128 x 128 elements take half of an SM's 256 KB; sums of 128 x
256, the usual tile of FP8 matmuls, would take all. A smaller tile loads more: 64 bytes from L2 for each clock of tensor
cores, against 48. If no scale changes along k, tl.dot promotes by itself: max_num_imprecise_acc=128 (by default never).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from course_lib.flash_attention.hopper import descriptor_memory
from course_lib.fp8.kernels import same_k_blocks
from course_lib.fp8.quantization import FULL, LARGEST, Quantized, check_scales
from course_lib.fp8.rounding import dot_fp8
from course_lib.kernels.matmul import tile_of, tunable
from course_lib.kernels.rounding import cast

TMA_BYTES = 16  # addresses and strides are multiples of it
ALL_ROWS = 2**30  # more than any tile, and a multiple of it
HOPPER_OUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HOPPER_BLOCK_CONFIGURATIONS = [
    triton.Config(
        {"block_m": m, "block_n": n, "specialized": specialized, "group": 8}, num_warps=warps, num_stages=stages
    )
    for m, n, specialized, warps, stages in [
        (128, 128, True, 4, 3),
        (128, 128, True, 4, 4),  # Triton 3.6: with 5, NaN
        (128, 128, False, 8, 4),
        (128, 64, False, 8, 4),
        (64, 128, False, 4, 4),
        (64, 64, False, 4, 4),
    ]
]


@triton.jit
def scales_of_tile(scale, first, count, step, rows: tl.constexpr, block: tl.constexpr):
    """Return pointers to the scales of `block` rows for the first block of k, and which of them exist: [block], or one
    pointer if a scale covers these rows, or a multiple of them.
    """
    if rows % block == 0:
        return scale + (first // rows).to(tl.int64) * step, first < count
    else:
        row = first + tl.arange(0, block)
        return scale + (row // rows).to(tl.int64) * step, row < count


@triton.jit
def promote(total, partial, scale_a, scale_b, each_row: tl.constexpr, each_column: tl.constexpr):
    """Return total + partial scale_a scale_b. Scales: [m] if each row has its own, [n] if each column has; else one."""
    if each_row and each_column:
        return total + partial * scale_a[:, None] * scale_b[None, :]
    elif each_row:
        return total + partial * (scale_a * scale_b)[:, None]
    elif each_column:
        return total + partial * (scale_a * scale_b)[None, :]
    else:
        return total + partial * (scale_a * scale_b)


@triton.jit
def hopper_block_matmul_kernel(
    a, b, out, scale_a, scale_b, m, n, k, a_row, b_row, scale_a_row, scale_a_block, scale_b_row, scale_b_block,
    rows_a: tl.constexpr, rows_b: tl.constexpr, block_k: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr,
    specialized: tl.constexpr, group: tl.constexpr,
):  # fmt: skip
    """Compute one tile of out [m, n], as block_matmul_kernel does; a_row, b_row: strides of a's and b's rows. TMA fills
    with zeros past the ends of a and b.
    """
    tile_m, tile_n = tile_of(tl.program_id(0), tl.cdiv(m, block_m), tl.cdiv(n, block_n), group)
    first_row, first_column = tile_m * block_m, tile_n * block_n
    a_tiles = tl.make_tensor_descriptor(a, [m, k], [a_row, 1], [block_m, block_k])
    b_tiles = tl.make_tensor_descriptor(b, [n, k], [b_row, 1], [block_n, block_k])
    scale_row = (tile_m + 1) * block_m - block_m  # first_row once more: see 1 above
    scales_a, exists_a = scales_of_tile(scale_a, scale_row, m, scale_a_row, rows_a, block_m)
    scales_b, exists_b = scales_of_tile(scale_b, first_column, n, scale_b_row, rows_b, block_n)
    total = tl.zeros((block_m, block_n), tl.float32)
    for number in tl.range(0, tl.cdiv(k, block_k), warp_specialize=specialized):
        of_a = tl.load(scales_a + number * scale_a_block, exists_a, other=0.0)
        of_b = tl.load(scales_b + number * scale_b_block, exists_b, other=0.0)
        tile_a = a_tiles.load([first_row, number * block_k])
        tile_b = b_tiles.load([first_column, number * block_k])
        partial = dot_fp8(tile_a, tl.trans(tile_b), tl.zeros((block_m, block_n), tl.float32))
        total = promote(total, partial, of_a, of_b, rows_a % block_m != 0, rows_b % block_n != 0)
    row, column = scale_row + tl.arange(0, block_m), first_column + tl.arange(0, block_n)
    at = out + row[:, None].to(tl.int64) * n + column[None, :]
    tl.store(at, cast(total, out.dtype.element_ty), (row[:, None] < m) & (column[None, :] < n))


HOPPER_BLOCK_KERNELS = {
    specialized: triton.autotune(tunable(configurations), ["m", "n", "k", "rows_a", "rows_b"])(
        hopper_block_matmul_kernel
    )
    for specialized, configurations in {
        True: HOPPER_BLOCK_CONFIGURATIONS,
        False: [each for each in HOPPER_BLOCK_CONFIGURATIONS if not each.kwargs["specialized"]],
    }.items()
}


def readable_by_tma(values: torch.Tensor) -> torch.Tensor:
    """Return values [rows, k], or a copy if rows do not begin at multiples of 16 bytes, padded with zeros along k if
    necessary.
    """
    missing = -values.shape[1] % TMA_BYTES
    if missing:
        return F.pad(values.view(torch.uint8), (0, missing)).view(values.dtype)
    fits = values.stride(1) == 1 and values.stride(0) % TMA_BYTES == 0 and values.data_ptr() % TMA_BYTES == 0
    return values if fits and values.stride(0) else values.clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("course::hopper_block_matmul", mutates_args=())
def hopper_block_matmul_op(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor,
    rows_a: int, rows_b: int, block_k: int, out_dtype: torch.dtype, specialized: bool,
) -> torch.Tensor:  # fmt: skip
    """Return `hopper_block_matmul` of plain tensors."""
    (m, k), n = a.shape, len(b)
    if not (m and n and k):
        return a.new_zeros((m, n), dtype=out_dtype)
    out = a.new_empty((m, n), dtype=out_dtype)
    a, b = readable_by_tma(a), readable_by_tma(b)
    if a.is_cuda:
        triton.set_allocator(descriptor_memory)
    with torch.cuda.device_of(a):
        grid = lambda meta: (triton.cdiv(m, meta["block_m"]) * triton.cdiv(n, meta["block_n"]),)  # noqa: E731
        HOPPER_BLOCK_KERNELS[specialized][grid](
            a, b, out, scale_a, scale_b, m, n, k, a.stride(0), b.stride(0), *scale_a.stride(), *scale_b.stride(),
            rows_a, rows_b, block_k,
        )  # fmt: skip
    return out


@hopper_block_matmul_op.register_fake
def _(a, b, scale_a, scale_b, rows_a, rows_b, block_k, out_dtype, specialized):
    return a.new_empty((len(a), len(b)), dtype=out_dtype)


def hopper_block_matmul(
    a: Quantized, b: Quantized, out_dtype: torch.dtype = torch.float32, specialized: bool = True
) -> torch.Tensor:
    """Return a [m, k] times the transpose of b [n, k], [m, n] in out_dtype: float32, bfloat16 or float16, as
    `block_matmul` does. specialized: the autotuner may also choose configurations whose warps share the work (1 of this
    module).

    Compiled for Hopper (it works on Ada, without TMA and groups). Raises ValueError if k, devices or dtypes do not fit,
    or the scales do not change after the same 32, 64 or 128 elements of k.
    """
    for x in (a, b):
        if x.values.dtype not in LARGEST:
            raise ValueError(f"values are {x.values.dtype}: expected {' or '.join(map(str, LARGEST))}")
        check_scales(x.values, x.values.dtype, x.block, x.scale)
    fits = a.values.shape[1] == b.values.shape[1] and a.values.device == b.values.device
    if not fits or out_dtype not in HOPPER_OUT_DTYPES:
        raise ValueError(
            f"hopper_block_matmul takes [m, k] and [n, k] on one device, for float32, bfloat16 or float16, not "
            f"{list(a.values.shape)} {a.values.device} and {list(b.values.shape)} {b.values.device} for {out_dtype}"
        )
    if not same_k_blocks(a, b):
        raise ValueError(
            f"scales of {a.block} and {b.block}: both must change after the same 32, 64 or 128 elements of k"
        )
    rows_a, rows_b = (ALL_ROWS if each.block[0] == FULL else each.block[0] for each in (a, b))
    operands = a.values, b.values, a.scale, b.scale
    return hopper_block_matmul_op(*operands, rows_a, rows_b, a.block[1], out_dtype, specialized)
