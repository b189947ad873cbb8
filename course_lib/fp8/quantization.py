"""8-bit floating-point numbers with scales: `quantize` and `dequantize`.

An e4m3 number has 3 bits of mantissa and lies between 2⁻⁹ and 448. So a matrix is divided by a scale before it is
rounded, and both are kept:

    amax  = the largest |x| of a block          scale = amax / 448          values = round(x / scale), 1 byte each

A block may be the full matrix, a row, a tile of 1 x 128 or a square of 128 x 128. The smaller it is, the fewer elements
suffer from one outlier, and the more scales there are: 4 bytes each. Within a block, the error of a value is half a
unit in its last place: at most 1/16 of it (e4m3), or half of the smallest subnormal times the scale.

If scales are powers of two, division and multiplication are exact, and quantizing again changes nothing.

Micikevicius et al. 2022 (FP8 Formats for Deep Learning, §3 and §4); DeepSeek-AI 2024 (DeepSeek-V3, §3.3.2).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

FULL = -1  # the block is as large as the matrix, in this dimension
TENSOR, ROW, TILE, SQUARE = (FULL, FULL), (1, FULL), (1, 128), (128, 128)
LARGEST = {dtype: torch.finfo(dtype).max for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)}
SMALLEST_SCALE = 2.0**-126  # the smallest normal float32: its reciprocal is finite


class Quantized(NamedTuple):
    """A matrix in 8 bits that represents values * scale, with one scale for each block of values."""

    values: torch.Tensor  # [rows, columns], float8
    scale: torch.Tensor  # [blocks of rows, blocks of columns], float32
    block: tuple[int, int]  # rows and columns that share a scale; FULL: all of them

    def t(self) -> Quantized:
        """Return the transposed matrix, whose values are contiguous, as the hardware needs them."""
        return Quantized(self.values.t().contiguous(), self.scale.t(), self.block[::-1])

    @property
    def nbytes(self) -> int:
        """Return the bytes of values and scales."""
        return self.values.nbytes + self.scale.nbytes


def blocks_of(shape: torch.Size, block: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return the number of blocks down and across, and the rows and columns of one."""
    rows, columns = (size if size != FULL else max(full, 1) for size, full in zip(block, shape, strict=True))
    down, across = (1 if size == FULL else -(-full // size) for size, full in zip(block, shape, strict=True))
    return down, across, rows, columns


def in_blocks(x: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Return x [rows, columns] as [blocks of rows, rows of one, blocks of columns, columns of one], zero-padded."""
    down, across, rows, columns = blocks_of(x.shape, block)
    missing = down * rows - x.shape[0], across * columns - x.shape[1]
    if any(missing):
        x = torch.nn.functional.pad(x, (0, missing[1], 0, missing[0]))
    return x.reshape(down, rows, across, columns)


def out_of_blocks(blocks: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Undo `in_blocks`: return [rows, columns]."""
    return blocks.flatten(2).flatten(0, 1)[: shape[0], : shape[1]].contiguous()


def block_amax(x: torch.Tensor, block: tuple[int, int], groups: tuple[dist.ProcessGroup, ...] = ()) -> torch.Tensor:
    """Return the largest finite |x| of each block, [blocks of rows, blocks of columns] float32; with groups, the
    largest over the ranks of each, which must have the same number of blocks (one all-reduce per group).
    """
    magnitude = x.detach().float().abs()
    amax = in_blocks(torch.where(magnitude.isfinite(), magnitude, 0.0), block).amax((1, 3))
    for group in groups:
        dist.all_reduce(amax, dist.ReduceOp.MAX, group)
    return amax


def check_scales(x: torch.Tensor, dtype: torch.dtype, block: tuple[int, int], scale: torch.Tensor | None) -> None:
    """Raise ValueError for arguments that `quantize` does not support."""
    if x.ndim != 2 or not x.is_floating_point():
        raise ValueError(f"quantize takes a matrix of floating-point numbers, not {list(x.shape)} {x.dtype}")
    if dtype not in LARGEST:
        raise ValueError(f"{dtype}: the 8-bit formats are {', '.join(map(str, LARGEST))}")
    if any(size != FULL and size < 1 for size in block):
        raise ValueError(f"block {block}: rows and columns of a block are 1 or more, or FULL (-1)")
    expected = blocks_of(x.shape, block)[:2]
    if scale is not None and tuple(scale.shape) != expected:
        raise ValueError(
            f"blocks of {block} in a matrix {list(x.shape)} have {expected} scales, not {list(scale.shape)}"
        )


# exercise 14.5
def scale_of(amax: torch.Tensor, dtype: torch.dtype, power_of_two: bool = False) -> torch.Tensor:
    """Return the scales that take each amax to the dtype's largest number, at least SMALLEST_SCALE; 1 for a block of
    zeros.

    amax: of each block, float32, 0 or more. power_of_two: round each scale up to a power of two.
    """
    largest = torch.full((), LARGEST[dtype], device=amax.device)  # a GPU multiplies by a number's rounded reciprocal
    scale = (amax / largest).clamp(min=SMALLEST_SCALE)
    if power_of_two:
        mantissa_bits = 2**23 - 1  # any of them that is set makes the exponent, which stands above them, one more
        scale = ((scale.view(torch.int32) + mantissa_bits) & ~mantissa_bits).view(torch.float32)
    return torch.where(amax > 0, scale, 1.0)


# exercise 14.5
def quantize(
    x: torch.Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    block: tuple[int, int] = TENSOR,
    power_of_two: bool = False,
    scale: torch.Tensor | None = None,
    groups: tuple[dist.ProcessGroup, ...] = (),
) -> Quantized:
    """Return x [rows, columns] in 8 bits, rounded to nearest, ties to even.

    Values that a given scale takes past the largest number saturate. Infinities and NaN become NaN, and do not count
    in their block's scale. The result belongs to no autograd graph. scale: [blocks of rows, blocks of columns]; None:
    each block's own. groups: those over whose ranks a block of x is split; these ranks share its scale. Reads no value
    on the host. Raises ValueError if x, dtype, block or scale do not fit.
    """
    check_scales(x, dtype, block, scale)
    if scale is None:
        scale = scale_of(block_amax(x, block, groups), dtype, power_of_two)
    largest = LARGEST[dtype]
    blocks = in_blocks(x.detach().float(), block)
    scaled = (blocks / scale[:, None, :, None]).clamp(-largest, largest)
    scaled = torch.where(blocks.isfinite(), scaled, torch.nan)
    return Quantized(out_of_blocks(scaled.to(dtype), x.shape), scale, block)


def dequantize(quantized: Quantized, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return values * scale, [rows, columns] in `dtype`."""
    values, scale, block = quantized
    blocks = in_blocks(values.to(torch.promote_types(dtype, torch.float32)), block) * scale[:, None, :, None]
    return out_of_blocks(blocks, values.shape).to(dtype)
