"""The bytes of a step that cross from node to node, for any order of the ranks.

Reductions and gathers use a ring that visits each node once, so each node has one rank whose next neighbor is on
another node. All-to-alls and sends go directly from rank to rank. (NCCL also has trees and, on some fabrics, reductions
in the switch: these send less.)
"""

from __future__ import annotations

from course_lib.collectives.traffic import Traffic
from course_lib.five_d.layouts import Layout, coordinates


def rank_order(layout: Layout, order: tuple[str, ...] = ("dp", "pp", "cp", "tp")) -> list[int]:
    """Return the slot of each rank of `build_mesh` if the axes had this order, the outermost first."""
    slots = []
    for rank in range(layout.ranks):
        indices, slot = coordinates(rank, layout), 0
        for axis in order:
            slot = slot * getattr(layout, axis) + indices[axis]
        slots.append(slot)
    return slots


# exercise 10.15
def inter_node_bytes(traffic: Traffic, slots: list[int], ranks_per_node: int) -> int:
    """Return the bytes of `traffic` that leave a node. slots: by rank; node n has the slots from n · ranks_per_node on.

    all_reduce, all_gather, reduce_scatter: a rank sends all of its bytes to the next slot of its group, the last slot
    to the first. send: to its peer. Any other collective: evenly to the others of its group.
    """
    crossing = 0
    for record in traffic.records:
        ring = sorted(record.group, key=lambda rank: slots[rank])
        node = slots[record.rank] // ranks_per_node
        if record.collective in ("all_reduce", "all_gather", "reduce_scatter"):
            targets = [ring[(ring.index(record.rank) + 1) % len(ring)]]
        elif record.collective == "send":
            targets = [] if record.peer is None else [record.peer]
        else:
            targets = [rank for rank in ring if rank != record.rank]
        outside = sum(slots[rank] // ranks_per_node != node for rank in targets)
        crossing += record.bytes * outside // max(1, len(targets))
    return crossing
