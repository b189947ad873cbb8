"""Fragmentation: how much memory a step needs beyond the live bytes, and contiguous buffers that reduce it.

`Arena` allocates memory as PyTorch's CUDA allocator does inside a segment. Replaying a step's recorded allocations in
it gives the fewest bytes in which the step can run. Memory defragmentation (M_D of ZeRO-R; Rajbhandari et al. 2020,
§6): preallocate memory for long-lived tensors. They leave no holes behind; the price is one copy, and their memory for
the whole step. For gradients, `buckets` does it; for checkpoints, this module.
"""

from __future__ import annotations

import bisect
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from course_lib.single_gpu.model import Transformer
from course_lib.single_gpu.profile import Allocation

ALIGNMENT = 512  # bytes: PyTorch's allocator rounds sizes up to multiples of it


class Arena:
    """`nbytes` of memory, allocated in blocks. holes: free ranges, as (start, end); taken: block sizes by address."""

    def __init__(self, nbytes: float):
        self.holes: list[tuple[int, int]] = [(0, cast(int, nbytes))]  # the end may be math.inf
        self.taken: dict[int, int] = {}

    def no_hole(self, size: int) -> MemoryError:
        """Return the error for a block that fits into no hole."""
        free = [(end - start) / 2**20 for start, end in self.holes]
        return MemoryError(
            f"{size / 2**20:,.1f} MiB wanted; free are {sum(free):,.1f} MiB, but in {len(free)} holes, the largest of "
            f"{max(free, default=0):,.1f}"
        )

    # exercise 05.12
    def take(self, nbytes: int) -> int:
        """Return the address of a new block of at least nbytes, a multiple of ALIGNMENT: best fit, at the hole's start.

        Raises MemoryError if no hole is large enough; nothing has changed then.
        """
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        fitting = [(start, end) for start, end in self.holes if end - start >= size]
        if not fitting:
            raise self.no_hole(size)
        start, end = min(fitting, key=lambda hole: hole[1] - hole[0])
        where = self.holes.index((start, end))
        self.holes[where : where + 1] = [(start + size, end)] if start + size < end else []
        self.taken[start] = size
        return start

    # exercise 05.12
    def give_back(self, address: int) -> None:
        """Free the block at `address`, and merge it with the holes that it touches. Raises KeyError if no block begins
        there.
        """
        start, end = address, address + self.taken.pop(address)
        for hole in [hole for hole in self.holes if hole[1] == start or hole[0] == end]:
            self.holes.remove(hole)
            start, end = min(start, hole[0]), max(end, hole[1])
        bisect.insort(self.holes, (start, end))


def replay(allocations: Sequence[Allocation], nbytes: float = math.inf) -> list[tuple[int, int]]:
    """Return the (address, size) of each allocation, in an arena of nbytes that replays their births and deaths.

    allocations: as `MemoryProfile` has them; one without bytes gets (0, 0). Raises MemoryError if one fits into no
    hole.
    """
    arena, blocks = Arena(nbytes), [(0, 0)] * len(allocations)
    events = [(a.born, 0, number) for number, a in enumerate(allocations) if a.nbytes]
    events += [(a.died, 1, number) for number, a in enumerate(allocations) if a.nbytes and a.died < math.inf]
    for _, dies, number in sorted(events):
        address, _ = blocks[number]
        if dies:
            arena.give_back(address)
        else:
            address = arena.take(allocations[number].nbytes)
            blocks[number] = address, arena.taken[address]
    return blocks


def fits(allocations: Sequence[Allocation], nbytes: int) -> bool:
    """Return True if the allocations can be replayed in an arena of nbytes."""
    try:
        replay(allocations, nbytes)
    except MemoryError:
        return False
    return True


def smallest_arena(allocations: Sequence[Allocation]) -> int:
    """Return a size in bytes at which the allocations fit, and at which 512 bytes fewer are too few.

    The size is found by bisection. A still smaller arena may fit, because best fit is not monotonic in the size.
    """
    enough = max(address + size for address, size in replay(allocations))
    largest = max(a.nbytes for a in allocations) // ALIGNMENT * ALIGNMENT
    sizes = range(largest, enough + 1, ALIGNMENT)
    return sizes[bisect.bisect_left(sizes, True, key=lambda nbytes: fits(allocations, nbytes))]


class CopyToSlot(torch.autograd.Function):
    """Copies `hidden` to the memory of `slot`; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx, hidden: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        return slot.copy_(hidden).detach()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        return gradient, None


class ContiguousCheckpoints:
    """Keeps the inputs of `model.blocks` in one buffer, one slot each, until backward; without grad it keeps nothing.

    tokens: the largest b x s of a forward; dtype: of the hidden states. `remove()` undoes it. A forward raises
    ValueError for an input that does not fit, and RuntimeError if an earlier forward still needs the slot.
    """

    def __init__(self, model: Transformer, tokens: int, dtype: torch.dtype = torch.float32):
        device, layers = next(model.parameters()).device, len(model.blocks)
        self.buffer = torch.empty(layers, tokens * model.config.hidden, dtype=dtype, device=device)  # [L, b*s*h]
        self.slots = [row.data for row in self.buffer]  # .data: autograd has a version counter for each
        self.copies: list[Callable[[], Any]] = [lambda: None] * layers  # weak references
        self.handles = [
            block.register_forward_pre_hook(lambda block, arguments, number=number: self.keep(number, *arguments))
            for number, block in enumerate(model.blocks)
        ]

    def keep(self, number: int, hidden: torch.Tensor, *others) -> tuple:
        """Return the arguments of block `number`, with `hidden` replaced by its copy in the slot."""
        slot = self.slots[number]
        if not torch.is_grad_enabled():
            return hidden, *others
        if hidden.dtype != slot.dtype or hidden.numel() > slot.numel():
            size, room = (f"{tensor.numel():,} elements of {tensor.dtype}" for tensor in (hidden, slot))
            raise ValueError(f"block {number}: its input has {size}, its slot is for {room}")
        if self.copies[number]() is not None:
            raise RuntimeError(f"block {number}: an earlier forward still needs its slot; run its backward first")
        copy = CopyToSlot.apply(hidden, slot[: hidden.numel()].view(hidden.shape))
        self.copies[number] = weakref.ref(copy)
        return copy, *others

    def remove(self) -> None:
        """Remove the hooks: autograd keeps the blocks' inputs again."""
        for handle in self.handles:
            handle.remove()
