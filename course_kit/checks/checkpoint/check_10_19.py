"""Check of exercise 10.19: `fill` copies the overlap of saved and wanted chunks, however either was cut."""

from __future__ import annotations

import itertools
import math

import torch

from course_lib.checkpoint import chunks
from course_lib.checkpoint.chunks import Chunk

Cut = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes


def as_chunks(full: torch.Tensor, cuts: list[Cut]) -> list[Chunk]:
    """Return chunks of a full tensor at these places, with their values."""
    return [
        Chunk(
            offsets,
            tuple(full.shape),
            full[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))].clone(),
        )
        for offsets, sizes in cuts
    ]


def grid_of(shape: tuple[int, ...], parts: int) -> list[Cut]:
    """Return the chunks of a tensor that is cut into so many parts in each dimension."""
    sides = [[(size * i // parts, size * (i + 1) // parts) for i in range(parts)] for size in shape]
    return [
        (tuple(begin for begin, _ in spans), tuple(end - begin for begin, end in spans))
        for spans in itertools.product(*sides)
        if all(begin < end for begin, end in spans)
    ]


def check_apart() -> None:
    """Assert that chunks that do not overlap change nothing."""
    apart = as_chunks(torch.full((8, 2), -1.0), [((3, 0), (4, 2))])
    try:
        chunks.fill(apart, as_chunks(torch.ones(8, 2), [((0, 0), (2, 2))]))
    except (RuntimeError, IndexError) as error:
        raise AssertionError(f"rows 0 and 1 have nothing of rows 3 to 6, and fill fails: {error}") from None
    assert (apart[0].values == -1).all(), "rows 0 and 1 have nothing of rows 3 to 6, and these have changed"


def check() -> None:
    """Assert rows to columns, a part of one chunk, chunks apart, and grids of several shapes."""
    full = torch.arange(24.0).view(4, 6)
    rows = as_chunks(full, [((0, 0), (2, 6)), ((2, 0), (2, 6))])
    columns = as_chunks(torch.full((4, 6), -1.0), [((0, 0), (4, 4)), ((0, 4), (4, 2))])
    before = [chunk.values.clone() for chunk in rows]
    chunks.fill(columns, rows)
    assert all(torch.equal(a, chunk.values) for a, chunk in zip(before, rows, strict=True)), (
        "the saved chunks have changed"
    )
    assert torch.equal(torch.cat([chunk.values for chunk in columns], 1), full), (
        f"from rows to columns 0 to 3 and 4 to 5 of {full.tolist()}: {[chunk.values.tolist() for chunk in columns]}"
    )
    part = as_chunks(torch.full((4, 6), -1.0), [((1, 1), (2, 3))])
    position = part[0].values
    chunks.fill(part, rows[:1])
    assert part[0].values is position and position[0].tolist() == [7, 8, 9], (
        f"row 1, columns 1 to 3: {position.tolist()}"
    )
    assert position[1].tolist() == [-1] * 3, "elements in no saved chunk should stay as they were"
    check_apart()
    for dtype, number in ((torch.float64, 1 / 3), (torch.int64, 2**40 + 1)):
        exact = torch.full((3,), number, dtype=dtype)
        ours = as_chunks(torch.zeros(3, dtype=dtype), [((0,), (3,))])
        chunks.fill(ours, as_chunks(exact, [((0,), (3,))]))
        assert torch.equal(ours[0].values, exact), f"{dtype}: {number} became {ours[0].values[0].item()}"
    for shape, (saved, wanted) in itertools.product(((4, 6), (3, 2, 5), (11,), ()), ((3, 4), (2, 3), (4, 2))):
        full = torch.randn(shape)
        ours = as_chunks(torch.full(shape, math.nan), grid_of(shape, wanted))
        chunks.fill(ours, as_chunks(full, grid_of(shape, saved)))
        for chunk, right in zip(ours, as_chunks(full, grid_of(shape, wanted)), strict=True):
            assert torch.equal(chunk.values, right.values), (
                f"{shape}, cut into {saved} and then into {wanted} in each dimension: {chunk.values.tolist()}, not "
                f"{right.values.tolist()}"
            )
