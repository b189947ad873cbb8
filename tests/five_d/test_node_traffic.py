"""course_lib.five_d.node_traffic: slots against permuted grids, bytes against a count by edges. Plain Python, any
machine.
"""

import itertools
import random

import pytest
import torch

from course_lib.collectives.traffic import Record, Traffic
from course_lib.five_d.layouts import Layout, groups_along
from course_lib.five_d.node_traffic import inter_node_bytes, rank_order

AXES = ("dp", "pp", "cp", "tp")
RINGS = ("all_reduce", "all_gather", "reduce_scatter")


def test_slots_are_those_of_a_grid_with_its_axes_in_another_order():
    layout = Layout(2, 3, 2, 4)
    assert rank_order(layout) == list(range(48))
    for order in itertools.permutations(AXES):
        placed = torch.arange(48).view([getattr(layout, axis) for axis in order])  # by place: the slot
        by_rank = placed.permute([order.index(axis) for axis in AXES]).flatten()
        assert rank_order(layout, order) == by_rank.tolist(), order


def edges(record: Record, places: list[int]) -> list[tuple[int, int, float]]:
    """(from slot, to slot, bytes) of a record."""
    own, ring = places[record.rank], sorted(places[rank] for rank in record.group)
    if record.collective == "send":
        return [(own, places[record.peer], record.bytes)]
    if record.collective in RINGS:
        following = [*ring[1:], ring[0]]
        return [(a, b, record.bytes) for a, b in zip(ring, following, strict=True) if a == own]
    return [(own, other, record.bytes / (len(ring) - 1)) for other in ring if other != own]


@pytest.mark.parametrize("seed", range(5))
def test_bytes_across_against_a_count_edge_by_edge(seed):
    by_chance, layout, records = random.Random(seed), Layout(2, 2, 1, 4), []
    places = rank_order(layout, tuple(by_chance.sample(AXES, 4)))
    for _ in range(100):
        axes = by_chance.sample(AXES, by_chance.randint(1, 3))
        group = tuple(by_chance.choice(groups_along(layout, *axes)))
        rank, kind = by_chance.choice(group), by_chance.choice([*RINGS, "send", "all_to_all", "broadcast"])
        others = [other for other in group if other != rank]
        if not others and kind == "send":
            continue
        peer = by_chance.choice(others) if kind == "send" else None
        records.append(Record(kind, group, rank, 840 * by_chance.randrange(10), peer))  # 1 to 7 others divide it
    for node in (1, 2, 4, 8, 16):
        links = [link for record in records for link in edges(record, places)]
        expected = sum(size for a, b, size in links if a // node != b // node)
        assert inter_node_bytes(Traffic(records), places, node) == pytest.approx(expected), node
    assert inter_node_bytes(Traffic(records), places, 16) == 0


def test_a_ring_leaves_each_node_once():
    """8 ranks on 2 nodes: 2 of 8 send to the other node; in a bad order of slots as many, since rings follow slots."""
    records = [Record("all_reduce", tuple(range(8)), rank, 100, None) for rank in range(8)]
    assert inter_node_bytes(Traffic(records), list(range(8)), 4) == 200
    assert inter_node_bytes(Traffic(records), [0, 4, 1, 5, 2, 6, 3, 7], 4) == 200
    straight = [Record("all_to_all", tuple(range(8)), rank, 700, None) for rank in range(8)]
    assert inter_node_bytes(Traffic(straight), list(range(8)), 4) == 8 * 400


def step_traffic(layout: Layout, layers: int, hidden: int, tokens: int) -> Traffic:
    """A step's all-reduces of a transformer in BF16: hidden states over tp, gradients over dp; tokens: of a rank."""
    sizes = {"tp": 4 * layers * tokens * hidden * 2, "dp": 12 * layers * hidden**2 * 2 // layout.tp}
    records = []
    for axis, size in sizes.items():
        for group in groups_along(layout, axis):
            sent = 2 * (len(group) - 1) * size // len(group)
            records += [Record("all_reduce", tuple(group), rank, sent, None) for rank in group]
    return Traffic(records)


@pytest.mark.parametrize("dp, tp, node", [(2, 4, 4), (4, 4, 8), (8, 8, 8), (2, 8, 8), (16, 2, 8)])
@pytest.mark.parametrize("hidden, tokens", [(4096, 8192), (8192, 16384), (2048, 65536)])
def test_tp_innermost_is_never_worse_than_outermost(dp, tp, node, hidden, tokens):
    layout = Layout(dp=dp, tp=tp)
    traffic = step_traffic(layout, 16, hidden, tokens)
    inner, outer = (
        inter_node_bytes(traffic, rank_order(layout, order), node) for order in (AXES, ("tp", "dp", "pp", "cp"))
    )
    assert inner <= outer
    assert inter_node_bytes(traffic.select("all_reduce", tuple(range(tp))), rank_order(layout), node) == 0
