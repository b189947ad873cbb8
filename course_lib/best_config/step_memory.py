"""Bytes of a training step on the fullest GPU, by part: for one layout, or for arrays of layouts at once.

    parameters, gradients, optimizer states    of a stage: N bytes per parameter each, sharded by ZeRO over dp x cp
                                               (zero3 with replicas: over the ranks of one replica)
    activations    layers x micro-batches in flight x tokens x 2 bytes x elements of kept_elements
    logits         of the last stage; with a loss that is fused with the head, its chunk and gradients
    buffers        gathered hidden states that wait for the GPU while the host runs ahead of it

Korthikanti et al. 2022, section 4; Rajbhandari et al. 2020, section 5.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from course_lib.best_config.clusters import Cluster
from course_lib.best_config.planned_config import expert_layers, latent_elements, layer_parts
from course_lib.best_config.software import Software
from course_lib.best_config.stage_loads import is_schedule, later_in_flight, rank_layers
from course_lib.best_config.tables import Layouts
from course_lib.single_gpu.config import ModelConfig


def expert_sizes(config: ModelConfig, moe: dict | None) -> tuple[int, int, int]:
    """Return the parameters of a layer's MLP: the ones that a token uses, that expert parallelism splits, and the ones
    that it replicates (router, shared expert). moe: arguments of apply_moe.
    """
    h = config.hidden
    if moe is None:
        return 3 * h * config.ffn_hidden, 0, 3 * h * config.ffn_hidden
    expert = 3 * h * (moe.get("ffn_hidden") or config.ffn_hidden)
    replicated = h * moe["experts"] + expert * moe.get("shared", 0)
    return moe["top_k"] * expert + replicated, moe["experts"] * expert, replicated


def head_in_layers(config: ModelConfig) -> float:
    """Return the FLOPs of the output layer over the FLOPs of a layer's matrices, as nanotron counts them."""
    return config.vocab / (4 * config.attention_width + 3 * config.ffn_hidden)


def stage_parameters(
    config: ModelConfig, layout, moe: dict | None, layers, embedding, head
) -> tuple[np.ndarray, np.ndarray]:
    """Return the parameters on a GPU of a stage with so many layers: the parameters that all replicas have, and those
    of experts, which dp x cp / ep ranks have. embedding, head: the share of each that the stage has, 0 to 1.
    """
    parts, tp = layer_parts(config), layout.tp
    _, experts, replicated = expert_sizes(config, moe)
    kv = parts["kv"] / np.minimum(tp, config.kv_heads)
    layer = parts["q_o"] / tp + kv + replicated / tp + parts["norms"] + parts["latent"]
    n = expert_layers(config, layers)
    dense = layers * layer + (1 * embedding + 1 * head) * parts["embedding"] / tp + head * parts["final_norm"]
    dense = dense + (layers - n) * (parts["mlp"] - replicated) / tp + embedding * parts["positions"]
    return dense, n * experts / np.asarray(layout.ep) / tp


def parameters_per_rank(layout, dense, experts, sharded) -> np.ndarray:
    """Return how many of these parameters a rank has, given which layouts shard them (`sharded`). ZeRO shards the dense
    parameters over the ranks of one replica (`replicate`), and the experts over all ranks with the same experts.
    """
    replicas = np.asarray(layout.dp) * layout.cp
    return np.where(sharded, dense * layout.replicate / replicas + experts * layout.ep / replicas, dense + experts)


# exercise 11.3
def kept_elements(config: ModelConfig, cluster: Cluster, layout, moe: dict | None = None) -> np.ndarray:
    """Return the elements per token that a layer keeps on one GPU for backward if nothing is recomputed.

    Outside the matrices that tp splits: `kept_outside_tp` times the hidden size, which sequence parallelism splits over
    tp. Inside, on each of tp GPUs: its K and V heads, one each if tp is larger than the number of heads; `kept_hidden`
    - `kept_outside_tp` - 2 times the width of attention; `kept_ffn` times the width of the MLP that a token uses.
    """
    software, tp, h = cluster.software, layout.tp, config.hidden
    outside = np.where(layout.sequence_parallel, tp, 1)
    width = config.ffn_hidden if moe is None else expert_sizes(config, moe)[0] / (3 * h)
    outside_tp = software.kept_outside_tp * h / outside
    keys = 2 * config.kv_heads * config.head_dim * np.maximum(1, tp / config.kv_heads)  # a K/V head is never split
    others = software.kept_hidden - software.kept_outside_tp - 2  # tensors of all heads
    inside = others * config.attention_width + keys + software.kept_ffn * width
    return outside_tp + inside / tp


