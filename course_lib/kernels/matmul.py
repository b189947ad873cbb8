"""Matrix multiplication in Triton: a program for each tile of c, tensor cores inside, programs ordered for the cache.

A program holds one tile of c, [block_m, block_n], in registers and loops over k: it loads a tile of a and a tile of b,
and multiplies them on the tensor cores. The compiler adds shared memory, barriers, and the loads that run ahead of the
multiplications (num_stages). FLOPs 2 m n k; elements loaded m n k (1/block_m + 1/block_n).

The order of the programs remains to be chosen. Programs that run at the same time should need the same rows of a and
columns of b, so that the L2 cache loads them once: `tile_of` goes down `group` rows before it moves to the next column
(Tillet, Kung, Cox 2019; Triton's tutorial on matrix multiplication).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from course_lib.kernels.rounding import cast, dot

CONFIGURATIONS = [
    triton.Config({"block_m": m, "block_n": n, "block_k": k, "group": 8}, num_warps=warps, num_stages=stages)
    for m, n, k, warps, stages in [
        (64, 64, 32, 4, 4),
        (128, 128, 64, 8, 3),
        (128, 256, 64, 8, 3),
        (128, 256, 64, 8, 4),
        (256, 128, 64, 8, 3),
        (128, 128, 32, 4, 4),
        (128, 64, 64, 4, 4),
        (64, 128, 64, 4, 4),
    ]
]


def tunable(configurations: list[triton.Config]) -> list[triton.Config]:
    """Return the configurations that an autotuner may try here; in the interpreter only the first one."""
    return configurations[:1] if triton.knobs.runtime.interpret else configurations


# exercise 12.6
@triton.jit
def tile_of(program, tiles_m, tiles_n, group: tl.constexpr):
    """Return row and column of the tile that a program works out: down the rows of a group, then the next column."""
    first = program // (group * tiles_n) * group
    rows = tl.minimum(tiles_m - first, group)
    within = program % (group * tiles_n)
    return first + within % rows, within // rows


@triton.autotune(configs=tunable(CONFIGURATIONS), key=["m", "n", "k"])
@triton.jit
def matmul_kernel(
    a, b, c, m, n, k, a_row, a_column, b_row, b_column,
    block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, group: tl.constexpr,
):  # fmt: skip
    """Compute one tile of c [m, n] = a [m, k] @ b [k, n]; a_row … are strides, c is contiguous."""
    tile_m, tile_n = tile_of(tl.program_id(0), tl.cdiv(m, block_m), tl.cdiv(n, block_n), group)
    row = (tile_m * block_m + tl.arange(0, block_m))[:, None].to(tl.int64)
    column = (tile_n * block_n + tl.arange(0, block_n))[None, :].to(tl.int64)
    inner, step = tl.arange(0, block_k), tl.full((), block_k, tl.int64)  # times a stride it may exceed 2^31
    at_a = a + row * a_row + inner.to(tl.int64)[None, :] * a_column
    at_b = b + inner.to(tl.int64)[:, None] * b_row + column * b_column
    total = tl.zeros((block_m, block_n), dtype=tl.float32)
    for start in range(0, k, block_k):
        tile_a = tl.load(at_a, (row < m) & (inner[None, :] < k - start), other=0.0)
        tile_b = tl.load(at_b, (inner[:, None] < k - start) & (column < n), other=0.0)
        total = dot(tile_a, tile_b, total)
        at_a += step * a_column
        at_b += step * b_row
    tl.store(c + row * n + column, cast(total, c.dtype.element_ty), (row < m) & (column < n))


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a [m, k] @ b [k, n], any strides, summed in float32; [m, n] in a's dtype. Raises ValueError if shapes,
    dtypes or devices do not fit, and for inputs that require a gradient.
    """
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0] or a.dtype != b.dtype or a.device != b.device:
        raise ValueError(
            f"matmul takes [m, k] and [k, n] of one dtype and device, not {list(a.shape)} {a.dtype} {a.device} and "
            f"{list(b.shape)} {b.dtype} {b.device}"
        )
    if (a.requires_grad or b.requires_grad) and torch.is_grad_enabled():
        raise ValueError("this matmul has no backward: its inputs must not require a gradient")
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty((m, n), device=a.device, dtype=a.dtype)
    if c.numel():
        with torch.cuda.device_of(a):
            matmul_kernel[lambda meta: (triton.cdiv(m, meta["block_m"]) * triton.cdiv(n, meta["block_n"]),)](
                a, b, c, m, n, k, *a.stride(), *b.stride()
            )  # fmt: skip
    return c


def strips_per_wave(tiles_m: int, tiles_n: int, group: int, running: int) -> float:
    """Return the number of strips of a (a tile's rows, all of k) and of b that `running` programs need between them,
    mean over the waves: what memory has to deliver if the programs run in lockstep and the L2 cache holds what one has
    fetched. A model: programs start in the order of their indices, in waves.
    """
    wanted, waves = 0, 0
    for first in range(0, tiles_m * tiles_n, running):
        tiles = [
            tile_of_program(p, tiles_m, tiles_n, group) for p in range(first, min(first + running, tiles_m * tiles_n))
        ]
        wanted += len({row for row, _ in tiles}) + len({column for _, column in tiles})
        waves += 1
    return wanted / waves


def tile_of_program(program: int, tiles_m: int, tiles_n: int, group: int) -> tuple[int, int]:
    """Compute `tile_of` in Python."""
    first = program // (group * tiles_n) * group
    rows = min(tiles_m - first, group)
    within = program % (group * tiles_n)
    return first + within % rows, within // rows
