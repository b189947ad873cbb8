"""Check of exercise 03.4: `ring_reduce_scatter` leaves each rank the sum of its shard, by a ring in little memory."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from course_kit.checks.collectives.watched import RANKS, SECONDS, SHAPES_OF_RINGS, Made, check_ring
from course_kit.labs.collectives import among, values
from course_kit.ranks import shared
from course_lib.collectives import rings


def reduce_scatter_trial(group: dist.ProcessGroup, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """Return what is wrong with the result; "" if it is right."""
    rank, n, numel = dist.get_rank(group), dist.get_world_size(group), math.prod(shape)
    tensor = values(rank, numel, dtype)
    shards = torch.stack([values(r, numel, dtype) for r in range(n)]).sum(0).tensor_split(n)
    with Made() as made:
        got = rings.ring_reduce_scatter(tensor.view(shape), group)
    if not isinstance(got, torch.Tensor) or got.dtype != dtype:
        return f"returns {getattr(got, 'dtype', type(got).__name__)}, not its shard in {dtype}"
    for shard in (p for p in range(n) if p != rank and got.shape == shards[p].shape and torch.equal(got, shards[p])):
        return (
            f"ends with the sum of shard {shard}, not of shard {rank}: which shard is sent first?"
            if got.numel()
            else ""
        )
    if got.shape != shards[rank].shape or not torch.equal(got, shards[rank]):
        return "returns something other than the sum of its shard"
    if not torch.equal(tensor.tensor_split(n)[rank], got):
        return "has the sum, but not in its shard of `tensor`"
    if got.numel() and got.data_ptr() != tensor.tensor_split(n)[rank].data_ptr():
        return "returns a copy of its shard: return the view of `tensor`"
    return made.too_much(shards[0].nbytes)


def check() -> None:
    """Assert sums, views, memory, neighbors, steps and bytes, for 1, 3 and 4 ranks and uneven shards."""
    ranks = shared(RANKS)
    for n, shape, dtype in SHAPES_OF_RINGS:
        with ranks.within(SECONDS):
            outcomes = ranks(among, n, reduce_scatter_trial, shape, dtype)[-n:]
        local = [shard.nbytes for shard in torch.empty(math.prod(shape), dtype=dtype).tensor_split(n)]
        what = f"{dtype} of shape {shape} on {n} ranks"
        check_ring(what, outcomes, n - 1, [sum(local) - local[r] for r in range(n)])
