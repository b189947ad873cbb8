"""Check of exercise 10.18: chunks of every range of small tensors, and of a large one without a loop over its rows."""

from __future__ import annotations

import itertools
import math
import sys

import torch

from course_lib.checkpoint import chunks

SHAPES = (4, 5), (7,), (2, 3, 4), (1, 6), (5, 1), (2, 1, 3, 2), ()
COUNTS = (  # shape, first, last, chunks that will do
    *(((4, 5), 0, 20, 1), ((4, 5), 5, 15, 1), ((4, 5), 6, 9, 1), ((4, 5), 3, 10, 2), ((4, 5), 3, 8, 2)),
    *(((4, 5), 5, 12, 2), ((4, 5), 7, 7, 0), ((2, 3, 4), 0, 24, 1), ((2, 3, 4), 4, 12, 1), ((2, 3, 4), 3, 22, 4)),
)
LARGE = 128256, 16384


def check_elements(shape: tuple[int, ...]) -> None:
    """Assert that the chunks of each range have its elements, in order, and are not too many."""
    size = math.prod(shape)
    grid = torch.arange(size).view(shape)
    for first, last in itertools.combinations_with_replacement(range(size + 1), 2):
        result = chunks.span_chunks(shape, first, last)
        cut = [grid[tuple(slice(o, o + n) for o, n in zip(*chunk, strict=True))].reshape(-1) for chunk in result]
        assert torch.cat([torch.empty(0), *cut]).tolist() == list(range(first, last)), (
            f"{shape}, elements {first} … {last - 1}: the chunks {result} have others"
        )
        assert all(math.prod(sizes) == len(part) for (_, sizes), part in zip(result, cut, strict=True)), (
            f"{shape}, elements {first} … {last - 1}: a chunk of {result} is larger than the tensor"
        )
        assert len(result) <= max(1, 2 * len(shape) - 1), (
            f"{shape}, {first} … {last - 1}: {len(result)} chunks are too many"
        )


def check_large() -> None:
    """Assert that a large matrix takes three chunks and few lines of Python."""
    steps, before = itertools.count(), sys.gettrace()

    def note_step(*_):
        next(steps)
        return note_step

    sys.settrace(note_step)
    try:
        large = chunks.span_chunks(LARGE, 12345, math.prod(LARGE) - 54321)
    finally:
        sys.settrace(before)
    assert len(large) == 3 and next(steps) < 1000, "of a large matrix: three chunks, and no loop over its 128,256 rows"


def check() -> None:
    """Assert one example, all ranges of SHAPES, the fewest chunks of COUNTS, and a large matrix."""
    result = chunks.span_chunks((4, 5), 3, 17)
    wanted = [((0, 3), (1, 2)), ((1, 0), (2, 5)), ((3, 0), (1, 2))]
    assert result == wanted, (
        f"elements 3 … 16 of [4, 5]: the end of row 0, rows 1 and 2, the beginning of row 3: {result}"
    )
    for shape in SHAPES:
        check_elements(shape)
    for shape, first, last, count in COUNTS:
        result = chunks.span_chunks(shape, first, last)
        assert len(result) == count, f"{shape}, elements {first} … {last - 1}: {count} will do, and there are {result}"
    check_large()
