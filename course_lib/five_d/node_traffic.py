"""How much of what a step sends crosses from node to node, for any order of the ranks.

Sums and gathers go round in a ring that visits each node once, so each node has one rank whose next neighbour is
elsewhere. All-to-alls and sends go straight from rank to rank. (NCCL also has trees and, on some fabrics, sums in the
switch: these send less.)
"""

from __future__ import annotations

from course_lib.collectives.traffic import Traffic
from course_lib.five_d.layouts import Layout, coordinates


def rank_order(layout: Layout, order: tuple[str, ...] = ("dp", "pp", "cp", "tp")) -> list[int]:
    """By rank of `build_mesh`: where it would stand if the axes had this order, the outermost first."""
    found = []
    for rank in range(layout.ranks):
        place, slot = coordinates(rank, layout), 0
        for axis in order:
            slot = slot * getattr(layout, axis) + place[axis]
        found.append(slot)
    return found


# exercise 10.15
def inter_node_bytes(traffic: Traffic, slots: list[int], ranks_per_node: int) -> int:
    """Return the bytes of `traffic` that leave a node. slots: by rank; node n has the slots from n · ranks_per_node on.

    all_reduce, all_gather, reduce_scatter: a rank sends all of its bytes to the next slot of its group, the last one to
    the first. send: to its peer. Anything else: evenly to the others of its group.
    """
    crossing = 0
    for record in traffic.records:
        ring = sorted(record.group, key=lambda rank: slots[rank])
        own = slots[record.rank] // ranks_per_node
        if record.collective in ("all_reduce", "all_gather", "reduce_scatter"):
            reached = [ring[(ring.index(record.rank) + 1) % len(ring)]]
        elif record.collective == "send":
            reached = [record.peer]
        else:
            reached = [rank for rank in ring if rank != record.rank]
        outside = sum(slots[rank] // ranks_per_node != own for rank in reached)
        crossing += record.bytes * outside // max(1, len(reached))
    return crossing
