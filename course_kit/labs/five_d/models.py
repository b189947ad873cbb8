"""Small models and batches for all layouts, one process as a reference, and steps of a layout compared with it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from course_kit.typed import grad_of
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
SHALLOW = dataclasses.replace(TINY, layers=2)  # if two layers are enough
MOE: dict[str, Any] = {"experts": 4, "top_k": 2, "aux_loss_coeff": 0.1}
ADAMW: dict[str, Any] = {"lr": 3e-3, "eps": 1e-4}  # a smaller eps amplifies rounding errors of gradients near 0

Numbers = list[tuple[float, float]]  # loss and norm of each step
Steps = tuple[Numbers, dict[str, torch.Tensor]]  # and the full weights after the last step


def batch_of(
    sequences: int = 8, seq: int = 16, vocab: int = TINY.vocab, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets, each [b, s], the same on all ranks; some targets are ignored."""
    tokens = torch.randint(0, vocab, (sequences, seq + 1), generator=torch.Generator().manual_seed(seed))
    targets = tokens[:, 1:].clone()
    targets[0, :5] = IGNORED
    return tokens[:, :-1], targets


def local_batch(layout: Layout, mesh: Mesh, *sizes: int, seed: int = 0) -> list[torch.Tensor]:
    """Return the inputs and targets of this rank's dp coordinate; sizes: sequences, seq and vocab of batch_of."""
    names = ("sequences", "seq", "vocab")
    batch = batch_of(**dict(zip(names, sizes, strict=False)), seed=seed)
    return [each.chunk(layout.dp)[mesh.dp.rank()] for each in batch]


def built(
    text: str, config: ModelConfig = SHALLOW, moe: dict | None = None, **settings
) -> tuple[Layout, Mesh, ParallelModel]:
    """On a rank: the layout of `text`, its mesh and its model. Collective."""
    layout = Layout.parse(text)
    mesh = five_d.build_mesh(layout)
    return layout, mesh, five_d.parallelize(config, layout, mesh, moe=moe, **settings)


@functools.cache
def one_process(
    layout: Layout, mixtures: bool = False, steps: int = 3, config: ModelConfig = TINY, seq: int = 16
) -> tuple[Numbers, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return losses and norms, gradients of the first step, and weights after the last step, of one process.

    It sees the micro-batches as the layout's ranks do together: an MoE model's balance loss is per micro-batch.
    """
    model = Transformer(config)
    if mixtures:
        apply_moe(model, **MOE)
    optimizer, numbers = torch.optim.AdamW(decay_groups(model), **ADAMW), []
    first: dict[str, torch.Tensor] = {}
    for step in range(steps):
        inputs, targets = batch_of(seq=seq, seed=step)
        m = len(inputs) // (layout.dp * layout.micro_batch)
        for router in routers_of(model):
            router.loss_weight = 1 / m
        optimizer.zero_grad()
        loss, tokens = 0.0, (targets != IGNORED).sum()
        order = torch.arange(len(inputs)).view(layout.dp, m, layout.micro_batch).transpose(0, 1).flatten(1)
        for indices in order:  # micro-batch i of all dp ranks
            part = summed_loss(model(inputs[indices]), targets[indices]) / tokens
            part.backward()
            loss += part.item()
        first = first or {name: grad_of(weight).clone() for name, weight in model.named_parameters()}
        numbers.append((loss, nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()))
        optimizer.step()
    return numbers, first, {name: w.detach() for name, w in model.named_parameters(remove_duplicate=False)}


def relative_difference(result: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest value."""
    return ((result - wanted).abs().max() / wanted.abs().max().clamp(min=1e-12)).item()


def after_steps(parallel: ParallelModel, steps: int) -> Steps:
    """On a rank: losses and norms of steps, and the full weights of its stages after the last step."""
    numbers = []
    for step in range(steps):
        inputs, targets = local_batch(parallel.layout, parallel.mesh, seed=step)
        loss, norm = parallel.step(inputs, targets, max_norm=0.5)
        numbers.append((loss.item(), norm.item()))
    return numbers, full_weights(parallel)


def differences(
    of_ranks: Sequence[Steps], text: str, moe: dict | None, steps: int, config: ModelConfig = TINY
) -> tuple[float, float]:
    """Return the largest relative differences from one process: of losses and norms, and of weights."""
    wanted, _, weights = one_process(Layout.parse(text), bool(moe), steps, config)
    pairs = [pair for numbers, _ in of_ranks for pair in zip(numbers, wanted, strict=True)]
    numbers = max(abs(a - b) / b for pair in pairs for a, b in zip(*pair, strict=True))
    return numbers, max(
        relative_difference(local, weights[name])
        for _, weights_of_rank in of_ranks
        for name, local in weights_of_rank.items()
    )
