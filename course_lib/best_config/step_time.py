"""Seconds of a training step, by part: for one layout, or for arrays of them at once.

    step = m x slot of the slowest stage + bubble + gradients + optimizer + host
    slot = max(GPU, host) + transfers;  GPU = layers x (matrices + attention + other kernels + exposed communication)

A matrix product reaches its share of the peak times rows / (rows + half_rows). Communication: size / bandwidth + steps
x latency by link (`clusters.ring`). Narayanan et al. 2021, section 3; Korthikanti et al. 2022, section 5; The
Ultra-Scale Playbook (2025), chapters 8, 9 and appendix A3.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np

from course_lib.best_config.clusters import (
    Cluster,
    all_to_all_time,
    latency_steps,
    link,
    replica_ring,
    ring,
    stride_of,
)
from course_lib.best_config.expert_time import exchange_time, uneven_time
from course_lib.best_config.planned_config import expert_layers, keys_by_layer, keys_seen, layer_parts
from course_lib.best_config.stage_loads import bubble_share, is_schedule, rank_layers
from course_lib.best_config.step_memory import expert_sizes, head_in_layers, own_share, stage_parameters
from course_lib.five_d.layouts import Layout
from course_lib.single_gpu.model import ModelConfig


# exercise 11.4
def tensor_parallel_time(cluster: Cluster, layout, size) -> np.ndarray:
    """Return the seconds of a layer's eight all-gathers and reduce-scatters of `size` bytes, forward and backward.

    Each takes `collective_s` to start, the time of its bytes in a ring, and `ring_step_s` for each rank beyond those of
    the first node. For tp above 1; layout: one, or arrays of several.
    """
    software, tp = cluster.software, np.asarray(layout.tp)
    bandwidth, beyond = ring(cluster, tp, 1)
    far_steps = np.maximum(0, tp - cluster.gpus_per_node)
    return 8 * (size * (tp - 1) / tp / bandwidth + software.collective_s + software.ring_step_s * far_steps)


def context_parallel_time(config: ModelConfig, cluster: Cluster, layout, tokens, seq: int, attention) -> np.ndarray:
    """Seconds of a layer that attention waits for other tokens. A ring sends K and V, backward again, and their
    gradients in FP32, and hides behind the attention of the same layer, which a window shortens; Ulysses' all-to-alls
    of q, k, v and the output do not hide (notebook 07). A program that gathers K and V (`gathers_keys`) hides the same
    traffic behind the attention to its local keys alone, 1/cp of it. attention: seconds of the mean layer.
    """
    software, tp, cp = cluster.software, np.asarray(layout.tp), np.asarray(layout.cp)
    kv = config.kv_heads * config.head_dim * np.maximum(1, tp / config.kv_heads) / tp  # width of a rank's K
    stride = stride_of(layout, "cp", software.order)
    bandwidth, beyond = ring(cluster, cp, stride)
    latency = np.where(beyond, software.ring_step_s, software.collective_s)
    again = np.where(np.asarray(layout.recompute) == "full", 1, 0)
    keys = 2 * tokens * 2 * kv
    rings = (cp - 1) * ((4 + again) * keys / bandwidth + (3 + again) * latency)
    exchanged = 2 * tokens * (2 * config.attention_width / tp + 2 * kv) / cp  # with each rank
    all_to_all = (2 + again) * (all_to_all_time(cluster, cp, stride, exchanged) + 2 * latency)
    ulysses = np.asarray(layout.cp_method) == "ulysses"
    mean, layers = keys_seen(config, seq, causal=True), keys_by_layer(config, seq, causal=True)
    beside = attention / cp if software.gathers_keys else attention
    waiting = sum(share * np.maximum(0, rings - beside * (keys / mean)) for share, keys in layers)
    return np.where(ulysses, all_to_all, waiting)


def layer_times(config: ModelConfig, cluster: Cluster, layout, seq: int, moe: dict | None = None) -> dict:
    """Seconds of one layer, forward and backward, for one micro-batch, by part; without what the host takes."""
    software, h, parts = cluster.software, config.hidden, layer_parts(config)
    share = expert_layers(config, config.layers) / config.layers  # of layers with experts; the mean layer is timed
    tp, cp = np.asarray(layout.tp), np.asarray(layout.cp)
    tokens = layout.micro_batch * seq / cp
    full = np.asarray(layout.recompute) == "full"
    selective = np.asarray(layout.recompute) == "selective"
    again = np.where(full, 4 / 3, np.where(selective, 1 + software.selective_again / 3, 1.0))  # a forward more, or part
    mlp = share * expert_sizes(config, moe)[0] + (1 - share) * parts["mlp"]
    dense = (parts["q_o"] + mlp) / tp + parts["kv"] / np.minimum(tp, config.kv_heads) + parts["latent"]
    scores = 7 * keys_seen(config, seq, causal=True) * config.attention_width * tokens / tp
    scores = scores * np.where(full | (selective & (software.selective_again == 0)), 9 / 7, 1)
    rate = cluster.matmul_rate
    products = 6 * tokens * dense / rate * (1 + software.half_rows / tokens)
    if moe is not None:
        products = products + share * uneven_time(config, cluster, layout, tokens, moe)
    outside = np.where(layout.sequence_parallel, tp, 1)
    moved = software.layer_traffic * tokens * h * (2 / 3 / tp + 1 / 3 / outside)
    times = {
        "matrices": products * again,
        "attention": scores / cluster.attention_rate,
        "other kernels": moved / cluster.memory_bandwidth * again,
    }
    split = np.asarray(layout.sequence_parallel)
    replayed = np.where(split, 3 / 8, 1 / 4)  # all exchanges of a forward but the last: the replay stops before it
    rounds = 1 + np.where(full, replayed, 0) + np.where(software.gathers_again & split, 1 / 4, 0)
    exchange = tensor_parallel_time(cluster, layout, 2 * tokens * h) * rounds
    times["tensor parallel"] = np.where(tp > 1, (1 - software.tp_overlap) * exchange, 0)
    waiting = context_parallel_time(config, cluster, layout, tokens, seq, times["attention"])
    times["context parallel"] = np.where(cp > 1, waiting, 0)
    if moe is not None:
        kernels = times["matrices"] + times["attention"] + times["other kernels"]
        hidden = np.where(is_schedule(layout, "dualpipe"), software.exchange_overlap * kernels, 0)
        exchange = exchange_time(config, cluster, layout, tokens, moe)
        times["expert parallel"] = share * np.maximum(0, exchange - hidden)
    return times


# exercise 11.5
def gradient_time(cluster: Cluster, layout, m, parameters, slot, others=0.0) -> np.ndarray:
    """Return the seconds of a step in which the GPU waits for gradients and weights of data parallelism.

    parameters: of this rank; slot: seconds of one micro-batch; m: micro-batches. What backward hides (stage 3: forward
    too) costs nothing; one replica sends nothing. layout: one, or arrays of several, with `replicate` 1 (no HSDP).
    others: seconds that gradients of other groups (experts) take on the same links; backward hides them too.
    """
    software, zero = cluster.software, np.asarray(layout.zero_stage)
    replicas = np.asarray(layout.dp) * layout.cp
    bandwidth, beyond = replica_ring(cluster, layout)
    latency = np.where(beyond, software.gradient_step_s, software.collective_s) * latency_steps(cluster, replicas)
    share = parameters * (replicas - 1) / replicas
    each_time = (zero == 3) & ~np.asarray(layout.gather_once)
    rounds = np.where((zero == 2) | each_time, m, 1)
    moved = np.where(
        zero == 0, 4 + 4, np.where(zero == 2, 4 * rounds + 2, np.where(each_time, (2 + 2 + 4) * rounds, 6))
    )
    share_hidden = np.where(zero == 0, software.overlap, software.sharded_overlap)
    hidden = share_hidden * slot * rounds * np.where(each_time, 1, 2 / 3)
    return np.maximum(0, share * moved / bandwidth + latency * rounds + others - hidden)


def with_fields(layout, **changes) -> SimpleNamespace:
    """Return the layout's fields, some of them changed, without a check."""
    fields = {field.name: getattr(layout, field.name) for field in dataclasses.fields(Layout)}
    return SimpleNamespace(**fields | changes)


