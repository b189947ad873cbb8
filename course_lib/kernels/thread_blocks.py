"""CUDA's way of writing a kernel, run on a CPU: one function for each thread, all threads of a block at once.

A kernel here is a Python function of a `Block` and the kernel's arguments. A value that differs between threads is a
NumPy array with one element per thread, so that a line of the kernel is one instruction of every warp:

    def add(block, x, y, out, n):                       __global__ void add(float *x, float *y, float *out, int n) {
        i = block.block_x * block.size + block.x            int i = blockIdx.x * blockDim.x + threadIdx.x;
        with block.where(i < n):                            if (i < n)
            block.store(out, i, block.load(x, i) + …)           out[i] = x[i] + y[i];
                                                        }

It counts what a GPU would do: sectors of global memory, passes of warps through branches, conflicts at the banks of
shared memory. All warps run in lockstep here, unlike on a GPU; so a value that a warp reads from shared memory before a
barrier guarantees it is an error here, where on a GPU it would sometimes be a wrong number.
"""

from __future__ import annotations

import contextlib
import linecache
import sys
from collections.abc import Iterator

import numpy as np
import torch

from course_lib.kernels.sectors import WARP, Transactions, shift

BANKS = 32
HELPERS = (
    "caller",
    "count",
    "load",
    "store",
    "refuse",
    "__getitem__",
    "__setitem__",
)  # functions that are not part of the kernel


class Threads:
    """The threads of one block. Arrays over threads have shape [threads], x fastest, as CUDA divides them in warps."""

    def __init__(self, threads: tuple[int, int], traffic: BlockTraffic):
        self.size_x, self.size_y = threads
        self.size = self.size_x * self.size_y
        index = np.arange(self.size)
        self.x, self.y = index % self.size_x, index // self.size_x
        self.warp = index // WARP
        self.traffic = traffic
        self.active = np.ones(self.size, dtype=bool)

    @contextlib.contextmanager
    def where(self, condition: np.ndarray) -> Iterator[None]:
        """Run the body as `if (condition)` does: for the threads for which the condition holds; the others wait.

        A warp without such a thread skips the body. A warp with some such threads pays the full price.
        """
        before = self.active
        self.active = before & condition
        warps = self.by_warp(self.active)
        self.traffic.passes += int(warps.any(axis=1).sum())
        self.traffic.busy_lanes += int(warps.sum())
        self.traffic.divergent += int((warps.any(axis=1) & (self.by_warp(before) & ~warps).any(axis=1)).sum())
        yield
        self.active = before

    def by_warp(self, values: np.ndarray) -> np.ndarray:
        """Return [threads] as [warps, 32]; lanes that are missing from the last warp are 0."""
        return np.pad(values, (0, -self.size % WARP)).reshape(-1, WARP)


class Block(Threads):
    """One block: its threads, the memory they share, and their barrier."""

    def __init__(self, number: tuple[int, int], threads: tuple[int, int], traffic: BlockTraffic):
        super().__init__(threads, traffic)
        self.block_x, self.block_y = number
        self.tiles: list[Shared] = []

    def load(self, array: torch.Tensor, index) -> np.ndarray:
        """Return array[index], one index per thread; 0 in masked threads. array: 1-D. Raises IndexError."""
        values = array.numpy()
        at = self.count("load", array, index)
        return np.where(self.active, values[at], 0)

    def store(self, array: torch.Tensor, index, values) -> None:
        """Set array[index] = values, in unmasked threads. array: 1-D. Raises IndexError out of bounds."""
        at = self.count("store", array, index)
        array.numpy()[at[self.active]] = np.broadcast_to(values, self.size)[self.active]

    def count(self, kind: str, array: torch.Tensor, index) -> np.ndarray:
        """Count one access, and return its indices, 0 in masked threads."""
        at = np.where(self.active, np.broadcast_to(index, self.size), 0)
        if (at < 0).any() or (at >= array.numel()).any():
            thread = int(((at < 0) | (at >= array.numel())).argmax())
            raise IndexError(
                f"{kind} outside of an array of {array.numel()} elements: thread ({self.x[thread]}, {self.y[thread]}) "
                f"of block ({self.block_x}, {self.block_y}) touches element {at[thread]}"
            )
        address = caller()
        addresses = array.data_ptr() + shift(array) + at * array.element_size()
        self.traffic.of(kind, address).add(self.by_warp(addresses), self.by_warp(self.active), array.element_size())
        return at

    def shared(self, *shape: int) -> Shared:
        """Allocate `__shared__ float tile[…]`: zeros that all threads of this block share."""
        self.tiles.append(Shared(self, shape))
        return self.tiles[-1]

    def sync(self) -> None:
        """Wait as `__syncthreads()` does, for all warps. Raises RuntimeError if some threads cannot reach it."""
        if not self.active.all():
            raise RuntimeError(
                "sync() in a branch that some threads of the block do not enter: the others wait forever"
            )
        for tile in self.tiles:
            tile.forget()


