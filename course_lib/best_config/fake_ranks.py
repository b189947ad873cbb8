"""One rank of many, alone in a process: groups of any size in which nothing is sent, and nobody has to be waited for.

PyTorch's backend "fake" makes the groups, and ends every collective at once. That is enough for a step, whose tensors
may be fake as well. What ranks tell each other as Python objects, before they begin, is made up here: a rank that runs
the same program says the same of its own neighbors.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from course_lib.five_d.layouts import Layout


def axes_of(layout: Layout) -> dict[str, int]:
    """The ranks along each axis of meshes.AXES, outermost first: dp is copies x ep."""
    copies = layout.dp // layout.ep
    return {"copies": copies, "ep": layout.ep, "pp": layout.pp, "cp": layout.cp, "tp": layout.tp}


def place_of(rank: int, layout: Layout) -> list[int]:
    """Where a rank stands on each axis of axes_of."""
    place = []
    for size in reversed(axes_of(layout).values()):
        rank, along = divmod(rank, size)
        place.insert(0, along)
    return place


def moved(ranks: list[int], steps: list[int], layout: Layout) -> list[int]:
    """The ranks that stand `steps` further than these along each axis, counted in a ring; ascending."""
    sizes = list(axes_of(layout).values())
    strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    places = (zip(place_of(rank, layout), steps, sizes, strides, strict=True) for rank in ranks)
    return sorted(sum((along + step) % size * stride for along, step, size, stride in place) for place in places)


def simulate_peer_object(other: int, own: int, said, layout: Layout):
    """What rank `other` says where rank `own` says `said`: of each list of ranks, the one that it is in itself."""
    if isinstance(said, tuple):
        return tuple(simulate_peer_object(other, own, part, layout) for part in said)
    if isinstance(said, list) and said and all(isinstance(rank, int) for rank in said):
        pairs = zip(place_of(other, layout), place_of(own, layout), strict=True)
        return moved(said, [there - here for there, here in pairs], layout)
    return said


def gather_simulated_objects(
    object_list: list, said, group: dist.ProcessGroup | None = None, *, layout: Layout
) -> None:
    """In the place of dist.all_gather_object."""
    members = dist.get_process_group_ranks(group or dist.group.WORLD)
    object_list[:] = [simulate_peer_object(other, dist.get_rank(), said, layout) for other in members]


@contextlib.contextmanager
def fake_ranks(layout: Layout, rank: int = 0):
    """Inside, this process is `rank` of the layout's ranks, of which no other one is there.

    Tensors that come from other ranks have any values. Raises ValueError for a rank that is none, and where the process
    has a default group: a dry run would take its place.
    """
    if not 0 <= rank < layout.ranks:
        raise ValueError(f"rank {rank} of {layout.ranks}: it is 0 to {layout.ranks - 1}")
    if dist.is_initialized():
        raise ValueError("this process is a rank of a process group already: call destroy_process_group() before")
    gather, excepthook = dist.all_gather_object, sys.excepthook
    try:
        store = FakeStore()  # its module registers the backend "fake"
        dist.init_process_group("fake", rank=rank, world_size=layout.ranks, store=store)
        dist.all_gather_object = functools.partial(gather_simulated_objects, layout=layout)
        yield
    finally:
        dist.all_gather_object, sys.excepthook = gather, excepthook  # init_process_group sets one that names the rank
        if dist.is_initialized():
            dist.destroy_process_group()
