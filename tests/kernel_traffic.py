"""What test modules of kernels count: bytes that an interpreted kernel loads and stores, and that PyTorch's own
operations read and write for the same result.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from course_lib.transactions import observed


@contextlib.contextmanager
def count_accesses() -> Iterator[Counter]:
    """Bytes under "load" and "store" that interpreted kernels move inside; what a mask excludes is not counted."""
    moved = Counter()

    def observe(kind: str, pointers, mask) -> None:
        size = pointers.get_element_ty().primitive_bitwidth // 8
        moved[kind] += int(np.broadcast_to(mask, pointers.data.shape).sum()) * size

    with observed(observe):
        yield moved


class OperationTraffic(TorchDispatchMode):
    """`elements` that the operations inside read and write: each tensor that goes in, once, and each that comes out.

    Views move nothing; tensors of fewer than `least` elements are left out.
    """

    def __init__(self, least: int = 1):
        super().__init__()
        self.least, self.elements, self.names = least, 0, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.is_view or function in (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default):
            return result
        self.names.append(function.__name__)
        read = {id(tensor): tensor for tensor in tree_leaves((args, kwargs)) if torch.is_tensor(tensor)}
        written = [tensor for tensor in tree_leaves(result) if torch.is_tensor(tensor)]
        self.elements += sum(t.numel() for t in (*read.values(), *written) if t.numel() >= self.least)
        return result
