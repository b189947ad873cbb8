"""Sizes of models that the planner can be asked about, whether or not the course can train them.

A PlannedConfig is a ModelConfig with what the formulas of time and memory need beyond it: latent attention, attention
windows, layers without experts, learned positions. The functions take either kind; for a plain ModelConfig they return
what the course's `Transformer` has.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from course_lib.expert_parallel.sizes import mixture_params
from course_lib.single_gpu.config import ModelConfig
from course_lib.single_gpu.memory import parameter_parts


@dataclass(frozen=True)
class LatentAttention:
    """Ranks and head sizes of multi-head latent attention. DeepSeek-V2 2024, section 2.1."""

    q_rank: int | None  # elements of q's latent; None: q is projected from the hidden state
    kv_rank: int  # elements of the latent that keys and values are projected from
    rope_size: int  # elements of a key that all heads share, with rotary positions
    qk_size: int  # elements per head of q and k, `rope_size` of them included
    v_size: int  # elements per head of v


@dataclass(frozen=True)
class PlannedConfig(ModelConfig):
    """Sizes of a model for the planner alone.

    With `latent`, `head_dim` is the mean of qk_size and v_size, and kv_heads is heads: q and k together, v and the
    output together, and the FLOPs of attention are then computed for such heads.
    """

    latent: LatentAttention | None = None
    window: int | None = None  # tokens that a token sees at most in `windowed` of the layers
    windowed: int = 0
    dense_first: int = 0  # first layers without experts; of the others, every `expert_every`-th has experts
    expert_every: int = 1
    positions: int = 0  # rows of a table of learned positions
    notes: tuple[str, ...] = ()  # English sentences: what is approximated or left out


def layer_parts(config: ModelConfig) -> dict[str, int]:
    """Return `parameter_parts`, and "latent", the projections of attention that tensor parallelism does not
    split, and "positions".

    Latent attention: "q_o" has all projections per head, and "kv" is 0.
    """
    parts = parameter_parts(config) | {"latent": 0, "positions": getattr(config, "positions", 0) * config.hidden}
    if (latent := getattr(config, "latent", None)) is None:
        return parts
    h, per_head = config.hidden, (latent.q_rank or config.hidden) * latent.qk_size
    per_head += latent.kv_rank * (latent.qk_size - latent.rope_size + latent.v_size) + latent.v_size * h
    shared = h * ((latent.q_rank or 0) + latent.kv_rank + latent.rope_size)
    return parts | {"q_o": config.heads * per_head, "kv": 0, "latent": shared}


def latent_elements(config: ModelConfig) -> int:
    """Return the elements per token of the latents that a layer keeps, each before and after its norm; 0 without
    latent attention.
    """
    latent = getattr(config, "latent", None)
    return 0 if latent is None else 2 * ((latent.q_rank or 0) + latent.kv_rank) + latent.rope_size


def expert_layers(config: ModelConfig, layers) -> np.ndarray:
    """Return the layers with experts of a model with experts, in the stage of `layers` layers that has the most."""
    if not isinstance(config, PlannedConfig):
        return layers
    others = config.layers - config.dense_first
    most = np.minimum(layers, others)
    if config.expert_every == 1:
        return most
    return np.minimum(np.minimum(np.ceil(most / config.expert_every), most), others // config.expert_every)


def keys_by_layer(config: ModelConfig, seq: int, causal: bool = False) -> list[tuple[float, float]]:
    """Return [(share of the layers, keys that a token of a sequence of `seq` tokens attends to in these layers)].

    Without causal: seq, or the window. causal: twice the keys that a causal mask leaves on average, which is seq
    without a window, and window (2 - window / seq) with one.
    """
    if not isinstance(config, PlannedConfig) or config.window is None or config.window >= seq:
        return [(1, seq)]
    window, share = config.window, config.windowed / config.layers
    return [(1 - share, seq), (share, window * (2 - window / seq) if causal else window)]


def keys_seen(config: ModelConfig, seq: int, causal: bool = False) -> float:
    """Return the mean of `keys_by_layer` over the layers."""
    return sum(share * keys for share, keys in keys_by_layer(config, seq, causal))


def count_parameters(config: ModelConfig, moe: dict | None = None) -> tuple[int, int]:
    """Return the parameters of a model, and those that one token uses, its embedding table and routers included. moe:
    arguments of apply_moe; biases, and norms beyond two per layer, are not counted.
    """
    parts = layer_parts(config)
    attention = parts["q_o"] + parts["kv"] + parts["latent"]
    if moe is None:
        ends = parts["embedding"] + parts["head"] + parts["final_norm"] + parts["positions"]
        total = config.layers * (attention + parts["mlp"] + parts["norms"]) + ends
        return total, total
    sizes = {name: moe[name] for name in ("experts", "top_k", "ffn_hidden", "shared") if name in moe}
    dense = config.layers - int(expert_layers(config, config.layers))
    both = mixture_params(config, **sizes, dense_layers=dense, attention=attention)
    return both[0] + parts["positions"], both[1] + parts["positions"]


def model_flops(config: ModelConfig, moe: dict | None, seq: int) -> tuple[float, float]:
    """Return the FLOPs of forward and backward for one token: with each key that a layer's window allows (PaLM,
    appendix B: 6N + 12·L·a·d·s), and with half of the scores, as a causal mask leaves (6N + 6·L·a·d·s).

    N: active parameters without routers, as everywhere in the course (`active_config`).
    """
    active = count_parameters(config, moe)[1]
    if moe is not None:
        active -= int(expert_layers(config, config.layers)) * config.hidden * moe["experts"]
    scores = config.layers * config.attention_width
    full = 6 * active + 12 * scores * keys_seen(config, seq)
    return full, 6 * active + 6 * scores * keys_seen(config, seq, causal=True)
