"""Memory of training steps over time, by purpose, on CPU and CUDA.

`saved_bytes` counts the bytes that a forward keeps for backward, `MemoryProfile` watches complete steps: a dispatch
mode sees the outputs of every operation, a weak reference to each storage tells when it is freed, and hooks tell its
owner. Sizes are the requested ones. Memory that an operation uses internally does not pass the dispatcher and is not
seen; on CUDA the allocator's own lines show it.
"""

from __future__ import annotations

import bisect
import contextlib
import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CATEGORIES = ("parameters", "optimizer states", "activations", "gradients", "temporary")


# exercise 01.6
def saved_bytes(module: nn.Module, forward: Callable[[], object]) -> int:
    """Return the bytes of the storages that autograd keeps for backward after `forward()`, each storage counted once.

    Parameters of `module`, including frozen ones, do not count; its buffers do. The call keeps no tensor alive.
    """
    resident = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    sizes = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in resident:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(sizes.values())


@dataclass
class Allocation:
    """One storage: its size, its lifetime in seconds since the profile began, and its known properties."""

    nbytes: int
    born: float
    died: float = math.inf
    counted: bool = True  # False for a storage from before the profile without an owner
    owner: str | None = None  # "parameters", "gradients" or "optimizer states", once it is claimed
    saved: bool = False  # autograd saved it for a backward
    in_backward: bool = False  # made while a backward ran
    outlived_forward: bool = False  # made outside a backward, and still alive when the next one began
    backwards: int = 0  # how many backwards had begun at its birth


# exercise 01.9
def category(allocation: Allocation) -> str:
    """Return an allocation's purpose, now that its lifetime is known: one of CATEGORIES.

    Its owner, if it has one. "activations": saved for backward, or alive when the next backward began, and not made by
    a backward. Else "temporary".
    """
    if allocation.owner:
        return allocation.owner
    if not allocation.in_backward and (allocation.saved or allocation.outlived_forward):
        return "activations"
    return "temporary"


class MemoryTimeline:
    """Lives of allocations, read as levels over time. A storage counts under its final category from birth on."""

    def __init__(self) -> None:
        self.allocations: list[Allocation] = []
        self.marks: list[tuple[float, str]] = []  # (seconds, name) of each phase
        self.allocator: list[tuple[float, int, int]] = []  # CUDA: (seconds, bytes requested, bytes reserved)

    def levels(self) -> tuple[list[float], dict[str, list[int]]]:
        """Return the seconds at which something changed, and the bytes of each category from then on."""
        changes = [(a.born, a.nbytes, category(a)) for a in self.allocations]
        changes += [(a.died, -a.nbytes, category(a)) for a in self.allocations if a.died < math.inf]
        now, moments = dict.fromkeys(CATEGORIES, 0), []
        levels: dict[str, list[int]] = {name: [] for name in CATEGORIES}
        for moment, nbytes, changed in sorted(changes):
            now[changed] += nbytes
            moments.append(moment)
            for name in CATEGORIES:
                levels[name].append(now[name])
        return moments, levels

    def peak(self, phase: str | None = None) -> dict[str, int]:
        """Return the bytes of each category when their sum is largest, in one phase or in all. Raises KeyError for an
        unknown phase.
        """
        names, starts = [name for _, name in self.marks], [moment for moment, _ in self.marks] + [math.inf]
        if phase is not None and phase not in names:
            raise KeyError(f"no phase {phase!r} was marked, only {names}")
        start, end = (0.0, math.inf) if phase is None else starts[names.index(phase) :][:2]
        moments, levels = self.levels()
        first = max(0, bisect.bisect_right(moments, start) - 1)  # the level that the phase finds when it begins
        inside = range(first, max(first + 1, bisect.bisect_left(moments, end)))
        top = max(inside, key=lambda i: sum(level[i] for level in levels.values()))
        return {name: level[top] for name, level in levels.items()}


