"""Peak memory of a step on a CPU, from the profiler's memory events."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import torch

MiB = 2**20


def allocations_of(nodes: Iterable) -> list[tuple[int, int, int]]:
    """(time, address, bytes) of what a profile has seen allocated (bytes > 0) and freed (bytes < 0)."""
    found = []
    for node in nodes:
        if node.typed[0].name == "Allocation":
            found.append((node.start_time_ns, node.typed[1].ptr, node.typed[1].alloc_size))
        found += allocations_of(node.children)
    return found


def peak_of(step: Callable[[], object]) -> float:
    """MiB at the peak of a step above what was there before, by the profiler's memory events.

    gloo's threads free memory unseen: a block is gone at the latest when its address is handed out again.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # PyTorch's profiler writes no log lines between our outputs
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as log:
        step()
    blocks, level, top = {}, 0, 0  # blocks: size by address
    for _, address, size in sorted(allocations_of(log.profiler.kineto_results.experimental_event_tree())):
        if size < 0:
            level -= blocks.pop(address, -size)
            continue
        for other in [a for a, s in blocks.items() if a < address + size and address < a + s]:
            level -= blocks.pop(other)
        blocks[address], level = size, level + size
        top = max(top, level)
    return top / MiB
