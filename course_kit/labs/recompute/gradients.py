"""Gradients of a model: with blocks called through a checkpoint, of batches with ignored targets; differences."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

from course_kit.typed import grad_of, override
from course_lib.recompute import by_hand
from course_lib.recompute.modes import IGNORED
from course_lib.single_gpu.model import loss

Batch = tuple[torch.Tensor, torch.Tensor]  # inputs and targets, [b, s] each


def gradients_of(
    model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor
) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and the gradients by parameter, with the same random numbers each time."""
    torch.manual_seed(1)
    model.zero_grad()
    step_loss = loss(model(inputs), targets)
    step_loss.backward()
    return step_loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@contextlib.contextmanager
def called_by(around: Callable, model: nn.Module) -> Iterator[None]:
    """Call each block's forward as around(forward, *arguments) inside the context."""
    blocks = model.blocks
    assert isinstance(blocks, nn.ModuleList)  # of any GPT
    for block in blocks:
        override(block, forward=functools.partial(around, block.forward))
    try:
        yield
    finally:
        for block in blocks:
            del block.forward  # the class's forward is back


@contextlib.contextmanager
def other_random_numbers() -> Iterator[None]:
    """Have `by_hand.recompute` keep no random state inside the context: a replay draws the next numbers."""
    with (
        mock.patch.object(by_hand, "random_state", lambda tensors: None),
        mock.patch.object(by_hand, "replayed", lambda state: contextlib.nullcontext()),
    ):
        yield


def relative_difference(grads: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> float:
    """Return the norm of the difference over the norm of `grads`, of all gradients together."""
    pairs = list(zip(grads, others, strict=True))
    zero = torch.zeros(())
    difference = sum(((g - o).square().sum() for g, o in pairs), zero)
    return (difference / sum((g.square().sum() for g, _ in pairs), zero)).sqrt().item()


def uneven(batch: int, seq: int, lengths: list[int], seed: int = 0) -> Batch:
    """Return inputs and targets, [batch, seq]; row i has lengths[i] targets, all others are IGNORED."""
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = torch.randint(256, (2, batch, seq), generator=generator)
    for row, length in enumerate(lengths):
        targets[row, length:] = IGNORED
    return inputs, targets


def micro_batches(inputs: torch.Tensor, targets: torch.Tensor, size: int) -> list[Batch]:
    """Cut inputs and targets, [b, s], into micro-batches of `size` sequences."""
    return list(zip(inputs.split(size), targets.split(size), strict=True))


def full_batch(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, list]:
    """Return the loss and the gradients of all rows at once, by PyTorch's mean over the targets."""
    model.zero_grad()
    mean_loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    mean_loss.backward()
    return mean_loss.detach(), [grad_of(p).clone() for p in model.parameters()]


def usual_loop(model: nn.Module, batches: list[Batch]) -> None:
    """Compute .grad as most loops on the web do: as the mean of the micro-batches' means. It is not exact."""
    model.zero_grad()
    for inputs, targets in batches:
        mean = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        (mean / len(batches)).backward()