def plot_timeline(timeline: MemoryTimeline, ax, colors: dict[str, str] | None = None) -> None:
    """Draw areas in MiB and a line per phase; on CUDA also the requested and reserved bytes of the allocator."""
    moments, levels = timeline.levels()
    areas = [[size / 2**20 for size in levels[name]] for name in CATEGORIES]
    shades = colors and [colors[name] for name in CATEGORIES]
    ax.stackplot(moments, areas, labels=CATEGORIES, colors=shades, step="post", linewidth=0)
    for moment, name in timeline.marks:
        ax.axvline(moment, color="grey", linewidth=0.5)
        ax.text(moment, 1.0, f" {name}", transform=ax.get_xaxis_transform(), fontsize=8, va="bottom")
    sampled = [sample[0] for sample in timeline.allocator]
    for column, (name, style) in enumerate({"requested": "k:", "reserved": "k-"}.items(), start=1):
        if sizes := [sample[column] / 2**20 for sample in timeline.allocator]:
            ax.plot(sampled, sizes, style, linewidth=1, label=f"{name}, at most {max(sizes):,.0f}")
    ax.set(xlabel="seconds", ylabel="MiB", xlim=(0, moments[-1]))


class StorageTracker(TorchDispatchMode):
    """Adds an `Allocation` to `timeline` for every storage on `device` that an operation makes, and notes its death."""

    def __init__(self, timeline: MemoryTimeline, device: torch.device):
        super().__init__()
        self.timeline, self.device, self.start = timeline, device, time.perf_counter()
        self.alive: dict[int, tuple[Allocation, weakref.ref]] = {}  # by the address of the storage
        self.backwards, self.task = 0, -1

    def now(self) -> float:
        """Return the seconds since the start."""
        return time.perf_counter() - self.start

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        in_backward = self.in_backward()
        if function is not torch.ops.aten.lift_fresh.default:  # that one is handed what torch.tensor has just made
            for tensor in tree_leaves((args, kwargs)):
                self.see(tensor, counted=False)  # a tensor from before the profile, such as the corpus, does not count
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            self.see(tensor, in_backward=in_backward)
        return out

    def in_backward(self) -> bool:
        """Return whether a backward runs; count those that have begun."""
        task = torch._C._current_graph_task_id()  # -1 where none runs
        if task not in (-1, self.task):
            self.backwards, self.task = self.backwards + 1, task
        return task != -1

    def see(self, tensor: object, counted: bool = True, in_backward: bool = False) -> Allocation | None:
        """Return the allocation of a tensor's storage, and register the storage if it is unknown. Return None if
        `tensor` is not a tensor or is on another device.
        """
        if not isinstance(tensor, torch.Tensor) or tensor.device != self.device:
            return None
        storage = tensor.untyped_storage()
        if storage._cdata not in self.alive:
            self.watch(storage, Allocation(storage.nbytes(), self.now(), counted=counted, in_backward=in_backward))
        return self.alive[storage._cdata][0]

    def watch(self, storage: torch.UntypedStorage, allocation: Allocation) -> None:
        """Note when the storage is freed: until then, it has this `allocation`."""
        key, allocation.backwards = storage._cdata, self.backwards
        self.alive[key] = (allocation, weakref.ref(storage, lambda _: self.bury(key)))
        if allocation.counted:
            self.timeline.allocations.append(allocation)
            if self.device.type == "cuda":
                stats = torch.cuda.memory_stats(self.device)
                asked, held = (stats[f"{name}_bytes.all.current"] for name in ("requested", "reserved"))
                self.timeline.allocator.append((allocation.born, asked, held))

    def bury(self, key: int, died: float | None = None) -> None:
        """Note that the storage is freed, by default now. Other threads free storages too, such as gloo's."""
        if entry := self.alive.pop(key, None):
            allocation, _ = entry
            allocation.died = self.now() if died is None else died
            allocation.outlived_forward = self.backwards > allocation.backwards


