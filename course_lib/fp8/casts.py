"""Quantization in as few looks at memory as it takes: `quantize_fused`, `quantize_both`, `quantize_delayed`,
`transpose_tiles`.

`quantize` of PyTorch's operators reads and writes a matrix some ten times over. A kernel reads e bytes an element and
writes 1 (`cast_kernels`):

    tiles, squares, rows of up to 16,384 numbers    a program has whole blocks: one pass               e + 1 bytes
    the matrix, longer rows                         amax first, and then all over again              2 e + 1
    a scale that is there already (delayed)         one pass, with the amax for the steps to come      e + 1

and 4 bytes for each scale. The backward pass wants operands transposed: an FP8 product takes k last in both. Of a piece
that is in registers a transposed copy costs 1 byte an element, written. Turned later it costs 2, and with scales of tiles,
whose blocks are others there, it is rounded twice. `quantize_both` writes both from one look, each from x as it was.

Tiles of 1 x 128: DeepSeek-AI 2024 (DeepSeek-V3, §3.3.2). Casts that transpose: NVIDIA's Transformer Engine.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch.utils._python_dispatch import _get_current_dispatch_mode

from course_lib.fp8.cast_kernels import EACH, GIVEN, MATRIX, MEASURED, OWN, PIECE, amax_kernel, quantize_kernel
from course_lib.fp8.quantization import FULL, ROW, SQUARE, TENSOR, TILE, Quantized, blocks_of, check_scales
from course_lib.kernels.rows import LONGEST_BLOCK, as_rows, shape_of_work

CAST_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FUSED_BLOCKS = (TILE, SQUARE, ROW, TENSOR)


def sharing(block: tuple[int, int]) -> tuple[int, int]:
    """Who shares a scale, down and across."""
    kinds = {1: EACH.value, 128: PIECE.value, FULL: MATRIX.value}
    return kinds[block[0]], kinds[block[1]]


def shape_of_piece(blocks: list[tuple[int, int]], transposed: bool, columns: int | None = None) -> dict[str, int]:
    """Rows and columns of x that a program holds, and its warps. A thread has 32 elements, or 64 where each gets two
    scales: twice as many threads would have too few registers each. blocks: those of the results, in the order of x.
    columns: a row's, where a program has to have all of it.

    Each row of a piece is whole lines of memory, 128 bytes of 16-bit numbers or more. Each row of a transposed one is a
    line, or half of one where no block asks for 128 rows: of such small pieces four or five fit on an SM, and some
    compute while others wait for memory.
    """
    if columns is not None:
        rows, columns, num_warps = shape_of_work(columns)
        return {"ROWS": rows, "COLUMNS": columns, "num_warps": num_warps}
    rows = 128 if any(block[0] == 128 for block in blocks) else 64 if transposed else 32
    columns = 64 if transposed and all(block[1] != 128 for block in blocks) else 128
    elements = 64 if len(set(blocks)) == 2 else 32
    return {"ROWS": rows, "COLUMNS": columns, "num_warps": rows * columns // elements // 32}


def programs(x: torch.Tensor, piece: dict[str, int]) -> tuple[int]:
    """The grid."""
    return (triton.cdiv(x.shape[0], piece["ROWS"]) * triton.cdiv(x.shape[1], piece["COLUMNS"]),)


def new_scales(x: torch.Tensor, shape: torch.Size, block: tuple[int, int]) -> torch.Tensor:
    """Memory for the scales of a matrix of this shape, [blocks of rows, blocks of columns]; 1 where it has no elements.
    Those of tiles lie row beside row, as programs write them and products read them.
    """
    down, across, *_ = blocks_of(shape, block)
    make = x.new_empty if x.numel() else x.new_ones
    return make((across, down), dtype=torch.float32).t() if block == TILE else make((down, across), dtype=torch.float32)


def needs_operator(x: torch.Tensor) -> bool:
    """Whether a compiler, a counter or the like follows what PyTorch does with x, or x has no numbers. Only then a
    kernel has to be an operator. Calling an operator takes the host 0.1 ms, and a step has hundreds of casts.
    """
    followed = torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None
    transformed = torch._C._are_functorch_transforms_active() or torch.jit.is_tracing()
    return followed or transformed or x.is_meta or type(x) is not torch.Tensor


def amax_now(x: torch.Tensor, block_rows: int, block_columns: int, transposed: bool) -> torch.Tensor:
    """The amax of each block of x [rows, columns], or of its transpose: [blocks of rows, blocks of columns]."""
    block = block_rows, block_columns
    amax = x.new_zeros(blocks_of(x.shape[::-1] if transposed else x.shape, block)[:2], dtype=torch.float32)
    if x.numel():
        x, seen = as_rows(x), amax.t() if transposed else amax
        block = block[::-1] if transposed else block
        piece = shape_of_piece([block], transposed)
        with torch.cuda.device_of(x):
            amax_kernel[programs(x, piece)](
                x, amax.view(torch.int32), *x.shape, x.stride(0), *seen.stride(), *sharing(block), **piece
            )  # fmt: skip
    return amax


amax_operator = torch.library.custom_op("course::block_amax", mutates_args=())(amax_now)


@amax_operator.register_fake
def _(x, block_rows, block_columns, transposed):
    shape = x.shape[::-1] if transposed else x.shape
    return x.new_empty(blocks_of(shape, (block_rows, block_columns))[:2], dtype=torch.float32)


def block_amaxes(x: torch.Tensor, *given) -> torch.Tensor:
    """`amax_now`, as an operator where x is needs_operator."""
    return (amax_operator if needs_operator(x) else amax_now)(x, *given)


class CastOutputs(NamedTuple):
    """What a launch fills; without elements what is not wanted."""

    values: torch.Tensor  # [rows, columns]
    scale: torch.Tensor  # [blocks of rows, blocks of columns]
    transposed: torch.Tensor  # the transpose's
    transposed_scale: torch.Tensor
    amax: torch.Tensor  # [1, 1], of the whole matrix


def cast_outputs(
    x: torch.Tensor,
    dtype: torch.dtype,
    block: tuple[int, int],
    straight: bool,
    transposed: bool,
    given: bool,
    record: bool,
) -> CastOutputs:
    """Memory for x in 8 bits, for its transpose, or both; for scales unless they are given, one for both where a block
    is as long as it is wide; and for an amax to record.
    """
    new = straight and not given
    transposed_new = transposed and not given and not (straight and block[0] == block[1])
    return CastOutputs(
        x.new_empty(x.shape if straight else (0,), dtype=dtype),
        new_scales(x, x.shape, block) if new else x.new_empty(0, dtype=torch.float32),
        x.new_empty(x.shape[::-1] if transposed else (0,), dtype=dtype),
        new_scales(x, x.shape[::-1], block) if transposed_new else x.new_empty(0, dtype=torch.float32),
        x.new_zeros((1, 1) if record else (0,), dtype=torch.float32),
    )


def quantize_now(
    x: torch.Tensor, scale: torch.Tensor | None, amax: torch.Tensor | None, dtype: torch.dtype, block_rows: int,
    block_columns: int, power_of_two: bool, straight: bool, transposed: bool, record: bool,
    x_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """`CastOutputs`. A block is one of x and of its transpose alike. scale, amax: of x where `straight`, or else of the
    transpose; none: each block's own. x_scale: of x, where it is in 8 bits, in tiles.
    """
    block = block_rows, block_columns
    made = cast_outputs(x, dtype, block, straight, transposed, scale is not None, record)
    if x.numel():
        launch_quantize(as_rows(x), scale, amax, made, block, power_of_two, x_scale)
    return tuple(made)


quantize_operator = torch.library.custom_op("course::quantize", mutates_args=())(quantize_now)


@quantize_operator.register_fake
def _(x, scale, amax, dtype, block_rows, block_columns, power_of_two, straight, transposed, record, x_scale=None):
    return tuple(cast_outputs(x, dtype, (block_rows, block_columns), straight, transposed, scale is not None, record))


def quantized(x: torch.Tensor, *given) -> CastOutputs:
    """`quantize_now`, as an operator where x is needs_operator."""
    return CastOutputs(*(quantize_operator if needs_operator(x) else quantize_now)(x, *given))


def launch_quantize(
    x: torch.Tensor, scale: torch.Tensor | None, amax: torch.Tensor | None, made: CastOutputs, block: tuple[int, int],
    power_of_two: bool, x_scale: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Fill `made`. For the kernel all scales are in the order of x."""
    values, new, transposed, transposed_new, recorded = (each if each.numel() else None for each in made)
    source = (GIVEN if scale is not None else OWN if amax is None else MEASURED).value
    across = block[::-1]
    blocks = [block] * (values is not None) + [across] * (transposed is not None)
    piece = shape_of_piece(blocks, transposed is not None, x.shape[1] if block == ROW and source == OWN.value else None)
    if scale is None:
        mine, others = new, None if transposed_new is None else transposed_new.t()
    else:
        mine, others = (scale, None) if values is not None else (None, scale.t())
    seen = amax if recorded is None else recorded.view(torch.int32)
    steps = [(0, 0) if each is None else each.stride() for each in (mine, others, x_scale)]
    of_x = {"x_scale": x_scale, "x_step_row": steps[2][0], "x_step_column": steps[2][1]}
    with torch.cuda.device_of(x):
        quantize_kernel[programs(x, piece)](
            x, values, mine, transposed, others, seen, *x.shape, x.stride(0), *steps[0], *steps[1],
            source, power_of_two, *sharing(block), *sharing(across), **piece, **of_x,
        )  # fmt: skip


