"""Check of exercise 12.6: programs go down the rows of a group, then the next column; the last group may be small."""

from __future__ import annotations

import types

import torch
import triton
import triton.language as tl

from course_kit.checks.kernels import run_guarded
from course_kit.labs.kernels import device
from course_lib.kernels import matmul

CASES = ((4, 4, 2), (5, 3, 2), (7, 5, 4), (3, 6, 8), (1, 1, 4), (6, 4, 1))  # rows of tiles, columns, rows of a group


def write_tiles(tiles, tiles_m, tiles_n, group: tl.constexpr):
    """Write row and column of the tile that program `program` has to tiles[program]."""
    program = tl.program_id(0)
    row, column = tile_of(program, tiles_m, tiles_n, group)  # type: ignore[name-defined]  # noqa: F821  # tiles_kernel binds it
    tl.store(tiles + 2 * program, row)
    tl.store(tiles + 2 * program + 1, column)


def tiles_kernel() -> triton.runtime.KernelInterface:
    """Return `write_tiles` as a kernel that calls the library's `tile_of` of this moment."""
    names = {**globals(), "tile_of": matmul.tile_of}
    function = types.FunctionType(write_tiles.__code__, names, "write_tiles")
    function.__annotations__ = write_tiles.__annotations__
    return triton.jit(function)


def check() -> None:
    """Assert the tile of every program, of six shapes."""
    kernel = tiles_kernel()

    def run_tiles(tiles_m: int, tiles_n: int, group: int) -> torch.Tensor:
        tiles = torch.empty(tiles_m * tiles_n, 2, dtype=torch.int32, device=device())
        kernel[(len(tiles),)](tiles, tiles_m, tiles_n, group=group)
        return tiles

    for tiles_m, tiles_n, group in CASES:
        right = [
            (row, column)
            for first in range(0, tiles_m, group)
            for column in range(tiles_n)
            for row in range(first, min(first + group, tiles_m))
        ]
        result = run_guarded(kernel, run_tiles, tiles_m, tiles_n, group).tolist()
        for program, (theirs, mine) in enumerate(zip(result, right, strict=True)):
            assert tuple(theirs) == mine, (
                f"{tiles_m} x {tiles_n} tiles in groups of {group} rows: "
                f"program {program} has tile {mine}, yours says {tuple(theirs)}"
            )
