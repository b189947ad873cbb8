"""Check of exercise 03.3: `tree_broadcast` copies the source's tensor in ⌈log₂ N⌉ steps of sends and receives."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from course_kit.checks.collectives.watched import RANKS, SECONDS, in_the_group, members
from course_kit.labs.collectives import among, values
from course_kit.ranks import shared
from course_lib.collectives import rings
from course_lib.collectives.traffic import Traffic

CASES = (  # ranks, shape, dtype, source
    (4, (1000,), torch.float32, 0),
    (4, (), torch.bfloat16, 2),
    (3, (3, 5), torch.int64, 1),
    (2, (7,), torch.bfloat16, 1),
    (1, (3,), torch.float32, 0),
)


def broadcast_trial(group: dist.ProcessGroup, shape: tuple[int, ...], dtype: torch.dtype, src: int) -> bool:
    """Return whether this rank has the source's tensor after it."""
    expected = values(1, math.prod(shape), dtype).view(shape)
    tensor = expected.clone() if dist.get_rank(group) == src else torch.full_like(expected, -1)
    rings.tree_broadcast(tensor, src, group)
    return torch.equal(tensor, expected)


def arrival(sends: Traffic, rank: int, src: int) -> int:
    """Return the step in which the tensor reaches a rank, by the recorded sends: a rank sends once per step."""
    if rank == src:
        return 0
    sender = next(record.rank for record in sends.records if record.peer == rank)
    earlier = [record.peer for record in sends.select(rank=sender).records].index(rank)
    return arrival(sends, sender, src) + earlier + 1


def check() -> None:
    """Assert values, calls and steps, for 1 to 4 ranks, several sources, shapes and dtypes."""
    ranks = shared(RANKS)
    for n, shape, dtype, src in CASES:
        what = f"{n} ranks, source {src}, {dtype} of shape {shape}"
        with ranks.within(SECONDS):
            outcomes = ranks(among, n, broadcast_trial, shape, dtype, src)[-n:]
        wrong = [rank for rank, (right, _) in enumerate(outcomes) if not right]
        assert not wrong, f"{what}: group rank {wrong[0]} does not have the source's tensor"
        traffic = sum((bytes_sent for _, bytes_sent in outcomes), Traffic())
        assert in_the_group(traffic, n), f"{what}: a send or receive is on the default group; pass group=group"
        sends, steps = traffic.select("send"), math.ceil(math.log2(n))
        assert traffic.calls == sends.calls + traffic.select("recv").calls, "use dist.send and dist.recv only"
        assert sends.calls == n - 1, (
            f"{what}: {sends.calls} sends; each rank but the source receives once, {n - 1} in all"
        )
        source = members(n)[src]
        last = max(members(n), key=lambda rank: arrival(sends, rank, source))
        needed, last = arrival(sends, last, source), members(n).index(last)
        assert needed <= steps, (
            f"{what}: at one send per rank and step, group rank {last} receives in step {needed}; a tree takes {steps}"
        )
