"""Check of exercise 11.4: starts, far steps and bytes of eight collectives, each by itself, in nodes of 8 and of 4."""

from __future__ import annotations

import dataclasses

import numpy as np

from course_lib.best_config import step_time
from course_lib.best_config.clusters import CLUSTERS
from course_lib.best_config.tables import LayoutTable
from course_lib.five_d.layouts import Layout


def check() -> None:
    """Assert the time of no bytes, what 1 GB adds to it, and arrays of layouts."""
    h100 = CLUSTERS["H100"].with_software(
        collective_s=1e-3, ring_step_s=1e-4, nvlink_efficiency=0.5, network_efficiency=0.5
    )
    small = dataclasses.replace(h100, gpus_per_node=4)
    cases = [(h100, 2, 225e9, 0), (h100, 8, 225e9, 0), (h100, 16, 200e9, 8), (h100, 32, 200e9, 24)]
    cases.append((small, 8, 100e9, 4))
    for cluster, tp, bandwidth, far in cases:
        where = f"tp {tp} in nodes of {cluster.gpus_per_node}"
        wanted = 8 * (1e-3 + far * 1e-4)
        got = float(step_time.tensor_parallel_time(cluster, Layout(tp=tp), 0.0))
        assert abs(got / wanted - 1) < 1e-9, (
            f"{where}, no bytes: {wanted * 1e3:.2f} ms, yours {got * 1e3:.2f}: eight starts of 1 ms, and eight times "
            f"{far} steps of 0.1 ms beyond the first node"
        )
        wanted = 8 * 1e9 * (tp - 1) / tp / bandwidth
        got = float(step_time.tensor_parallel_time(cluster, Layout(tp=tp), 1e9)) - got
        assert abs(got / wanted - 1) < 1e-9, (
            f"{where}, 1 GB: {wanted * 1e3:.2f} ms for the bytes, yours {got * 1e3:.2f}: eight times {tp - 1}/{tp} of "
            f"them, at {bandwidth / 1e9:.0f} GB/s (ring, neighbors 1 apart)"
        )
    two = [Layout(tp=2), Layout(tp=16)]
    times = step_time.tensor_parallel_time(h100, LayoutTable.of(two), 1e9)
    alone = [step_time.tensor_parallel_time(h100, layout, 1e9) for layout in two]
    assert np.shape(times) == (2,) and np.allclose(times, alone), (
        "arrays of layouts give other results than one at a time"
    )
