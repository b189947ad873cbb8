"""Dropout under tensor parallelism: its masks, and training, with one seed, a seed per rank, or by region."""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F

from course_kit.labs.tensor_parallel.faults import diverged
from course_kit.labs.tensor_parallel.models import batch_of, sgd, split_model
from course_kit.typed import override, transformer_blocks, world
from course_lib import tensor_parallel
from course_lib.single_gpu.model import ModelConfig, causal_attention
from course_lib.tensor_parallel import regions

CONFIG = ModelConfig(2, 48, 4, 4, 100, 97, dropout=0.2)


def dropout_core(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return causal attention of one head with a dropout of 20% on its output."""
    return F.dropout(causal_attention(q, k, v), 0.2)


def dropout_masks(how: str) -> tuple[torch.Tensor, torch.Tensor]:
    """On a rank: the masks that a dropout of 40% applies to its head's probabilities [8, 8] and to the output [8, 12].

    how: "one seed", "own seed" or "by region".
    """
    group = world()
    torch.manual_seed(1 + (group.rank() if how == "own seed" else 0))
    with regions.local_rng(group) if how == "by region" else contextlib.nullcontext():
        of_head = F.dropout(torch.ones(8, 8), 0.4) > 0
    return of_head, F.dropout(torch.ones(8, 12), 0.4) > 0


def trained_with_dropout(how: str, steps: int = 3) -> tuple[list[float], list[str]]:
    """On a rank: losses, and the parameters that have diverged; how: "one seed", "own seed" or "by region"."""
    group = world()
    torch.manual_seed(2 + (group.rank() if how == "own seed" else 0))
    model, (inputs, targets) = split_model(CONFIG, group), batch_of(CONFIG)
    for block in transformer_blocks(model):
        override(block.attention, core=regions.local_rng(group)(dropout_core) if how == "by region" else dropout_core)
    optimizer, losses = sgd(model.parameters(), 0.05), []
    for _ in range(steps):
        optimizer.zero_grad()
        step_loss = tensor_parallel.vocab_parallel_cross_entropy(model(inputs), targets, group, CONFIG.vocab)
        step_loss.backward()
        optimizer.step()
        losses.append(step_loss.item())
    return losses, diverged(model, group)
