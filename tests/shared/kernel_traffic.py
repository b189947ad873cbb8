"""What test modules of kernels count: bytes that an interpreted kernel loads and stores."""

import contextlib
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import triton

from course_kit.gpu.transactions import observed

NUMPY, TRITON = (tuple(map(int, each.__version__.split(".")[:2])) for each in (np, triton))
interpreted = pytest.mark.skipif(
    TRITON < (3, 7) and NUMPY >= (2, 4), reason="Triton 3.6's interpreter wants a NumPy before 2.4"
)


@contextlib.contextmanager
def count_accesses() -> Iterator[Counter]:
    """Bytes under "load" and "store" that interpreted kernels move inside; what a mask excludes is not counted."""
    moved = Counter()

    def observe(kind: str, pointers, mask) -> None:
        size = pointers.get_element_ty().primitive_bitwidth // 8
        moved[kind] += int(np.broadcast_to(mask, pointers.data.shape).sum()) * size

    with observed(observe):
        yield moved
