"""To and from transformers: names, sizes and weights of models of Llama's kind.

Llama, Mistral, Qwen2 and Qwen3 have the layers of `Transformer`, under other names. What ours has not is refused, by
the name that transformers gives it.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from course_lib.single_gpu.model import ModelConfig, Transformer

HF_NAMES = {  # ours -> theirs
    "embedding.": "model.embed_tokens.",
    "blocks.": "model.layers.",
    "attention_norm.": "input_layernorm.",
    "attention.": "self_attn.",
    "mlp_norm.": "post_attention_layernorm.",
    "head.": "lm_head.",
}


def hf_name(name: str) -> str:
    """Hugging Face's name of one of our parameters."""
    for ours, theirs in HF_NAMES.items():
        name = name.replace(ours, theirs)
    return "model.norm.weight" if name == "norm.weight" else name


def hf_kind(c: ModelConfig) -> str:
    """The architecture of transformers that has what this model has. Raises ValueError where there is none."""
    if c.qkv_bias and (c.qk_norm or c.head_size):
        raise ValueError("no model of transformers has biases of q, k and v, and norms of q and k or heads of any size")
    return "Qwen3" if c.qk_norm else "Qwen2" if c.qkv_bias else "Llama"


def to_hf_config(c: ModelConfig):
    """The same sizes as a `LlamaConfig`, `Qwen2Config` or `Qwen3Config` of transformers. Needs the extra `[hf]`."""
    import transformers

    rope = {"rope_type": "default", "rope_theta": c.rope_theta}
    if c.rope_factor != 1:
        rope |= {"rope_type": "llama3", "factor": c.rope_factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope |= {"original_max_position_embeddings": c.rope_trained}
    return getattr(transformers, f"{hf_kind(c)}Config")(
        architectures=[f"{hf_kind(c)}ForCausalLM"],
        head_dim=c.head_dim,
        num_hidden_layers=c.layers,
        hidden_size=c.hidden,
        num_attention_heads=c.heads,
        num_key_value_heads=c.kv_heads,
        intermediate_size=c.ffn_hidden,
        vocab_size=c.vocab,
        tie_word_embeddings=c.tied,
        rms_norm_eps=c.norm_eps,
        rope_parameters=rope,
    )


def to_hf(model: Transformer) -> nn.Module:
    """A `LlamaForCausalLM`, or the same of Qwen2 or Qwen3, with the weights of `model`. Needs the extra `[hf]`. Raises
    ValueError where transformers has no such model (hf_kind).
    """
    import transformers

    theirs = getattr(transformers, f"{hf_kind(model.config)}ForCausalLM")(to_hf_config(model.config))
    theirs.to(model.norm.weight.dtype)
    theirs.load_state_dict({hf_name(name): tensor for name, tensor in model.state_dict().items()})
    return theirs


HF_KINDS = ("llama", "mistral", "qwen2", "qwen3")


def hf_config(c, kinds: tuple[str, ...] = HF_KINDS) -> ModelConfig:
    """The sizes of a Hugging Face model of Llama's kind, from its config; kinds: values of `model_type` that will do.

    Raises ValueError where the model has what ours has not: another architecture, biases of o or of the MLP, another
    activation, positions that are rotated in part or scaled in another way than Llama 3.1's, a window of attention.
    """
    rope, kind = c.rope_parameters, c.model_type
    factors = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if rope["rope_type"] == "llama3" else {}
    ours = {"model_type": kinds, "rope_type": ("default", "llama3"), "partial_rotary_factor": (1.0,)}
    ours |= {"attention_bias": (False,), "mlp_bias": (False,), "hidden_act": ("silu",), "sliding_window": (None,)}
    ours |= {name: (value,) for name, value in factors.items()}
    found = {name: rope.get(name, getattr(c, name, None)) or allowed[0] for name, allowed in ours.items()}
    if differing := [name for name, allowed in ours.items() if found[name] not in allowed]:
        listed = ", ".join(f"{name} is {found[name]}, not {' or '.join(map(str, ours[name]))}" for name in differing)
        raise ValueError(f"not the model of this course: {listed}")
    head_size = getattr(c, "head_dim", None)
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
        rope_factor=rope["factor"] if factors else 1.0,
        rope_trained=rope["original_max_position_embeddings"] if factors else 8192,
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
    )


PLAIN_TYPES = ("F64", "F32", "F16", "BF16")  # of safetensors: those whose numbers are the weights themselves
PLAIN_RELEASE = "use the release of the model in bfloat16, or save it dequantized with transformers"


def plain_model(kind: type, source: nn.Module | str | Path) -> nn.Module:
    """A model of transformers: `source` itself, or what class `kind` loads from a name or folder.

    Raises ValueError where its weights are quantized (their numbers mean nothing without their scales), or where the
    model and its files differ in names: transformers fills what is missing with random numbers.
    """
    if isinstance(source, (str, Path)):
        from safetensors import safe_open
        from transformers import AutoConfig

        if quantized := getattr(AutoConfig.from_pretrained(source), "quantization_config", None):
            method = quantized.get("quant_method", "an unnamed method")
            more = ", or the from_hf of course_lib.checkpoint" if method == "fp8" else ""
            raise ValueError(f"{source} is quantized (quant_method {method}): {PLAIN_RELEASE}{more}")
        for file in sorted(Path(source).glob("model*.safetensors")):
            with safe_open(file, "pt") as opened:
                types = {name: opened.get_slice(name).get_dtype() for name in opened.keys()}
            if odd := next((name for name, each in types.items() if each not in PLAIN_TYPES), None):
                raise ValueError(f"{odd} is {types[odd]} in {file}: {PLAIN_RELEASE}")
        source, found = kind.from_pretrained(source, output_loading_info=True)
        for how in ("missing", "unexpected"):
            if names := sorted(found[f"{how}_keys"]):
                raise ValueError(f"not the model of this course: {how} weights {', '.join(names[:3])}")
    for name, tensor in source.state_dict().items():
        if name.endswith((".weight", ".bias")) and (not tensor.is_floating_point() or tensor.element_size() < 2):
            raise ValueError(f"{name} is {tensor.dtype}, a quantized weight: {PLAIN_RELEASE}")
    return source


def from_hf(source: nn.Module | str | Path) -> Transformer:
    """A `Transformer` with the weights of a Hugging Face model of Llama's kind, or of one by name or folder. Needs the
    extra `[hf]`.

    Raises ValueError where the model has what ours has not (see hf_config), or its weights are quantized.
    """
    from transformers import AutoModelForCausalLM

    theirs = plain_model(AutoModelForCausalLM, source)
    config = hf_config(theirs.config)
    with torch.device("meta"):
        model = Transformer(config)
    tensors = theirs.state_dict()
    model.load_state_dict({name: tensors[hf_name(name)].clone() for name in model.state_dict()}, assign=True)
    if config.tied:
        model.head.weight = model.embedding.weight
    return model
