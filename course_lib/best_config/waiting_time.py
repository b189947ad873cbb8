"""Seconds of a step in which the GPU waits for the host, for pipeline neighbors, or for a network that stalls."""

from __future__ import annotations

import numpy as np

from course_lib.best_config.clusters import Cluster, link, stride_of
from course_lib.best_config.stage_loads import is_schedule
from course_lib.best_config.tables import Layouts
from course_lib.single_gpu.config import ModelConfig


def host_time(cluster: Cluster, layout: Layouts) -> np.ndarray:
    """Return the seconds in which the host can launch a layer, forward and backward. Rings of a tensor-parallel group
    that run while a pipeline waits for another node are slow at any size, so they count here.
    """
    software = cluster.software
    pipeline = (np.asarray(layout.pp) > 1) & (np.asarray(layout.ranks) > cluster.gpus_per_node)
    return software.layer_host_s + np.where(pipeline, 8 * software.busy_step_s * (np.asarray(layout.tp) - 1), 0)


def transfer_time(config: ModelConfig, cluster: Cluster, layout: Layouts, seq: int) -> np.ndarray:
    """Return the seconds per micro-batch in which a stage waits for its neighbors' hidden states and gradients."""
    software, pp, tp = cluster.software, np.asarray(layout.pp), np.asarray(layout.tp)
    stride = stride_of(layout, "pp", software.order)
    beyond = stride * pp > cluster.gpus_per_node
    rate, _ = link(cluster, np.where(beyond, 1, pp), pp)
    latency = np.where(beyond, software.ring_step_s, software.collective_s)
    size = 2 * layout.micro_batch * seq / np.asarray(layout.cp) * config.hidden
    size = size / np.where(layout.sequence_parallel | software.scatters_transfers, tp, 1)
    chunks = np.where(is_schedule(layout, "interleaved"), layout.virtual, 1)
    chunks = np.where(is_schedule(layout, "interleaved") & software.overlaps_transfers, 0, chunks)
    chunks = np.where(is_schedule(layout, "zb-v"), 2, chunks)
    return np.where(pp > 1, 2 * chunks * (size / rate + latency), 0)


def stall_time(cluster: Cluster, layout: Layouts, m) -> np.ndarray:
    """Return the seconds per step in which exchanges with neighbors stall because the network does: in large jobs, and
    in pipelines of tensor-parallel groups of more than two nodes. A rank of a ring has two neighbors, the ends of a
    pipeline have one; filling and draining it takes pp - 3 more exchanges.
    """
    software, pp, tp = cluster.software, np.asarray(layout.pp), np.asarray(layout.tp)
    large, wide = layout.ranks >= software.stall_nodes * cluster.gpus_per_node, tp > 2 * cluster.gpus_per_node
    beyond = stride_of(layout, "pp", software.order) * pp > cluster.gpus_per_node
    pipeline = (pp > 1) & beyond & (large | wide)
    rings = (pp == 1) & (np.asarray(layout.dp) > 1) & large & ~wide
    exchanges = np.where(pp > 1, m * np.minimum(pp - 1, 2) + np.maximum(0, pp - 3), 2 * m)
    return np.where(pipeline | rings, software.stall_s * exchanges, 0)
