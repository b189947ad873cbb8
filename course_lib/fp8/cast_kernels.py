"""Kernels that quantize: a program loads a tile of x into registers, and computes amax, scale and 8 bits of its blocks.

A program's tile has whole blocks: 128 x 128 elements for squares, full rows for scales of rows. If a block is as large
as the matrix, its amax has to be known first (`amax_kernel`): each program sends the amax of its tile to memory, where
an atomic maximum keeps the larger one. Unlike a sum, a maximum is the same to the bit in any order of programs.

Divisions round as IEEE 754 says, as PyTorch's do (`x / y` in Triton is off by up to two last bits), so the results are
`quantize`'s, bit by bit. A division takes some ten instructions. All elements of a block have one divisor, so it is
inverted once, and each element is multiplied by the reciprocal and corrected by its remainder: four instructions
(`divide`; Markstein 1990, "Computation of elementary functions on the IBM RISC System/6000 processor", IBM J. Res. Dev.
34:1). The reciprocal of a power of two is exact: then it is one instruction.
"""

from __future__ import annotations

import triton
import triton.language as tl

from course_lib.fp8.quantization import SMALLEST_SCALE
from course_lib.fp8.rounding import cast_fp8, widen_first, widen_fp8
from course_lib.kernels.rounding import interpreted, widen

SCALE_FLOOR = tl.constexpr(SMALLEST_SCALE)
# The rows (or columns) of a tile that share a scale: one scale each, per tile, or per matrix.
EACH, PROGRAM_TILE, MATRIX = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# The source of scales: the tile's own amax, an amax that was measured before, or given scales.
LOCAL_AMAX, MEASURED_AMAX, GIVEN_SCALE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.constexpr_function
def largest_number(dtype) -> float:
    """Return the largest number of e4m3 or e5m2."""
    return 448.0 if dtype == tl.float8e4nv else 57344.0


