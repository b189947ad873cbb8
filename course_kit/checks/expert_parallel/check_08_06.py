"""Check of exercise 08.6: total and active parameters, against a model's tensors."""

from __future__ import annotations

import torch

from course_kit.labs.expert_parallel.models import TINY
from course_kit.typed import transformer_blocks
from course_lib.expert_parallel import mixture
from course_lib.expert_parallel.mixture import MoE
from course_lib.single_gpu.model import ModelConfig, Transformer


def numbers(module: torch.nn.Module) -> int:
    """Return the number of elements of a module's parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def total_of(config: ModelConfig, experts: int, top_k: int, options: dict) -> int:
    """Return the parameters of a model with mixtures in place of its MLPs."""
    with torch.device("meta"):
        model, layer = Transformer(config), MoE(config, experts, top_k, **options)
    return numbers(model) + config.layers * (numbers(layer) - numbers(transformer_blocks(model)[0].mlp))


def check() -> None:
    """Judge mixture_params."""
    odd = ModelConfig(3, 40, 5, 1, 56, 131)  # its head is not its embedding
    for config, experts, top_k, options in ((TINY, 8, 2, {}), (odd, 6, 1, {"ffn_hidden": 10, "shared": 2})):
        total = total_of(config, experts, top_k, options)
        idle = (experts - top_k) * config.layers * 3 * config.hidden * options.get("ffn_hidden", config.ffn_hidden)
        result = mixture.mixture_params(config, experts, top_k, **options)
        assert result == (total, total - idle), (
            f"{config}, {experts} experts, {options}: {result}, not {(total, total - idle)}"
        )
    plain = mixture.mixture_params(TINY, 8, 2)
    dense_one = mixture.mixture_params(TINY, 8, 2, dense_layers=1)
    assert dense_one[0] == plain[0] - 8 * 48 - 7 * 3 * 48 * 40, "dense_layers: no router, one MLP"
    moved = mixture.mixture_params(TINY, 8, 2, attention=0)
    kv = 2 * 48 * 48 + 2 * 48 * 24
    assert [a - b for a, b in zip(plain, moved, strict=True)] == [2 * kv] * 2, "attention replaces q, k, v and o"
