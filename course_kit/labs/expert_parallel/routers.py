"""Trainings of a small MoE model that log the tokens of each expert; the break-it lab of exercise 08.7."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import nn

from course_lib.expert_parallel import mixture
from course_lib.expert_parallel.router import routers_of
from course_lib.single_gpu.data import ByteTokenizer, TokenBatches, corpus
from course_lib.single_gpu.model import PRESETS, Transformer, loss


@functools.cache
def text() -> torch.Tensor:
    """Return the corpus as tokens."""
    return ByteTokenizer().encode(corpus())


class Training(NamedTuple):
    """The log of a training."""

    losses: np.ndarray  # [steps]
    counts: np.ndarray  # [steps, L, E], choices of each expert
    norms: np.ndarray  # [steps, L], of the gradients of the routers' weights


def note_choices(router: nn.Module, inputs: tuple, gates: torch.Tensor) -> None:
    """Note the choices of each expert as `router.seen` (a forward hook of a router)."""
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
    """Train the debug model with mixtures of experts; after(model, counts [L, E]) is called in each step, change(model)
    before the first step.
    """
    model = mixture.apply_moe(Transformer(PRESETS["debug"]), experts, top_k, ffn_hidden=88, **routing)
    routers = routers_of(model)
    for router in routers:
        router.register_forward_hook(note_choices)
    change(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.95))
    batches, losses, counts, norms = iter(TokenBatches(text(), batch=8, seq=128)), [], [], []
    for _ in range(steps):
        inputs, targets = next(batches)
        step_loss = loss(model(inputs), targets)
        optimizer.zero_grad()
        step_loss.backward()
        norms.append([0.0 if r.weight.grad is None else r.weight.grad.norm().item() for r in routers])
        counts.append(torch.stack([cast(torch.Tensor, router.seen) for router in routers]))
        after(model, counts[-1])
        optimizer.step()
        losses.append(step_loss.item())
    return Training(np.array(losses), torch.stack(counts).numpy(), np.array(norms))


def unevenness(counts: np.ndarray) -> np.ndarray:
    """Return the choices of the busiest expert over its even share, by step, averaged over the layers.

    counts: [steps, L, E].
    """
    return counts.max(2).mean(1) / counts.mean((1, 2))


def dropped(counts: np.ndarray, factor: float) -> float:
    """Return the share of all choices above a capacity, over all layers. counts: [L, E] of one step."""
    slots = np.ceil(factor * counts[0].sum() / counts.shape[1])
    return np.maximum(counts - slots, 0).sum() / counts.sum()


def detach_gates(model: nn.Module) -> None:
    """Detach the gates from the graph."""
    for router in routers_of(model):
        router.register_forward_hook(lambda module, inputs, gates: gates.detach().requires_grad_())


def normalize_gates(model: nn.Module) -> None:
    """Divide the gates of each token by their sum."""
    for router in routers_of(model):
        router.register_forward_hook(lambda module, inputs, gates: gates / gates.sum(-1, keepdim=True))


FAULTS: dict[str, dict[str, Any]] = {
    "sound": {"aux_loss_coeff": 0.01},
    "detached": {"change": detach_gates},
    "rewarded": {"aux_loss_coeff": -0.03},
    "normalized": {"top_k": 1, "change": normalize_gates},
}
LETTERS = dict(
    zip("ABCD", (list(FAULTS)[i] for i in torch.randperm(4, generator=torch.Generator().manual_seed(8))), strict=True)
)


@functools.cache
def lab_runs() -> dict[str, Training]:
    """Return the lab's four trainings, by letter."""
    return {letter: counted_training(steps=60, **FAULTS[name]) for letter, name in LETTERS.items()}
