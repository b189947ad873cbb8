"""Check of exercise 03.6: `ring_all_reduce` sums in chunks, by a ring, in the memory of a chunk's shard."""

from __future__ import annotations

import math
from unittest import mock

import torch
import torch.distributed as dist

from course_kit.checks.collectives.watched import RANKS, SECONDS, Made, check_ring
from course_kit.labs.collectives import among, values
from course_kit.ranks import shared
from course_lib.collectives import rings

CASES = (  # ranks, shape, dtype, CHUNK
    (4, (5, 7), torch.float32, 2**22),
    (3, (4,), torch.int64, 2**22),
    (2, (3, 1025), torch.bfloat16, 1024),
)


def all_reduce_trial(group: dist.ProcessGroup, shape: tuple[int, ...], dtype: torch.dtype, chunk: int) -> str:
    """Return what is wrong with the result; "" if it is right. chunk: the value of CHUNK."""
    rank, n, numel = dist.get_rank(group), dist.get_world_size(group), math.prod(shape)
    tensor = values(rank, numel, dtype).view(shape)
    with mock.patch.object(rings, "CHUNK", chunk), Made() as made:
        rings.ring_all_reduce(tensor, group)
    right = torch.equal(tensor, torch.stack([values(r, numel, dtype) for r in range(n)]).sum(0).view(shape))
    shard = tensor.view(-1)[:chunk].tensor_split(n)[0].nbytes
    return made.too_much(shard) if right else "does not have the sum in `tensor`"


def check() -> None:
    """Assert sums, memory, neighbors, steps and bytes, in one chunk and in several."""
    ranks = shared(RANKS)
    for n, shape, dtype, chunk in CASES:
        with ranks.within(SECONDS):
            outcomes = ranks(among, n, all_reduce_trial, shape, dtype, chunk)[-n:]
        enough, chunks = [0] * n, torch.empty(math.prod(shape), dtype=dtype).split(chunk)
        for part in chunks:
            local = [shard.nbytes for shard in part.tensor_split(n)]
            enough = [enough[r] + 2 * sum(local) - local[r] - local[(r + 1) % n] for r in range(n)]
        what = f"{dtype} of shape {shape} on {n} ranks, with CHUNK = {chunk}"
        check_ring(what, outcomes, 2 * (n - 1) * len(chunks), enough)