def expert_gradient_time(cluster: Cluster, layout, m, experts) -> np.ndarray:
    """Return gradient_time of experts before any of it is hidden: their group is the dp x cp / ep ranks with the same
    experts, and its neighbors along dp are ep replicas apart. experts: parameters of this rank, 0 without a mixture.
    """
    ep = np.asarray(layout.ep)
    holders = with_fields(layout, dp=np.asarray(layout.dp) // ep, replicas_apart=ep)
    return np.where(experts > 0, gradient_time(cluster, holders, m, experts, 0.0), 0)


def replica_time(cluster: Cluster, layout, m, dense, experts, slot) -> np.ndarray:
    """gradient_time with several groups that keep the same pieces: of one group; of the all-reduce over the groups, in
    FP32, once a step; and of experts, which all replicas share out. dense, experts: parameters of this rank.

    The all-reduce hides behind as much of the last backward as the group's own traffic and the experts' leave.
    """
    software, copies = cluster.software, np.asarray(layout.replicate)
    group = with_fields(layout, dp=np.asarray(layout.dp) // copies)  # of those that share parameters out
    bandwidth, beyond = ring(cluster, copies, stride_of(layout, "dp", software.order) * group.dp)
    latency = np.where(beyond, software.gradient_step_s, software.collective_s) * latency_steps(cluster, copies)
    moved = 2 * 4 * dense / (group.dp * layout.cp) * (copies - 1) / copies
    once, of_experts = (expert_gradient_time(cluster, layout, rounds, experts) for rounds in (1, m))
    left = software.sharded_overlap * slot * 2 / 3 - gradient_time(cluster, group, 1, dense, 0.0, once)
    summed = np.where(copies > 1, np.maximum(0, moved / bandwidth + latency - np.maximum(0, left)), 0)
    return gradient_time(cluster, group, m, dense, slot, of_experts) + summed


def host_time(cluster: Cluster, layout) -> np.ndarray:
    """Seconds in which the host can launch a layer, forward and backward. Rings of a tensor-parallel group that run
    while a pipeline waits for another node are slow whatever they send, so they count here.
    """
    software = cluster.software
    pipeline = (np.asarray(layout.pp) > 1) & (np.asarray(layout.ranks) > cluster.gpus_per_node)
    return software.layer_host_s + np.where(pipeline, 8 * software.busy_step_s * (np.asarray(layout.tp) - 1), 0)


def transfer_time(config: ModelConfig, cluster: Cluster, layout, seq: int) -> np.ndarray:
    """Seconds a micro-batch that a stage waits for its neighbors, to move hidden states and gradients."""
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


def stall_time(cluster: Cluster, layout, m) -> np.ndarray:
    """Seconds a step that exchanges with neighbors stand still, where the network stalls: in large jobs, and in
    pipelines of tensor-parallel groups of more than two nodes. A rank of a ring has two neighbors, a pipeline's ends
    have one; to fill and to drain it takes pp - 3 exchanges more.
    """
    software, pp, tp = cluster.software, np.asarray(layout.pp), np.asarray(layout.tp)
    large, wide = layout.ranks >= software.stall_nodes * cluster.gpus_per_node, tp > 2 * cluster.gpus_per_node
    beyond = stride_of(layout, "pp", software.order) * pp > cluster.gpus_per_node
    pipeline = (pp > 1) & beyond & (large | wide)
    rings = (pp == 1) & (np.asarray(layout.dp) > 1) & large & ~wide
    exchanges = np.where(pp > 1, m * np.minimum(pp - 1, 2) + np.maximum(0, pp - 3), 2 * m)
    return np.where(pipeline | rings, software.stall_s * exchanges, 0)


def outer_exchanges(config: ModelConfig, cluster: Cluster, layout, tokens) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of tensor parallelism's exchanges for one micro-batch: at the embedding, and at the output layer. With
    sequence parallelism the output layer's input may be gathered a second time.
    """
    tp, again = np.asarray(layout.tp), cluster.software.gathers_again & np.asarray(layout.sequence_parallel)
    ring = np.where(tp > 1, tensor_parallel_time(cluster, layout, 2 * tokens * config.hidden) / 8, 0)
    return 2 * ring, (2 + again) * ring


def step_time(
    config: ModelConfig, cluster: Cluster, layout, m, seq: int, moe: dict | None = None
) -> dict[str, np.ndarray]:
    """Seconds by part; their sum is the step's. m: micro-batches. "launch": what the host takes longer than the GPU."""
    software, tp, pp = cluster.software, np.asarray(layout.tp), np.asarray(layout.pp)
    tokens = layout.micro_batch * seq / np.asarray(layout.cp)
    layer = layer_times(config, cluster, layout, seq, moe)
    # Fused with the loss or not: notebook 12b's loss computes no product twice.
    logit_s = 6 * config.hidden / cluster.head_rate + software.logit_traffic / cluster.memory_bandwidth
    head_s = logit_s * config.vocab * tokens / tp
    layers = rank_layers(config, layout, software.split, head_in_layers(config))
    at_head, other = (
        np.where(is_schedule(layout, "zb-v"), *ends)
        for ends in ((layers["first"], layers["last"]), (layers["last"], layers["first"]))
    )
    fullest = np.maximum(other, layers["second"])
    embedding_rings, head_rings = outer_exchanges(config, cluster, layout, tokens)
    host, of_layer = host_time(cluster, layout), sum(layer.values())
    of_batches = np.where(is_schedule(layout, "dualpipe"), 1 / 2, 1)  # with the head on a rank at an end
    outside = embedding_rings + head_s + head_rings  # of one micro-batch, on all ranks
    head_s, head_rings = of_batches * head_s, of_batches * head_rings
    of_head = np.maximum(at_head * of_layer + head_s + head_rings, at_head * host)
    head_is_top = of_head > fullest * np.maximum(of_layer, host)
    n = np.where((pp == 1) | ~head_is_top, fullest, at_head)
    has_head = (pp == 1) | head_is_top
    parts = {name: n * each for name, each in layer.items()}
    parts["output layer"] = np.where(has_head, head_s, 0)
    parts["tensor parallel"] = parts["tensor parallel"] + np.where(has_head, head_rings, 0)
    parts["tensor parallel"] = parts["tensor parallel"] + np.where(pp == 1, embedding_rings, 0)
    parts["launch"] = np.maximum(0, n * host - sum(parts.values()))
    parts["transfers"] = moving = transfer_time(config, cluster, layout, seq)
    slot = sum(parts.values())
    whole = np.maximum(config.layers * of_layer + outside, config.layers * host)
    whole = whole + pp * moving
    parts = {name: m * part for name, part in parts.items()}
    parts["stalls"] = stall_time(cluster, layout, m)
    parts["bubble"] = np.where(pp > 1, bubble_share(layout, m) * np.maximum(0, whole - slot), 0)
    dense, experts = stage_parameters(config, layout, moe, config.layers / pp, 1 / pp, (not config.tied) / pp)
    copies = np.where(is_schedule(layout, "dualpipe"), 2, 1)
    of_experts = expert_gradient_time(cluster, layout, m, copies * experts)
    # interleaved chunks: gradients that are sent once per step are complete while pp micro-batches finish the others
    once = (np.asarray(layout.zero_stage) < 2) & is_schedule(layout, "interleaved")
    last_slot = np.where(once, np.minimum(pp, m), 1) * slot
    parts["gradients"] = gradient_time(cluster, layout, m, copies * dense, last_slot, of_experts)
    if np.any(replicated := np.asarray(layout.replicate) > 1):
        in_groups = replica_time(cluster, layout, m, dense, experts, slot)
        parts["gradients"] = np.where(replicated, in_groups, parts["gradients"])
    sharded = np.asarray(layout.zero_stage) > 0
    # AdamW: weights and two states in FP32, read and written; gradients in FP32 read, weights in BF16 written: 30 bytes
    parts["optimizer"] = 30 * own_share(layout, copies * dense, copies * experts, sharded) / cluster.memory_bandwidth
    parts["step"] = software.step_host_s + 0 * slot
    return parts
