"""A small model and its batch, groups of ranks to split it over, and its training in one process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn

from course_kit.ranks import shared
from course_kit.typed import grad_of, world
from course_lib import tensor_parallel
from course_lib.single_gpu.model import ModelConfig, Transformer, init_parameter, loss
from course_lib.tensor_parallel.shards import materialize

TINY = ModelConfig(2, 48, 4, 2, 100, 97, tied=True)  # four heads, two K/V heads, an odd vocabulary
MHA = ModelConfig(2, 48, 4, 4, 100, 97)  # as many K/V heads as heads, separate head and embedding


def batch_of(config: ModelConfig = TINY, batch: int = 2, seq: int = 17) -> torch.Tensor:
    """Return inputs and targets, each [b, s], the same on all ranks."""
    return torch.randint(config.vocab, (2, batch, seq), generator=torch.Generator().manual_seed(100))


def in_groups(size: int, function: Callable, *args) -> Any:
    """On a rank: return function(group, *args) in groups of `size` consecutive ranks."""
    if size == dist.get_world_size():
        return function(world(), *args)
    group = dist.new_subgroups(group_size=size)[0]
    result = function(group, *args)
    dist.barrier(group)
    return result


def on_first(size: int, function: Callable, *args) -> Any:
    """On a rank: return function(group, *args) in a group of the first `size` ranks, while the other ranks wait."""
    group = dist.new_group(range(size))
    result = function(group, *args) if dist.get_rank() < size else None
    dist.barrier()
    return result


def relative_error(got: torch.Tensor | None, expected: torch.Tensor) -> float:
    """Return the largest difference from `expected` over its largest element; infinite for another shape or None."""
    if got is None or got.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    scale = expected.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    return ((got - expected).abs().max() / scale).nan_to_num(nan=float("inf")).item()


def sgd(parameters: Iterable[nn.Parameter], lr: float = 0.5) -> torch.optim.Optimizer:
    """Return the optimizer of the small models: updates are proportional to gradients, so a wrong gradient shows."""
    return torch.optim.SGD(parameters, lr, momentum=0.9)


def split_model(config: ModelConfig, group: dist.ProcessGroup | None, meta: bool = False, **options) -> Transformer:
    """Return a model of `config` for seed 0, split over the group. meta: on the meta device first; options: for
    apply_tensor_parallel. Collective.
    """
    if not meta:
        return tensor_parallel.apply_tensor_parallel(Transformer(config), group, **options)
    with torch.device("meta"):
        model = Transformer(config)
    tensor_parallel.apply_tensor_parallel(model, group, **options)
    return cast(Transformer, materialize(model, lambda name, tensor: init_parameter(name, tensor, config)))


class Training(NamedTuple):
    """Results of some training steps: losses and gradient norms by step, the first step's gradients, the weights."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def process_trial(config: ModelConfig, steps: int, max_norm: float = 0.4) -> Training:
    """Train in one process."""
    model, losses, norms = Transformer(config), [], []
    gradients: dict[str, torch.Tensor] = {}
    optimizer, (inputs, targets) = sgd(model.parameters()), batch_of(config)
    for _ in range(steps):
        optimizer.zero_grad()
        step_loss = loss(model(inputs), targets)
        step_loss.backward()
        gradients = gradients or {name: grad_of(p).clone() for name, p in model.named_parameters()}
        losses.append(step_loss.item())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
    return Training(losses, norms, gradients, {name: tensor.clone() for name, tensor in model.state_dict().items()})


@functools.cache
def one_process(config: ModelConfig, steps: int = 1) -> Training:
    """Return the training of one process. It runs on a rank, which has already imported the optimizer's modules."""
    return shared(4)(process_trial, config, steps)[0]
