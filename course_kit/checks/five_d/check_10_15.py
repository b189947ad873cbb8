"""Check of exercise 10.15: bytes that leave a node, of made-up traffic."""

from __future__ import annotations

from course_lib.collectives.traffic import Record, Traffic
from course_lib.five_d import node_traffic

EVERY = (0, 1, 2, 3)
STRAIGHT, MIXED = [0, 1, 2, 3], [0, 2, 1, 3]  # slots by rank


def check() -> None:
    """Assert rings, sends and all-to-alls on nodes of two and of four ranks."""
    across = node_traffic.inter_node_bytes
    ring = Traffic([Record("all_reduce", EVERY, rank, 100, None) for rank in range(4)])
    assert across(ring, STRAIGHT, 4) == 0, "one node of four: nothing leaves it"
    assert across(ring, STRAIGHT, 2) == 200, "two nodes of two: in a ring of four, two of the four sends cross"
    assert across(ring, MIXED, 2) == 200, "the ring goes by slots: another order of the ranks crosses as often"
    pair = Traffic([Record("all_gather", (0, 1), rank, 100, None) for rank in range(2)])
    assert (across(pair, STRAIGHT, 2), across(pair, MIXED, 2)) == (0, 200), "0 and 1: slots 0 and 2 are apart"
    scatter = Traffic([Record("reduce_scatter", EVERY, rank, 100, None) for rank in range(4)])
    assert across(scatter, STRAIGHT, 2) == 200, "a reduce-scatter goes around the ring as an all-reduce does: 200 cross"
    sends = Traffic([Record("send", EVERY, rank, 60, peer) for rank, peer in ((0, 1), (1, 2), (3, 2))])
    assert across(sends, STRAIGHT, 2) == 60, "0 to 1 stays, 1 to 2 crosses, 3 to 2 stays: no ring, but the peer"
    experts = Traffic([Record("all_to_all", EVERY, 0, 90, None)])
    assert across(experts, STRAIGHT, 2) == 60, "two of the three others are on the other node"
    some = Traffic([Record("all_to_all", (0, 1, 3), 0, 90, None)])
    crossing = across(some, STRAIGHT, 2), across(some, MIXED, 2)
    assert crossing == (45, 90), (
        f"0 to 1 and 3: with slots {STRAIGHT} one of the two is on another node, with {MIXED} both: 45 and 90 bytes, "
        f"yours {crossing}: nodes follow from the slots"
    )
