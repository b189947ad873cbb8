"""Seconds that a mixture's experts add to a layer: uneven loads, and the exchange of tokens (notebook 08).

    dispatch    rows of h and the gates of a rank's experts, once to each rank that has experts of the token
    combine     rows of h back
    backward    the gradients of both; with full recomputation the dispatch a second time, but not the combine

All tensor-parallel ranks of an expert exchange all tokens of their group, with sequence parallelism too: the sequence
is gathered first. The shared expert's matmuls hide the dispatch, forward and backward. In notebook 10's program a row
is sent directly to its rank; other programs have two hops, or hide the exchange behind another micro-batch
(`Software`). All ranks wait for the busiest one (`fullest_load`). Lepikhin et al. 2020 (GShard); DeepSeek-V3 2024,
sections 2.1.2, 3.2.1 and 3.2.2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from statistics import NormalDist

import numpy as np

from course_lib.best_config.clusters import Cluster, all_to_all_time, in_node, stride_of
from course_lib.single_gpu.config import ModelConfig


@functools.cache
def limited_ranks(experts: int, top_k: int, nodes: int, limit: int, ep: int) -> float:
    """Return the mean number of ep ranks on which a token has experts, if its router restricts it to `limit` of `nodes`
    nodes. Counted over 4,096 tokens with random scores, by the router's `within_nodes`.
    """
    import torch

    from course_lib.expert_parallel.router import within_nodes

    scores = torch.rand(4096, experts, generator=torch.Generator().manual_seed(0))
    choices = within_nodes(scores, nodes, limit, top_k).topk(top_k, dim=-1).indices
    return torch.zeros(len(scores), ep).scatter_(1, choices * ep // experts, 1.0).sum(1).mean().item()


def ranks_per_token(moe: dict, ep) -> np.ndarray:
    """Return the mean number of ep ranks on which a token has experts, if all experts are equally likely. The token is
    sent once to each of these ranks. moe: arguments of apply_moe, the node limit included.
    """
    experts, top_k, nodes = moe["experts"], moe["top_k"], moe.get("nodes", 1)
    if (limit := moe.get("node_limit", 1)) < nodes:
        return by_size(ep, lambda size: limited_ranks(experts, top_k, nodes, limit, size))
    elsewhere = experts - experts / ep
    none_there = np.prod([np.maximum(0, elsewhere - i) / (experts - i) for i in range(top_k)], axis=0)
    return ep * (1 - none_there)


def by_size(sizes, function: Callable[[int], float]) -> np.ndarray:
    """Return `function` of each size in an array of a few different sizes, or of one size."""
    different, row = np.unique(sizes, return_inverse=True)
    return np.array([function(size) for size in different.tolist()])[row].reshape(np.shape(sizes))


def largest_of(n: int) -> float:
    """Return the mean of the largest of n standard normal variables: about the quantile (n - 3/8) / (n + 1/4) (Blom
    1958).
    """
    return NormalDist().inv_cdf((n - 3 / 8) / (n + 1 / 4))


def fullest_load(cluster: Cluster, moe: dict, ep) -> np.ndarray:
    """Return the load of the fullest of ep ranks over the mean: 1 without expert parallelism.

    The loads of experts scatter by `expert_spread` of their mean, so the loads of ranks with E / ep experts each
    scatter by sqrt(ep / E) of that.
    """
    spread = cluster.software.expert_spread * np.sqrt(ep / moe["experts"])
    return 1 + spread * by_size(ep, largest_of)


def expert_matmul_time(config: ModelConfig, cluster: Cluster, layout, tokens, moe: dict, each: int) -> np.ndarray:
    """Return the seconds in which `each` experts process a rank's tokens, forward and backward, with many rows."""
    flops = 6 * tokens * each * 3 * config.hidden * (moe.get("ffn_hidden") or config.ffn_hidden) / np.asarray(layout.tp)
    return flops / cluster.matmul_rate


def uneven_time(config: ModelConfig, cluster: Cluster, layout, tokens, moe: dict) -> np.ndarray:
    """Return the seconds by which the routed experts' matmuls of a layer take longer than one MLP of the same FLOPs: an
    expert has fewer rows, its share of the tokens of ep ranks, and the fullest rank has more rows than the others.
    """
    half_rows, ep = cluster.software.half_rows, np.asarray(layout.ep)
    rows = tokens * moe["top_k"] * ep / moe["experts"]
    even = expert_matmul_time(config, cluster, layout, tokens, moe, moe["top_k"])
    return even * (fullest_load(cluster, moe, ep) - 1 + half_rows * (1 / rows - 1 / tokens))


def one_way_time(config: ModelConfig, cluster: Cluster, layout, tokens, moe: dict, gates: bool) -> np.ndarray:
    """Return the seconds of one way of the exchange: dispatch, with gates, or combine. tokens: of a rank.

    With two hops a token is sent once to each node that has its experts, through its GPU's card, and then to the ranks
    with the experts over the links of the node.
    """
    software, ep = cluster.software, np.asarray(layout.ep)
    stride = stride_of(layout, "dp", software.order)  # ep is the inner part of dp
    inside = in_node(cluster, ep, stride)
    latency = np.where(inside < ep, software.ring_step_s, software.collective_s)

    def row_bytes(ranks) -> np.ndarray:
        return 2 * config.hidden + gates * 4 * moe["experts"] / ranks

    rows = tokens * np.minimum(1, ranks_per_token(moe, ep) / ep * fullest_load(cluster, moe, ep))  # to each rank
    once = latency + all_to_all_time(cluster, ep, stride, rows * row_bytes(ep))
    if software.hops == 1:
        return once
    nodes = ep // inside
    crossing = tokens * ranks_per_token(moe, nodes) / nodes * row_bytes(nodes)  # bytes to each node
    across = latency + all_to_all_time(cluster, nodes, cluster.gpus_per_node, crossing)
    within = software.collective_s + all_to_all_time(cluster, inside, stride, nodes * rows * row_bytes(ep))
    return np.where((inside > 1) & (nodes > 1), across + within, once)


def exchange_time(config: ModelConfig, cluster: Cluster, layout, tokens, moe: dict) -> np.ndarray:
    """Return the seconds of a layer in which a rank waits for the exchange of tokens, forward and backward. One small
    exchange of sizes comes before each dispatch.
    """
    dispatch, combine = (one_way_time(config, cluster, layout, tokens, moe, gates) for gates in (True, False))
    sizes = one_way_time(config, cluster, layout, 0, moe, True)
    forwards = np.where(np.asarray(layout.recompute) == "full", 2, 1)
    shared = expert_matmul_time(config, cluster, layout, tokens, moe, moe.get("shared", 0))
    shared = shared * (1 + cluster.software.half_rows / tokens)
    exposed = forwards * np.maximum(0, dispatch - shared / 3) + np.maximum(0, dispatch - shared * 2 / 3)
    return np.where(np.asarray(layout.ep) > 1, forwards * sizes + exposed + 2 * combine, 0)
