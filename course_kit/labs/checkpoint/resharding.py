"""Boxes of small models in any layout: where they are, all tensors assembled from them, and what differs."""

from __future__ import annotations

import math

import torch

from course_kit.labs.five_d.models import SHALLOW, TINY, built
from course_lib.checkpoint import chunks
from course_lib.checkpoint.chunks import Chunk, state_chunks, weight_chunks
from course_lib.checkpoint.staging import synchronize_for_save
from course_lib.five_d.layouts import Layout
from course_lib.five_d.meshes import Mesh

Place = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # offsets, sizes, sizes of the full tensor


def local_samples(layout: Layout, mesh: Mesh, sequences: int = 8) -> slice:
    """Return which of a batch's sequences are those of this rank's dp coordinate."""
    each = sequences // layout.dp
    return slice(each * mesh.dp.rank(), each * (mesh.dp.rank() + 1))


def positions_in_full(text: str, name: str) -> list[list[Place]]:
    """On a rank: where its elements of a weight, and of its first moment, are in the full tensor."""
    layout, _, parallel = built(text, TINY, lr=1e-3)
    parallel.step(*torch.randint(97, (2, layout.pp, 8)))
    states = synchronize_for_save(parallel).state
    found = [weight_chunks(parallel).get(name, []), state_chunks(parallel, states).get(f"{name}/exp_avg", [])]
    return [[(chunk.offsets, tuple(chunk.values.shape), chunk.full_shape) for chunk in each] for each in found]


def local_chunks_with_values(text: str, seed: int = 0, steps: int = 2) -> dict[str, list[Chunk]]:
    """On a rank: its chunks of all weights and states after some steps."""
    layout, mesh, parallel = built(text, SHALLOW, seed=seed, lr=1e-3, eps=1e-4)
    batch = torch.randint(97, (2, 8, 8), generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        parallel.step(*batch[:, local_samples(layout, mesh)])
    states = synchronize_for_save(parallel).state
    found = weight_chunks(parallel) | state_chunks(parallel, states)
    return {name: [chunk._replace(values=chunk.values.clone()) for chunk in each] for name, each in found.items()}


def merged(of_ranks: list[dict[str, list[Chunk]]]) -> dict[str, list[Chunk]]:
    """Return the chunks of all ranks, by name."""
    return {name: [chunk for each in of_ranks for chunk in each.get(name, [])] for name in set().union(*of_ranks)}


def assembled(saved: dict[str, list[Chunk]]) -> dict[str, torch.Tensor]:
    """Return all full tensors, filled from chunks; NaN where no chunk has an element."""
    full = {}
    for name, each in saved.items():
        shape = each[0].full_shape
        full[name] = torch.full(shape, math.nan, dtype=each[0].values.dtype)
        chunks.fill([Chunk((0,) * len(shape), shape, full[name])], each)
    return full


def farthest(full: dict[str, torch.Tensor], others: dict[str, list[Chunk]]) -> float:
    """Return how far chunks are from the full tensors, at most."""
    apart = 0.0
    for name, chunk in ((name, chunk) for name, each in others.items() for chunk in each):
        place = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.values.shape, strict=True))
        apart = max(apart, (full[name][place] - chunk.values).abs().max().item())
    return apart
