"""Memory of an answer on a rank: tensors that a layer leaves behind, that its forward keeps for backward, and large
tensors alive at once.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from course_kit.labs.tensor_parallel.step import storage_bytes

Built = TypeVar("Built")


def retained_by(build: Callable[[], Built]) -> tuple[Built, int]:
    """Return the result of build(), and the bytes of all tensors that it leaves behind, wherever they are held."""

    def tensors() -> dict[int, torch.Tensor]:
        return {id(each): each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)}

    before, built = tensors(), build()
    gc.collect()  # tensors in dead cycles count at no time, not just when it is their turn
    return built, storage_bytes(each for number, each in tensors().items() if number not in before)


def nodes_of(out: torch.Tensor | Iterable[torch.Tensor]) -> Iterator[object]:
    """Yield the nodes of the graph that has made these tensors."""
    outs = [out] if torch.is_tensor(out) else list(out)
    waiting, seen = [each.grad_fn for each in outs], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting += [before for before, _ in node.next_functions]


def saved_for_backward(forward: Callable[[], Built], *known: torch.Tensor) -> tuple[Built, int]:
    """Return the result of forward(), and the bytes that its graph keeps: saved tensors, and tensors that are
    attributes of a ctx. Storages of the `known` tensors do not count.
    """
    saved: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = forward()
    nodes: list = list(nodes_of(out))  # type: ignore[arg-type]
    saved += [leaf for node in nodes for leaf in tree_leaves(getattr(node, "__dict__", {})) if torch.is_tensor(leaf)]
    known_storages = {tensor.untyped_storage()._cdata for tensor in known}
    return out, storage_bytes(each for each in saved if each.untyped_storage()._cdata not in known_storages)


def saved_as_attributes(module: torch.nn.Module) -> int:
    """Return the bytes of tensors that a module keeps and that are no parameters or buffers."""
    registered = {"_parameters", "_buffers", "_modules"}
    registered_storages = {each.untyped_storage()._cdata for each in [*module.parameters(), *module.buffers()]}
    leaves = tree_leaves([value for name, value in vars(module).items() if name not in registered])
    tensors = [leaf for leaf in leaves if torch.is_tensor(leaf)]
    return storage_bytes(each for each in tensors if each.untyped_storage()._cdata not in registered_storages)


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