def check_cast(x: torch.Tensor, dtype: torch.dtype, block: tuple[int, int], scale: torch.Tensor | None) -> None:
    """Raises ValueError for what the kernels can't take."""
    check_scales(x, dtype, block, scale)
    if x.dtype not in CAST_DTYPES or block not in FUSED_BLOCKS:
        raise ValueError(
            f"x is {x.dtype} in blocks of {block}: expected float32, bfloat16 or float16, and blocks of "
            f"{', '.join(map(str, FUSED_BLOCKS))}"
        )


def block_amax_fused(x: torch.Tensor, block: tuple[int, int] = TENSOR, transposed: bool = False) -> torch.Tensor:
    """`block_amax` of x [rows, columns], or of its transpose, in one pass. Raises ValueError for other blocks and types
    than the kernels'.
    """
    check_cast(x, torch.float8_e4m3fn, block, None)
    return block_amaxes(x.detach(), *block, transposed)


def quantize_fused(
    x: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn, block: tuple[int, int] = TENSOR,
    power_of_two: bool = False, scale: torch.Tensor | None = None, transposed: bool = False,
) -> Quantized:  # fmt: skip
    """`quantize`, to the bit, of x [rows, columns] in float32, bfloat16 or float16, by blocks of TILE, SQUARE, ROW or
    TENSOR. transposed: of x.t(), which is not made: x is read as it lies.

    scale: of the matrix that is quantized; None: each block's own. Raises ValueError where something does not fit.
    """
    check_cast(x.t() if transposed else x, dtype, block, scale)
    x, whole = x.detach(), block == TENSOR or block == ROW and (transposed or x.shape[1] > LONGEST_BLOCK)
    amax = block_amaxes(x, *block, transposed) if whole and scale is None else None
    made = quantized(x, scale, amax, dtype, *block, power_of_two, not transposed, transposed, False)
    values, new = (made.transposed, made.transposed_scale) if transposed else (made.values, made.scale)
    return Quantized(values, new if scale is None else scale, block)


