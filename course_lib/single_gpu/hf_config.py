"""Sizes of a model of Llama's kind from its config of transformers: plain data, without torch."""

from __future__ import annotations

from course_lib.single_gpu.config import ModelConfig

HF_KINDS = ("llama", "mistral", "qwen2", "qwen3")


def one_of(values: tuple) -> str:
    """Return the values as "a, b or c"."""
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last


def unlike_ours(c, rope: dict) -> list[str]:
    """Return the features of a config of transformers that our model lacks, each as "name is value, not ours".

    rope: as rope_of returns it.
    """
    ours: dict[str, tuple] = {
        "rope_type": ("default", "llama3"),
        "partial_rotary_factor": (1.0,),
        "attention_bias": (False,),
    }
    ours |= {"mlp_bias": (False,), "hidden_act": ("silu",), "sliding_window": (None,)}
    if rope["rope_type"] == "llama3":
        ours |= {"low_freq_factor": (1.0,), "high_freq_factor": (4.0,)}
    given = {name: rope.get(name, getattr(c, name, None)) for name in ours}
    values = {name: ours[name][0] if value is None else value for name, value in given.items()}
    wrong = [name for name in ours if values[name] not in ours[name]]
    return [f"{name} is {values[name]}, not {one_of(ours[name])}" for name in wrong]


def rope_of(c) -> dict:
    """Return the rotary positions of a config of transformers, with `rope_type` and `rope_theta`. Raises ValueError if
    they differ by layer, or lack what Llama 3.1's need.
    """
    rope = getattr(c, "rope_parameters", None) or {}
    if by_layer := [name for name, value in rope.items() if isinstance(value, dict)]:
        raise ValueError(f"not the model of this course: rope_parameters differ by layer ({', '.join(by_layer)})")
    rope = {"rope_type": rope.get("type", "default"), "rope_theta": getattr(c, "rope_theta", 10_000.0)} | rope
    needed = ("factor", "original_max_position_embeddings") if rope["rope_type"] == "llama3" else ()
    if missing := [name for name in needed if rope.get(name) is None]:
        raise ValueError(f"rope_type is llama3, and rope_parameters lack {' and '.join(missing)}")
    if not isinstance(rope["rope_theta"], (int, float)) or not rope["rope_theta"] > 0:
        raise ValueError(f"rope_theta is {rope['rope_theta']!r}: it must be a number above 0")
    return rope


def hf_config(c) -> ModelConfig:
    """Return the sizes of a Hugging Face model of Llama's kind, from its config.

    Raises ValueError if the model has features that ours lacks: another architecture, biases of o or of the MLP,
    another activation, positions that are rotated in part or scaled in another way than Llama 3.1's, a window of
    attention.
    """
    kind = getattr(c, "model_type", None)
    if kind not in HF_KINDS:  # others may lack anything that is read below
        hint = "; course_lib.checkpoint.from_hf reads mixtures" if kind in ("mixtral", "qwen3_moe") else ""
        raise ValueError(f"not the model of this course: model_type is {kind}, not {one_of(HF_KINDS)}{hint}")
    rope = rope_of(c)
    if differing := unlike_ours(c, rope):
        raise ValueError(f"not the model of this course: {', '.join(differing)}")
    head_size = getattr(c, "head_dim", None)
    longer = rope["rope_type"] == "llama3" and rope["factor"] != 1
    return ModelConfig(
        c.num_hidden_layers,
        c.hidden_size,
        c.num_attention_heads,
        c.num_key_value_heads,
        c.intermediate_size,
        c.vocab_size,
        c.tie_word_embeddings,
        rope["rope_theta"],
        c.rms_norm_eps,
        head_size=None if head_size is None or head_size * c.num_attention_heads == c.hidden_size else head_size,
        rope_factor=rope["factor"] if longer else 1.0,
        rope_trained=rope["original_max_position_embeddings"] if longer else 8192,
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        context=getattr(c, "max_position_embeddings", None),
    )
