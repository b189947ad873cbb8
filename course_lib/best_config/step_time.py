"""Seconds of a training step, by part: for one layout, or for arrays of layouts at once.

    step = m x slot of the slowest stage + bubble + gradients + optimizer + host
    slot = max(GPU, host) + transfers;  GPU = layers x (matrices + attention + other kernels + exposed communication)

A matmul reaches its share of the peak times rows / (rows + half_rows). Communication: size / bandwidth + steps x
latency by link (`clusters.ring`). Narayanan et al. 2021, section 3; Korthikanti et al. 2022, section 5; The Ultra-Scale
Playbook (2025), chapters 8, 9 and appendix A3.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from course_lib.best_config.clusters import (
    Cluster,
    all_to_all_time,
    latency_steps,
    replica_ring,
    ring,
    stride_of,
)
from course_lib.best_config.expert_time import exchange_time, uneven_time
from course_lib.best_config.planned_config import expert_layers, keys_by_layer, keys_seen, layer_parts
from course_lib.best_config.stage_loads import bubble_share, is_schedule, rank_layers
from course_lib.best_config.step_memory import expert_sizes, head_in_layers, parameters_per_rank, stage_parameters
from course_lib.best_config.tables import Layouts
from course_lib.best_config.waiting_time import host_time, stall_time, transfer_time
from course_lib.five_d.layouts import Layout
from course_lib.single_gpu.config import ModelConfig

FORWARD, BACKWARD = 1 / 3, 2 / 3  # shares of a layer's forward and backward together
SCORE_MATMULS, FORWARD_SCORE_MATMULS = 7, 2  # of flash attention: two in forward, five in backward
REPLAYED = {"sp": 3 / 8, "no sp": 1 / 4}  # of a layer's eight collectives: a recomputed forward's, all but its last
GATHERED_AGAIN = 1 / 4  # of a layer's eight collectives: in backward the inputs of its two column layers
# AdamW: weights and two states in FP32, read and written; gradients in FP32 read, weights in BF16 written.
OPTIMIZER_BYTES = 30  # moved per parameter


# exercise 11.4
def tensor_parallel_time(cluster: Cluster, layout, size) -> np.ndarray:
    """Return the seconds of a layer's eight all-gathers and reduce-scatters of `size` bytes, forward and backward.

    Each takes `collective_s` to start, the time of its bytes in a ring, and `ring_step_s` for each rank beyond the
    ranks of the first node. For tp above 1; layout: one, or arrays of several.
    """
    software, tp = cluster.software, np.asarray(layout.tp)
    bandwidth, beyond = ring(cluster, tp, 1)
    far_steps = np.maximum(0, tp - cluster.gpus_per_node)
    return 8 * (size * (tp - 1) / tp / bandwidth + software.collective_s + software.ring_step_s * far_steps)


def context_parallel_time(config: ModelConfig, cluster: Cluster, layout, tokens, seq: int, attention) -> np.ndarray:
    """Return the seconds of a layer in which attention waits for tokens of other ranks. attention: seconds of the mean
    layer.

    A ring sends K and V, in backward again with their gradients in FP32, and hides behind the attention of the same
    layer, which a window shortens. The all-to-alls of Ulysses for q, k, v and the output do not hide (notebook 07). A
    program that gathers K and V (`gathers_keys`) hides the same traffic behind the attention to its local keys alone,
    1/cp of it.
    """
    software, tp, cp = cluster.software, np.asarray(layout.tp), np.asarray(layout.cp)
    kv = config.kv_heads * config.head_dim * np.maximum(1, tp / config.kv_heads) / tp  # width of a rank's K
    stride = stride_of(layout, "cp", software.order)
    bandwidth, beyond = ring(cluster, cp, stride)
    latency = np.where(beyond, software.ring_step_s, software.collective_s)
    again = np.where(np.asarray(layout.recompute) == "full", 1, 0)
    keys = 2 * tokens * 2 * kv
    rings = (cp - 1) * ((4 + again) * keys / bandwidth + (3 + again) * latency)
    per_rank = 2 * tokens * (2 * config.attention_width / tp + 2 * kv) / cp  # bytes to each rank
    all_to_all = (2 + again) * (all_to_all_time(cluster, cp, stride, per_rank) + 2 * latency)
    ulysses = np.asarray(layout.cp_method) == "ulysses"
    mean, layers = keys_seen(config, seq, causal=True), keys_by_layer(config, seq, causal=True)
    hiding = attention / cp if software.gathers_keys else attention
    waiting = sum(share * np.maximum(0, rings - hiding * (keys / mean)) for share, keys in layers)
    return np.where(ulysses, all_to_all, waiting)


def kernel_times(
    config: ModelConfig, cluster: Cluster, layout, tokens, seq: int, moe: dict | None, moe_share: float
) -> dict[str, np.ndarray]:
    """Return the seconds of the mean layer's kernels, forward and backward, for one micro-batch: matrices, attention,
    and other kernels. moe_share: the share of the layers that have experts.
    """
    software, parts, tp = cluster.software, layer_parts(config), np.asarray(layout.tp)
    recompute = np.asarray(layout.recompute)
    full, selective = recompute == "full", recompute == "selective"
    part_again = np.where(selective, 1 + software.selective_again * FORWARD, 1.0)
    again = np.where(full, 1 + FORWARD, part_again)
    mlp = moe_share * expert_sizes(config, moe)[0] + (1 - moe_share) * parts["mlp"]
    dense = (parts["q_o"] + mlp) / tp + parts["kv"] / np.minimum(tp, config.kv_heads) + parts["latent"]
    matmuls = 6 * tokens * dense / cluster.matmul_rate * (1 + software.half_rows / tokens)
    if moe is not None:
        matmuls = matmuls + moe_share * uneven_time(config, cluster, layout, tokens, moe)
    scores = SCORE_MATMULS * keys_seen(config, seq, causal=True) * config.attention_width * tokens / tp
    scores_again = full | (selective & (software.selective_again == 0))
    scores = scores * np.where(scores_again, (SCORE_MATMULS + FORWARD_SCORE_MATMULS) / SCORE_MATMULS, 1)
    outside = np.where(layout.sequence_parallel, tp, 1)
    moved = software.layer_traffic * tokens * config.hidden * (2 / 3 / tp + 1 / 3 / outside)
    return {
        "matrices": matmuls * again,
        "attention": scores / cluster.attention_rate,
        "other kernels": moved / cluster.memory_bandwidth * again,
    }


def layer_times(
    config: ModelConfig, cluster: Cluster, layout: Layouts, seq: int, moe: dict | None = None
) -> dict[str, np.ndarray]:
    """Return the seconds of one layer, forward and backward, for one micro-batch, by part; without the host's time."""
    software, tp, cp = cluster.software, np.asarray(layout.tp), np.asarray(layout.cp)
    moe_share = float(expert_layers(config, config.layers)) / config.layers  # the mean layer is timed
    tokens = layout.micro_batch * seq / cp
    times = kernel_times(config, cluster, layout, tokens, seq, moe, moe_share)
    sp, full = np.asarray(layout.sequence_parallel), np.asarray(layout.recompute) == "full"
    replayed = np.where(full, np.where(sp, REPLAYED["sp"], REPLAYED["no sp"]), 0)
    repeats = 1 + replayed + np.where(software.gathers_again & sp, GATHERED_AGAIN, 0)
    collectives = tensor_parallel_time(cluster, layout, 2 * tokens * config.hidden) * repeats
    kernels = times["matrices"] + times["attention"] + times["other kernels"]
    times["tensor parallel"] = np.where(tp > 1, (1 - software.tp_overlap) * collectives, 0)
    waiting = context_parallel_time(config, cluster, layout, tokens, seq, times["attention"])
    times["context parallel"] = np.where(cp > 1, waiting, 0)
    if moe is not None:
        hidden = np.where(is_schedule(layout, "dualpipe"), software.exchange_overlap * kernels, 0)
        exchange = exchange_time(config, cluster, layout, tokens, moe)
        times["expert parallel"] = moe_share * np.maximum(0, exchange - hidden)
    return times


