"""Global memory accesses: in sectors of 32 bytes, four of which make a line of 128, one warp at a time.

The 32 lanes of a warp execute one load together, a request. The memory moves the full sector of every lane's element.
Lanes that touch adjacent elements share sectors; lanes a stride apart pay a sector each, and waste most of it (NVIDIA,
CUDA C++ Best Practices Guide, "Coalesced Access to Global Memory").

    32 lanes, float32, adjacent             128 bytes requested    4 sectors
    every second element                    128                    8
    every eighth, or farther apart          128                    32: eight bytes moved for one requested
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

WARP = 32
SECTOR_BYTES = 32
LINE_BYTES = 128
ALLOCATION_BYTES = 512


def shift(tensor: torch.Tensor) -> int:
    """Return the offset that gives a tensor's addresses the alignment of a GPU's allocations, multiples of 512 bytes:
    on a CPU, lines would begin elsewhere from run to run. A storage at address a is moved to 512 a, so that no two
    overlap.
    """
    return tensor.untyped_storage().data_ptr() * (ALLOCATION_BYTES - 1)


# exercise 12.2
def touched_units(addresses: np.ndarray, active: np.ndarray, unit: int) -> int:
    """Return the number of distinct units of `unit` bytes that each request touches, summed over the requests.

    addresses: [requests, touches], in bytes; active: the same shape, False for touches that a mask switches off. A
    unit begins at a multiple of `unit`. Lanes of one request that touch the same unit pay once; two requests pay
    twice. Without an active lane the result is 0.
    """
    request = np.broadcast_to(np.arange(len(addresses))[:, None], addresses.shape)[active]
    sector = addresses[active].astype(np.int64) // unit
    if not len(sector):
        return 0
    sector -= sector.min()
    return len(np.unique(request * (sector.max() + 1) + sector))  # one number for a pair: a sort of pairs is slow


@dataclass
class Count:
    """The traffic of one load or store of a kernel, summed over all warps that executed it."""

    kind: str  # load, store
    location: str  # in the source
    requests: int = 0
    sectors: int = 0
    lines: int = 0
    bytes: int = 0  # distinct bytes that the lanes of a request touch, summed over requests
    touched: set[int] = field(default_factory=set, repr=False)  # indices of all sectors

    def add(self, addresses: np.ndarray, active: np.ndarray, size: int) -> None:
        """Add requests of lanes that each touch `size` bytes at each of their addresses. Both arrays: [requests,
        touches], where the touches of a request are the touches of all its lanes.
        """
        self.requests += int(active.any(axis=1).sum())
        self.bytes += size * touched_units(addresses, active, size)
        self.sectors += touched_units(addresses, active, SECTOR_BYTES)
        self.lines += touched_units(addresses, active, LINE_BYTES)
        self.touched.update(np.unique(addresses[active].astype(np.int64) // SECTOR_BYTES).tolist())


@dataclass
class Transactions:
    """The traffic of one launch, access by access."""

    counts: list[Count] = field(default_factory=list)
    removed: set[str] = field(default_factory=set)  # locations of accesses that the compiler removed

    def of(self, kind: str, location: str) -> Count:
        """Return the count of one access, adding it if it is new."""
        for count in self.counts:
            if (count.kind, count.location) == (kind, location):
                return count
        self.counts.append(Count(kind, location))
        return self.counts[-1]

    def kinds(self, kind: str | None) -> Iterator[Count]:
        return (count for count in self.counts if kind in (None, count.kind))

    def sectors(self, kind: str | None = None) -> int:
        """Return the sectors moved between L1 and the threads, by loads, stores, or both."""
        return sum(count.sectors for count in self.kinds(kind))

    def requests(self, kind: str | None = None) -> int:
        """Return the number of loads or stores that a warp executed."""
        return sum(count.requests for count in self.kinds(kind))

    def distinct_sectors(self, kind: str | None = None) -> int:
        """Return the number of distinct sectors touched: the least that memory has to deliver, with infinite caches."""
        return len(set().union(*(count.touched for count in self.kinds(kind))))

    def efficiency(self, kind: str | None = None) -> float:
        """Return the share of the moved bytes that a lane requested; 1 if nothing was moved."""
        moved = SECTOR_BYTES * self.sectors(kind)
        return sum(count.bytes for count in self.kinds(kind)) / moved if moved else 1.0

    def __str__(self) -> str:
        rows = [f"{'':<6}{'requests':>9}{'sectors':>9}{'a request':>10}{'lines':>7}{'of use':>8}  where"]
        for c in self.counts:
            each, use = c.sectors / max(c.requests, 1), c.bytes / max(SECTOR_BYTES * c.sectors, 1)
            where = c.location if len(c.location) < 68 else f"{c.location[:66]}…"
            rows.append(f"{c.kind:<6}{c.requests:>9,}{c.sectors:>9,}{each:>10.1f}{c.lines:>7,}{use:>8.0%}  {where}")
        return "\n".join(rows + [f"removed by the compiler: {offset}" for offset in sorted(self.removed)])
