"""The bytes that PyTorch's operations move: the memory traffic of eager code, operation by operation.

Every operation that is not a view counts as a kernel that reads its inputs once and writes its results once, which is
the minimum. The mode works below autograd (a `TorchDispatchMode`), so it sees backward as well.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def bytes_of(tree) -> int:
    """Return the bytes of the tensors in `tree`, each once; of an expanded tensor, the bytes of its storage."""
    tensors = {id(x): x for x in tree_leaves(tree) if torch.is_tensor(x)}
    return sum(min(x.nbytes, x.untyped_storage().nbytes()) for x in tensors.values())


class BytesMoved(TorchDispatchMode):
    """Bytes that PyTorch's operations read and write: `rows` of (name, read, written), in order."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[str, int, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result, name = func(*args, **(kwargs or {})), func.name()
        if not (func.is_view or name == "aten::_unsafe_view"):  # a view moves nothing
            read = 0 if name.endswith("_like") else bytes_of(args)  # zeros_like needs only the shape
            self.rows.append((name, read, bytes_of(result)))
        return result

    @property
    def total(self) -> int:
        return sum(read + written for _, read, written in self.rows)
