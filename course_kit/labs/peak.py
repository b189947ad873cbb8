"""Peak memory of a step on a CPU, from the profiler's memory events."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import torch

MiB = 2**20


def allocations_of(nodes: Iterable) -> list[tuple[int, int, int]]:
    """Return (time, address, bytes) of each allocation (bytes > 0) and release (bytes < 0) in a profile."""
    events: list[tuple[int, int, int]] = []
    for node in nodes:
        if node.typed[0].name == "Allocation":
            events.append((node.start_time_ns, node.typed[1].ptr, node.typed[1].alloc_size))
        events += allocations_of(node.children)
    return events


def peak_of(step: Callable[[], object]) -> float:
    """Return the MiB at the peak of a step above its start, by the profiler's memory events.

    The profiler does not see memory that gloo's threads free: a block is gone at the latest when its address is reused.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # PyTorch's profiler writes no log lines between our outputs
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as log:
        step()
    blocks: dict[int, int] = {}  # size by address
    level, top = 0, 0
    for _, address, size in sorted(allocations_of(log.profiler.kineto_results.experimental_event_tree())):
        if size < 0:
            level -= blocks.pop(address, -size)
            continue
        for other in [a for a, s in blocks.items() if a < address + size and address < a + s]:
            level -= blocks.pop(other)
        blocks[address], level = size, level + size
        top = max(top, level)
    return top / MiB
