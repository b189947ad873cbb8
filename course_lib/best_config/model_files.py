"""A model's sizes from its config.json, as Hugging Face's transformers writes it; transformers is not needed.

    config, moe = read_config(Path("config.json"))         moe: arguments of apply_moe; None where there are no experts

Fields that do not change a matrix are ignored: position scaling, the activation, a sliding window (which counts as full
attention). `answer.launch` says so if notebook 10's program refuses such a model. Models for which the planner has no
formula are refused: latent attention, mixtures in only some of the layers.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

from course_lib.expert_parallel.hugging_face import MIXTURES, moe_of, size
from course_lib.single_gpu.hugging_face import HF_KINDS, hf_config
from course_lib.single_gpu.model import ModelConfig

DENSE_SIZES = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"
)  # fmt: skip
LEFT_OUT = {  # defaults of transformers for fields that a file omits; other kinds: as many K/V heads as heads
    "mistral": {"num_key_value_heads": 8},
    "mixtral": {"num_key_value_heads": 8},
    "qwen2": {"num_key_value_heads": 32},
    "qwen2_moe": {"num_key_value_heads": 16},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    "qwen3_moe": {"num_key_value_heads": 4},
}
NOT_SIZES = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "sliding_window": None}
NOT_SIZES |= {"attention_bias": False, "mlp_bias": False}


def sizes_of(sizes: dict) -> tuple[ModelConfig, dict | None]:
    """Return what read_config does, from the fields of the file."""
    kind = sizes.get("model_type")
    sizes = LEFT_OUT.get(str(kind), {}) | sizes
    if kind not in (*HF_KINDS, *MIXTURES):
        raise ValueError(f"model_type is {kind}: the planner knows {', '.join((*HF_KINDS, *MIXTURES))}")
    moe = moe_of(sizes) if kind in MIXTURES else None
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
