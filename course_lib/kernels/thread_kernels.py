"""Kernels written thread by thread: a branch that divides warps and one that does not, and four matmuls.

    kernel      a thread's work                        elements loaded from global memory, and their layout
    naive       one element; a warp runs down rows     2 n^3, each lane of a and of c in a sector of its own
    coalesced   one element; a warp runs along a row   2 n^3, adjacent
    tiled       one element; the block shares tiles    2 n^3 / TILE
    coarsened   ROWS elements below each other         2 n^3 / TILE, and fewer reads of shared memory

c = a b, all n x n, row-major, float32, given as flat arrays. NVIDIA, CUDA C++ Programming Guide, "Shared Memory"; Boehm
2022, "How to Optimize a CUDA Matmul Kernel for cuBLAS-like Performance".
"""

from __future__ import annotations

import numpy as np
import torch

from course_lib.kernels.thread_blocks import Block

TILE = 32
ROWS = 8  # of c that a coarsened thread computes


def branch_by_lane(block: Block, x: torch.Tensor, out: torch.Tensor) -> None:
    """Double even elements and square odd ones: adjacent threads of a warp diverge. Threads (256,)."""
    i = block.block_x * block.size + block.x
    compute(block, x, out, i)


def compute(block: Block, x: torch.Tensor, out: torch.Tensor, i) -> None:
    """Compute element i of each thread."""
    with block.where(i % 2 == 0):
        block.store(out, i, 2 * block.load(x, i))
    with block.where(i % 2 == 1):
        block.store(out, i, block.load(x, i) ** 2)


# exercise 12.3
def branch_by_warp(block: Block, x: torch.Tensor, out: torch.Tensor) -> None:
    """Work out the same elements as `branch_by_lane` in the same block, with all lanes of a warp in the same branch.

    The first half of the block's threads takes the even elements, the second half the odd ones.
    """
    half = block.size // 2
    i = block.block_x * block.size + 2 * (block.x % half) + block.x // half
    compute(block, x, out, i)


def naive(block: Block, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, n: int) -> None:
    """Multiply with threads (32, 32): threadIdx.x, by which lanes differ, counts rows."""
    row = block.block_x * TILE + block.x
    column = block.block_y * TILE + block.y
    multiply(block, a, b, c, n, row, column)


def multiply(block: Block, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, n: int, row, column) -> None:
    """Compute one element of c for each thread, directly from global memory."""
    with block.where((row < n) & (column < n)):
        total = np.zeros(block.size, dtype=np.float32)
        for k in range(n):
            total += block.load(a, row * n + k) * block.load(b, k * n + column)
        block.store(c, row * n + column, total)


def bring(block: Block, tile, at, matrix: torch.Tensor, row, column, n: int) -> None:
    """Copy one element per thread from global into shared memory; 0 outside the matrix."""
    inside = (row < n) & (column < n)
    tile[at] = 0.0
    with block.where(inside):
        tile[at] = block.load(matrix, row * n + column)


# exercise 12.5
def coalesced(block: Block, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, n: int) -> None:
    """Multiply with threads (1024,): adjacent threads of a warp have adjacent columns. a, b, c: [n * n], row-major."""
    row = block.block_x * TILE + block.x // TILE
    column = block.block_y * TILE + block.x % TILE
    multiply(block, a, b, c, n, row, column)


# exercise 12.5
def tiled(block: Block, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, n: int) -> None:
    """Multiply with threads (1024,): each brings one element of each tile, and all threads use them 32 times.

    Stores each element of c once. a, b, c: [n * n], row-major; TILE need not divide n.
    """
    y, x = block.x // TILE, block.x % TILE
    row, column = block.block_x * TILE + y, block.block_y * TILE + x
    tile_a, tile_b = block.shared(TILE, TILE), block.shared(TILE, TILE)
    total = np.zeros(block.size, dtype=np.float32)
    for start in range(0, n, TILE):
        bring(block, tile_a, (y, x), a, row, start + x, n)
        bring(block, tile_b, (y, x), b, start + y, column, n)
        block.sync()  # all have written before any thread reads
        for k in range(TILE):
            total += tile_a[y, k] * tile_b[k, x]
        block.sync()  # all have read these before any thread writes the next tiles
    with block.where((row < n) & (column < n)):
        block.store(c, row * n + column, total)


def coarsened(block: Block, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, n: int) -> None:
    """Multiply with threads (128,): each computes ROWS elements below each other, and reads each element of tile_b once
    for all of them.
    """
    y, x = block.x // TILE * ROWS, block.x % TILE
    row, column = block.block_x * TILE + y, block.block_y * TILE + x
    tile_a, tile_b = block.shared(TILE, TILE), block.shared(TILE, TILE)
    totals = [np.zeros(block.size, dtype=np.float32) for _ in range(ROWS)]
    for start in range(0, n, TILE):
        for i in range(ROWS):
            bring(block, tile_a, (y + i, x), a, row + i, start + x, n)
            bring(block, tile_b, (y + i, x), b, start + y + i, column, n)
        block.sync()
        for k in range(TILE):
            shared = tile_b[k, x]
            for i in range(ROWS):
                totals[i] += tile_a[y + i, k] * shared
        block.sync()
    for i in range(ROWS):
        with block.where((row + i < n) & (column < n)):
            block.store(c, (row + i) * n + column, totals[i])


# kernel, threads of a block
LADDER = {
    "naive": (naive, (TILE, TILE)),
    "coalesced": (coalesced, (TILE * TILE,)),
    "tiled": (tiled, (TILE * TILE,)),
    "coarsened": (coarsened, (TILE * TILE // ROWS,)),
}
