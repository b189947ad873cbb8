"""A small model with tensor and sequence parallelism, its batch, and its training in one process."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn

from course_kit.labs.tensor_parallel.models import TINY, sgd
from course_kit.ranks import shared
from course_kit.typed import grad_of
from course_lib.sequence_parallel import model as sequence
from course_lib.single_gpu.model import ModelConfig, Transformer, init_parameter, loss
from course_lib.single_gpu.placement import placement_of
from course_lib.tensor_parallel.model import apply_tensor_parallel
from course_lib.tensor_parallel.shards import materialize

ONE_LAYER = dataclasses.replace(TINY, layers=1)  # for checks: takes half the time


def batch_of(config: ModelConfig = TINY, batch: int = 2, seq: int = 16) -> torch.Tensor:
    """Return inputs and targets, each [b, s]: full sequences, the same on all ranks."""
    return torch.randint(config.vocab, (2, batch, seq), generator=torch.Generator().manual_seed(100))


def split_model(
    config: ModelConfig, group: dist.ProcessGroup, sequence_parallel: bool = True, meta: bool = False, **options
) -> Transformer:
    """Return a tensor-parallel model of `config` for seed 0, by default with sequence parallelism. meta: on the meta
    device first; options: for apply_sequence_parallel. Collective.
    """
    with torch.device("meta" if meta else "cpu"):
        model = Transformer(config)
    apply_tensor_parallel(model, group)
    if sequence_parallel:
        sequence.apply_sequence_parallel(model, group, **options)
    if not meta:
        return model
    return cast(Transformer, materialize(model, lambda name, tensor: init_parameter(name, tensor, config)))


def full_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the gathered gradients of a tensor-parallel model. Collective."""

    def full_gradient(parameter: nn.Parameter) -> torch.Tensor:
        shard = placement_of(parameter).tensor_shard
        return shard.gather(grad_of(parameter)) if shard else grad_of(parameter)

    return {name: full_gradient(parameter).clone() for name, parameter in model.named_parameters()}


class Training(NamedTuple):
    """Losses by step, gradients of the first step, and weights after the last step."""

    losses: list[float]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def process_trial(config: ModelConfig, steps: int, lr: float) -> Training:
    """Train in one process."""
    model, losses = Transformer(config), []
    gradients: dict[str, torch.Tensor] = {}
    optimizer, (inputs, targets) = sgd(model.parameters(), lr), batch_of(config)
    for _ in range(steps):
        optimizer.zero_grad()
        step_loss = loss(model(inputs), targets)
        step_loss.backward()
        gradients = gradients or {name: grad_of(p).clone() for name, p in model.named_parameters()}
        losses.append(step_loss.item())
        optimizer.step()
    return Training(losses, gradients, {name: tensor.clone() for name, tensor in model.state_dict().items()})


@functools.cache
def one_process(config: ModelConfig, steps: int = 3, lr: float = 0.5) -> Training:
    """Return the training of one process. It runs on a rank, which has already imported the optimizer's modules."""
    return shared(4)(process_trial, config, steps, lr)[0]
