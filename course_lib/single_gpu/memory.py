"""The bytes that a training run keeps, computed before anything runs: parameters, gradients, optimizer states,
activations.

Symbols: b batch, s sequence, h hidden, a heads, d head size, f feed-forward size, v vocabulary, L layers. All results
are bytes on one GPU; the arguments `tp`, `sp`, `cp`, `pp`, `ep`, `dp` and `zero_stage` say how the work is split;
later notebooks derive the effect of each.

Rajbhandari et al. 2020 (ZeRO, §3); Korthikanti et al. 2022 (activation recomputation, §4); The Ultra-Scale Playbook
(2025), chapter 2.
"""

from __future__ import annotations

from course_lib.single_gpu.config import ModelConfig


# exercise 01.4
def parameter_parts(config: ModelConfig) -> dict[str, int]:
    """Return the number of parameters of each part of a `Transformer`.

    Of one layer: q_o (both projections), kv (both), mlp, norms (both); of the model: embedding, head (0 if tied),
    final_norm. Biases, and norms of q and k, are not counted.
    """
    h = config.hidden
    return {
        "q_o": 2 * h * config.heads * config.head_dim,
        "kv": 2 * h * config.kv_heads * config.head_dim,
        "mlp": 3 * h * config.ffn_hidden,
        "norms": 2 * h,
        "embedding": config.vocab * h,
        "head": 0 if config.tied else config.vocab * h,
        "final_norm": h,
    }


