"""Sizes of mixtures from their config.json: plain data, without torch."""

from __future__ import annotations

MIXTURES = {  # model_type: the dense kind of the rest; names of experts, of their width, and of the shared ones' count
    "mixtral": ("mistral", "num_local_experts", "intermediate_size", None),
    "qwen2_moe": ("qwen2", "num_experts", "moe_intermediate_size", None),
    "qwen3_moe": ("qwen3", "num_experts", "moe_intermediate_size", None),
    "deepseek": ("llama", "n_routed_experts", "moe_intermediate_size", "n_shared_experts"),
}
DENSE_LAYERS = {"first_k_dense_replace": 0, "mlp_only_layers": [], "decoder_sparse_step": 1, "moe_layer_freq": 1}


def size(sizes: dict, name: str) -> int:
    """Return one of a config's sizes. Raises ValueError if it is missing, or not an integer of 1 or more."""
    if name not in sizes:
        raise ValueError(f"{name} is missing")
    if type(sizes[name]) is not int or sizes[name] < 1:
        raise ValueError(f"{name} is {sizes[name]!r}: it must be a whole number of 1 or more")
    return sizes[name]


def moe_of(sizes: dict) -> dict:
    """Return arguments of apply_moe from the config.json of a mixture in MIXTURES. Raises ValueError."""
    for name, value in DENSE_LAYERS.items():
        if (sizes.get(name) or value) != value:
            raise ValueError(f"{name} is {sizes[name]}: the course has mixtures in all layers, or in none")
    _, experts, width, shared = MIXTURES[sizes["model_type"]]
    experts = "num_local_experts" if "num_local_experts" in sizes else experts  # transformers 5 writes this for all
    moe = {"experts": size(sizes, experts), "top_k": size(sizes, "num_experts_per_tok")}
    moe |= {"ffn_hidden": size(sizes, width), "shared": sizes.get(shared) or 0}
    if wide := sizes.get("shared_expert_intermediate_size"):
        moe["shared"], rest = divmod(wide, moe["ffn_hidden"])
        if rest:
            raise ValueError(f"shared_expert_intermediate_size {wide} is no multiple of {width} {moe['ffn_hidden']}")
    return moe