def quantize_both(
    x: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn, block: tuple[int, int] = TENSOR,
    power_of_two: bool = False, scale: torch.Tensor | None = None,
) -> tuple[Quantized, Quantized]:  # fmt: skip
    """`quantize` of x and of x.t(), both from x as it is: read once, twice for TENSOR, and three times for ROW. scale:
    of x, in blocks that are as long as wide; with it x is read once. Raises ValueError where something does not fit.
    """
    check_cast(x, dtype, block, scale)
    if scale is not None and block not in (TENSOR, SQUARE):
        raise ValueError(f"blocks of {block} have other scales in the transpose: give none")
    if block == ROW:
        return tuple(quantize_fused(x, dtype, block, power_of_two, transposed=each) for each in (False, True))
    x = x.detach()
    amax = block_amaxes(x, *block, False) if block == TENSOR and scale is None else None
    made = quantized(x, scale, amax, dtype, *block, power_of_two, True, True, False)
    found = made.scale if scale is None else scale
    transposed_scale = made.transposed_scale if block == TILE else found.t()
    return Quantized(made.values, found, block), Quantized(made.transposed, transposed_scale, block)


def transpose_tiles(x: Quantized, power_of_two: bool = False) -> Quantized:
    """The transpose of x, which is in tiles of 1 x 128, in such tiles again: as `quantize` makes it of what its 8 bits
    stand for, to the bit, by one look at them. Raises ValueError for other blocks.
    """
    if x.block != TILE:
        raise ValueError(f"x is in blocks of {x.block}: expected tiles, {TILE}")
    how = None, None, x.values.dtype, *TILE, power_of_two, False, True, False
    made = quantized(x.values, *how, x.scale)
    return Quantized(made.transposed, made.transposed_scale, TILE)


def quantize_delayed(
    x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn, both: bool = True
) -> tuple[Quantized, Quantized | None, torch.Tensor]:
    """x and, for both, x.t() by a scale [1, 1] that is there already, and x's amax [1, 1] for scales to come: x is read
    once.
    """
    check_cast(x, dtype, TENSOR, scale)
    made = quantized(x.detach(), scale, None, dtype, *TENSOR, False, True, both, True)
    transposed = Quantized(made.transposed, scale, TENSOR) if both else None
    return Quantized(made.values, scale, TENSOR), transposed, made.amax
