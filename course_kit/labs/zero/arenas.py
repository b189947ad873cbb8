"""Recorded allocations of a step without memory, and the smallest arena in which they can be replayed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import cast

import torch
from torch import nn

from course_kit.labs.zero.models import GiB
from course_kit.typed import override, transformer_blocks
from course_lib.data_parallel.buckets import Bucket
from course_lib.recompute.modes import apply_recompute
from course_lib.single_gpu.model import PRESETS, Transformer, loss
from course_lib.single_gpu.profile import MemoryProfile
from course_lib.zero import defragmentation
from course_lib.zero.defragmentation import ContiguousCheckpoints


def fused_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return attention with the CPU's operator, [b, s, heads, d]; PyTorch chooses another one for the meta device."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [b, heads, s, d]
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return fused(q, k, v, is_causal=True)[0].transpose(1, 2)


def no_buffers(model: nn.Module) -> list[torch.Tensor]:
    """Leave a model as it is."""
    return []


def keep_gradients(model: nn.Module) -> list[torch.Tensor]:
    """Make gradients views of one buffer. Returns no buffer: the profile finds it through the parameters."""
    for parameter, view in Bucket(list(model.parameters()), None, 1.0).views.items():
        parameter.grad = view
    return []


def keep_checkpoints(model: nn.Module) -> list[torch.Tensor]:
    """Keep the inputs of the blocks in one buffer, and return it."""
    return [ContiguousCheckpoints(cast(Transformer, model), tokens=4096).buffer]


def keep_both(model: nn.Module) -> list[torch.Tensor]:
    """Keep gradients in one buffer and checkpoints in another."""
    return keep_gradients(model) + keep_checkpoints(model)


@functools.cache
def recorded(
    prepare: Callable[[nn.Module], list[torch.Tensor]] = no_buffers,
    preset: str = "llama3.2-1B",
    micro_batches: int = 2,
    seq: int = 4096,
) -> MemoryProfile:
    """Return the profile of micro-batches, forward and backward, on the meta device, with full recomputation.

    prepare(model) changes the model and returns the buffers that it has made.
    """
    with torch.device("meta"):
        model, tokens = Transformer(PRESETS[preset]), torch.zeros(1, seq, dtype=torch.int64)
    for block in transformer_blocks(model):
        override(block.attention, core=fused_attention)
    buffers = prepare(apply_recompute(model, "full"))
    with MemoryProfile(model) as profile:
        profile.claim(buffers, "activations")
        for _ in range(micro_batches):
            loss(model(tokens), tokens).backward()
    return profile


def arena_gib(profile: MemoryProfile) -> tuple[float, float]:
    """Return the most GiB alive at once, and the GiB of the smallest arena in which the profile can run."""
    return sum(profile.peak().values()) / GiB, defragmentation.smallest_arena(profile.allocations) / GiB


def arena_line(name: str, profile: MemoryProfile) -> str:
    """Return a line that tells how much larger the arena must be than the memory alive."""
    alive, arena = arena_gib(profile)
    return f"{name:28} alive at most {alive:6.2f} GiB, arena {arena:6.2f} GiB: {arena / alive - 1:+.2%}"
