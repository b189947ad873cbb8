"""Bytes of a training step on the fullest GPU, by part: for one layout, or for arrays of them at once.

    parameters, gradients, optimizer states    of a stage: N bytes a parameter each, split by ZeRO over dp x cp
                                               (zero3 with replicas: over the ranks of one of them)
    activations    layers x micro-batches in flight x tokens x 2 bytes x elements of kept_elements
    logits         of the last stage; with a loss that is fused with the head, its chunk and gradients
    buffers        gathered hidden states that wait for the GPU, while the host runs ahead of it

Korthikanti et al. 2022, section 4; Rajbhandari et al. 2020, section 5.
"""

from __future__ import annotations

import numpy as np

from course_lib.best_config.clusters import Cluster
from course_lib.best_config.planned_config import expert_layers, latent_elements, layer_parts
from course_lib.best_config.stage_loads import is_schedule, later_in_flight, rank_layers
from course_lib.single_gpu.model import ModelConfig


def expert_sizes(config: ModelConfig, moe: dict | None) -> tuple[int, int, int]:
    """Parameters of a layer's MLP: those that a token uses, those that expert parallelism splits, and those it leaves
    whole (router, shared expert). moe: arguments of apply_moe.
    """
    h = config.hidden
    if moe is None:
        return 3 * h * config.ffn_hidden, 0, 3 * h * config.ffn_hidden
    expert = 3 * h * (moe.get("ffn_hidden") or config.ffn_hidden)
    whole = h * moe["experts"] + expert * moe.get("shared", 0)
    return moe["top_k"] * expert + whole, moe["experts"] * expert, whole


def head_in_layers(config: ModelConfig) -> float:
    """FLOPs of the output layer over those of a layer's matrices, as nanotron counts them."""
    return config.vocab / (4 * config.attention_width + 3 * config.ffn_hidden)


def stage_parameters(
    config: ModelConfig, layout, moe: dict | None, layers, embedding, head
) -> tuple[np.ndarray, np.ndarray]:
    """Parameters on a GPU of a stage with so many layers: those that all replicas have, and those of experts, which
    dp x cp / ep ranks have. embedding, head: whether the stage has them (0 or 1).
    """
    parts, tp = layer_parts(config), layout.tp
    _, experts, whole = expert_sizes(config, moe)
    kv = parts["kv"] / np.minimum(tp, config.kv_heads)
    layer = parts["q_o"] / tp + kv + whole / tp + parts["norms"] + parts["latent"]
    n = expert_layers(config, layers)
    dense = layers * layer + (1 * embedding + 1 * head) * parts["embedding"] / tp + head * parts["final_norm"]
    dense = dense + (layers - n) * (parts["mlp"] - whole) / tp + embedding * parts["positions"]
    return dense, n * experts / np.asarray(layout.ep) / tp


def own_share(layout, dense, experts, sharded) -> np.ndarray:
    """What of these parameters ZeRO leaves this rank, where `sharded`: each kind is divided by those who share it, of
    the dense ones one group's ranks, where there are several that keep the same pieces (`replicate`).
    """
    replicas = np.asarray(layout.dp) * layout.cp
    return np.where(sharded, dense * layout.replicate / replicas + experts * layout.ep / replicas, dense + experts)


# exercise 11.3
def kept_elements(config: ModelConfig, cluster: Cluster, layout, moe: dict | None = None) -> np.ndarray:
    """Return the elements that a layer keeps for backward if nothing is recomputed, on one GPU, for each of its tokens.

    Outside the matrices that tp splits: `kept_outside_tp` times the hidden size, which sequence parallelism splits over tp.
    Inside, on each of tp GPUs: its K and V heads, one each if tp is larger than the number of heads; `kept_hidden` -
    `kept_outside_tp` - 2 times the width of attention; `kept_ffn` times the MLP's width, of what a token uses.
    """
    software, tp, h = cluster.software, layout.tp, config.hidden
    outside = np.where(layout.sequence_parallel, tp, 1)
    width = config.ffn_hidden if moe is None else expert_sizes(config, moe)[0] / (3 * h)
    whole = software.kept_outside_tp * h / outside
    keys = 2 * config.kv_heads * config.head_dim * np.maximum(1, tp / config.kv_heads)  # a K/V head is never split
    others = software.kept_hidden - software.kept_outside_tp - 2  # tensors of all heads
    inside = others * config.attention_width + keys + software.kept_ffn * width
    return whole + inside / tp


def routed_elements(config: ModelConfig, cluster: Cluster, moe: dict | None) -> float:
    """Elements that a mixture keeps more than an MLP as wide as all that a token goes through, for each token and on
    each tensor-parallel rank: each choice's `kept_rows` of h; and x once more, since the router has it in FP32.
    """
    return 0 if moe is None else (cluster.software.kept_rows * moe["top_k"] + 1) * config.hidden


def weighting_bytes(config: ModelConfig, moe: dict | None) -> int:
    """Bytes for each token and on each tensor-parallel rank that backward needs in one mixture at a time, where the
    experts' results are multiplied by their gates. For each choice's row of h: its gradient, and the products of that
    with the gates and with the result, in FP32; and the gradient of the result in BF16.
    """
    return 0 if moe is None else (3 * 4 + 2) * moe["top_k"] * config.hidden


def fp8_saved(config: ModelConfig, cluster: Cluster, layout, moe: dict | None = None) -> np.ndarray:
    """Return the elements of 16 bits that a layer keeps less, for each of its tokens, with products in FP8.

    The inputs of its matrices take one byte: the norms' outputs and the input of the last matrix. Attention's output
    is kept in both forms, since attention's backward needs it in 16 bits. Experts stay in BF16 (notebook 14b).
    """
    if cluster.software.products != "fp8" or not cluster.software.fp8_inputs:
        return np.asarray(0.0)
    norms, width = (1.0, config.ffn_hidden) if moe is None else (0.5, 0)
    outside = np.where(layout.sequence_parallel, layout.tp, 1)
    return norms * config.hidden / outside + (width - config.attention_width) / 2 / layout.tp


