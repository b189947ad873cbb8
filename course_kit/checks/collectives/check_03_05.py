"""Check of exercise 03.5: `ring_all_gather` fills in all shards, by a ring in little memory."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from course_kit.checks.collectives.watched import RANKS, SECONDS, SHAPES_OF_RINGS, Made, check_ring
from course_kit.labs.collectives import among, values
from course_kit.ranks import shared
from course_lib.collectives import rings


def all_gather_trial(group: dist.ProcessGroup, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """Return what is wrong with the result; "" if it is right."""
    rank, n, expected = dist.get_rank(group), dist.get_world_size(group), values(0, math.prod(shape), dtype)
    tensor = torch.full_like(expected, -1)
    tensor.tensor_split(n)[rank].copy_(expected.tensor_split(n)[rank])
    with Made() as made:
        rings.ring_all_gather(tensor.view(shape), group)
    missing = [p for p, shard in enumerate((tensor == expected).tensor_split(n)) if not shard.all()]
    return f"does not have shards {missing}" if missing else made.too_much(tensor.tensor_split(n)[0].nbytes)


def check() -> None:
    """Assert values, memory, neighbors, steps and bytes, for 1, 3 and 4 ranks and uneven shards."""
    ranks = shared(RANKS)
    for n, shape, dtype in SHAPES_OF_RINGS:
        with ranks.within(SECONDS):
            outcomes = ranks(among, n, all_gather_trial, shape, dtype)[-n:]
        local = [shard.nbytes for shard in torch.empty(math.prod(shape), dtype=dtype).tensor_split(n)]
        what = f"{dtype} of shape {shape} on {n} ranks"
        check_ring(what, outcomes, n - 1, [sum(local) - local[(r + 1) % n] for r in range(n)])
