"""Check of exercise 11.5: exposed seconds by hand for each ZeRO stage, groups in and beyond a node, slots that hide."""

from __future__ import annotations

import numpy as np

from course_lib.best_config import step_time
from course_lib.best_config.clusters import CLUSTERS, Cluster
from course_lib.best_config.tables import LayoutTable
from course_lib.five_d.layouts import Layout

EACH, NEAR, FAR = "4 bytes in each sync, and 2 once", "7 short steps", "15 long steps"
ONCE, LATE = f"4 + 2 bytes, {FAR}", "2/3 of one slot's"
# layout, m, slot: seconds by hand, for 1e9 parameters, and of what they are made
CASES = {
    ("dp1", 4, 0.0): (0.0, "one replica sends nothing"),
    ("dp8", 4, 0.0): (7 / 8 * 8 / 225 + 7e-4, f"7/8 of 4 + 4 bytes over NVLink, {NEAR}"),
    ("dp8,zero1", 4, 0.0): (7 / 8 * 6 / 225 + 7e-4, f"7/8 of 4 + 2 bytes over NVLink, {NEAR}"),
    ("dp16,tp8,sp,zero1", 4, 0.0): (15 / 16 * 6 / 25 + 15e-3, f"15/16 of {ONCE}, one card"),
    ("dp512,tp8,sp,zero1", 4, 0.0): (511 / 512 * 6 / 25 + 255 * 9 / 8 * 1e-3, "latency_steps: a tree's beyond 256"),
    ("dp16,tp8,sp", 4, 0.1): (15 / 16 * 8 / 25 + 15e-3 - 0.9 * 0.1 * 2 / 3, f"less {LATE} overlap"),
    ("dp16,tp8,sp,zero1", 4, 0.1): (15 / 16 * 6 / 25 + 15e-3 - 0.5 * 0.1 * 2 / 3, f"less {LATE} sharded_overlap"),
    ("dp16,tp8,sp", 4, 9.0): (0.0, "all of it is hidden"),
    ("dp8,cp2,tp8,sp,zero1", 4, 0.0): (15 / 16 * 6 / 25 + 15e-3, f"replicas are dp x cp = 16: {ONCE}"),
    ("dp16,tp8,sp,zero2", 4, 0.1): (
        15 / 16 * (4 * 4 + 2) / 25 + 4 * 15e-3 - 0.5 * 4 * 0.1 * 2 / 3,
        f"{EACH}; {FAR} per sync; less half of 2/3 of 4 slots"
    ),
    ("dp16,tp8,sp,zero3", 4, 0.1): (
        15 / 16 * 8 * 4 / 25 + 4 * 15e-3 - 0.5 * 4 * 0.1, f"8 bytes and {FAR} per sync; less half of 4 slots"
    ),
    ("dp16,pp2,tp8,sp,zero3,keep", 4, 0.1): (
        15 / 16 * 6 / 25 + 15e-3 - 0.5 * 0.1 * 2 / 3, f"as ZeRO-1: one sync of {ONCE}"
    ),
    ("dp2,cp4", 4, 0.0): (7 / 8 * 8 / 225 + 7e-4, "replicas are dp x cp = 8, all in one node"),
    ("dp2,pp2,cp8,zero1", 4, 0.0): (15 / 16 * 6 / 200 + 15e-3, "eight of the replicas are in a node: eight cards"),
    ("dp2,pp8,cp2", 4, 0.0): (3 / 4 * 8 / 50 + 3e-3, "two of the four replicas are in a node: two cards"),
    ("dp4,pp4,tp2,sp", 4, 0.0): (3 / 4 * 8 / 25 + 3e-3, "neighbors along dp are 8 apart: one card"),
}  # fmt: skip


def check_arrays(cluster: Cluster) -> None:
    """Assert that m, parameters, slot and others may differ between the layouts of a table."""
    specs = ("dp16,tp8,sp,zero2", "dp16,tp8,sp,zero3", "dp16,tp8,sp,zero2", "dp8,cp2,tp8,sp,zero1")
    m, parameters, slots, others = np.array(
        [[2, 4, 8, 1], [1e9, 2e9, 5e8, 3e9], [0.1, 0.2, 0.3, 0], [0.3, 0, 0.1, 0.2]]
    )
    times = step_time.gradient_time(cluster, LayoutTable.of(map(Layout.parse, specs)), m, parameters, slots, others)
    alone = [
        float(step_time.gradient_time(cluster, Layout.parse(spec), *arguments))
        for spec, *arguments in zip(specs, m, parameters, slots, others, strict=True)
    ]
    assert np.allclose(times, alone), (
        f"m, parameters, slot and others as arrays: {times}, and one layout at a time {alone}: do not turn them into "
        "numbers"
    )


def check() -> None:
    """Assert every case alone and in arrays, and the order of ranks that the software has."""
    h100 = CLUSTERS["H100"].with_software(
        nvlink_efficiency=0.5, network_efficiency=0.5, gradient_step_s=1e-3, collective_s=1e-4,
        overlap=0.9, sharded_overlap=0.5,
    )  # fmt: skip
    for (spec, m, slot), (wanted, why) in CASES.items():
        got = float(step_time.gradient_time(h100, Layout.parse(spec), m, 1e9, slot))
        assert got >= 0, f"{spec}: {got:.3f} s; what is hidden costs nothing, and is no gain either"
        assert abs(got - wanted) < 1e-6, (
            f"{spec}, m = {m}, slot {slot} s: {wanted:.4f} s exposed, yours {got:.4f}: {why}"
        )
    spec, bytes_sent = "dp16,tp8,sp,zero1", 15 / 16 * 6 / 25 + 15e-3
    for layout, slot, wanted in ((spec, 0.6, bytes_sent + 0.5 - 0.2), (spec, 3.0, 0.0), ("tp8", 0.0, 0.5)):
        got = float(step_time.gradient_time(h100, Layout.parse(layout), 4, 1e9, slot, 0.5))
        assert abs(got - wanted) < 1e-6, (
            f"{spec}, slot {slot} s, others 0.5 s: {wanted:.4f} s exposed, yours {got:.4f}: add `others`, with one "
            "replica too, before you subtract what is hidden"
        )
    got = float(step_time.gradient_time(h100, Layout.parse("dp16,tp8,sp,zero2"), 2, 1e9, 0.1))
    wanted = 15 / 16 * (2 * 4 + 2) / 25 + 2 * 15e-3 - 0.5 * 2 * 0.1 * 2 / 3
    assert abs(got - wanted) < 1e-6, f"dp16,tp8,sp,zero2, m = 2: {wanted:.4f} s, yours {got:.4f}: a sync in each of m"
    pipelines_outside = h100.with_software(order=("pp", "dp", "cp", "tp"))
    got = float(step_time.gradient_time(pipelines_outside, Layout.parse("dp4,pp4,tp2,sp"), 4, 1e9, 0.0))
    wanted = 3 / 4 * 8 / 225 + 3e-4
    assert abs(got - wanted) < 1e-6, (
        f"dp4,pp4,tp2,sp in the order pp, dp, cp, tp: {wanted:.4f} s, yours {got:.4f}: use replica_ring"
    )
    check_arrays(h100)
    table = LayoutTable.of(Layout.parse(spec) for spec, _, _ in CASES)
    slots = np.array([slot for _, _, slot in CASES])
    times = step_time.gradient_time(h100, table, 4, np.full(len(CASES), 1e9), slots)
    assert np.shape(times) == (len(CASES),) and np.allclose(times, [wanted for wanted, _ in CASES.values()]), (
        "arrays of layouts give other results than one at a time"
    )