@triton.jit
def finite_amax(tile, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    """Return the largest finite |x| of each block of a tile [rows, columns]: [1 or rows, 1 or columns]."""
    amax = tl.where(tl.abs(tile) < float("inf"), tl.abs(tile), 0.0)
    if ACROSS != EACH:
        amax = tl.max(amax, axis=1, keep_dims=True)
    if DOWN != EACH:
        amax = tl.max(amax, axis=0, keep_dims=True)
    return amax


@triton.jit
def block_offsets(
    row, column, tile_row, tile_column, rows, columns, step_row, step_column,
    DOWN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Return the offsets of the scales (or amaxes) of this tile's blocks, which blocks exist, and which of them this
    tile is the first to hold: [1 or rows, 1 or columns] each.
    """
    none = tl.zeros((1, 1), tl.int64)
    down = row if DOWN == EACH else none + (tile_row if DOWN == PROGRAM_TILE else 0)
    across = column if ACROSS == EACH else none + (tile_column if ACROSS == PROGRAM_TILE else 0)
    exists = (down < rows) & (across < columns)
    first = exists & (none + tile_row == 0) if DOWN == MATRIX else exists
    first = first & (none + tile_column == 0) if ACROSS == MATRIX else first
    return down * step_row + across * step_column, exists, first


@triton.jit
def scale_of_amax(amax, largest, POWER_OF_TWO: tl.constexpr):
    """Return the scale of each amax as `scale_of` does. The power of two is rounded up by a float32's bits: any
    mantissa but 0 carries into the exponent.
    """
    scale = tl.maximum(tl.div_rn(amax, largest), SCALE_FLOOR)
    if POWER_OF_TWO:
        bits = scale.to(tl.uint32, bitcast=True)
        scale = ((bits + 0x7FFFFF) & 0xFF800000).to(tl.float32, bitcast=True)
    return tl.where(amax > 0, scale, 1.0)


@triton.jit
def divide(x, scale, BOUNDED: tl.constexpr):
    """Return x / scale as IEEE 754 rounds it, wherever 8 bits can tell: from 2^-18 to 2^17; a quotient beyond that
    range stays beyond it, with its sign. BOUNDED: no finite quotient is above 2^17; then values that are not finite
    become NaN. scale is 2^-126 or more.

    With q = x (1 / scale), off by a bit or two, q scale - x is exact unless it underflows: so scales near either end
    are moved by a power of two, and x with them. The remainder is added as a correction, rounded once. Its sign is such
    that the quotient of -0 is -0. (Negating the inner sum would not do: Triton's -x is 0 - x, which is 0 for 0.)
    """
    if interpreted():  # its fma rounds twice
        quotient = tl.div_rn(x, scale)
        return tl.where(tl.abs(x) < float("inf"), quotient, float("nan")) if BOUNDED else quotient
    move = tl.where(scale < 2.0**-64, 2.0**64, tl.where(scale > 2.0**64, 2.0**-64, 1.0))
    scale *= move
    x *= move
    inverse = tl.div_rn(1.0, scale)
    q = x * inverse
    if not BOUNDED:
        q = tl.minimum(tl.maximum(q, -(2.0**17)), 2.0**17)  # the remainder of infinity is infinity
    return tl.fma(tl.fma(q, scale, -x), -inverse, q)


@triton.jit
def round_tile(tile, scale, dtype: tl.constexpr, POWER_OF_TWO: tl.constexpr, BOUNDED: tl.constexpr):
    """Return tile / scale as `dtype`, saturated; NaN for values that are not finite. BOUNDED: the scale comes from an
    amax which no finite element exceeds.
    """
    if POWER_OF_TWO:
        scaled = tile * tl.div_rn(1.0, scale)
    else:
        scaled = divide(tile, scale, BOUNDED)
    if POWER_OF_TWO or not BOUNDED:
        scaled = tl.where(tl.abs(tile) < float("inf"), scaled, float("nan"))
    return cast_fp8(scaled, dtype)


@triton.jit
def quantize_tile(
    tile, scale, amax, row, column, tile_row, tile_column, rows, columns, step_row, step_column,
    dtype: tl.constexpr, SOURCE: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    """Return the tile in 8 bits, and store its new scales."""
    offset, exists, first = block_offsets(
        row, column, tile_row, tile_column, rows, columns, step_row, step_column, DOWN, ACROSS
    )
    if SOURCE == GIVEN_SCALE:
        return round_tile(tile, tl.load(scale + offset, exists, other=1.0), dtype, False, False)
    else:  # without the else, the compiler compiles what follows a return
        if SOURCE == LOCAL_AMAX:
            block_amax = finite_amax(tile, DOWN, ACROSS)
        else:
            block_amax = tl.load(amax + offset, exists, other=0.0)
        new = scale_of_amax(block_amax, largest_number(dtype), POWER_OF_TWO)
        tl.store(scale + offset, new, first)
        return round_tile(tile, new, dtype, POWER_OF_TWO, True)


@triton.jit
def quantize_kernel(
    x, values, scale, transposed, transposed_scale, amax, rows, columns, x_row,
    step_row, step_column, transposed_step_row, transposed_step_column,
    SOURCE: tl.constexpr, POWER_OF_TWO: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
    TRANSPOSED_DOWN: tl.constexpr, TRANSPOSED_ACROSS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    x_scale=None, x_step_row=0, x_step_column=0,
):  # fmt: skip
    """Quantize one tile of x into values, and its transpose into transposed, unless these are None. If one scale serves
    both, `transposed_scale` is None. Blocks and steps are in the order of x. If scales are given, `amax` gets the amax
    of the matrix. x_scale: x itself is in 8 bits, in tiles of 1 x 128.
    """
    tiles_across = tl.cdiv(columns, COLUMNS)
    tile_row, tile_column = tl.program_id(0) // tiles_across, tl.program_id(0) % tiles_across
    first_row, first_column = tile_row.to(tl.int64) * ROWS, tile_column.to(tl.int64) * COLUMNS
    row, column = first_row + tl.arange(0, ROWS)[:, None], first_column + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < columns)
    loaded = tl.load(x + row * x_row + column, inside, other=0.0)
    if x_scale is None:
        tile = widen(loaded) if transposed is None else widen_first(loaded)
    else:  # a program's tile is 128 columns wide, as the blocks of x, or half
        of_row = x_scale + row * x_step_row + first_column // 128 * x_step_column
        tile = widen_fp8(loaded) * tl.load(of_row, row < rows, other=0.0)
    # A thread loads 16 bytes at once. Without the hint it would also store 16, and so hold two or four times as many
    # adjacent elements: the lanes of a load would not be adjacent.
    WIDE: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
    if SOURCE == GIVEN_SCALE and amax is not None:
        largest = tl.max(finite_amax(tile, MATRIX, MATRIX))
        tl.atomic_max(amax, largest.to(tl.int32, bitcast=True), sem="relaxed")
    if values is not None:
        codes = quantize_tile(
            tile, scale, amax, row, column, tile_row, tile_column, rows, columns, step_row, step_column,
            values.dtype.element_ty, SOURCE, DOWN, ACROSS, POWER_OF_TWO,
        )  # fmt: skip
        tl.store(values + tl.max_contiguous(row * columns + column, [1, WIDE]), codes, inside)
    if transposed is not None:
        if transposed_scale is not None:
            codes = quantize_tile(
                tile, transposed_scale, amax, row, column, tile_row, tile_column, rows, columns,
                transposed_step_row, transposed_step_column,
                transposed.dtype.element_ty, SOURCE, TRANSPOSED_DOWN, TRANSPOSED_ACROSS, POWER_OF_TWO,
            )  # fmt: skip
        transposed_row = first_column + tl.arange(0, COLUMNS)[:, None]
        transposed_column = first_row + tl.arange(0, ROWS)[None, :]
        exists = (transposed_row < columns) & (transposed_column < rows)
        tl.store(
            transposed + tl.max_contiguous(transposed_row * rows + transposed_column, [1, WIDE]),
            tl.trans(codes),
            exists,
        )


@triton.jit
def amax_kernel(
    x, amax, rows, columns, x_row, step_row, step_column,
    DOWN: tl.constexpr, ACROSS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Combine the amax of each block of a tile into `amax` by an atomic maximum of the bits, whose order is the order
    of floats from 0 on.
    """
    tiles_across = tl.cdiv(columns, COLUMNS)
    tile_row, tile_column = tl.program_id(0) // tiles_across, tl.program_id(0) % tiles_across
    row = tile_row.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tile_column.to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tile = widen(tl.load(x + row * x_row + column, (row < rows) & (column < columns), other=0.0))
    block_amax = finite_amax(tile, DOWN, ACROSS)
    offset, exists, _ = block_offsets(
        row, column, tile_row, tile_column, rows, columns, step_row, step_column, DOWN, ACROSS
    )
    tl.atomic_max(amax + offset, block_amax.to(tl.int32, bitcast=True), exists, sem="relaxed")
