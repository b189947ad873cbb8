"""Trainings of a small mixture that log how many tokens each expert gets; the break-it lab of exercise 08.7."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from course_lib.expert_parallel import mixture
from course_lib.single_gpu.data import ByteTokenizer, TokenBatches, corpus
from course_lib.single_gpu.model import PRESETS, Transformer, loss


@functools.cache
def text() -> torch.Tensor:
    """The corpus, as tokens."""
    return ByteTokenizer().encode(corpus())


class Training(NamedTuple):
    """The log of a training."""

    losses: np.ndarray  # [steps]
    counts: np.ndarray  # [steps, L, E], choices of each expert
    norms: np.ndarray  # [steps, L], of the gradients of the routers' weights


def note_choices(router: nn.Module, inputs: tuple, gates: torch.Tensor) -> None:
    """A forward hook of a router: keeps the choices of each expert as `router.seen`."""
    router.seen = (gates.detach() != 0).flatten(0, -2).sum(0)


def counted_training(
    steps: int = 80,
    lr: float = 2e-3,
    experts: int = 8,
    top_k: int = 2,
    after: Callable[[nn.Module, torch.Tensor], object] = lambda model, counts: None,
    change: Callable[[nn.Module], object] = lambda model: None,
    **routing,
) -> Training:
    """Train the debug model with mixtures; after(model, counts [L, E]) is called in each step, change(model) before
    the first.
    """
    model = mixture.apply_moe(Transformer(PRESETS["debug"]), experts, top_k, ffn_hidden=88, **routing)
    for block in model.blocks:
        block.mlp.router.register_forward_hook(note_choices)
    change(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.95))
    batches, losses, counts, norms = iter(TokenBatches(text(), batch=8, seq=128)), [], [], []
    found = [block.mlp.router for block in model.blocks]
    for _ in range(steps):
        inputs, targets = next(batches)
        step_loss = loss(model(inputs), targets)
        optimizer.zero_grad()
        step_loss.backward()
        norms.append([0.0 if r.weight.grad is None else r.weight.grad.norm().item() for r in found])
        counts.append(torch.stack([router.seen for router in found]))
        after(model, counts[-1])
        optimizer.step()
        losses.append(step_loss.item())
    return Training(np.array(losses), torch.stack(counts).numpy(), np.array(norms))


def unevenness(counts: np.ndarray) -> np.ndarray:
    """The choices of the busiest expert over its even share, by step, the mean of the layers. counts: [steps, L, E]."""
    return counts.max(2).mean(1) / counts.mean((1, 2))


def dropped(counts: np.ndarray, factor: float) -> float:
    """The share of all choices above a capacity, over all layers. counts: [L, E] of a step."""
    slots = np.ceil(factor * counts[0].sum() / counts.shape[1])
    return np.maximum(counts - slots, 0).sum() / counts.sum()


def detach_gates(model: nn.Module) -> None:
    """Cut the gates off from the graph."""
    for block in model.blocks:
        block.mlp.router.register_forward_hook(lambda module, inputs, gates: gates.detach().requires_grad_())


def normalise_gates(model: nn.Module) -> None:
    """Divide the gates of a token by their sum."""
    for block in model.blocks:
        block.mlp.router.register_forward_hook(lambda module, inputs, gates: gates / gates.sum(-1, keepdim=True))


FAULTS = {
    "sound": {"aux_loss_coeff": 0.01},
    "detached": {"change": detach_gates},
    "rewarded": {"aux_loss_coeff": -0.03},
    "normalised": {"top_k": 1, "change": normalise_gates},
}
LETTERS = dict(
    zip("ABCD", (list(FAULTS)[i] for i in torch.randperm(4, generator=torch.Generator().manual_seed(8))), strict=True)
)


@functools.cache
def lab_runs() -> dict[str, Training]:
    """The lab's four trainings, by letter."""
    return {letter: counted_training(steps=60, **FAULTS[name]) for letter, name in LETTERS.items()}
