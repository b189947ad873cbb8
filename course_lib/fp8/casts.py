"""Quantization in as few passes over memory as it takes: `quantize_fused`, `quantize_both`, `quantize_delayed`,
`transpose_tiles`.

`quantize`, of PyTorch's operators, reads and writes a matrix some ten times. A kernel reads e bytes per element and
writes 1 (`cast_kernels`):

    tiles, squares, rows of up to 16,384 elements    a program has whole blocks: one pass               e + 1 bytes
    the matrix, longer rows                          the amax first, then a second pass                2 e + 1
    a scale that is known before (delayed)           one pass, which records the amax for later steps   e + 1

and 4 bytes for each scale. The backward pass needs transposed operands, because an FP8 matmul takes k last in both. Of
a tile that is in registers a transposed copy costs 1 byte per element, written. Transposed later it costs 2, and with
scales of tiles, whose blocks differ in the transpose, it is rounded twice. `quantize_both` quantizes row-wise and
column-wise in one pass, each from the unrounded x.

Tiles of 1 x 128: DeepSeek-AI 2024 (DeepSeek-V3, §3.3.2). Casts that transpose: NVIDIA's Transformer Engine.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch.utils._python_dispatch import _get_current_dispatch_mode

from course_lib.fp8.cast_kernels import (
    EACH,
    GIVEN_SCALE,
    LOCAL_AMAX,
    MATRIX,
    MEASURED_AMAX,
    PROGRAM_TILE,
    amax_kernel,
    quantize_kernel,
)
from course_lib.fp8.quantization import FULL, ROW, SQUARE, TENSOR, TILE, Quantized, blocks_of, check_scales
from course_lib.kernels.rows import LONGEST_BLOCK, as_rows, shape_of_work

CAST_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FUSED_BLOCKS = (TILE, SQUARE, ROW, TENSOR)


def scale_sharing(block: tuple[int, int]) -> tuple[int, int]:
    """Return which rows of a program's tile share a scale, and which columns."""
    kinds = {1: EACH.value, 128: PROGRAM_TILE.value, FULL: MATRIX.value}
    return kinds[block[0]], kinds[block[1]]


