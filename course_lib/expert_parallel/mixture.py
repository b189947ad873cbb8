"""A mixture of experts in place of the MLP: y = sum of g_i E_i(x) over the k experts that the router chooses.

Parameters grow with E, FLOPs with k: 6 h f a choice in forward. A shared expert, which every token goes through, stands
beside the routed ones (DeepSeekMoE, Dai et al. 2024). Jiang et al. 2024 (Mixtral of Experts); DeepSeek-V3 2024, §2.1.2.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from course_lib.expert_parallel.experts import Experts, batched_experts, grouped_experts
from course_lib.expert_parallel.router import Router, Routing
from course_lib.single_gpu.memory import param_count, parameter_parts
from course_lib.single_gpu.model import MLP, ModelConfig, Transformer, init_parameter, need_transformer


class MoE(nn.Module):
    """Of `experts` SwiGLU MLPs of `ffn_hidden` (None: as the dense one's) each token goes through top_k, and through
    `shared` more as one MLP. **routing: of Routing. `run(x, gates, meanwhile)` is what the routed experts make of x;
    it calls `meanwhile()` once, while tokens travel where they do.
    """

    def __init__(
        self, config: ModelConfig, experts: int, top_k: int, ffn_hidden: int | None = None, shared: int = 0, **routing
    ):
        super().__init__()
        width, self.dropout = ffn_hidden or config.ffn_hidden, config.dropout
        self.router = Router(config.hidden, experts, top_k, **routing)
        self.experts = Experts(experts, config.hidden, width, grouped_experts)
        self.shared = MLP(dataclasses.replace(config, ffn_hidden=shared * width, dropout=0.0)) if shared else None
        here = functools.partial(run_local_experts, routing=self.router.routing, experts=self.experts)
        self.run = functools.partial(run_after, compute=here)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [b, s, h]; returns [b, s, h]."""
        always = []

        def shared() -> None:  # before the way back, which a replay in backward need not reach
            if self.shared is not None:
                always.append(self.shared(x))

        out = self.run(x, self.router(x), shared)
        return F.dropout(sum(always, out), self.dropout, self.training)


def active_config(config: ModelConfig, moe: dict | None) -> ModelConfig:
    """The sizes of what one token goes through: an MLP as wide as its top_k experts and the shared ones together. moe:
    arguments of apply_moe; None for a model without experts.

    FLOPs and MFU are counted by it, everywhere. Without the router, which is no MLP of any width: its E·h weights a
    layer are 0.4% of the active parameters of Qwen3-30B-A3B (`mixture_params` has them).
    """
    if moe is None:
        return config
    width = moe.get("ffn_hidden") or config.ffn_hidden
    return dataclasses.replace(config, ffn_hidden=(moe["top_k"] + moe.get("shared", 0)) * width)


def moe_options(options: argparse.Namespace, found: dict | None = None) -> dict | None:
    """Return the arguments of apply_moe for a program's options experts, top_k (2 by default), expert_hidden, shared.

    An option is None if it was not given. found: the arguments by a model's config.json, which the options may repeat.

    Returns None for a model without experts. Raises ValueError if the options contradict `found`, or lack --experts.
    """
    asked = {"experts": options.experts, "top_k": options.top_k}
    asked |= {"ffn_hidden": options.expert_hidden, "shared": options.shared}
    given = {name: value for name, value in asked.items() if value is not None}
    for name, value in given.items() if found else ():
        if value != (there := found.get(name, 0)):
            option = {"ffn_hidden": "expert-hidden", "top_k": "top-k"}.get(name, name)
            raise ValueError(f"--{option} is {value}, and the model's config.json says {there}")
    if found or not given:
        return found
    if options.experts is None:
        raise ValueError("--top-k, --expert-hidden and --shared go with --experts")
    sizes = asked | {"top_k": 2 if options.top_k is None else options.top_k}
    return {name: value for name, value in sizes.items() if name != "shared" or value}


def run_after(x: torch.Tensor, gates: torch.Tensor, meanwhile: Callable, compute: Callable) -> torch.Tensor:
    """A mixture's `run` where no token travels."""
    meanwhile()
    return compute(x, gates)


def check_moe(model: Transformer, experts: int, top_k: int, **routing) -> None:
    """Raise ValueError where the numbers do not fit together, or a block has no MLP of the model's own."""
    need_transformer(model, "apply_moe", "MoE(config, experts, top_k) takes the place of an MLP in any model")
    if not all(type(block.mlp) is MLP and isinstance(block.mlp.down_proj, nn.Linear) for block in model.blocks):
        raise ValueError("a block's MLP is split or replaced already: apply_moe comes first")
    Routing(experts, top_k, **routing)


# exercise 08.5
def run_local_experts(x: torch.Tensor, gates: torch.Tensor, routing: Routing, experts: Experts) -> torch.Tensor:
    """All experts are on this rank. x: [b, s, h]; gates: [b, s, E]; returns [b, s, h]."""
    rows, row_gates = x.flatten(0, -2), gates.flatten(0, -2)
    if routing.capacity is None:
        out = experts(rows, row_gates, len(rows) * routing.top_k)
    else:
        out = batched_experts(experts, rows, row_gates, routing.slots(len(rows)))
    return out.view_as(x)


# exercise 08.5
def apply_moe(
    model: Transformer,
    experts: int,
    top_k: int,
    ffn_hidden: int | None = None,
    shared: int = 0,
    seed: int = 0,
    **routing,
) -> Transformer:
    """Put a mixture in the place of each block's MLP, in place; returns the model. Arguments: see MoE; seed: of its
    initial values (init_parameter). The model may be on the meta device. Comes before all other transforms.
    `model.active_config` has the sizes of what one token goes through. Raises ValueError, and changes nothing, where
    `check_moe` refuses.
    """
    check_moe(model, experts, top_k, **routing)
    for number, block in enumerate(model.blocks):
        like = block.mlp.down_proj.weight
        with torch.device(like.device):
            block.mlp = MoE(model.config, experts, top_k, ffn_hidden, shared, **routing)
        for name, parameter in block.mlp.named_parameters():
            parameter.data = parameter.data.to(like.dtype)
            init_parameter(f"blocks.{number}.mlp.{name}", parameter, model.config, seed)
    sizes = {"top_k": top_k, "ffn_hidden": ffn_hidden, "shared": shared}
    model.active_config = active_config(model.config, sizes)
    return model


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
    """Parameters of a mixture, and those among them that one token goes through.

    dense_layers: how many layers keep the MLP of `config`; attention: parameters of a layer's attention, where it is
    another than the course's.
    """
    parts = parameter_parts(config)
    expert = 3 * config.hidden * (ffn_hidden or config.ffn_hidden)
    layer = (parts["q_o"] + parts["kv"] if attention is None else attention) + parts["norms"]
    ends = parts["embedding"] + parts["head"] + parts["final_norm"]
    always = ends + config.layers * layer + dense_layers * parts["mlp"]
    mixtures = config.layers - dense_layers
    return tuple(always + mixtures * (experts * config.hidden + (used + shared) * expert) for used in (experts, top_k))


def describe_model(name: str, config: ModelConfig, moe: dict | None) -> str:
    """Return a model's name and parameter counts, for a line of output. moe: arguments of apply_moe, or None."""
    heads = config.qkv_bias * (config.heads + 2 * config.kv_heads) + config.qk_norm * 2
    small = config.layers * heads * config.head_dim  # biases and norms of q, k and v, which parameter_parts leaves out
    if moe is None:
        return f"{name}, {param_count(config) + small:,} parameters"
    sizes = {each: moe[each] for each in ("experts", "top_k", "ffn_hidden", "shared") if each in moe}
    total, active = (count + small for count in mixture_params(config, **sizes))
    return f"{name} with {moe['experts']} experts, {total:,} parameters, {active:,} active"
