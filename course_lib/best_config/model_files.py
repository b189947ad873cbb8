"""A model's sizes from its config.json, as Hugging Face's transformers writes it; transformers is not needed.

    config, moe = read_config(Path("config.json"))         moe: arguments of apply_moe; None for a model without experts
    getattr(config, "notes", ())                           sentences: what is approximated or left out

Models that the course cannot train are read as a PlannedConfig: windows of attention, latent attention, layers without
experts (`model_kinds`). Position scaling and activations do not change a matrix and are ignored; `launch.launch` says
so if the training program refuses such a model. Models for which the planner has no formula are refused with the
reason.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from course_lib.best_config.model_kinds import (
    KINDS,
    NESTED,
    Kind,
    dense_layers_of,
    latent_of,
    node_limit_of,
    why_unknown,
    windows_of,
    with_common_names,
)
from course_lib.best_config.planned_config import PlannedConfig, expert_layers
from course_lib.expert_parallel.hf_sizes import MIXTURES, moe_of, size
from course_lib.single_gpu.config import ModelConfig
from course_lib.single_gpu.hf_config import HF_KINDS, hf_config

DENSE_SIZES = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"
)  # fmt: skip
LEFT_OUT = {  # defaults of transformers for fields that a file omits; other kinds: as many K/V heads as heads
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "mixtral": {"num_key_value_heads": 8},
    "qwen2": {"num_key_value_heads": 32, "use_sliding_window": False},
    "qwen2_moe": {"num_key_value_heads": 16, "use_sliding_window": False},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128, "use_sliding_window": False},
    "qwen3_moe": {"num_key_value_heads": 4, "use_sliding_window": False},
}
READ = (*HF_KINDS, *MIXTURES, *KINDS)  # model types
SOME_LAYERS = ("first_k_dense_replace", "decoder_sparse_step", "moe_layer_freq")  # `dense_layers_of` reads them
NOT_SIZES: dict[str, Any] = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "sliding_window": None}
NOT_SIZES |= {"attention_bias": False, "mlp_bias": False}


def course_sizes(sizes: dict, kind: str) -> tuple[ModelConfig, dict | None]:
    """Return the sizes of one of the course's kinds with identical layers, and arguments of apply_moe or None."""
    same = {name: value for name, value in sizes.items() if name not in SOME_LAYERS} | {"model_type": kind}
    moe = moe_of(same) if kind in MIXTURES else None
    heads = {"num_key_value_heads": sizes.get("num_key_value_heads") or sizes.get("num_attention_heads")}
    named: dict[str, int | None] = {name: size(sizes | heads, name) for name in DENSE_SIZES}
    named["head_dim"] = size(sizes, "head_dim") if sizes.get("head_dim") else None
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    dense = MIXTURES[kind][0] if kind in MIXTURES else kind
    named["tie_word_embeddings"] = bool(sizes.get("tie_word_embeddings"))
    return hf_config(SimpleNamespace(**NOT_SIZES, **named, model_type=dense, rope_parameters=rope)), moe


def notes_on(config: PlannedConfig, kind: str, sizes: dict) -> tuple[str, ...]:
    """Return sentences on the approximations and omissions for a model that the course does not train."""
    notes, latent = [], config.latent
    if kind in KINDS:
        notes.append(f"{kind}: biases, and norms beyond two per layer, are not counted")
    if latent is not None:
        notes.append(
            f"latent attention: its projections are counted, scores of {latent.qk_size} and {latent.v_size} elements "
            "per head, and keys and values of all heads in memory and in context parallelism"
        )
    if config.window is not None:
        chunked = ", chunks counted as windows" if kind == "llama4_text" else ""
        notes.append(
            f"attention: {config.windowed} of {config.layers} layers see at most {config.window:,} tokens{chunked}; "
            "their kernels are counted as efficient as full attention's, and context parallelism sends all keys"
        )
    if config.dense_first or config.expert_every > 1:
        dense = config.layers - int(expert_layers(config, config.layers))
        notes.append(
            f"layers without experts: {dense} of {config.layers}; each pipeline stage is counted with as many layers "
            "with experts as a stage can have"
        )
    if kind in KINDS and KINDS[kind].two_matrices:
        notes.append(
            f"an MLP of two matrices is counted as three of 2/3 the width, {config.ffn_hidden:,}: the same "
            "parameters and FLOPs"
        )
    if sizes.get("num_nextn_predict_layers"):
        notes.append("the layer that predicts further tokens (num_nextn_predict_layers) is not counted")
    return tuple(notes)


def text_model(sizes: dict) -> tuple[dict, tuple[str, ...]]:
    """Return the fields of the text model in a file, with its model_type, and notes. For a model with a vision or audio
    encoder, these are the fields of text_config if the planner knows its model_type.
    """
    kind, text = sizes.get("model_type"), sizes.get("text_config")
    if not isinstance(kind, str) or kind in READ or not isinstance(text, dict) or sizes.get("is_encoder_decoder"):
        return sizes, ()
    if (inner := NESTED.get(kind, text.get("model_type"))) not in READ:
        return sizes, ()
    tied = {name: sizes[name] for name in ("tie_word_embeddings",) if name in sizes}
    return tied | text | {"model_type": inner}, ("only the text model is counted, not the vision or audio encoder",)


def sizes_of(sizes: dict) -> tuple[ModelConfig, dict | None]:
    """Return `read_config` of a file with these fields."""
    sizes, notes = text_model(sizes)
    if (name := sizes.get("model_type")) not in READ:
        raise ValueError(why_unknown(sizes))
    kind = KINDS.get(name) or Kind(name, LEFT_OUT.get(name, {}))
    sizes = with_common_names(sizes, kind)
    latent, (window, windowed) = latent_of(sizes), windows_of(sizes, kind.full_every)
    if latent is not None:
        sizes |= {"head_dim": (latent.qk_size + latent.v_size) // 2, "num_key_value_heads": None}
    config, moe = course_sizes(sizes, kind.like)
    dense_first, expert_every = (0, 1) if moe is None else dense_layers_of(sizes)
    planned = PlannedConfig(
        **vars(config),
        latent=latent,
        window=window,
        windowed=windowed,
        dense_first=dense_first,
        expert_every=expert_every,
        positions=size(sizes, "n_positions") if name == "gpt2" else 0,
    )
    if name not in KINDS and not notes and planned == PlannedConfig(**vars(config)):
        return config, moe
    if moe is not None:
        moe |= node_limit_of(sizes)
    return dataclasses.replace(planned, notes=notes_on(planned, name, sizes) + notes), moe


def read_config(file: Path) -> tuple[ModelConfig, dict | None]:
    """Return the sizes in a config.json, and arguments of apply_moe for a mixture. Raises ValueError, in one line, for
    a file that cannot be read, and for a model that the planner has no formula for.
    """
    file = Path(file)
    file = file / "config.json" if file.is_dir() else file
    try:
        sizes = json.loads(file.read_text(encoding="utf-8-sig"))
        if not isinstance(sizes, dict):
            raise ValueError("it is no JSON object")
        return sizes_of(sizes)
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from None
    except RecursionError:
        raise ValueError(f"{file}: it is no config.json: its JSON is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{file}: {' '.join(str(error).split())}") from None
