"""A mixture of experts in place of the MLP: y = sum of g_i E_i(x) over the k experts that the router chooses.

Parameters grow with E, FLOPs with k: 6 h f per choice in forward. Every token also passes through the shared experts,
if there are any (DeepSeekMoE, Dai et al. 2024). Jiang et al. 2024 (Mixtral of Experts); DeepSeek-V3 2024, §2.1.2.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from course_lib.expert_parallel.experts import Experts, batched_experts, grouped_experts
from course_lib.expert_parallel.router import Router, Routing
from course_lib.expert_parallel.sizes import active_config as active_config
from course_lib.expert_parallel.sizes import mixture_params
from course_lib.expert_parallel.sizes import moe_options as moe_options
from course_lib.single_gpu.memory import param_count
from course_lib.single_gpu.memory import parameter_parts as parameter_parts
from course_lib.single_gpu.model import MLP, ModelConfig, Transformer, init_parameter, need_transformer

RunExperts = Callable[[torch.Tensor, torch.Tensor, Callable[[], object]], torch.Tensor]


class MoE(nn.Module):
    """A mixture of `experts` SwiGLU MLPs of width `ffn_hidden` (None: the dense MLP's width), top_k of them per token.

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
        raise ValueError("a block's MLP is split or replaced already: call apply_moe first")
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


def describe_model(name: str, config: ModelConfig, moe: dict | None) -> str:
    """Return a model's name and parameter counts, for a line of output. moe: arguments of apply_moe, or None."""
    heads = config.qkv_bias * (config.heads + 2 * config.kv_heads) + config.qk_norm * 2
    small = config.layers * heads * config.head_dim  # biases and norms of q, k and v, which parameter_parts leaves out
    if moe is None:
        return f"{name}, {param_count(config) + small:,} parameters"
    sizes = {each: moe[each] for each in ("experts", "top_k", "ffn_hidden", "shared") if each in moe}
    total, active = (count + small for count in mixture_params(config, **sizes))
    return f"{name} with {moe['experts']} experts, {total:,} parameters, {active:,} active"