def tile_launch(blocks: list[tuple[int, int]], transposed: bool, columns: int | None = None) -> dict[str, int]:
    """Return the launch options of a cast kernel: ROWS and COLUMNS of a program's tile of x, and num_warps.

    blocks: the block shapes of the results, in the order of x; columns: the length of a row of x, if a program needs
    full rows. A thread holds 32 elements, or 64 if each element gets two scales: with twice as many threads, each
    thread would have too few registers.

    Each row of a tile fills one or more 128-byte memory lines, even with 16-bit numbers. Each row of a transposed tile
    fills one line, or half a line if no block needs 128 rows: four or five of these small tiles fit on an SM, and some
    compute while others wait for memory.
    """
    if columns is not None:
        rows, columns, num_warps = shape_of_work(columns)
        return {"ROWS": rows, "COLUMNS": columns, "num_warps": num_warps}
    rows = 128 if any(block[0] == 128 for block in blocks) else 64 if transposed else 32
    columns = 64 if transposed and all(block[1] != 128 for block in blocks) else 128
    elements = 64 if len(set(blocks)) == 2 else 32
    return {"ROWS": rows, "COLUMNS": columns, "num_warps": rows * columns // elements // 32}


def launch_grid(x: torch.Tensor, tile: dict[str, int]) -> tuple[int]:
    """Return the grid that covers x with tiles."""
    return (triton.cdiv(x.shape[0], tile["ROWS"]) * triton.cdiv(x.shape[1], tile["COLUMNS"]),)


def new_scales(x: torch.Tensor, shape: torch.Size, block: tuple[int, int]) -> torch.Tensor:
    """Return memory for the scales of a matrix of this shape, [blocks of rows, blocks of columns]; ones if the matrix
    is empty. Scales of tiles are stored column-major, as programs write and matmuls read them.
    """
    down, across, *_ = blocks_of(shape, block)
    make = x.new_empty if x.numel() else x.new_ones
    return make((across, down), dtype=torch.float32).t() if block == TILE else make((down, across), dtype=torch.float32)


def needs_operator(x: torch.Tensor) -> bool:
    """True if a compiler, a counter or the like traces PyTorch's operations on x, or x has no data. Only then a kernel
    must be an operator: calling an operator takes the host 0.1 ms, and a step has hundreds of casts.
    """
    traced = torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None
    transformed = torch._C._are_functorch_transforms_active() or torch.jit.is_tracing()
    return traced or transformed or x.is_meta or type(x) is not torch.Tensor


def launch_amax(x: torch.Tensor, block_rows: int, block_columns: int, transposed: bool) -> torch.Tensor:
    """Return the amax of each block of x [rows, columns], or of its transpose: [blocks of rows, blocks of columns]."""
    block = block_rows, block_columns
    amax = x.new_zeros(blocks_of(x.shape[::-1] if transposed else x.shape, block)[:2], dtype=torch.float32)
    if x.numel():
        x, in_order_of_x = as_rows(x), amax.t() if transposed else amax
        block = block[::-1] if transposed else block
        tile = tile_launch([block], transposed)
        with torch.cuda.device_of(x):
            amax_kernel[launch_grid(x, tile)](
                x, amax.view(torch.int32), *x.shape, x.stride(0), *in_order_of_x.stride(), *scale_sharing(block), **tile
            )  # fmt: skip
    return amax


amax_operator = torch.library.custom_op("course::block_amax", mutates_args=())(launch_amax)


@amax_operator.register_fake
def _(x, block_rows, block_columns, transposed):
    shape = x.shape[::-1] if transposed else x.shape
    return x.new_empty(blocks_of(shape, (block_rows, block_columns))[:2], dtype=torch.float32)


def block_amaxes(x: torch.Tensor, block_rows: int, block_columns: int, transposed: bool) -> torch.Tensor:
    """`launch_amax`, as an operator if necessary."""
    return (amax_operator if needs_operator(x) else launch_amax)(x, block_rows, block_columns, transposed)


class CastOutputs(NamedTuple):
    """The tensors that a launch fills; those that are not wanted are empty."""

    values: torch.Tensor  # [rows, columns]
    scale: torch.Tensor  # [blocks of rows, blocks of columns]
    transposed: torch.Tensor  # [columns, rows]
    transposed_scale: torch.Tensor
    amax: torch.Tensor  # [1, 1], of the full matrix


def cast_outputs(
    x: torch.Tensor,
    dtype: torch.dtype,
    block: tuple[int, int],
    rowwise: bool,
    columnwise: bool,
    given: bool,
    record: bool,
) -> CastOutputs:
    """Return memory for x in 8 bits (rowwise), for its transpose (columnwise), or both; for scales unless they are
    given, one for both if blocks are square; and for an amax to record.
    """
    new = rowwise and not given
    transposed_new = columnwise and not given and not (rowwise and block[0] == block[1])
    return CastOutputs(
        x.new_empty(x.shape if rowwise else (0,), dtype=dtype),
        new_scales(x, x.shape, block) if new else x.new_empty(0, dtype=torch.float32),
        x.new_empty(x.shape[::-1] if columnwise else (0,), dtype=dtype),
        new_scales(x, x.shape[::-1], block) if transposed_new else x.new_empty(0, dtype=torch.float32),
        x.new_zeros((1, 1) if record else (0,), dtype=torch.float32),
    )


def quantize_by_kernel(
    x: torch.Tensor, scale: torch.Tensor | None, amax: torch.Tensor | None, dtype: torch.dtype, block_rows: int,
    block_columns: int, power_of_two: bool, rowwise: bool, columnwise: bool, record: bool,
    x_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the fields of `CastOutputs`. A block has the same shape in x and in its transpose. scale, amax: of x
    if `rowwise`, else of the transpose; None: each block's own. x_scale: the scale of x, if it is in 8 bits, in tiles.
    """
    block = block_rows, block_columns
    outputs = cast_outputs(x, dtype, block, rowwise, columnwise, scale is not None, record)
    if x.numel():
        launch_quantize(as_rows(x), scale, amax, outputs, block, power_of_two, x_scale)
    return outputs


quantize_operator = torch.library.custom_op("course::quantize", mutates_args=())(quantize_by_kernel)


@quantize_operator.register_fake
def _(x, scale, amax, dtype, block_rows, block_columns, power_of_two, rowwise, columnwise, record, x_scale=None):
    return tuple(cast_outputs(x, dtype, (block_rows, block_columns), rowwise, columnwise, scale is not None, record))


def cast_outputs_of(x: torch.Tensor, *args) -> CastOutputs:
    """`quantize_by_kernel`, as an operator if necessary."""
    return CastOutputs(*(quantize_operator if needs_operator(x) else quantize_by_kernel)(x, *args))


def launch_quantize(
    x: torch.Tensor, scale: torch.Tensor | None, amax: torch.Tensor | None, outputs: CastOutputs,
    block: tuple[int, int], power_of_two: bool, x_scale: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Fill `outputs`. The kernel takes all scales in the order of x."""
    values, new, transposed, transposed_new, recorded = (each if each.numel() else None for each in outputs)
    source = (GIVEN_SCALE if scale is not None else LOCAL_AMAX if amax is None else MEASURED_AMAX).value
    across = block[::-1]
    blocks = [block] * (values is not None) + [across] * (transposed is not None)
    tile = tile_launch(
        blocks, transposed is not None, x.shape[1] if block == ROW and source == LOCAL_AMAX.value else None
    )
    if scale is None:
        rowwise_scale, columnwise_scale = new, None if transposed_new is None else transposed_new.t()
    else:
        rowwise_scale, columnwise_scale = (scale, None) if values is not None else (None, scale.t())
    amax_bits = amax if recorded is None else recorded.view(torch.int32)
    steps = [(0, 0) if each is None else each.stride() for each in (rowwise_scale, columnwise_scale, x_scale)]
    of_x = {"x_scale": x_scale, "x_step_row": steps[2][0], "x_step_column": steps[2][1]}
    with torch.cuda.device_of(x):
        quantize_kernel[launch_grid(x, tile)](
            x, values, rowwise_scale, transposed, columnwise_scale, amax_bits, *x.shape, x.stride(0),
            *steps[0], *steps[1], source, power_of_two, *scale_sharing(block), *scale_sharing(across), **tile, **of_x,
        )  # fmt: skip


def check_cast(x: torch.Tensor, dtype: torch.dtype, block: tuple[int, int], scale: torch.Tensor | None) -> None:
    """Raise ValueError for inputs that the kernels do not support."""
    check_scales(x, dtype, block, scale)
    if x.dtype not in CAST_DTYPES or block not in FUSED_BLOCKS:
        raise ValueError(
            f"x is {x.dtype} in blocks of {block}: expected float32, bfloat16 or float16, and blocks of "
            f"{', '.join(map(str, FUSED_BLOCKS))}"
        )


def block_amax_fused(x: torch.Tensor, block: tuple[int, int] = TENSOR, transposed: bool = False) -> torch.Tensor:
    """Return `block_amax` of x [rows, columns], or of its transpose, in one pass. Raises ValueError for blocks and
    dtypes that the kernels do not support.
    """
    check_cast(x, torch.float8_e4m3fn, block, None)
    return block_amaxes(x.detach(), *block, transposed)


def quantize_fused(
    x: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn, block: tuple[int, int] = TENSOR,
    power_of_two: bool = False, scale: torch.Tensor | None = None, transposed: bool = False,
) -> Quantized:  # fmt: skip
    """Return `quantize`, to the bit, of x [rows, columns] in float32, bfloat16 or float16, in blocks of TILE, SQUARE,
    ROW or TENSOR. transposed: quantize x.t(), without making it: x is read in its own order.

    scale: of the matrix to quantize; None: each block's own. Raises ValueError for inputs that do not fit.
    """
    check_cast(x.t() if transposed else x, dtype, block, scale)
    x, needs_amax = x.detach(), block == TENSOR or block == ROW and (transposed or x.shape[1] > LONGEST_BLOCK)
    amax = block_amaxes(x, *block, transposed) if needs_amax and scale is None else None
    outputs = cast_outputs_of(x, scale, amax, dtype, *block, power_of_two, not transposed, transposed, False)
    values, new = (outputs.transposed, outputs.transposed_scale) if transposed else (outputs.values, outputs.scale)
    return Quantized(values, new if scale is None else scale, block)


def quantize_both(
    x: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn, block: tuple[int, int] = TENSOR,
    power_of_two: bool = False, scale: torch.Tensor | None = None,
) -> tuple[Quantized, Quantized]:  # fmt: skip
    """Quantize row-wise and column-wise: return `quantize` of x and of x.t(), both from the unrounded x, which is read
    once, twice for TENSOR, and three times for ROW. scale: of x, in square blocks; with it x is read once. Raises
    ValueError for inputs that do not fit.
    """
    check_cast(x, dtype, block, scale)
    if scale is not None and block not in (TENSOR, SQUARE):
        raise ValueError(f"blocks of {block} have other scales in the transpose: give none")
    if block == ROW:
        rowwise = quantize_fused(x, dtype, block, power_of_two)
        return rowwise, quantize_fused(x, dtype, block, power_of_two, transposed=True)
    x = x.detach()
    amax = block_amaxes(x, *block, False) if block == TENSOR and scale is None else None
    outputs = cast_outputs_of(x, scale, amax, dtype, *block, power_of_two, True, True, False)
    scale = outputs.scale if scale is None else scale
    transposed_scale = outputs.transposed_scale if block == TILE else scale.t()
    return Quantized(outputs.values, scale, block), Quantized(outputs.transposed, transposed_scale, block)


def transpose_tiles(x: Quantized, power_of_two: bool = False) -> Quantized:
    """Return the transpose of x, both in tiles of 1 x 128: `quantize` of the transposed values that x's 8 bits stand
    for, to the bit, in one pass over them. Raises ValueError for other blocks.
    """
    if x.block != TILE:
        raise ValueError(f"x is in blocks of {x.block}: expected tiles, {TILE}")
    args = None, None, x.values.dtype, *TILE, power_of_two, False, True, False
    outputs = cast_outputs_of(x.values, *args, x.scale)
    return Quantized(outputs.transposed, outputs.transposed_scale, TILE)


def quantize_delayed(
    x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn, both: bool = True
) -> tuple[Quantized, Quantized | None, torch.Tensor]:
    """Quantize x, and x.t() if both, by a scale [1, 1] that is known already; return them and x's amax [1, 1], for
    later scales. x is read once.
    """
    check_cast(x, dtype, TENSOR, scale)
    outputs = cast_outputs_of(x.detach(), scale, None, dtype, *TENSOR, False, True, both, True)
    transposed = Quantized(outputs.transposed, scale, TENSOR) if both else None
    return Quantized(outputs.values, scale, TENSOR), transposed, outputs.amax
