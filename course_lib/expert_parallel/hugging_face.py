"""Mixtures of experts of transformers, Mixtral and Qwen3-MoE: their sizes, weight names, and routers.

    config, moe = hf_mixture(AutoConfig.from_pretrained("Qwen/Qwen3-30B-A3B"))    moe: arguments of apply_moe
    model = from_hf("Qwen/Qwen3-30B-A3B")                                         in one process

A file has a matrix per expert, as published models do; in memory transformers stacks them, as `Experts` does. A model
whose router computes other gates than `Router` is refused. Jiang et al. 2024 (Mixtral of Experts); Qwen Team 2025
(Qwen3).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

from course_lib.expert_parallel.hf_sizes import MIXTURES, moe_of
from course_lib.expert_parallel.mixture import apply_moe
from course_lib.expert_parallel.router import Routing
from course_lib.single_gpu.hf_config import hf_config, one_of
from course_lib.single_gpu.hugging_face import hf_name, plain_model, with_old_rope
from course_lib.single_gpu.model import ModelConfig, Transformer

HF_MIXTURES = ("mixtral", "qwen3_moe")  # those whose router is the course's; the others have the sizes alone


def check_gates(sizes: dict) -> None:
    """Raise ValueError if a model of HF_MIXTURES, by its config.json, computes other gates than `Router`."""
    k, normed = sizes["num_experts_per_tok"], sizes.get("norm_topk_prob", sizes["model_type"] == "mixtral")
    differing = []
    if noise := sizes.get("router_jitter_noise"):
        differing.append(f"router_jitter_noise is {noise}, not 0.0")
    if k == 1 and normed:
        differing.append("num_experts_per_tok is 1, and its gate 1, not the score")
    if k > 1 and not normed:
        differing.append("norm_topk_prob is False, and the course divides the gates by their sum")
    if differing:
        raise ValueError(f"not the model of this course: {', '.join(differing)}")


def hf_mixture(c) -> tuple[ModelConfig, dict]:
    """Return the sizes of a Mixtral or Qwen3-MoE from its config of transformers, and arguments of apply_moe.

    Raises ValueError if our model lacks one of its features (see single_gpu.hugging_face.hf_config, and check_gates).
    """
    sizes = c.to_dict()
    if sizes["model_type"] not in HF_MIXTURES:
        raise ValueError(
            f"not the model of this course: model_type is {sizes['model_type']}, not {one_of(HF_MIXTURES)}"
        )
    moe = moe_of(sizes)
    check_gates(sizes)
    config = hf_config(SimpleNamespace(**sizes | {"model_type": MIXTURES[sizes["model_type"]][0]}))
    return config, {name: value for name, value in moe.items() if name != "shared"}


def to_hf_mixture(dense, routing: Routing, width: int):
    """Return the config of transformers of a mixture. dense: by to_hf_config, without experts; width: of an expert.

    Needs the extra `[hf]`. Raises ValueError if transformers has no such model.
    """
    import transformers

    kind = {"llama": "Mixtral", "mistral": "Mixtral", "qwen3": "Qwen3Moe"}.get(dense.model_type)
    k, expected = routing.top_k, {"score": "softmax", "scale": 1.0, "node_limit": routing.nodes}
    actual = {name: getattr(routing, name) for name in expected}
    differing = [f"{name} {actual[name]}" for name, value in expected.items() if actual[name] != value]
    differing += [f"{dense.model_type}'s attention"] if kind is None else []
    differing += ["top_k 1 without norms of q and k"] if k == 1 and kind == "Mixtral" else []
    if differing:
        raise ValueError(f"no mixture of transformers that the course knows has {', '.join(differing)}")
    sizes = {"num_experts_per_tok": k, "architectures": [f"{kind}ForCausalLM"], "head_dim": dense.head_dim}
    if kind == "Mixtral":
        sizes |= {"num_local_experts": routing.experts, "intermediate_size": width}
    else:
        sizes |= {"num_experts": routing.experts, "moe_intermediate_size": width, "norm_topk_prob": k > 1}
    config = getattr(transformers, f"{kind}Config")
    skipped = ("model_type", "rope_scaling")
    same = {name: value for name, value in dense.to_dict().items() if hasattr(config(), name) and name not in skipped}
    return with_old_rope(config(**same | sizes))


def hf_tensor(name: str, kind: str, expert: int | None = None) -> str:
    """Return the name in transformers' files of one of our parameters, or of an expert's matrix. kind: a model_type."""
    name = hf_name(name)
    if kind not in HF_MIXTURES:
        return name
    name = name.replace(".mlp.router.", ".mlp.gate.").replace(".experts.", f".experts.{expert}.")
    if kind == "mixtral":
        name = name.replace(".mlp.", ".block_sparse_moe.")
        if expert is not None:
            for ours, theirs in {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}.items():
                name = name.replace(ours, theirs)
    return name


def hf_tensors(name: str, shape: tuple[int, ...], kind: str) -> Iterator[tuple[str, int | None]]:
    """Yield (name, expert) for each tensor in transformers' files that makes up one of our parameters or buffers.

    expert: None if it is a single tensor. shape: of ours; kind: a model_type. Yields nothing for the router's bias,
    which transformers lacks.
    """
    if ".experts." in name:
        yield from ((hf_tensor(name, kind, expert), expert) for expert in range(shape[0]))
    elif not name.endswith("router.bias"):
        yield hf_tensor(name, kind), None


def from_hf(source: nn.Module | str | Path, **routing) -> Transformer:
    """Return a `Transformer` of mixtures with the weights of a Mixtral or Qwen3-MoE: a model of transformers, or its
    name or folder. Needs the extra `[hf]`. routing: of Router; aux_loss_coeff is 0 by default.

    Raises ValueError if our model lacks one of its features (see hf_mixture), or its weights are quantized.
    """
    from transformers import AutoModelForCausalLM

    theirs = plain_model(AutoModelForCausalLM, source)
    config, moe = hf_mixture(theirs.config)
    with torch.device("meta"):
        model = apply_moe(Transformer(config), **moe, **routing)
    tensors, weights = theirs.state_dict(), {}
    for name, like in model.state_dict().items():
        stacked = hf_name(name).replace("mlp.router.", "mlp.gate.").removesuffix(".weight")  # in memory [E, ...]
        if name.endswith("router.bias"):
            weights[name] = torch.zeros(like.shape)
        elif name.endswith(("experts.gate_proj.weight", "experts.up_proj.weight")):
            both = tensors[stacked.rpartition(".")[0] + ".gate_up_proj"]  # [E, 2f, h]
            weights[name] = both.chunk(2, dim=1)["up_proj" in name].clone()
        else:
            weights[name] = tensors[stacked if ".experts." in name else f"{stacked}.weight"].clone()
    model.load_state_dict(weights, assign=True)
    if config.tied and model.head and model.embedding:
        model.head.weight = model.embedding.weight
    return model
