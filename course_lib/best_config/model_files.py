"""A model's sizes from its config.json, as Hugging Face's transformers writes it; transformers is not needed.

    config, moe = read_config(Path("config.json"))         moe: arguments of apply_moe; None where there are no experts

What does not change a matrix is not looked at: how positions are scaled, the activation, a window of attention. What
the planner has no formula for is refused: latent attention, mixtures in some of the layers alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

from course_lib.single_gpu.hugging_face import HF_KINDS, hf_config
from course_lib.single_gpu.model import ModelConfig

MIXTURES = {  # model_type: of which dense kind the rest is; names of experts, their width, and the shared ones' count
    "mixtral": ("mistral", "num_local_experts", "intermediate_size", None),
    "qwen2_moe": ("qwen2", "num_experts", "moe_intermediate_size", None),
    "qwen3_moe": ("qwen3", "num_experts", "moe_intermediate_size", None),
    "deepseek": ("llama", "n_routed_experts", "moe_intermediate_size", "n_shared_experts"),
}
DENSE_LAYERS = {"first_k_dense_replace": 0, "mlp_only_layers": [], "decoder_sparse_step": 1, "moe_layer_freq": 1}
DENSE_SIZES = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"
)  # fmt: skip
NOT_SIZES = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "sliding_window": None}
NOT_SIZES |= {"attention_bias": False, "mlp_bias": False}


def size(sizes: dict, name: str) -> int:
    """One of a config's sizes. Raises ValueError where it is missing, or no whole number of 1 or more."""
    if name not in sizes:
        raise ValueError(f"{name} is missing")
    if type(sizes[name]) is not int or sizes[name] < 1:
        raise ValueError(f"{name} is {sizes[name]!r}: it is a whole number of 1 or more")
    return sizes[name]


def moe_of(sizes: dict, names: tuple) -> dict:
    """Arguments of apply_moe from a mixture's config; names: of MIXTURES. Raises ValueError."""
    for name, value in DENSE_LAYERS.items():
        if sizes.get(name, value) != value:
            raise ValueError(f"{name} is {sizes[name]}: the planner has mixtures in all layers, or in none")
    _, experts, width, shared = names
    moe = {"experts": size(sizes, experts), "top_k": size(sizes, "num_experts_per_tok")}
    moe |= {"ffn_hidden": size(sizes, width), "shared": sizes.get(shared) or 0}
    if wide := sizes.get("shared_expert_intermediate_size"):
        moe["shared"], rest = divmod(wide, moe["ffn_hidden"])
        if rest:
            raise ValueError(f"shared_expert_intermediate_size {wide} is no multiple of {width} {moe['ffn_hidden']}")
    return moe


def sizes_of(sizes: dict) -> tuple[ModelConfig, dict | None]:
    """read_config of what stands in the file."""
    kind = sizes.get("model_type")
    if kind not in (*HF_KINDS, *MIXTURES):
        raise ValueError(f"model_type is {kind}: the planner knows {', '.join((*HF_KINDS, *MIXTURES))}")
    moe = moe_of(sizes, MIXTURES[kind]) if kind in MIXTURES else None
    heads = {"num_key_value_heads": sizes.get("num_key_value_heads") or sizes.get("num_attention_heads")}
    named = {name: size(sizes | heads, name) for name in DENSE_SIZES}
    named["head_dim"] = size(sizes, "head_dim") if sizes.get("head_dim") else None
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    dense = MIXTURES[kind][0] if kind in MIXTURES else kind
    named["tie_word_embeddings"] = bool(sizes.get("tie_word_embeddings"))
    return hf_config(SimpleNamespace(**NOT_SIZES, **named, model_type=dense, rope_parameters=rope)), moe


def read_config(file: Path) -> tuple[ModelConfig, dict | None]:
    """The sizes in a config.json, and arguments of apply_moe where the model is a mixture. Raises ValueError, in one
    line, where there is no such file, or the planner has no such model.
    """
    file = Path(file)
    file = file / "config.json" if file.is_dir() else file
    try:
        sizes = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(sizes, dict):
            raise ValueError("it is no JSON object")
        return sizes_of(sizes)
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{file}: {' '.join(str(error).split())}") from None