class Shared:
    """Shared memory of a block: tile[row, column] with one index per thread.

    4-byte words are in 32 banks. A warp that accesses different words of one bank is served one word after the other:
    the traffic's `shared_ways` counts these steps, one per request without conflicts. Raises RuntimeError if a warp
    touches an element that another warp has written, or writes one that another has touched, without a `sync` in
    between.
    """

    def __init__(self, block: Block, shape: tuple[int, ...]):
        self.block, self.values = block, np.zeros(shape, dtype=np.float32)
        self.forget()

    def forget(self) -> None:
        """Forget all readers and writers, as after a barrier."""
        size, no_thread = self.values.size, len(self.block.warp)
        self.writer = np.full(size, -1)
        self.first_reader, self.last_reader = np.full(size, no_thread), np.full(size, -1)

    def __getitem__(self, index) -> np.ndarray:
        at = self.count(index)
        mine, warp = at[self.block.active], self.block.warp[self.block.active]
        self.refuse((self.writer[mine] >= 0) & (self.writer[mine] != warp), "reads", "wrote")
        np.minimum.at(self.first_reader, mine, warp)
        np.maximum.at(self.last_reader, mine, warp)
        return np.where(self.block.active, self.values.reshape(-1)[at], 0)

    def __setitem__(self, index, values) -> None:
        at = self.count(index)
        mine, warp = at[self.block.active], self.block.warp[self.block.active]
        self.refuse((self.writer[mine] >= 0) & (self.writer[mine] != warp), "writes", "wrote")
        self.refuse((self.first_reader[mine] < warp) | (self.last_reader[mine] > warp), "writes", "read")
        self.writer[mine] = warp
        self.refuse(self.writer[mine] != warp, "writes", "wrote")  # at the same time
        self.values.reshape(-1)[mine] = np.broadcast_to(values, self.block.size)[self.block.active]

    def refuse(self, race: np.ndarray, does: str, did: str) -> None:
        """Raise RuntimeError if there is a race."""
        if race.any():
            raise RuntimeError(f"a warp {does} shared memory that another {did}, with no sync() in between: {caller()}")

    def count(self, index) -> np.ndarray:
        """Return the flat element indices of the threads' indices, 0 in masked threads."""
        index = [np.where(self.block.active, i, 0) for i in (index if isinstance(index, tuple) else (index,))]
        at = np.broadcast_to(np.ravel_multi_index(index, self.values.shape), self.block.size)
        for of_warp, active in zip(self.block.by_warp(at), self.block.by_warp(self.block.active), strict=True):
            if active.any():
                words = np.unique(of_warp[active])  # lanes that read one word share it
                self.block.traffic.shared_requests += 1
                self.block.traffic.shared_ways += int(np.bincount(words % BANKS).max())
        return at


class BlockTraffic(Transactions):
    """Transactions, and counts that only a kernel written for threads has."""

    def __init__(self):
        super().__init__()
        self.passes = 0  # warps that went into a branch
        self.divergent = 0  # of these, with some lanes masked off
        self.busy_lanes = 0  # active lanes
        self.shared_requests = 0
        self.shared_ways = 0

    @property
    def lane_use(self) -> float:
        """Return the share of the lanes of all passes that were active; 1 if there was no branch."""
        return self.busy_lanes / (WARP * self.passes) if self.passes else 1.0


def caller() -> str:
    """Return line number and text of the kernel's line that is being executed."""
    frame = sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__") == __name__ and frame.f_code.co_name in HELPERS:
        frame = frame.f_back
    return f"{frame.f_lineno}: {linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()}"


def run_blocks(kernel, grid: tuple[int, ...], threads: tuple[int, ...], *args) -> BlockTraffic:
    """Run `kernel(block, *args)` for every block of the grid, with (x) or (x, y) threads each; return the counts."""
    grid_x, grid_y = (*grid, 1)[:2]
    size_x, size_y = (*threads, 1)[:2]
    if not 1 <= size_x * size_y <= 1024:
        raise ValueError(f"a block has 1 to 1,024 threads, not {size_x} x {size_y}")
    traffic = BlockTraffic()
    for y in range(grid_y):
        for x in range(grid_x):
            kernel(Block((x, y), (size_x, size_y), traffic), *args)
    return traffic