# exercise 11.5
def gradient_time(cluster: Cluster, layout, m, parameters, slot, others=0.0) -> np.ndarray:
    """Return the seconds of a step in which the GPU waits for gradients and weights of data parallelism.

    parameters: of this rank; slot: seconds of one micro-batch; m: micro-batches. Traffic that backward hides (stage 3:
    forward too) costs nothing; one replica sends nothing. layout: one, or arrays of several, with `replicate` 1 (no
    HSDP). others: seconds that gradients of other groups (experts) take on the same links; backward hides them too.
    """
    software, zero = cluster.software, np.asarray(layout.zero_stage)
    replicas = np.asarray(layout.dp) * layout.cp
    bandwidth, beyond = replica_ring(cluster, layout)
    latency = np.where(beyond, software.gradient_step_s, software.collective_s) * latency_steps(cluster, replicas)
    share = parameters * (replicas - 1) / replicas
    each_time = (zero == 3) & ~np.asarray(layout.gather_once)
    syncs = np.where((zero == 2) | each_time, m, 1)
    moved = np.where(zero == 0, 4 + 4, np.where(zero == 2, 4 * syncs + 2, np.where(each_time, (2 + 2 + 4) * syncs, 6)))
    share_hidden = np.where(zero == 0, software.overlap, software.sharded_overlap)
    hidden = share_hidden * slot * syncs * np.where(each_time, 1, 2 / 3)
    return np.maximum(0, share * moved / bandwidth + latency * syncs + others - hidden)


