"""A mixture of experts in place of the MLP: y = sum of g_i E_i(x) over the k experts that the router chooses.

Parameters grow with E, FLOPs with k: 6 h f per choice in forward. Every token also passes through the shared experts,
if there are any (DeepSeekMoE, Dai et al. 2024). Jiang et al. 2024 (Mixtral of Experts); DeepSeek-V3 2024, §2.1.2.
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

RunExperts = Callable[[torch.Tensor, torch.Tensor, Callable[[], object]], torch.Tensor]


class MoE(nn.Module):
    """A mixture of `experts` SwiGLU MLPs of width `ffn_hidden` (None: that of the dense MLP), top_k of them per token.

    shared: how many more experts all tokens pass through, as one MLP. routing: of Routing. `run(x, gates,
    overlap_with)` returns the routed experts' output for x, and calls overlap_with() once; apply_expert_parallel
    replaces it by one that sends tokens between ranks.
    """

    def __init__(
        self, config: ModelConfig, experts: int, top_k: int, ffn_hidden: int | None = None, shared: int = 0, **routing
    ):
        super().__init__()
        width, self.dropout = ffn_hidden or config.ffn_hidden, config.dropout
        self.router = Router(config.hidden, experts, top_k, **routing)
        self.experts = Experts(experts, config.hidden, width, grouped_experts)
        self.shared = MLP(dataclasses.replace(config, ffn_hidden=shared * width, dropout=0.0)) if shared else None
        local = functools.partial(run_local_experts, routing=self.router.routing, experts=self.experts)
        self.run: RunExperts = functools.partial(run_after, compute=local)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mixture's output [b, s, h]. x: [b, s, h]."""
        shared_outputs = []

        def run_shared() -> None:  # before combine, which a recomputation in backward need not reach
            if self.shared is not None:
                shared_outputs.append(self.shared(x))

        out = self.run(x, self.router(x), run_shared)
        return F.dropout(sum(shared_outputs, out), self.dropout, self.training)


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


def run_after(
    x: torch.Tensor, gates: torch.Tensor, overlap_with: Callable[[], object], compute: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """Call overlap_with(), then compute(x, gates): the `run` of a mixture whose experts are all on this rank."""
    overlap_with()
    return compute(x, gates)


def check_moe(model: Transformer, experts: int, top_k: int, **routing) -> None:
    """Raise ValueError if the sizes do not fit together, or a block's MLP has been split or replaced."""
    need_transformer(model, "apply_moe", "MoE(config, experts, top_k) takes the place of an MLP in any model")
    if not all(type(block.mlp) is MLP and isinstance(block.mlp.down_proj, nn.Linear) for block in model.blocks):
        raise ValueError("a block's MLP is split or replaced already: apply_moe comes first")
    Routing(experts, top_k, **routing)


# exercise 08.5
def run_local_experts(x: torch.Tensor, gates: torch.Tensor, routing: Routing, experts: Experts) -> torch.Tensor:
    """Return the output [b, s, h] of experts that are all on this rank. x: [b, s, h]; gates: [b, s, E]."""
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
    """Replace each block's MLP by a mixture, in place; return the model. Arguments: see MoE; seed: of initial values
    (init_parameter). The model may be on the meta device. Call it before all other transforms. It sets
    `model.active_config`, the sizes of the model that one token passes through. Raises ValueError, and changes nothing,
    if `check_moe` refuses the model.
    """
    check_moe(model, experts, top_k, **routing)
    for number, block in enumerate(model.blocks):
        like = next(block.mlp.parameters())
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


def describe_model(name: str, config: ModelConfig, moe: dict | None) -> str:
    """Return a model's name and parameter counts, for a line of output. moe: arguments of apply_moe, or None."""
    heads = config.qkv_bias * (config.heads + 2 * config.kv_heads) + config.qk_norm * 2
    small = config.layers * heads * config.head_dim  # biases and norms of q, k and v, which parameter_parts leaves out
    if moe is None:
        return f"{name}, {param_count(config) + small:,} parameters"
    sizes = {each: moe[each] for each in ("experts", "top_k", "ffn_hidden", "shared") if each in moe}
    total, active = (count + small for count in mixture_params(config, **sizes))
    return f"{name} with {moe['experts']} experts, {total:,} parameters, {active:,} active"