@contextlib.contextmanager
def on_resize(call: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Inside, call `call` with every storage that Python code has resized, on any device.

    Sharded data parallelism frees a tensor's memory by `tensor.untyped_storage().resize_(0)` and gets it back later. No
    dispatch mode sees that, since it is no operation on tensors.
    """
    resize = torch.UntypedStorage.resize_

    def resize_and_tell(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
        resize(storage, nbytes)
        call(storage)
        return storage

    setattr(torch.UntypedStorage, "resize_", resize_and_tell)  # noqa: B010  # mypy: a method
    try:
        yield
    finally:
        setattr(torch.UntypedStorage, "resize_", resize)  # noqa: B010


class OwnerTracker(StorageTracker):
    """Also notes the owner of a storage, and that autograd has saved it."""

    def claim(self, tensors: Iterable[object], owner: str) -> None:
        """Count the storages of `tensors` as `owner`, one of CATEGORIES."""
        for tensor in tensors:
            if (allocation := self.see(tensor)) is not None:
                allocation.owner = owner
                if not allocation.counted:  # it was there before the profile, and now we know whose it is
                    allocation.counted = True
                    self.timeline.allocations.append(allocation)

    def claim_states(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the tensors of the optimizer's state as such."""
        self.claim([value for state in optimizer.state.values() for value in state.values()], "optimizer states")

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Record that a storage was resized outside any operation: a new allocation, with the owner of the old one."""
        if storage._cdata in self.alive or storage.device == self.device:  # a fake tensor's storage is on meta
            new = Allocation(storage.nbytes(), self.now(), in_backward=self.in_backward())
            if storage._cdata in self.alive:  # its old memory is given up after the new is there
                old, _ = self.alive[storage._cdata]
                new.owner, new.saved = old.owner, old.saved
                self.bury(storage._cdata)
            self.watch(storage, new)

    def note_saved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note that autograd saves `tensor` for backward."""
        if known := self.alive.get(tensor.untyped_storage()._cdata):
            known[0].saved = True
        return tensor.detach()  # an output that is kept as it is would hold its own graph, forever


class MemoryProfile(MemoryTimeline):
    """Records allocations, their purpose and their life: `with MemoryProfile(model, optimizer) as profile: ...`

    Counted are the tensors of `module` and `optimizer`, and all that is made inside the `with` on the module's device.
    record_history (CUDA): keep what `snapshot` writes. Raises ValueError for record_history elsewhere.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer | None = None, record_history: bool = False):
        super().__init__()
        self.module, self.optimizer, self.record_history = module, optimizer, record_history
        self.device = next(module.parameters()).device
        if record_history and self.device.type != "cuda":
            raise ValueError(f"record_history needs a module on CUDA, for PyTorch's memory viewer, not {self.device}")

    def __enter__(self):
        if self.record_history:
            torch.cuda.memory._record_memory_history()
        self.tracker, self.context = OwnerTracker(self, self.device), contextlib.ExitStack()
        parameters = list(self.module.parameters())
        self.claim([*parameters, *self.module.buffers()], "parameters")
        self.claim([p.grad for p in parameters], "gradients")
        for parameter in (p for p in parameters if p.requires_grad):
            hook = parameter.register_post_accumulate_grad_hook(lambda p: self.claim([p.grad], "gradients"))
            self.context.callback(hook.remove)
        if self.optimizer is not None:
            self.tracker.claim_states(self.optimizer)
            hook = self.optimizer.register_step_post_hook(lambda optimizer, *_: self.tracker.claim_states(optimizer))
            self.context.callback(hook.remove)
        saved = torch.autograd.graph.saved_tensors_hooks(self.tracker.note_saved, lambda tensor: tensor)
        self.context.enter_context(saved)
        self.context.enter_context(self.tracker)
        self.context.enter_context(on_resize(self.tracker.resized))
        return self

    def __exit__(self, *error):
        self.context.close()
        for key in list(self.tracker.alive):
            self.tracker.bury(key, math.inf)  # it lives on, unwatched

    def claim(self, tensors: Iterable[object], owner: str) -> None:
        """Count `tensors` as `owner`, one of CATEGORIES: for states that no torch optimizer holds."""
        self.tracker.claim(tensors, owner)

    def mark(self, name: str) -> None:
        """A phase called `name` begins now."""
        self.marks.append((self.tracker.now(), name))

    def plot(self, ax, colors: dict[str, str] | None = None) -> None:
        """Draw the levels: see `plot_timeline`. colors: one for each of CATEGORIES."""
        plot_timeline(self, ax, colors)

    def snapshot(self, path: str) -> None:
        """Write the history of the CUDA allocations for PyTorch's memory viewer (pytorch.org/memory_viz)."""
        if not self.record_history:
            raise ValueError("a snapshot needs the history of the allocations: use record_history=True")
        torch.cuda.memory._dump_snapshot(path)
        torch.cuda.memory._record_memory_history(enabled=None)