def param_count(config: ModelConfig, tp: int = 1, pp: int = 1, ep: int = 1) -> int:
    """Return the number of parameters on the fullest GPU; with all degrees 1, of the model.

    TP splits matrices and leaves norms unsplit; K/V heads are split down to one head, then replicated. PP gives each
    stage ceil(L / pp) layers; the first stage has the embedding, the last one norm and head (a copy of the embedding if
    tied). EP splits the MLPs (the experts).
    """
    parts = parameter_parts(config)
    kv_split = min(tp, config.kv_heads)
    layer = parts["q_o"] // tp + parts["kv"] // kv_split + parts["mlp"] // (tp * ep) + parts["norms"]
    if pp == 1:
        return config.layers * layer + (parts["embedding"] + parts["head"]) // tp + parts["final_norm"]
    ends = max(parts["embedding"] // tp, (parts["head"] or parts["embedding"]) // tp + parts["final_norm"])
    return -(-config.layers // pp) * layer + ends


def gpt_param_count(hidden: int, layers: int, vocab: int) -> int:
    """Return the number of parameters of a GPT: N = hv + L(12h² + 13h) + 2h, with biases, a tied head and no positions
    (the playbook, chapter 2).
    """
    return hidden * vocab + layers * (12 * hidden**2 + 13 * hidden) + 2 * hidden


# policy: bytes per parameter of (weights, gradients, optimizer states with master weights)
POLICIES = {
    "fp32": (4, 4, 8),
    "bf16": (2, 2, 12),
    "bf16, fp32 gradients": (2, 6, 12),
    "bf16, no master weights": (2, 2, 8),
}


# exercise 01.5
def state_bytes(params: int, policy: str = "bf16", zero_stage: int = 0, dp: int = 1) -> dict[str, float]:
    """Return the bytes of parameters, gradients and optimizer states on one GPU, by these names and in this order.

    params: the parameters that the GPU holds without ZeRO. ZeRO splits over `dp` GPUs: from stage 1 on the optimizer
    states, from 2 on the gradients too, from 3 on the parameters too. Raises KeyError for a policy that is not in
    POLICIES. Rajbhandari et al. 2020, §3.1 and §5.
    """
    weights, gradients, optimizer = POLICIES[policy]
    return {
        "parameters": params * weights / (dp if zero_stage >= 3 else 1),
        "gradients": params * gradients / (dp if zero_stage >= 2 else 1),
        "optimizer states": params * optimizer / (dp if zero_stage >= 1 else 1),
    }


# exercise 01.7
def gpt_layer_bytes(hidden: int, heads: int, seq: int, recompute: str = "none") -> int:
    """Return the bytes per token that one GPT layer keeps in 16-bit precision; seq: tokens that a token can see.

    "none": 34h + 5as; "selective": 34h; "full": 2h. Korthikanti et al. 2022, §4 and table 2.
    """
    if recompute not in ("none", "selective", "full"):
        raise ValueError(f"recompute={recompute!r}: it is none, selective or full")
    if recompute == "full":
        return 2 * hidden
    scores = 5 * heads * seq if recompute == "none" else 0
    return 34 * hidden + scores


def gpt_activation_bytes(
    layers: int,
    hidden: int,
    heads: int,
    batch: int,
    seq: int,
    recompute: str = "none",
    tp: int = 1,
    sp: bool = False,
    cp: int = 1,
) -> float:
    """Return the activation bytes of a GPT in 16-bit precision: L·sbh(34 + 5as/h); selective 34, full 2 (Korthikanti et
    al. 2022, §4 and table 2).

    TP leaves 10 of the 34 unsplit (norms, dropout, layer inputs) and splits 24 and the scores; SP splits the 10 as
    well; CP splits the sequence. PP changes nothing: a stage has 1/pp of the layers and pp micro-batches in flight.
    """
    layer = gpt_layer_bytes(hidden, heads, seq, recompute)
    unsplit = 2 * hidden if recompute == "full" else 10 * hidden  # outside of the matrices that TP splits
    return layers * batch * seq / cp * (unsplit / (tp if sp else 1) + (layer - unsplit) / tp)


# exercise 01.8
def layer_activations(
    config: ModelConfig, seq: int, e: int = 2, flash: bool = True, fused_norm: bool = True
) -> dict[str, int]:
    """Return the bytes per token that one layer of `Transformer` keeps for backward: "norms", "norm outputs",
    "attention" and "mlp".

    e: bytes of an element; seq: tokens that a token can see. Without the norms of q and k, which activation_bytes adds.
    """
    h, width, kv = config.hidden, config.attention_width, config.kv_heads * config.head_dim
    if flash:
        attention = e * (2 * width + 2 * kv) + 4 * config.heads
    else:
        attention = e * (4 * width + config.heads * seq)
    return {
        "norms": 2 * ((e * h if fused_norm else 8 * h) + 4),
        "norm outputs": 2 * e * h,
        "attention": attention,
        "mlp": 4 * e * config.ffn_hidden,
    }


def activation_bytes(
    config: ModelConfig,
    batch: int,
    seq: int,
    e: int = 2,
    recompute: str = "none",
    flash: bool = True,
    fused_norm: bool = True,
    tp: int = 1,
    sp: bool = False,
    cp: int = 1,
    pp: int = 1,
) -> float:
    """Return the bytes that `Transformer` and its loss keep for backward on one GPU, at the end of a forward of
    batch × seq tokens.

    recompute: "none"; "selective" keeps Q, K, V and the output of attention, nothing between (a flash core does that
    anyway); "matmuls" the input of each layer and the outputs of its matmuls and flash core (notebook 02);
    "full" the input of each layer alone. TP splits the tensors between a column- and a row-parallel matrix (Korthikanti
    et al. 2022, §4.2); SP splits the norms and the residual too; CP splits the sequence. PP: the fuller of the first
    stage (pp micro-batches in flight under 1F1B) and the last one (one, with the loss).
    """
    recompute = "matmuls" if recompute == "products" else recompute  # its name in earlier versions
    if recompute not in ("none", "selective", "matmuls", "full"):
        raise ValueError(f"recompute={recompute!r}: it is none, selective, matmuls or full")
    tokens, h, width, kv = batch * seq / cp, config.hidden, config.attention_width, config.kv_heads * config.head_dim
    outside = tp if sp else 1  # what the region between two blocks is divided by
    sizes = layer_activations(config, seq, e, flash, fused_norm)
    if recompute == "selective" and not flash:  # a flash core has dropped its scores already
        sizes["attention"] = e * (2 * width + 2 * kv)
    copies = max(1, tp // config.kv_heads)  # K/V heads cannot be split below one
    inside = sizes["attention"] + sizes["mlp"] + e * 2 * kv * (copies - 1)
    if config.qk_norm:  # q and k before their norms, and a number for each head
        inside += (e if fused_norm else 8) * (width + kv * copies) + 4 * (config.heads + config.kv_heads * copies)
    layer = (sizes["norms"] + sizes["norm outputs"]) / outside + inside / tp
    if recompute == "matmuls":  # of what is split: Q, K, V, gate, up, and the output of a flash core
        core = e * width + 4 * config.heads if flash else 0
        layer = 3 * e * h / outside + (e * (width + 2 * kv * copies + 2 * config.ffn_hidden) + core) / tp
    elif recompute == "full":
        layer = e * h / outside
    head = ((sizes["norms"] + sizes["norm outputs"]) / 2) / outside + 4 * config.vocab / tp
    indices = 16 + e * config.head_dim / batch  # token and target numbers; the cosines and sines that all layers share
    stage = -(-config.layers // pp) * layer + indices
    return tokens * (stage + head if pp == 1 else max(pp * stage, stage + head))


def training_bytes(
    config: ModelConfig,
    batch: int,
    seq: int,
    policy: str = "bf16",
    recompute: str = "none",
    zero_stage: int = 0,
    dp: int = 1,
    tp: int = 1,
    sp: bool = False,
    cp: int = 1,
    pp: int = 1,
    ep: int = 1,
) -> dict[str, float]:
    """Return the bytes on the fullest GPU: parameters, gradients, optimizer states, activations of one micro-batch of
    `batch` sequences.

    ZeRO shards over dp · cp GPUs, since the GPUs of a CP group hold the same parameters.
    """
    parts = state_bytes(param_count(config, tp, pp, ep), policy, zero_stage, dp * cp)
    parts["activations"] = activation_bytes(
        config, batch, seq, 4 if policy == "fp32" else 2, recompute, tp=tp, sp=sp, cp=cp, pp=pp
    )
    return parts
