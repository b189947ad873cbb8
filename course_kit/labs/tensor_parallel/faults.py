"""The break-it lab of exercise 06.11: training with a fault in one block, and the parameters that diverge."""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course_kit.labs.tensor_parallel.models import TINY, batch_of, one_process, sgd, split_model
from course_kit.ranks import shared
from course_kit.typed import transformer_blocks, world
from course_lib import tensor_parallel
from course_lib.single_gpu.model import ModelConfig
from course_lib.single_gpu.placement import placement_of
from course_lib.tensor_parallel import regions
from course_lib.tensor_parallel.linear import ColumnParallelLinear

FAULTS = ("right", "row layer", "f", "copies")
RUNS = ("f", "right", "copies", "row layer")  # runs 0 to 3 in the notebook, with the fault in block 1


def plant_fault(model: nn.Module, fault: str, number: int) -> nn.Module:
    """Plant a fault in block `number` of a split model."""
    block = transformer_blocks(model)[number]
    attention: Any = block.attention  # its layers are tensor parallel

    def project_without_f(x: torch.Tensor, layers: list[ColumnParallelLinear]) -> tuple[torch.Tensor, ...]:
        weights = [
            regions.copy_to_group(each.weight, each.replicas.copies) if each.replicas else each.weight
            for each in layers
        ]
        return tuple(F.linear(x, weight) for weight in weights)

    if fault == "row layer":  # the mean, not the sum
        for layer in (attention.o_proj, cast(Any, block.mlp).down_proj):
            layer.register_forward_hook(lambda layer, _, out: out / layer.group.size())
    elif fault == "f":
        attention.project_layers = project_without_f
    elif fault == "copies":
        attention.k_proj.replicas = attention.v_proj.replicas = None
    return model


def diverged(model: nn.Module, group: dist.ProcessGroup) -> list[str]:
    """Return the names of the parameters that differ between ranks that should hold the same values. Collective."""

    def start_and_sum(parameter: nn.Parameter) -> tuple[int, float]:
        shard = placement_of(parameter).tensor_shard
        return shard.start if shard else 0, parameter.detach().double().sum().item()

    local = {name: start_and_sum(p) for name, p in model.named_parameters()}
    of_all: list = [None] * group.size()
    dist.all_gather_object(of_all, local, group)
    pairs_by_name = {name: {of_rank[name] for of_rank in of_all} for name in local}  # (start, sum): one pair per shard
    return [name for name, pairs in pairs_by_name.items() if len(pairs) > len({start for start, _ in pairs})]


def lab_trial(fault: str, number: int, steps: int, config: ModelConfig) -> dict[str, list]:
    """On a rank: the losses of a training with a fault, and the parameters that have diverged after it."""
    group = world()
    model = plant_fault(split_model(config, group), fault, number)
    optimizer, (inputs, targets) = sgd(model.parameters(), 0.05), batch_of(config)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        step_loss = tensor_parallel.vocab_parallel_cross_entropy(model(inputs), targets, group, config.vocab)
        step_loss.backward()
        optimizer.step()
        losses.append(step_loss.item())
    return {"losses": losses, "differing": diverged(model, group)}


@functools.cache
def lab_run(fault: str, number: int, steps: int, config: ModelConfig = TINY) -> dict[str, list]:
    """Train on four ranks with a fault in block `number`: {"losses": by step, "differing": names of parameters}."""
    return shared(4)(lab_trial, fault, number, steps, config)[0]


def lab_runs(steps: int) -> list[dict[str, list]]:
    """Return the four runs whose faults the learner has to find."""
    return [lab_run(fault, 1, steps) for fault in RUNS]


def evidence(runs: list[dict[str, list]]) -> str:
    """Return lines with the first and last loss of each run, and the parameters that differ between its ranks."""
    lines = []
    for number, run in enumerate(runs):
        names = ", ".join(run["differing"]) or "none"
        lines.append(f"run {number}: first loss {run['losses'][0]:.6f}, last {run['losses'][-1]:.6f}")
        lines.append(f"       differ between ranks but should not: {names}")
    return "\n".join([*lines, f"one process: first loss {one_process(TINY).losses[0]:.6f}"])
