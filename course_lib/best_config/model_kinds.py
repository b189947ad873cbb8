"""How to read the config.json of each model_type: the kind of the course with the same matrices, and the differences.

    kind = KINDS["gemma2"]                 kind.like: "llama"; kind.left_out: defaults of transformers

A row counts matrices. Other norms, biases, activations and positions change less than 0.2% of the parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from course_lib.best_config.planned_config import LatentAttention
from course_lib.expert_parallel.hf_sizes import MIXTURES, size
from course_lib.single_gpu.hf_config import HF_KINDS


@dataclass(frozen=True)
class Kind:
    """A model_type that the course cannot train, or that only the planner reads."""

    like: str  # a kind of single_gpu or expert_parallel with the same field names
    left_out: dict = field(default_factory=dict)  # defaults of transformers for fields that a file omits
    renamed: dict = field(default_factory=dict)  # the name of a field in `like`, by its name in this kind
    full_every: int = 0  # unless a file says otherwise, every n-th layer sees all tokens, the others a window
    two_matrices: bool = False  # an MLP of two matrices, up and down, without a gate


GEMMA = {"tie_word_embeddings": True, "head_dim": 256}
GPT2_NAMES = {
    "n_layer": "num_hidden_layers", "n_embd": "hidden_size", "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
}  # fmt: skip
LLAMA4_NAMES = {"intermediate_size": "moe_intermediate_size", "intermediate_size_mlp": "intermediate_size"}
KINDS = {
    "cohere": Kind("llama", {"tie_word_embeddings": True}),
    "cohere2": Kind("llama", {"tie_word_embeddings": True, "sliding_window": 4096, "head_dim": 128}, full_every=4),
    "deepseek_v2": Kind("deepseek", {"n_shared_experts": 2, "first_k_dense_replace": 0}),
    "deepseek_v3": Kind("deepseek", {"n_shared_experts": 1, "first_k_dense_replace": 3}),
    "gemma": Kind("llama", GEMMA | {"num_key_value_heads": 16}),
    "gemma2": Kind("llama", GEMMA | {"sliding_window": 4096, "num_key_value_heads": 4}, full_every=2),
    "gemma3_text": Kind(
        "llama",
        GEMMA | {"sliding_window": 4096, "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4},
        full_every=6,
    ),
    "glm4_moe": Kind("deepseek", {"num_key_value_heads": 8, "n_shared_experts": 1, "first_k_dense_replace": 1}),
    "gpt2": Kind("llama", {"tie_word_embeddings": True, "n_positions": 1024}, GPT2_NAMES, two_matrices=True),
    "gpt_neox": Kind("llama", two_matrices=True),
    "gpt_oss": Kind(
        "mixtral", {"num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128}, full_every=2
    ),
    "granite": Kind("llama"),
    "granitemoe": Kind("mixtral"),
    "kimi_k2": Kind("deepseek", {"n_shared_experts": 1, "first_k_dense_replace": 1}),
    "llama4_text": Kind(
        "deepseek",
        {"num_key_value_heads": 8, "head_dim": 128, "sliding_window": 8192, "n_shared_experts": 1},
        LLAMA4_NAMES | {"attention_chunk_size": "sliding_window", "num_local_experts": "n_routed_experts"},
        full_every=4,
    ),
    "nemotron": Kind("llama", two_matrices=True),
    "olmo": Kind("llama"),
    "olmo2": Kind("llama"),
    "olmo3": Kind("llama", {"sliding_window": 4096}, full_every=4),
    "olmoe": Kind("mixtral", renamed={"num_experts": "num_local_experts"}),
    "phi3": Kind("llama"),
    "phimoe": Kind("mixtral", {"num_key_value_heads": 8}),
    "smollm3": Kind("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "starcoder2": Kind("llama", {"num_key_value_heads": 2, "tie_word_embeddings": True}, two_matrices=True),
}  # fmt: skip
NESTED = {"gemma3": "gemma3_text", "llama4": "llama4_text"}  # kinds of text_config if the file does not name them


def with_common_names(sizes: dict, kind: Kind) -> dict:
    """Return the fields of a config.json under the names of `kind.like`, with defaults for the fields that it omits."""
    sizes = kind.left_out | {kind.renamed.get(name, name): value for name, value in sizes.items()}
    if kind.renamed is GPT2_NAMES:
        sizes["intermediate_size"] = sizes.get("intermediate_size") or 4 * size(sizes, "hidden_size")
    if kind.two_matrices:
        sizes["intermediate_size"] = 8 * round(size(sizes, "intermediate_size") / 12)
    return sizes


def latent_of(sizes: dict) -> LatentAttention | None:
    """Return the latent attention in a config.json, or None. Raises ValueError for sizes that the planner lacks."""
    if "kv_lora_rank" not in sizes:
        return None
    names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    kv_rank, rope, rest, v_size = (size(sizes, name) for name in names)
    if (rest + rope + v_size) % 4:
        raise ValueError(f"heads of {rest + rope} and {v_size} elements: the planner needs an even mean")
    q_rank = None if sizes.get("q_lora_rank", 0) is None else size(sizes, "q_lora_rank")
    return LatentAttention(q_rank, kv_rank, rope, rest + rope, v_size)


def windows_of(sizes: dict, full_every: int = 0) -> tuple[int | None, int]:
    """Return the tokens of a config.json's attention window, and the number of layers with this window; (None, 0)
    without windows. Raises ValueError for layers other than attention.
    """
    layers, types = size(sizes, "num_hidden_layers"), sizes.get("layer_types")
    if not sizes.get("sliding_window") or sizes.get("use_sliding_window") is False:
        return None, 0
    if isinstance(types, list):
        known = ("full_attention", "sliding_attention", "chunked_attention")
        if other := sorted({str(each) for each in types if each not in known}):
            raise ValueError(f"layer_types has {other[0]}: the planner counts {', '.join(known)}")
        if len(types) != layers:
            raise ValueError(f"layer_types has {len(types)} entries, and the model {layers} layers")
        windowed = sum(each != "full_attention" for each in types)
    elif sizes.get("max_window_layers"):
        windowed = max(0, layers - size(sizes, "max_window_layers"))
    else:
        full_every = size(sizes, "sliding_window_pattern") if sizes.get("sliding_window_pattern") else full_every
        windowed = layers - layers // full_every if full_every else layers
    return (size(sizes, "sliding_window"), windowed) if windowed else (None, 0)


def dense_layers_of(sizes: dict) -> tuple[int, int]:
    """Return how many first layers of a mixture have no experts, and n if every n-th of the other layers has experts.
    Raises ValueError if no layer has experts.
    """
    steps = ("decoder_sparse_step", "moe_layer_freq", "interleave_moe_layer_step")
    every = [size(sizes, name) for name in steps if sizes.get(name)]
    first = size(sizes, "first_k_dense_replace") if sizes.get("first_k_dense_replace") else 0
    if first >= size(sizes, "num_hidden_layers") or max(every, default=1) > size(sizes, "num_hidden_layers"):
        raise ValueError(f"first_k_dense_replace {first}, steps {every}: they leave no layer with experts")
    return first, max(every, default=1)


def node_limit_of(sizes: dict) -> dict:
    """Return the arguments of apply_moe that limit the groups of experts of a token (DeepSeek-V3 2024, section 2.1.2);
    {} without a limit. Raises ValueError for sizes that are missing or not whole.
    """
    if (sizes.get("n_group") or 1) == 1 or sizes.get("topk_method") == "greedy":
        return {}
    return {"nodes": size(sizes, "n_group"), "node_limit": size(sizes, "topk_group")}


def why_unknown(sizes: dict) -> str:
    """Return the reason why the planner has no formula for a config.json with an unknown model_type."""
    names = " ".join(sizes)
    reason = "the planner knows " + ", ".join((*HF_KINDS, *MIXTURES, *KINDS, *NESTED))
    if sizes.get("is_encoder_decoder"):
        reason = "it has an encoder and a decoder, and the planner counts decoders alone"
    elif any(word in names for word in ("mamba", "ssm_", "state_size", "time_step_", "linear_conv", "rwkv", "lru_")):
        reason = "it has state-space or other recurrent layers, for which the planner has no formula"
    elif any(f"{word}_config" in sizes for word in ("vision", "audio", "text")) or "image_size" in sizes:
        reason = "the planner counts text models, and has no formula for this one's text_config"
    return f"model_type is {sizes.get('model_type')}: {reason}"
