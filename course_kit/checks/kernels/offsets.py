"""The width of a kernel's offsets: 32 bits are enough at the sizes of a check, and not from 2^31 elements on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import numpy as np
from triton.runtime.interpreter import InterpreterBuilder

HINT = (
    "Rows and blocks times their size may pass 2^31: cast to 64 bits before the product, as in "
    "tl.program_id(0).to(tl.int64) or tl.cast(start, tl.int64); after it the cast comes too late"
)


@contextlib.contextmanager
def narrow_integers() -> Iterator[list[int]]:
    """Yield the largest size of each offset of a pointer, and of each product, that has 32 bits in the `with` block.

    Seen in the interpreter; on a GPU the list stays empty.
    """
    add, multiply, sizes = InterpreterBuilder.create_addptr, InterpreterBuilder.create_mul, []

    def note(values: np.ndarray) -> None:
        if values.dtype in (np.int32, np.uint32) and values.size:
            sizes.append(int(np.abs(values.astype(np.int64)).max()))

    def adding(self, pointer, offset):
        note(offset.data)
        return add(self, pointer, offset)

    def multiplying(self, one, other):
        result = multiply(self, one, other)
        note(result.data)
        return result

    with (
        mock.patch.object(InterpreterBuilder, "create_addptr", adding),
        mock.patch.object(InterpreterBuilder, "create_mul", multiplying),
    ):
        yield sizes


@contextlib.contextmanager
def wide_offsets(limit: int) -> Iterator[None]:
    """Raise AssertionError after the block if an offset of `limit` elements or more was computed in 32 bits.

    limit: more than any offset that the sizes of one block, or of a small table, bound.
    """
    with narrow_integers() as sizes:
        yield
    largest = max(sizes, default=0)
    assert largest < limit, f"an offset of {largest:,} elements was computed in 32 bits. {HINT}"
