"""Chunks of small models in any layout: their positions, full tensors assembled from them, and differences."""

from __future__ import annotations

import math

import torch

from course_kit.labs.five_d.models import SHALLOW, TINY, built
from course_lib.checkpoint import chunks
from course_lib.checkpoint.chunks import Chunk, state_chunks, weight_chunks
from course_lib.checkpoint.staging import synchronize_for_save
from course_lib.five_d.layouts import Layout
from course_lib.five_d.meshes import Mesh

ChunkPosition = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # offsets, sizes, sizes of the full tensor


def local_samples(layout: Layout, mesh: Mesh, sequences: int = 8) -> slice:
    """Return the slice of a batch's sequences for this rank's dp coordinate."""
    each = sequences // layout.dp
    return slice(each * mesh.dp.rank(), each * (mesh.dp.rank() + 1))


def positions_in_full(text: str, name: str) -> list[list[ChunkPosition]]:
    """On a rank: the positions of its chunks of a weight, and of the weight's first moment, in the full tensor."""
    layout, _, parallel = built(text, TINY, lr=1e-3)
    inputs, targets = torch.randint(97, (2, layout.pp, 8))
    parallel.step(inputs, targets)
    states = synchronize_for_save(parallel).state
    chunks_of_both = [weight_chunks(parallel).get(name, []), state_chunks(parallel, states).get(f"{name}/exp_avg", [])]
    return [[(chunk.offsets, tuple(chunk.values.shape), chunk.full_shape) for chunk in each] for each in chunks_of_both]


def local_chunks_with_values(text: str, seed: int = 0, steps: int = 2) -> dict[str, list[Chunk]]:
    """On a rank: its chunks of all weights and states after some steps."""
    layout, mesh, parallel = built(text, SHALLOW, seed=seed, lr=1e-3, eps=1e-4)
    batch = torch.randint(97, (2, 8, 8), generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        inputs, targets = batch[:, local_samples(layout, mesh)]
        parallel.step(inputs, targets)
    states = synchronize_for_save(parallel).state
    local_chunks = weight_chunks(parallel) | state_chunks(parallel, states)
    return {
        name: [chunk._replace(values=chunk.values.clone()) for chunk in each] for name, each in local_chunks.items()
    }


def merged(of_ranks: list[dict[str, list[Chunk]]]) -> dict[str, list[Chunk]]:
    """Return the chunks of all ranks, by name."""
    return {name: [chunk for each in of_ranks for chunk in each.get(name, [])] for name in set().union(*of_ranks)}


def assembled(saved: dict[str, list[Chunk]]) -> dict[str, torch.Tensor]:
    """Return all full tensors, filled from chunks; with NaN for elements that no chunk has."""
    full: dict[str, torch.Tensor] = {}
    for name, each in saved.items():
        shape = each[0].full_shape
        full[name] = torch.full(shape, math.nan, dtype=each[0].values.dtype)
        chunks.fill([Chunk((0,) * len(shape), shape, full[name])], each)
    return full


def farthest(full: dict[str, torch.Tensor], others: dict[str, list[Chunk]]) -> float:
    """Return the largest difference between chunks and the full tensors."""
    largest = 0.0
    for name, chunk in ((name, chunk) for name, each in others.items() for chunk in each):
        region = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.values.shape, strict=True))
        largest = max(largest, (full[name][region] - chunk.values).abs().max().item())
    return largest
