"""Memory of an answer on a rank: tensors that a layer leaves behind, and large tensors alive at once."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from course_kit.labs.tensor_parallel.step import storage_bytes

Built = TypeVar("Built")


def retained_by(build: Callable[[], Built]) -> tuple[Built, int]:
    """Return the result of build(), and the bytes of all tensors that it leaves behind, wherever they are kept."""

    def tensors() -> dict[int, torch.Tensor]:
        return {id(each): each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)}

    before, built = tensors(), build()
    gc.collect()  # tensors in dead cycles count at no time, not just when it is their turn
    return built, storage_bytes(each for number, each in tensors().items() if number not in before)


class AtOnce(TorchDispatchMode):
    """Notes how many tensors of `nbytes` or more, made inside, are alive at once: `most`."""

    def __init__(self, nbytes: int):
        super().__init__()
        self.nbytes, self.most = nbytes, 0
        self.alive: dict = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if torch.is_tensor(t)}
        for address, weak in list(self.alive.items()):
            if torch.UntypedStorage._expired(weak):
                torch.UntypedStorage._free_weak_ref(self.alive.pop(address))
        for storage in (t.untyped_storage() for t in tree_leaves(out) if torch.is_tensor(t)):
            if storage.nbytes() >= self.nbytes and storage._cdata not in given:
                self.alive.setdefault(storage._cdata, storage._weak_ref())
        self.most = max(self.most, len(self.alive))
        return out
