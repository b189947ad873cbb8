"""Boxes of small models in any layout: where they are, all tensors assembled from them, and what differs."""

from __future__ import annotations

import math

import torch

from course_kit.labs.five_d.models import SHALLOW, TINY, built
from course_lib.checkpoint import boxes
from course_lib.checkpoint.boxes import Box, state_boxes, weight_boxes
from course_lib.checkpoint.host_copies import at_rest
from course_lib.five_d.layouts import Layout
from course_lib.five_d.meshes import Mesh

Place = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # offsets, sizes, sizes of the full tensor


def own_samples(layout: Layout, mesh: Mesh, sequences: int = 8) -> slice:
    """Return which of a batch's sequences are those of this rank's dp coordinate."""
    each = sequences // layout.dp
    return slice(each * mesh.dp.rank(), each * (mesh.dp.rank() + 1))


def places_of(text: str, name: str) -> list[list[Place]]:
    """On a rank: where its elements of a weight, and of its first moment, are in the full tensor."""
    layout, _, parallel = built(text, TINY, lr=1e-3)
    parallel.step(*torch.randint(97, (2, layout.pp, 8)))
    states = at_rest(parallel).state
    found = [weight_boxes(parallel).get(name, []), state_boxes(parallel, states).get(f"{name}/exp_avg", [])]
    return [[(box.offsets, tuple(box.values.shape), box.whole) for box in each] for each in found]


def boxes_with_values(text: str, seed: int = 0, steps: int = 2) -> dict[str, list[Box]]:
    """On a rank: its boxes of all weights and states after some steps."""
    layout, mesh, parallel = built(text, SHALLOW, seed=seed, lr=1e-3, eps=1e-4)
    batch = torch.randint(97, (2, 8, 8), generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        parallel.step(*batch[:, own_samples(layout, mesh)])
    states = at_rest(parallel).state
    found = weight_boxes(parallel) | state_boxes(parallel, states)
    return {name: [box._replace(values=box.values.clone()) for box in each] for name, each in found.items()}


def merged(of_ranks: list[dict[str, list[Box]]]) -> dict[str, list[Box]]:
    """Return the boxes of all ranks, by name."""
    return {name: [box for each in of_ranks for box in each.get(name, [])] for name in set().union(*of_ranks)}


def assembled(saved: dict[str, list[Box]]) -> dict[str, torch.Tensor]:
    """Return all full tensors, filled from boxes; NaN where no box has an element."""
    full = {}
    for name, each in saved.items():
        shape = each[0].whole
        full[name] = torch.full(shape, math.nan, dtype=each[0].values.dtype)
        boxes.fill([Box((0,) * len(shape), shape, full[name])], each)
    return full


def farthest(full: dict[str, torch.Tensor], others: dict[str, list[Box]]) -> float:
    """Return how far boxes are from the full tensors, at most."""
    apart = 0.0
    for name, box in ((name, box) for name, each in others.items() for box in each):
        place = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.values.shape, strict=True))
        apart = max(apart, (full[name][place] - box.values).abs().max().item())
    return apart
