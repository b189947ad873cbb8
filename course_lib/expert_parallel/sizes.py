"""Sizes of mixtures of experts: parameters, and the options of programs; without torch."""

from __future__ import annotations

import argparse
import dataclasses

from course_lib.single_gpu.config import ModelConfig
from course_lib.single_gpu.memory import parameter_parts


def active_config(config: ModelConfig, moe: dict | None) -> ModelConfig:
    """Return the sizes of the model that one token passes through: its MLP is as wide as the top_k experts and the
    shared ones together. moe: arguments of apply_moe; None for a model without experts.

    All counts of FLOPs and MFU use it. It leaves out the router, which is no MLP of any width: its E·h weights per
    layer are 0.4% of the active parameters of Qwen3-30B-A3B (`mixture_params` counts them).
    """
    if moe is None:
        return config
    width = moe.get("ffn_hidden") or config.ffn_hidden
    return dataclasses.replace(config, ffn_hidden=(moe["top_k"] + moe.get("shared", 0)) * width)


def moe_options(options: argparse.Namespace, config_moe: dict | None = None) -> dict | None:
    """Return the arguments of apply_moe for a program's options experts, top_k (2 by default), expert_hidden, shared.

    An option is None if it was not passed. config_moe: arguments by a model's config.json, which options may repeat.

    Returns None for a model without experts. Raises ValueError if the options contradict config_moe, or lack --experts.
    """
    asked = {"experts": options.experts, "top_k": options.top_k}
    asked |= {"ffn_hidden": options.expert_hidden, "shared": options.shared}
    passed = {name: value for name, value in asked.items() if value is not None}
    for name, value in passed.items() if config_moe else ():
        if config_moe and value != (expected := config_moe.get(name, 0)):
            option = {"ffn_hidden": "expert-hidden", "top_k": "top-k"}.get(name, name)
            raise ValueError(f"--{option} is {value}, and the model's config.json says {expected}")
    if config_moe or not passed:
        return config_moe
    if options.experts is None:
        raise ValueError("--top-k, --expert-hidden and --shared go with --experts")
    sizes = asked | {"top_k": 2 if options.top_k is None else options.top_k}
    return {name: value for name, value in sizes.items() if name != "shared" or value}


# exercise 08.6
def mixture_params(
    config: ModelConfig,
    experts: int,
    top_k: int,
    ffn_hidden: int | None = None,
    shared: int = 0,
    dense_layers: int = 0,
    attention: int | None = None,
) -> tuple[int, int]:
    """Return the parameter count of a model with mixtures, and the number of parameters that one token passes through.

    dense_layers: how many layers keep the MLP of `config`; attention: parameters of a layer's attention, if it is not
    the course's.
    """
    count = parameter_parts(config)
    expert = 3 * config.hidden * (ffn_hidden or config.ffn_hidden)
    layer = (count["q_o"] + count["kv"] if attention is None else attention) + count["norms"]
    ends = count["embedding"] + count["head"] + count["final_norm"]
    dense = ends + config.layers * layer + dense_layers * count["mlp"]
    mixtures = config.layers - dense_layers
    total, active = (
        dense + mixtures * (experts * config.hidden + (used + shared) * expert) for used in (experts, top_k)
    )
    return total, active
