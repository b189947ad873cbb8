"""Small models and a batch for all layouts, one process as their oracle, and steps of a layout against it."""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import nn

from course_lib import five_d
from course_lib.expert_parallel.mixture import apply_moe
from course_lib.expert_parallel.router import routers_of
from course_lib.five_d.layouts import Layout
from course_lib.five_d.meshes import Mesh
from course_lib.five_d.model import ParallelModel, full_weights
from course_lib.recompute.modes import IGNORED, summed_loss
from course_lib.single_gpu.model import ModelConfig, Transformer
from course_lib.single_gpu.training import decay_groups

TINY = ModelConfig(4, 32, 4, 2, 48, 97, tied=True)  # four layers, an odd vocabulary, one matrix for embedding and head
SHALLOW = dataclasses.replace(TINY, layers=2)  # where two layers show as much
MOE = {"experts": 4, "top_k": 2, "aux_loss_coeff": 0.1}
ADAMW = {"lr": 3e-3, "eps": 1e-4}  # a smaller eps would blow rounding errors up where a gradient is nearly 0

Numbers = list[tuple[float, float]]  # loss and norm of each step
Steps = tuple[Numbers, dict[str, torch.Tensor]]  # and the full weights after them


def batch_of(
    sequences: int = 8, seq: int = 16, vocab: int = TINY.vocab, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets, each [b, s], the same on all ranks; some targets are not trained on."""
    tokens = torch.randint(0, vocab, (sequences, seq + 1), generator=torch.Generator().manual_seed(seed))
    targets = tokens[:, 1:].clone()
    targets[0, :5] = IGNORED
    return tokens[:, :-1], targets


def local_batch(layout: Layout, mesh: Mesh, *sizes: int, seed: int = 0) -> list[torch.Tensor]:
    """Return the inputs and targets of this rank's dp coordinate; sizes: arguments of batch_of."""
    return [each.chunk(layout.dp)[mesh.dp.rank()] for each in batch_of(*sizes, seed=seed)]


def built(
    text: str, config: ModelConfig = SHALLOW, moe: dict | None = None, **settings
) -> tuple[Layout, Mesh, ParallelModel]:
    """On a rank: the layout of `text`, its mesh and the model, as the library makes them. Collective."""
    layout = Layout.parse(text)
    mesh = five_d.build_mesh(layout)
    return layout, mesh, five_d.parallelize(config, layout, mesh, moe=moe, **settings)


@functools.cache
def one_process(
    layout: Layout, mixtures: bool = False, steps: int = 3, config: ModelConfig = TINY
) -> tuple[Numbers, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return losses and norms, gradients of the first step, and weights after the last one, of one process.

    It sees the micro-batches as the layout's ranks do together: the balance loss of a mixture is one of a micro-batch.
    """
    model = Transformer(config)
    if mixtures:
        apply_moe(model, **MOE)
    optimizer, numbers, first = torch.optim.AdamW(decay_groups(model), **ADAMW), [], None
    for step in range(steps):
        inputs, targets = batch_of(seed=step)
        m = len(inputs) // (layout.dp * layout.micro_batch)
        for router in routers_of(model):
            router.loss_weight = 1 / m
        optimizer.zero_grad()
        loss, tokens = 0, (targets != IGNORED).sum()
        order = torch.arange(len(inputs)).view(layout.dp, m, layout.micro_batch).transpose(0, 1).flatten(1)
        for chosen in order:  # micro-batch i of all dp ranks
            part = summed_loss(model(inputs[chosen]), targets[chosen]) / tokens
            part.backward()
            loss += part.item()
        first = first or {name: weight.grad.clone() for name, weight in model.named_parameters()}
        numbers.append((loss, nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()))
        optimizer.step()
    return numbers, first, {name: w.detach() for name, w in model.named_parameters(remove_duplicate=False)}


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest value."""
    return ((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-12)).item()


def after_steps(parallel: ParallelModel, steps: int) -> Steps:
    """On a rank: losses and norms of steps, and the full weights of its stages after them."""
    numbers = []
    for step in range(steps):
        loss, norm = parallel.step(*local_batch(parallel.layout, parallel.mesh, seed=step), max_norm=0.5)
        numbers.append((loss.item(), norm.item()))
    return numbers, full_weights(parallel)


def differences(
    found: list[Steps], text: str, moe: dict | None, steps: int, config: ModelConfig = TINY
) -> tuple[float, float]:
    """Return how far the ranks' steps are from one process's, at most and relative: losses and norms, and weights."""
    wanted, _, weights = one_process(Layout.parse(text), bool(moe), steps, config)
    pairs = [pair for numbers, _ in found for pair in zip(numbers, wanted, strict=True)]
    numbers = max(abs(a - b) / b for pair in pairs for a, b in zip(*pair, strict=True))
    return numbers, max(apart(own, weights[name]) for _, held in found for name, own in held.items())