def routed_elements(config: ModelConfig, cluster: Cluster, moe: dict | None) -> float:
    """Return the elements per token, on each tensor-parallel rank, that a mixture keeps beyond an MLP as wide as all
    that a token uses: `kept_rows` of h for each choice, and a copy of x, since the router has it in FP32.
    """
    return 0 if moe is None else (cluster.software.kept_rows * moe["top_k"] + 1) * config.hidden


def weighting_bytes(config: ModelConfig, moe: dict | None) -> int:
    """Return the bytes per token, on each tensor-parallel rank, that backward needs in one mixture at a time to
    multiply the experts' results by their gates. Each choice has a row of h: its gradient, the gradient times the gates
    and times the result, in FP32; and the gradient of the result in BF16.
    """
    return 0 if moe is None else (3 * 4 + 2) * moe["top_k"] * config.hidden


def fp8_saved(config: ModelConfig, cluster: Cluster, layout, moe: dict | None = None) -> np.ndarray:
    """Return the elements of 16 bits per token by which FP8 matmuls reduce a layer's saved activations.

    The inputs of its matrices take one byte: the norms' outputs and the input of the last matrix. Attention's output
    is kept in both forms, since attention's backward needs it in 16 bits. Experts stay in BF16 (notebook 14b).
    """
    if cluster.software.matmul_dtype != "fp8" or not cluster.software.fp8_inputs:
        return np.asarray(0.0)
    norms, width = (1.0, config.ffn_hidden) if moe is None else (0.5, 0)
    outside = np.where(layout.sequence_parallel, layout.tp, 1)
    return norms * config.hidden / outside + (width - config.attention_width) / 2 / layout.tp


