"""Conversion from and to transformers: names, sizes and weights of models of Llama's kind.

Llama, Mistral, Qwen2 and Qwen3 have the layers of `Transformer`, under other names. Features that
ours lacks are refused, by the name that transformers gives them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from course_lib.single_gpu.errors import one_line_message
from course_lib.single_gpu.hf_config import hf_config as hf_config
from course_lib.single_gpu.model import ModelConfig, Transformer, plain_name

HF_NAMES = {  # ours -> theirs
    "embedding.": "model.embed_tokens.",
    "blocks.": "model.layers.",
    "attention_norm.": "input_layernorm.",
    "attention.": "self_attn.",
    "mlp_norm.": "post_attention_layernorm.",
    "head.": "lm_head.",
}


def hf_name(name: str) -> str:
    """Return Hugging Face's name of one of our parameters."""
    name = plain_name(name)
    for ours, theirs in HF_NAMES.items():
        name = name.replace(ours, theirs)
    return "model.norm.weight" if name == "norm.weight" else name


def hf_kind(c: ModelConfig) -> str:
    """Return the architecture of transformers that has the features of this model. Raises ValueError if none has."""
    if c.qkv_bias and c.qk_norm:
        raise ValueError("no model of transformers has both biases of q, k and v, and norms of q and k")
    if c.qk_norm or c.qkv_bias:
        return "Qwen3" if c.qk_norm else "Qwen2"
    return "Mistral" if c.hidden % c.heads else "Llama"  # LlamaConfig refuses heads that do not divide h


def with_old_rope(config):
    """Name the rotary positions of a config of transformers as transformers 4 does, too; returns the config.

    It does not read rope_parameters, and would take a rope_theta of 10,000 and no scaling without a word.
    """
    rope = dict(config.rope_parameters)
    theta = rope.pop("rope_theta")
    scaling = None if rope["rope_type"] == "default" else rope
    vars(config).update(rope_theta=theta, rope_scaling=scaling)  # to_dict writes them; transformers 5 reads the new one
    return config


def to_hf_config(c: ModelConfig, tokenizer: Any = None):
    """Return the same sizes as a config of transformers, of the kind that hf_kind names. Needs the extra `[hf]`.

    tokenizer: of transformers. The config names its start, end and padding tokens; without a tokenizer it names none,
    and text is generated to the maximum length. Raises ValueError if transformers has no such model, or the tokenizer
    has more tokens than the model.
    """
    import transformers

    if tokenizer is not None and len(tokenizer) > c.vocab:
        raise ValueError(f"the tokenizer has {len(tokenizer):,} tokens, the model's vocabulary {c.vocab:,}")
    rope = {"rope_type": "default", "rope_theta": c.rope_theta}
    if c.rope_factor != 1:
        rope |= {"rope_type": "llama3", "factor": c.rope_factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope |= {"original_max_position_embeddings": c.rope_trained}
    context = c.context or 0
    if context < 1 or c.rope_factor != 1 and context <= c.rope_trained:  # transformers expects more than rope_trained
        context = round(c.rope_trained * c.rope_factor)
    config = getattr(transformers, f"{hf_kind(c)}Config")(
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
        max_position_embeddings=context,
        **{f"{name}_token_id": getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad")},
        sliding_window=None,  # Mistral has one by default
    )
    return with_old_rope(config)


def to_hf(model: Transformer, tokenizer: Any = None) -> nn.Module:
    """Return a `LlamaForCausalLM`, or the same of Mistral, Qwen2 or Qwen3, with the weights of `model`. Needs the extra
    `[hf]`. tokenizer: of transformers, whose end token ends what the model generates. Raises ValueError as
    to_hf_config.
    """
    import transformers

    theirs = getattr(transformers, f"{hf_kind(model.config)}ForCausalLM")(to_hf_config(model.config, tokenizer))
    theirs.to(next(model.parameters()).dtype)
    tensors = {hf_name(name): tensor for name, tensor in model.state_dict().items()}
    if foreign := sorted(tensors.keys() - theirs.state_dict().keys()):
        raise ValueError(f"no model of Llama's kind: it has {foreign[0]}; course_lib.checkpoint.to_hf writes mixtures")
    theirs.load_state_dict(tensors)
    return theirs


PLAIN_TYPES = ("F64", "F32", "F16", "BF16")  # of safetensors: their numbers are the weights themselves
PLAIN_RELEASE = "use the release of the model in bfloat16, or save it dequantized with transformers"


def loaded(kind: Any, source: str | Path) -> nn.Module:
    """Load a model of class `kind` of transformers from a name or folder. Raises as plain_model, or what transformers
    raises if there is nothing to load.
    """
    from safetensors import safe_open
    from transformers import AutoConfig

    if quantized := getattr(AutoConfig.from_pretrained(source), "quantization_config", None):
        method = quantized.get("quant_method", "an unnamed method")
        hint = "; course_lib.checkpoint.from_hf reads FP8" if method == "fp8" else ""
        raise ValueError(f"{source} is quantized (quant_method {method}): {PLAIN_RELEASE}{hint}")
    for file in sorted(Path(source).glob("model*.safetensors")):
        with safe_open(file, "pt") as opened:
            types = {name: opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118
        if odd := next((name for name, each in types.items() if each not in PLAIN_TYPES), None):
            raise ValueError(f"{odd} is {types[odd]} in {file}: {PLAIN_RELEASE}")
    model, info = kind.from_pretrained(source, output_loading_info=True)
    for how in ("missing", "unexpected"):
        if names := sorted(info[f"{how}_keys"]):
            raise ValueError(f"not the model of this course: {how} weights {', '.join(names[:3])}")
    return model


def plain_model(kind: Any, source: nn.Module | str | Path) -> nn.Module:
    """Return a model of transformers: `source` itself, or the one that class `kind` loads from a name or folder.

    Raises ValueError, in one line, if there is none, its weights are quantized (their numbers mean nothing without
    their scales), or the model and its files differ in names: transformers fills what is missing with random numbers.
    """
    if isinstance(source, (str, Path)):
        try:
            source = loaded(kind, source)
        except ImportError:
            raise
        except Exception as error:  # transformers raises anything: no such model, a wrong value, a file cut short
            line = one_line_message(error)
            raise ValueError(line if str(source) in line else f"{source}: {line}") from None
    for name, tensor in source.state_dict().items():
        if name.endswith((".weight", ".bias")) and (not tensor.is_floating_point() or tensor.element_size() < 2):
            raise ValueError(f"{name} is {tensor.dtype}, a quantized weight: {PLAIN_RELEASE}")
    return source


def from_hf(source: nn.Module | str | Path) -> Transformer:
    """Return a `Transformer` with the weights of a Hugging Face model of Llama's kind, or of one by name or folder.
    Needs the extra `[hf]`.

    Raises ValueError if the model has features that ours lacks (see hf_config), or its weights are quantized.
    """
    from transformers import AutoModelForCausalLM

    theirs = plain_model(AutoModelForCausalLM, source)
    config = hf_config(theirs.config)
    with torch.device("meta"):
        model = Transformer(config)
    tensors = theirs.state_dict()
    model.load_state_dict({name: tensors[hf_name(name)].clone() for name in model.state_dict()}, assign=True)
    if config.tied and model.head and model.embedding:
        model.head.weight = model.embedding.weight
    return model
