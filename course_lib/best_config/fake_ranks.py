"""One rank of many, alone in a process: groups of any size in which nothing is sent and no rank has to be waited for.

PyTorch's "fake" backend makes the groups and completes every collective at once. That is enough for a step, whose
tensors may be fake as well. The Python objects that ranks exchange before the first step are simulated here: a rank
that runs the same program contributes the same object, about its own neighbors.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from course_lib.collectives.simulation import all_gather_object
from course_lib.five_d.layouts import Layout


def axes_of(layout: Layout) -> dict[str, int]:
    """Return the ranks along each axis of meshes.AXES, outermost first: dp is copies x ep."""
    copies = layout.dp // layout.ep
    return {"copies": copies, "ep": layout.ep, "pp": layout.pp, "cp": layout.cp, "tp": layout.tp}


def mesh_coordinates(rank: int, layout: Layout) -> list[int]:
    """Return the coordinate of a rank on each axis of axes_of."""
    indices: list[int] = []
    for size in reversed(axes_of(layout).values()):
        rank, index = divmod(rank, size)
        indices.insert(0, index)
    return indices


def shifted(ranks: list[int], steps: list[int], layout: Layout) -> list[int]:
    """Return the ranks that are `steps` further than these along each axis, cyclically; ascending."""
    sizes = list(axes_of(layout).values())
    strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    axes = (zip(mesh_coordinates(rank, layout), steps, sizes, strides, strict=True) for rank in ranks)
    return sorted(sum((index + step) % size * stride for index, step, size, stride in axis) for axis in axes)


def simulate_peer_object(other: int, rank: int, obj: Any, layout: Layout) -> Any:
    """Return the object that rank `other` would contribute, given that `rank` contributes `obj`. A list of ranks
    becomes the list at the same offsets from rank `other`.
    """
    if isinstance(obj, tuple):
        return tuple(simulate_peer_object(other, rank, part, layout) for part in obj)
    if isinstance(obj, list) and obj and all(isinstance(each, int) for each in obj):
        pairs = zip(mesh_coordinates(other, layout), mesh_coordinates(rank, layout), strict=True)
        return shifted(obj, [theirs - ours for theirs, ours in pairs], layout)
    return obj


def gather_simulated_objects(
    object_list: list, obj: Any, group: dist.ProcessGroup | None = None, *, layout: Layout
) -> None:
    """Fill object_list as all_gather_object does, with simulated objects of the other ranks."""
    members = dist.get_process_group_ranks(group or dist.group.WORLD)
    object_list[:] = [simulate_peer_object(other, dist.get_rank(), obj, layout) for other in members]


@contextlib.contextmanager
def fake_ranks(layout: Layout, rank: int = 0) -> Iterator[None]:
    """Make this process `rank` of the layout's ranks, none of which exists, inside the context.

    Tensors from other ranks have arbitrary values. Raises ValueError for a rank that does not exist, and if the process
    has a default group, which a dry run would replace.
    """
    if not 0 <= rank < layout.ranks:
        raise ValueError(f"rank {rank} of {layout.ranks}: it is 0 to {layout.ranks - 1}")
    if dist.is_initialized():
        raise ValueError("this process is a rank of a process group already: call destroy_process_group() first")
    excepthook = sys.excepthook
    try:
        store = FakeStore()  # its module registers the backend "fake"
        dist.init_process_group("fake", rank=rank, world_size=layout.ranks, store=store)
        with all_gather_object.simulated_by(functools.partial(gather_simulated_objects, layout=layout)):
            yield
    finally:
        sys.excepthook = excepthook  # init_process_group sets one that names the rank
        if dist.is_initialized():
            dist.destroy_process_group()