def with_fields(layout: Layouts, **changes) -> SimpleNamespace:
    """Return the layout's fields, some of them changed, without a check."""
    fields = {field.name: getattr(layout, field.name) for field in dataclasses.fields(Layout)}
    return SimpleNamespace(**fields | changes)


def expert_gradient_time(cluster: Cluster, layout: Layouts, m, experts) -> np.ndarray:
    """Return gradient_time of experts before any of it is hidden: their group is the dp x cp / ep ranks with the same
    experts, and neighbors along dp are ep replicas apart. experts: parameters of this rank, 0 without a mixture.
    """
    ep = np.asarray(layout.ep)
    expert_group = with_fields(layout, dp=np.asarray(layout.dp) // ep, replicas_apart=ep)
    return np.where(experts > 0, gradient_time(cluster, expert_group, m, experts, 0.0), 0)


def replica_time(cluster: Cluster, layout: Layouts, m, dense, experts, slot) -> np.ndarray:
    """Return gradient_time for several groups with the same shards (HSDP): the time of one group, of the all-reduce
    over the groups, in FP32, once per step, and of experts, which all replicas shard. dense, experts: parameters of
    this rank.

    The all-reduce hides behind the part of the last backward that the group's own traffic and the experts' leave.
    """
    software, groups = cluster.software, np.asarray(layout.replicate)
    group = with_fields(layout, dp=np.asarray(layout.dp) // groups)  # the ranks that shard the parameters
    bandwidth, beyond = ring(cluster, groups, stride_of(layout, "dp", software.order) * group.dp)
    latency = np.where(beyond, software.gradient_step_s, software.collective_s) * latency_steps(cluster, groups)
    moved = 2 * 4 * dense / (group.dp * layout.cp) * (groups - 1) / groups
    experts_once, experts_s = (expert_gradient_time(cluster, layout, steps, experts) for steps in (1, m))
    left = software.sharded_overlap * slot * BACKWARD - gradient_time(cluster, group, 1, dense, 0.0, experts_once)
    all_reduce = np.where(groups > 1, np.maximum(0, moved / bandwidth + latency - np.maximum(0, left)), 0)
    return gradient_time(cluster, group, m, dense, slot, experts_s) + all_reduce


def outer_collectives(config: ModelConfig, cluster: Cluster, layout: Layouts, tokens) -> tuple[np.ndarray, np.ndarray]:
    """Return the seconds of tensor parallelism's collectives for one micro-batch at the embedding, and at the output
    layer. With sequence parallelism the output layer's input may be gathered a second time.
    """
    tp, again = np.asarray(layout.tp), cluster.software.gathers_again & np.asarray(layout.sequence_parallel)
    one = np.where(tp > 1, tensor_parallel_time(cluster, layout, 2 * tokens * config.hidden) / 8, 0)
    return 2 * one, (2 + again) * one


class Slot(NamedTuple):
    """One micro-batch, forward and backward, on the slowest pipeline stage."""

    parts: dict[str, np.ndarray]  # seconds by part; they add up to `seconds`
    seconds: np.ndarray
    of_pipeline: np.ndarray  # seconds of one micro-batch through all stages, one after the other


def slowest_slot(config: ModelConfig, cluster: Cluster, layout: Layouts, seq: int, moe: dict | None) -> Slot:
    """Return the slot of the slowest stage: a fullest one, or the stage with the output layer."""
    software, tp, pp = cluster.software, np.asarray(layout.tp), np.asarray(layout.pp)
    tokens = layout.micro_batch * seq / np.asarray(layout.cp)
    layer = layer_times(config, cluster, layout, seq, moe)
    # Fused with the loss or not: notebook 12b's loss computes no matmul twice.
    logit_s = 6 * config.hidden / cluster.head_rate + software.logit_traffic / cluster.memory_bandwidth
    head_s = logit_s * config.vocab * tokens / tp
    layers = rank_layers(config, layout, software.split, head_in_layers(config))
    zb_v = is_schedule(layout, "zb-v")  # the first rank has the head
    at_head, other_end = (
        np.where(zb_v, *ends) for ends in ((layers["first"], layers["last"]), (layers["last"], layers["first"]))
    )
    fullest = np.maximum(other_end, layers["second"])
    embedding_s, head_tp_s = outer_collectives(config, cluster, layout, tokens)
    host, layer_s = host_time(cluster, layout), sum(layer.values())
    outside = embedding_s + head_s + head_tp_s  # of one micro-batch, on all ranks
    batches = np.where(is_schedule(layout, "dualpipe"), 1 / 2, 1)  # that meet the head on a rank at an end
    head_s, head_tp_s = batches * head_s, batches * head_tp_s
    with_head_s = np.maximum(at_head * layer_s + head_s + head_tp_s, at_head * host)
    head_is_slowest = with_head_s > fullest * np.maximum(layer_s, host)
    n = np.where((pp == 1) | ~head_is_slowest, fullest, at_head)
    has_head = (pp == 1) | head_is_slowest
    parts = {name: n * each for name, each in layer.items()}
    parts["output layer"] = np.where(has_head, head_s, 0)
    parts["tensor parallel"] = parts["tensor parallel"] + np.where(has_head, head_tp_s, 0)
    parts["tensor parallel"] = parts["tensor parallel"] + np.where(pp == 1, embedding_s, 0)
    parts["launch"] = np.maximum(0, n * host - sum(parts.values()))
    parts["transfers"] = transfers = transfer_time(config, cluster, layout, seq)
    of_pipeline = np.maximum(config.layers * layer_s + outside, config.layers * host)
    return Slot(parts, np.asarray(sum(parts.values())), of_pipeline + pp * transfers)


def update_times(
    config: ModelConfig, cluster: Cluster, layout: Layouts, m, slot: np.ndarray, moe: dict | None
) -> dict[str, np.ndarray]:
    """Return the seconds per step in which the GPU waits for gradients, and the seconds of the optimizer. slot: seconds
    of one micro-batch.
    """
    pp = np.asarray(layout.pp)
    dense, experts = stage_parameters(config, layout, moe, config.layers / pp, 1 / pp, (not config.tied) / pp)
    copies = np.where(is_schedule(layout, "dualpipe"), 2, 1)
    expert_s = expert_gradient_time(cluster, layout, m, copies * experts)
    # interleaved chunks: gradients that are sent once per step are complete while pp micro-batches finish the others
    once = (np.asarray(layout.zero_stage) < 2) & is_schedule(layout, "interleaved")
    last_slot = np.where(once, np.minimum(pp, m), 1) * slot
    gradients = gradient_time(cluster, layout, m, copies * dense, last_slot, expert_s)
    if np.any(replicated := np.asarray(layout.replicate) > 1):
        gradients = np.where(replicated, replica_time(cluster, layout, m, dense, experts, slot), gradients)
    sharded = np.asarray(layout.zero_stage) > 0
    updated = parameters_per_rank(layout, copies * dense, copies * experts, sharded)
    return {"gradients": gradients, "optimizer": OPTIMIZER_BYTES * updated / cluster.memory_bandwidth}


def step_time(
    config: ModelConfig, cluster: Cluster, layout: Layouts, m, seq: int, moe: dict | None = None
) -> dict[str, np.ndarray]:
    """Return the seconds by part; their sum is the step's. m: micro-batches. "launch": by how much the host takes
    longer than the GPU.
    """
    slot = slowest_slot(config, cluster, layout, seq, moe)
    parts = {name: m * part for name, part in slot.parts.items()}
    parts["stalls"] = stall_time(cluster, layout, m)
    bubble = bubble_share(layout, m) * np.maximum(0, slot.of_pipeline - slot.seconds)
    parts["bubble"] = np.where(np.asarray(layout.pp) > 1, bubble, 0)
    parts |= update_times(config, cluster, layout, m, slot.seconds, moe)
    parts["step"] = cluster.software.step_host_s + 0 * slot.seconds
    return parts
