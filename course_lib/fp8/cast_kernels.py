"""Kernels that quantize: a program takes a piece of x into registers, and finds amax, scale and 8 bits of its blocks.

A piece has whole blocks: 128 x 128 numbers for squares, whole rows for scales of rows. Where a block is as large as the
matrix its amax has to be found first (`amax_kernel`): each program sends that of its piece to memory, where the larger
one stays. Of sums and maxima, a maximum is what any order of programs leaves the same to the bit.

Divisions round as IEEE's, as PyTorch's do (`x / y` in Triton is off by up to two last bits), so the results are
`quantize`'s, bit by bit. A division is some ten instructions. All numbers of a block have one divisor, so it is divided
once, and each number is multiplied by the reciprocal and corrected by its remainder: four (`divide`; Markstein 1990,
"Computation of elementary functions on the IBM RISC System/6000 processor", IBM J. Res. Dev. 34:1). A power of two has
a reciprocal without an error: there it is one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from course_lib.fp8.quantization import SMALLEST_SCALE
from course_lib.fp8.rounding import cast_fp8, widen_first, widen_fp8
from course_lib.kernels.rounding import interpreted, widen

SCALE_FLOOR = tl.constexpr(SMALLEST_SCALE)
# Who shares a scale, of the rows or of the columns of a piece.
EACH, PIECE, MATRIX = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# Where scales come from: the piece's own amax, an amax measured before, or they are given.
OWN, MEASURED, GIVEN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.constexpr_function
def largest_number(dtype) -> float:
    """Of e4m3 or e5m2."""
    return 448.0 if dtype == tl.float8e4nv else 57344.0


@triton.jit
def finite_amax(piece, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    """The largest finite |x| of each block of a piece [rows, columns]: [1 or rows, 1 or columns]."""
    amax = tl.where(tl.abs(piece) < float("inf"), tl.abs(piece), 0.0)
    if ACROSS != EACH:
        amax = tl.max(amax, axis=1, keep_dims=True)
    if DOWN != EACH:
        amax = tl.max(amax, axis=0, keep_dims=True)
    return amax


@triton.jit
def block_places(
    row, column, piece_row, piece_column, rows, columns, step_row, step_column,
    DOWN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Where the blocks of this piece have their number (scale, amax), which of them are there, and which of these no
    earlier piece has: [1 or rows, 1 or columns].
    """
    none = tl.zeros((1, 1), tl.int64)
    down = row if DOWN == EACH else none + (piece_row if DOWN == PIECE else 0)
    across = column if ACROSS == EACH else none + (piece_column if ACROSS == PIECE else 0)
    there = (down < rows) & (across < columns)
    first = there & (none + piece_row == 0) if DOWN == MATRIX else there
    first = first & (none + piece_column == 0) if ACROSS == MATRIX else first
    return down * step_row + across * step_column, there, first


@triton.jit
def scale_of_amax(amax, largest, POWER_OF_TWO: tl.constexpr):
    """As `scale_of`. The next power of two by a float32's bits: any mantissa but 0 carries into the exponent."""
    scale = tl.maximum(tl.div_rn(amax, largest), SCALE_FLOOR)
    if POWER_OF_TWO:
        bits = scale.to(tl.uint32, bitcast=True)
        scale = ((bits + 0x7FFFFF) & 0xFF800000).to(tl.float32, bitcast=True)
    return tl.where(amax > 0, scale, 1.0)