def chunk_rows(tokens, hidden: int, vocab) -> np.ndarray:
    """`chunk_size` of notebook 12b's loss without logits, for arrays: rows of logits that exist at a time."""
    like_hidden = 2 ** np.ceil(np.log2(np.ceil(tokens / np.ceil(vocab / hidden))))
    like_gradient = 2 ** np.floor(np.log2(max(hidden // 2, 1)))
    return np.minimum(np.maximum(like_hidden, like_gradient), tokens)


def loss_bytes(config: ModelConfig, cluster: Cluster, layout, tokens) -> np.ndarray:
    """Return the bytes of the loss at the peak: of logits, their copies and gradients; or, with `fused_loss`, of the
    gradients of hidden states (16 bits) and of the head (FP32), and the larger of a chunk of logits, in forward, and
    the head's gradient in 16 bits, in backward.
    """
    software, h, vocab = cluster.software, config.hidden, config.vocab / np.asarray(layout.tp)
    if not software.fused_loss:
        return tokens * vocab * np.where(np.asarray(layout.pp) == 1, *software.logit_bytes)
    return 2 * tokens * h + 4 * vocab * h + 2 * vocab * np.maximum(chunk_rows(tokens, h, vocab), h)


def step_memory(
    config: ModelConfig, cluster: Cluster, layout, m, seq: int, moe: dict | None = None, ahead=True
) -> dict[str, np.ndarray]:
    """Bytes by part on the GPU that needs most; m: micro-batches; ahead: whether the host runs ahead of the GPU."""
    software, tp, pp, h = cluster.software, np.asarray(layout.tp), np.asarray(layout.pp), config.hidden
    tokens = layout.micro_batch * seq / np.asarray(layout.cp)
    layers = rank_layers(config, layout, software.split, head_in_layers(config))
    copies = np.where(is_schedule(layout, "dualpipe"), 2, 1)
    both_ends = (pp == 1) | is_schedule(layout, "zb-v", "dualpipe")  # the first rank has the last stage too
    elements = (
        kept_elements(config, cluster, layout, moe) + routed_elements(config, cluster, moe) + latent_elements(config)
    )
    layer_kept = 2 * tokens * (elements - fp8_saved(config, cluster, layout, moe))
    scores = software.score_bytes * config.heads / tp * tokens * seq
    recompute, zero = np.asarray(layout.recompute), np.asarray(layout.zero_stage)
    full, selective = recompute == "full", recompute == "selective"
    part = np.where(selective, software.selective_keeps, 1.0)
    inputs = 2 * tokens * h / np.where(layout.sequence_parallel, tp, 1)  # of a layer, from which it is computed again
    kept = np.where(full, inputs, part * layer_kept + np.where(selective, 0, scores))
    again = np.where(full, layer_kept, (1 - part) * layer_kept) + np.where(full | selective, scores, 0)
    sharded = (zero == 3) & ~np.asarray(layout.gather_once)  # between the layers; else as a stage's weights
    weighting = tokens * weighting_bytes(config, moe)  # after the logits are freed
    masters = (zero >= 2) & (software.weight_bytes > 2)  # FSDP's weights are FP32 shards; gathered ones are in BF16
    one_layer = sum(stage_parameters(config, layout, moe, 1, 0, 0))
    fp8_copies = software.fp8_weight_bytes * one_layer * (software.products == "fp8")
    gathered_layer = software.gathered_layers * one_layer
    each, once = software.held
    gathered = np.where(ahead & (tp > 1), 2 * tokens * h, 0)
    logits = loss_bytes(config, cluster, layout, tokens)
    divided = {"weights": sharded | masters, "gradients": (zero == 2) | sharded, "states": zero > 0}
    found = {}
    for stage, later in (("first", 0), ("second", 1), ("last", pp - 1)):
        flight = later_in_flight(layout, m, later)
        n, there = layers[stage], layers[stage] > 0 if stage == "second" else True
        head = both_ends & ~(config.tied & (pp == 1)) if stage == "first" else (pp > 1) & (stage == "last")
        # DualPipe's first rank has the first stage and the last: two stages, but one embedding and one head
        ends = (stage == "first") / copies, head / copies
        dense, experts = stage_parameters(config, layout, moe, n, *ends)
        of_head = np.where(both_ends | (stage == "last"), logits, 0)
        own = {share: copies * own_share(layout, dense, experts, where) for share, where in divided.items()}
        found[stage] = {
            "parameters": own["weights"] * software.weight_bytes + n * fp8_copies,
            "gradients": own["gradients"] * software.gradient_bytes,
            "optimizer states": own["states"] * software.optimizer_bytes,
            "activations": flight * n * kept + again + np.maximum(0, weighting - of_head),
            "logits": of_head,
            "buffers": n * gathered * (each * flight + once),
            "gathered weights": 2 * np.where(sharded, gathered_layer, np.where(masters, dense + experts, 0)),
            "reserved": software.reserved_bytes + 0 * tp,
        }
        found[stage] = {name: np.where(there, part, 0) for name, part in found[stage].items()}
    totals = np.stack([np.broadcast_arrays(sum(parts.values()), tp + 0 * np.asarray(m))[0] for parts in found.values()])
    fullest = totals.argmax(0)
    return {
        name: np.choose(fullest, [found[stage][name] + 0 * totals[0] for stage in found]) for name in found["first"]
    }
