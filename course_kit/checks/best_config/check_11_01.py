"""Check of exercise 11.1: strides of four axes in two orders; ranks of a group in a node, alone and as arrays."""

from __future__ import annotations

import dataclasses

import numpy as np

from course_lib.best_config import clusters
from course_lib.best_config.clusters import Cluster
from course_lib.best_config.tables import LayoutTable
from course_lib.five_d.layouts import Layout

ORDER = ("dp", "pp", "cp", "tp")
IN_NODE = (  # of a node of 8: size, stride, and how many are in a node
    (8, 1, 8),
    (16, 1, 8),
    (16, 4, 2),
    (2, 8, 1),
    (4, 2, 4),
    (2, 64, 1),
    (2, 6, 1),
    (2, 1, 2),
)


def check() -> None:
    """Assert strides and counts of layouts and groups, of arrays of them, and of nodes of 4."""
    plain = Cluster("plain", 1e15, 80e9, 3e12, node_link=400e9, network=50e9, gpus_per_node=8)
    layout = Layout(dp=16, pp=4, cp=2, tp=8)
    for axis, wanted in (("tp", 1), ("cp", 8), ("pp", 16), ("dp", 64)):
        got = clusters.stride_of(layout, axis, ORDER)
        assert got == wanted, (
            f"{layout}: the stride along {axis} is {wanted}, yours {got}: multiply the degrees of the "
            f"axes after {axis} in {ORDER}"
        )
    got = clusters.stride_of(layout, "dp", ("pp", "dp", "cp", "tp"))
    assert got == 16, f"in the order pp, dp, cp, tp, neighbors along dp are 16 apart, yours {got}: use the order"
    for size, stride, wanted in IN_NODE:
        got = clusters.in_node(plain, size, stride)
        assert got == wanted, (
            f"a group of {size}, {stride} apart, nodes of 8: {wanted} of its ranks in a node, yours {got}: "
            "gpus_per_node // stride, one at least, and no more than the group has"
        )
    sizes, strides = np.array([8, 16, 16, 2]), np.array([1, 1, 4, 64])
    got = clusters.in_node(plain, sizes, strides)
    assert np.array_equal(got, [8, 8, 2, 1]), f"four groups as arrays: 8, 8, 2 and 1 ranks in a node, yours {got}"
    two = LayoutTable.of([Layout(dp=4, pp=2, tp=8), Layout(dp=4, pp=2, cp=2, tp=2)])
    got = clusters.stride_of(two, "pp", ORDER)
    assert np.array_equal(got, [8, 4]), f"stride_of of two layouts as arrays: 8 and 4, yours {got}"
    got = clusters.in_node(dataclasses.replace(plain, gpus_per_node=4), 4, 2)
    assert got == 2, f"nodes of 4, a group of 4, 2 apart: two in a node, yours {got}: use cluster.gpus_per_node"