def chunk_rows(tokens, hidden: int, vocab) -> np.ndarray:
    """Return `chunk_size` of notebook 12b's loss without logits, for arrays: rows of logits in memory at a time."""
    like_hidden = 2 ** np.ceil(np.log2(np.ceil(tokens / np.ceil(vocab / hidden))))
    like_gradient = 2 ** np.floor(np.log2(max(hidden // 2, 1)))
    return np.minimum(np.maximum(like_hidden, like_gradient), tokens)


def loss_bytes(config: ModelConfig, cluster: Cluster, layout, tokens) -> np.ndarray:
    """Return the bytes of the loss at the peak: of logits, their copies and gradients; or, with `fused_loss`, of the
    gradients of hidden states (16 bits) and of the head (FP32), plus the larger of a chunk of logits, in forward, and
    the head's gradient in 16 bits, in backward.
    """
    software, h, vocab = cluster.software, config.hidden, config.vocab / np.asarray(layout.tp)
    if not software.fused_loss:
        return tokens * vocab * np.where(np.asarray(layout.pp) == 1, *software.logit_bytes)
    return 2 * tokens * h + 4 * vocab * h + 2 * vocab * np.maximum(chunk_rows(tokens, h, vocab), h)


def layer_activations(
    config: ModelConfig, cluster: Cluster, layout, tokens, seq: int, moe: dict | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes that a layer keeps for each micro-batch in flight, and the bytes that exist once, while one
    layer is recomputed. tokens: of a micro-batch on one rank.
    """
    software, tp, h = cluster.software, np.asarray(layout.tp), config.hidden
    elements = (
        kept_elements(config, cluster, layout, moe) + routed_elements(config, cluster, moe) + latent_elements(config)
    )
    everything = 2 * tokens * (elements - fp8_saved(config, cluster, layout, moe))
    scores = software.score_bytes * config.heads / tp * tokens * seq
    recompute = np.asarray(layout.recompute)
    full, selective = recompute == "full", recompute == "selective"
    part = np.where(selective, software.selective_keeps, 1.0)
    inputs = 2 * tokens * h / np.where(layout.sequence_parallel, tp, 1)  # of a layer, from which it is recomputed
    saved = np.where(full, inputs, part * everything + np.where(selective, 0, scores))
    recomputed = np.where(full, everything, (1 - part) * everything) + np.where(full | selective, scores, 0)
    return saved, recomputed


class Sharding(NamedTuple):
    """The parts of the memory that ZeRO shards in each layout, as boolean arrays."""

    between_layers: np.ndarray  # stage 3 that gathers each layer; if it gathers once per step, as a stage's weights
    masters: np.ndarray  # FSDP's weights are FP32 shards; the gathered weights are in BF16
    gradients: np.ndarray
    states: np.ndarray

    @classmethod
    def of(cls, software: Software, layout) -> Sharding:
        """Return the sharded parts of a layout, or of arrays of layouts."""
        zero = np.asarray(layout.zero_stage)
        between_layers = (zero == 3) & ~np.asarray(layout.gather_once)
        masters = (zero >= 2) & (software.weight_bytes > 2)
        return cls(between_layers, masters, (zero == 2) | between_layers, zero > 0)


def step_memory(
    config: ModelConfig, cluster: Cluster, layout: Layouts, m, seq: int, moe: dict | None = None, host_ahead=True
) -> dict[str, np.ndarray]:
    """Return the bytes by part on the GPU that needs the most. m: micro-batches; host_ahead: layouts in which the host
    runs ahead of the GPU.
    """
    software, tp, pp = cluster.software, np.asarray(layout.tp), np.asarray(layout.pp)
    tokens = layout.micro_batch * seq / np.asarray(layout.cp)
    layers = rank_layers(config, layout, software.split, head_in_layers(config))
    copies = np.where(is_schedule(layout, "dualpipe"), 2, 1)
    both_ends = (pp == 1) | is_schedule(layout, "zb-v", "dualpipe")  # the first rank has the last stage too
    saved, recomputed = layer_activations(config, cluster, layout, tokens, seq, moe)
    sharding = Sharding.of(software, layout)
    weighting = tokens * weighting_bytes(config, moe)  # after the logits are freed
    one_layer = np.add(*stage_parameters(config, layout, moe, 1, 0, 0))
    fp8_copies = software.fp8_weight_bytes * one_layer * (software.matmul_dtype == "fp8")
    gathered = np.where(host_ahead & (tp > 1), 2 * tokens * config.hidden, 0)
    logits = loss_bytes(config, cluster, layout, tokens)

    def stage_memory(stage: str, later) -> dict[str, np.ndarray]:
        flight = later_in_flight(layout, m, later)
        n, exists = layers[stage], layers[stage] > 0 if stage == "second" else True
        head = both_ends & ~(config.tied & (pp == 1)) if stage == "first" else (pp > 1) & (stage == "last")
        # DualPipe's first rank has the first stage and the last: two stages, but one embedding and one head
        ends = (stage == "first") / copies, head / copies
        dense, experts = stage_parameters(config, layout, moe, n, *ends)
        of_head = np.where(both_ends | (stage == "last"), logits, 0)

        def per_rank(sharded: np.ndarray) -> np.ndarray:
            return copies * parameters_per_rank(layout, dense, experts, sharded)

        gathered_weights = np.where(sharding.masters, dense + experts, 0)
        gathered_weights = np.where(sharding.between_layers, software.gathered_layers * one_layer, gathered_weights)
        weights = per_rank(sharding.between_layers | sharding.masters)
        per_micro_batch, once = software.held
        parts = {
            "parameters": weights * software.weight_bytes + n * fp8_copies,
            "gradients": per_rank(sharding.gradients) * software.gradient_bytes,
            "optimizer states": per_rank(sharding.states) * software.optimizer_bytes,
            "activations": flight * n * saved + recomputed + np.maximum(0, weighting - of_head),
            "logits": of_head,
            "buffers": n * gathered * (per_micro_batch * flight + once),
            "gathered weights": 2 * gathered_weights,
            "reserved": software.reserved_bytes + 0 * tp,
        }
        return {name: np.where(exists, part, 0) for name, part in parts.items()}

    stages = [stage_memory(*stage) for stage in (("first", 0), ("second", 1), ("last", pp - 1))]
    return fullest_stage(stages, tp + 0 * np.asarray(m))


def fullest_stage(stages: list[dict[str, np.ndarray]], like: np.ndarray) -> dict[str, np.ndarray]:
    """Return the parts of the stage with the largest sum, for each layout. like: an array of the result's shape."""
    totals = np.stack([np.broadcast_arrays(sum(parts.values()), like)[0] for parts in stages])
    fullest = totals.argmax(0)
    return {name: np.choose(fullest, [parts[name] + 0 * totals[0] for parts in stages]) for name in stages[0]}
