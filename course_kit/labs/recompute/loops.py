"""The break-it lab of notebook 02: a training loop with three faults. Its results are right, but it is slow."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.profiler import record_function

from course_kit.labs.single_gpu import this_device
from course_kit.typed import grad_of
from course_lib.single_gpu.data import corpus
from course_lib.single_gpu.model import PRESETS, Transformer, loss


@functools.cache
def text() -> str:
    """Return the text that the lab trains on."""
    return corpus(400_000)


def slow_data(step: int, batch: int = 4, seq: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the batch of this step: inputs and targets, [batch, seq]."""
    numbers = [byte for character in text() for byte in character.encode()]
    starts = [(37 * (step * batch + row) * seq) % (len(numbers) - seq - 1) for row in range(batch)]
    windows = torch.tensor([numbers[start : start + seq + 1] for start in starts])
    return windows[:, :-1], windows[:, 1:]


def slow_clip(parameters: list[nn.Parameter], max_norm: float = 1.0) -> None:
    """Scale the gradients so that their norm is at most max_norm."""
    squares = 0.0
    for parameter in parameters:
        squares += grad_of(parameter).square().sum().item()
    if squares**0.5 > max_norm:
        for parameter in parameters:
            grad_of(parameter).mul_(max_norm / squares**0.5)


@torch.no_grad()
def slow_sgd(parameters: list[nn.Parameter], momenta: list[torch.Tensor], lr: float = 0.05) -> None:
    """Take a step of SGD with momentum 0.9, row by row."""
    for parameter, momentum in zip(parameters, momenta, strict=True):
        rows = (x.unsqueeze(0) if x.dim() == 1 else x for x in (parameter, grad_of(parameter), momentum))
        for weight, gradient, moment in zip(*rows, strict=True):
            moment.mul_(0.9).add_(gradient)
            weight.sub_(moment, alpha=lr)


def slow_training(model: nn.Module, data: Callable = slow_data) -> Callable[[], torch.Tensor]:
    """Return a function that makes one training step and returns its loss."""
    parameters = list(model.parameters())
    momenta, count = [torch.zeros_like(p) for p in parameters], iter(range(10**9))

    def step() -> torch.Tensor:
        with record_function("data"):
            inputs, targets = (part.to(parameters[0].device) for part in data(next(count)))
        with record_function("forward"):
            step_loss = loss(model(inputs), targets)
        with record_function("backward"):
            step_loss.backward()
        with record_function("clip"):
            slow_clip(parameters)
        with record_function("optimizer"):
            slow_sgd(parameters, momenta)
            model.zero_grad()
        return step_loss.detach()

    return step


def ms_per_step(step: Callable[[], object], steps: int = 3) -> float:
    """Return the mean ms per step, after a warm-up step."""
    step()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - start) / steps * 1e3


def fresh_model() -> Transformer:
    """Return the lab's model, preset debug, always with the same weights."""
    return Transformer(PRESETS["debug"]).to(this_device())
