"""Check of exercise 05.12: an arena takes and gives back, each time against holes found 512 bytes at a time."""

from __future__ import annotations

from typing import Any

import torch

from course_lib.zero.defragmentation import Arena


def holes_between(taken: dict[int, int], nbytes: int) -> list[tuple[int, int]]:
    """Return the holes of an arena with these blocks (sizes by address)."""
    used = {address for start, size in taken.items() for address in range(start, start + size, 512)}
    holes: list[tuple[int, int]] = []
    for address in range(0, nbytes, 512):
        if address not in used and holes and holes[-1][1] == address:
            holes[-1] = (holes[-1][0], address + 512)
        elif address not in used:
            holes.append((address, address + 512))
    return holes


def follow(steps: list[int], nbytes: int, where: str) -> Arena:
    """Return an arena of nbytes after some steps: each takes as many bytes as it says, or gives back what step number
    -step has taken. Assert addresses and holes after each.
    """
    arena = Arena(nbytes)
    taken: dict[int, int] = {}
    addresses: list[Any] = []  # of blocks; "MemoryError"; None for a step that gives a block back
    for step in steps:
        before = holes_between(taken, nbytes)
        if step > 0:
            size, word = -(-step // 512) * 512, f"take({step})"
            fitting = [(end - start, start) for start, end in before if end - start >= size]
            expected: Any = min(fitting)[1] if fitting else "MemoryError"
            result: Any = "MemoryError"
            none = f"{where}: {word}, holes {before}: none is large enough, so raise self.no_hole(size)"
            try:
                result = arena.take(step)
            except MemoryError:
                pass
            except ValueError as error:
                assert fitting, f"{none}; your code raised ValueError: {error}"
                raise
            assert fitting or result == expected, f"{none}; you return {result}"
            assert result is not None, f"{where}: {word} returns nothing: return the block's address"
            assert result == expected, f"{where}: {word}, holes {before}: {result}, not {expected}: is it the best fit?"
            taken |= {result: size} if fitting else {}
        else:
            result, address = None, addresses[-step]
            word = f"give_back({address})"
            if address in taken:  # not where there was a MemoryError
                arena.give_back(address)
                del taken[address]
        addresses.append(result)
        after, empty = holes_between(taken, nbytes), [hole for hole in arena.holes if hole[0] == hole[1]]
        assert not empty, f"{where}: after {word} there is a hole of no bytes, {empty[0]}: the block has filled it"
        assert arena.holes == after, (
            f"{where}: after {word}, with the holes {before}, they are {arena.holes}, not {after}: sizes rounded up to "
            "512, the rest of a hole kept, holes that touch made one, in order of address, nothing lost if nothing fits"
        )
    return arena


def check() -> None:
    """Assert four short traces, six random ones, and a KeyError for an address where no block begins."""
    follow([1, 1000, 512], 4096, "three blocks")
    follow([1536, 512, 1024, 512, 0, -2, 1000, 512], 8192, "two holes, the second fits better")
    follow([512, 512, 512, 512, 512, -1, -3, -2, 0, -4], 4096, "back in another order")
    follow([1024, 512, 1024, 512, 0, -2, 2048, 1024, 512], 3072, "enough in sum, not in a row")
    generator = torch.Generator().manual_seed(5)
    for trace in range(6):
        steps: list[int] = []
        alive: list[int] = []
        for number in range(80):
            come, selected = torch.randint(3000, (2,), generator=generator).tolist()
            if alive and come < 1300:
                steps.append(-alive.pop(selected % len(alive)))
            else:
                steps.append(1 + selected)
                alive.append(number)
        arena = follow(steps, 2**14, f"random trace {trace}")
        for unknown in (256, -512):
            try:
                arena.give_back(unknown)
            except KeyError:
                continue
            raise AssertionError(f"give_back({unknown}), where no block begins, should raise a KeyError")