@triton.jit
def divide(x, scale, BOUNDED: tl.constexpr):
    """x / scale as IEEE rounds it, wherever 8 bits can tell: from 2^-18 to 2^17; beyond that it stays beyond, with its
    sign. BOUNDED: no finite quotient is above 2^17; then what is not finite becomes NaN. scale is 2^-126 or more.

    With q = x (1 / scale), off by a bit or two, q scale - x is exact unless it underflows: so scales near either end
    are moved by a power of two, and x with them. It is added as a correction, and rounded once. Its sign is such that
    the quotient of -0 is -0. (Minus the inner sum would not do: Triton's -x is 0 - x, which is 0 of 0.)
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
        q = tl.minimum(tl.maximum(q, -(2.0**17)), 2.0**17)  # infinity would be left with a remainder of infinity
    return tl.fma(tl.fma(q, scale, -x), -inverse, q)


@triton.jit
def round_piece(piece, scale, dtype: tl.constexpr, POWER_OF_TWO: tl.constexpr, BOUNDED: tl.constexpr):
    """piece / scale as `dtype`, where what is too large becomes the largest; NaN for what is not finite. BOUNDED: the
    scale is that of an amax which is none of these numbers' less.
    """
    if POWER_OF_TWO:
        scaled = piece * tl.div_rn(1.0, scale)
    else:
        scaled = divide(piece, scale, BOUNDED)
    if POWER_OF_TWO or not BOUNDED:
        scaled = tl.where(tl.abs(piece) < float("inf"), scaled, float("nan"))
    return cast_fp8(scaled, dtype)


@triton.jit
def quantize_piece(
    piece, scale, amax, row, column, piece_row, piece_column, rows, columns, step_row, step_column,
    dtype: tl.constexpr, SOURCE: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    """The piece in 8 bits; scales that are new go to memory."""
    place, there, first = block_places(
        row, column, piece_row, piece_column, rows, columns, step_row, step_column, DOWN, ACROSS
    )
    if SOURCE == GIVEN:
        return round_piece(piece, tl.load(scale + place, there, other=1.0), dtype, False, False)
    else:  # the compiler would read on after a return
        if SOURCE == OWN:
            found = finite_amax(piece, DOWN, ACROSS)
        else:
            found = tl.load(amax + place, there, other=0.0)
        new = scale_of_amax(found, largest_number(dtype), POWER_OF_TWO)
        tl.store(scale + place, new, first)
        return round_piece(piece, new, dtype, POWER_OF_TWO, True)


@triton.jit
def quantize_kernel(
    x, values, scale, transposed, transposed_scale, amax, rows, columns, x_row,
    step_row, step_column, transposed_step_row, transposed_step_column,
    SOURCE: tl.constexpr, POWER_OF_TWO: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
    TRANSPOSED_DOWN: tl.constexpr, TRANSPOSED_ACROSS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    x_scale=None, x_step_row=0, x_step_column=0,
):  # fmt: skip
    """One piece of x into values, and transposed into transposed, where there are these; of one scale for both there is no
    `transposed_scale`. Blocks and steps are in the order of x. Where scales are given, `amax` gets the matrix's. x_scale: x
    is in 8 bits itself, in tiles of 1 x 128.
    """
    pieces_across = tl.cdiv(columns, COLUMNS)
    piece_row, piece_column = tl.program_id(0) // pieces_across, tl.program_id(0) % pieces_across
    first_row, first_column = piece_row.to(tl.int64) * ROWS, piece_column.to(tl.int64) * COLUMNS
    row, column = first_row + tl.arange(0, ROWS)[:, None], first_column + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < columns)
    loaded = tl.load(x + row * x_row + column, inside, other=0.0)
    if x_scale is None:
        piece = widen(loaded) if transposed is None else widen_first(loaded)
    else:  # a piece is as wide as a tile, or half
        of_row = x_scale + row * x_step_row + first_column // 128 * x_step_column
        piece = widen_fp8(loaded) * tl.load(of_row, row < rows, other=0.0)
    # A thread loads 16 bytes at once. Without the hint it would also store 16, and so hold two or four times as many
    # numbers side by side: the lanes of a load would lie apart.
    WIDE: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
    if SOURCE == GIVEN and amax is not None:
        largest = tl.max(finite_amax(piece, MATRIX, MATRIX))
        tl.atomic_max(amax, largest.to(tl.int32, bitcast=True), sem="relaxed")
    if values is not None:
        codes = quantize_piece(
            piece, scale, amax, row, column, piece_row, piece_column, rows, columns, step_row, step_column,
            values.dtype.element_ty, SOURCE, DOWN, ACROSS, POWER_OF_TWO,
        )  # fmt: skip
        tl.store(values + tl.max_contiguous(row * columns + column, [1, WIDE]), codes, inside)
    if transposed is not None:
        if transposed_scale is not None:
            codes = quantize_piece(
                piece, transposed_scale, amax, row, column, piece_row, piece_column, rows, columns,
                transposed_step_row, transposed_step_column,
                transposed.dtype.element_ty, SOURCE, TRANSPOSED_DOWN, TRANSPOSED_ACROSS, POWER_OF_TWO,
            )  # fmt: skip
        transposed_row = first_column + tl.arange(0, COLUMNS)[:, None]
        transposed_column = first_row + tl.arange(0, ROWS)[None, :]
        there = (transposed_row < columns) & (transposed_column < rows)
        tl.store(
            transposed + tl.max_contiguous(transposed_row * rows + transposed_column, [1, WIDE]), tl.trans(codes), there
        )


@triton.jit
def amax_kernel(
    x, amax, rows, columns, x_row, step_row, step_column,
    DOWN: tl.constexpr, ACROSS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The amax of a piece's blocks, as bits, into `amax`, where the larger one stays: floats from 0 on are in the order
    of their bits.
    """
    pieces_across = tl.cdiv(columns, COLUMNS)
    piece_row, piece_column = tl.program_id(0) // pieces_across, tl.program_id(0) % pieces_across
    row = piece_row.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = piece_column.to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    piece = widen(tl.load(x + row * x_row + column, (row < rows) & (column < columns), other=0.0))
    found = finite_amax(piece, DOWN, ACROSS)
    place, there, _ = block_places(
        row, column, piece_row, piece_column, rows, columns, step_row, step_column, DOWN, ACROSS
    )
    tl.atomic_max(amax + place, found.to(tl.int32, bitcast=True), there, sem="relaxed")
