"""Check of exercise 03.10: `shift` returns the previous rank's tensor, by one send and one receive, and never hangs."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist

from course_kit.checks.collectives.watched import RANKS, SECONDS, in_the_group
from course_kit.labs.collectives import among, values
from course_kit.ranks import shared

CASES = (  # ranks, shape, dtype
    (4, (1,), torch.float32),
    (3, (500, 200), torch.int64),
    (2, (3, 5), torch.bfloat16),
    (1, (5,), torch.float32),
)


def shift_trial(group: dist.ProcessGroup, shift: Callable, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Return whether shift gives a copy of the previous rank's tensor and leaves its own as it is."""
    rank, n, numel = dist.get_rank(group), dist.get_world_size(group), math.prod(shape)
    tensor = values(rank, numel, dtype).view(shape)
    got = shift(tensor, group)
    if not isinstance(got, torch.Tensor) or got.dtype != dtype or got.data_ptr() == tensor.data_ptr():
        return False
    before = values((rank - 1) % n, numel, dtype).view(shape)
    return torch.equal(got, before) and torch.equal(tensor.view(-1), values(rank, numel, dtype))


def check(shift: Callable) -> None:
    """Assert values, calls and groups, for 1 to 4 ranks, several shapes and dtypes."""
    ranks = shared(RANKS)
    for n, shape, dtype in CASES:
        with ranks.within(SECONDS):
            outcomes = ranks(among, n, shift_trial, shift, shape, dtype)[-n:]
        for rank, (right, bytes_sent) in enumerate(outcomes):
            assert right, (
                f"{n} ranks, {dtype} of shape {shape}: group rank {rank} has no copy of rank {(rank - 1) % n}'s tensor "
                "of the same shape and dtype, or has changed its own"
            )
            assert in_the_group(bytes_sent, n), (
                f"{n} ranks: group rank {rank} is on the default group; pass group=group"
            )
            once = (bytes_sent.select("send").calls, bytes_sent.select("recv").calls, bytes_sent.calls)
            assert once == ((1, 1, 2) if n > 1 else (0, 0, 0)), (
                f"{n} ranks: group rank {rank} made {once[2]} calls, not one send and one receive"
            )
