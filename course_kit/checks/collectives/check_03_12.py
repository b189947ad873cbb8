"""Check of exercise 03.12: `train` makes a common decision in each step, and gets weights from rank 0 in bad ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from unittest import mock

import torch
import torch.distributed as dist

from course_kit.checks.collectives.watched import RANKS, SECONDS
from course_kit.labs.collectives import among
from course_kit.ranks import shared

STEPS = 6
CASES = (  # ranks; (step, rank, value) of odd gradients; the rank whose weight differs from the others'
    (4, [(4, 2, "nan")], None),
    (3, [(1, 2, "inf"), (2, 1, "3e38"), (4, 0, "-inf")], None),  # 3e38 is finite
    (3, [(0, 2, "nan"), (3, 0, "nan"), (3, 1, "nan"), (5, 0, "nan")], 1),
)
Odd = list[tuple[int, int, str]]


def train_trial(group: dist.ProcessGroup, train: Callable, odd_steps: Odd, drifts: int | None) -> torch.Tensor:
    """Return the weight. The rank `drifts` gets another first sum of gradients than the others."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    gradients = [torch.full((3,), rank + 1.0) for _ in range(STEPS)]
    for step, odd_rank, value in odd_steps:
        if rank == odd_rank:
            gradients[step][1] = float(value)
    all_reduce = dist.all_reduce
    sums: list = []

    def drifting(tensor, *args, **kwargs):
        work = all_reduce(tensor, *args, **kwargs)
        if work is not None:
            work.wait()
        if rank == drifts and not sums and tensor.tolist() == 3 * [n * (n + 1) / 2]:
            sums.append(tensor.add_(1))
        return work

    with mock.patch.object(dist, "all_reduce", drifting):
        return train(gradients, group)


def check(train: Callable) -> None:
    """Assert weights and calls of all ranks, with NaN, infinities and large gradients on one rank or several."""
    ranks = shared(RANKS)
    for n, odd_steps, drifts in CASES:
        with ranks.within(SECONDS):
            outcomes = ranks(among, n, train_trial, train, odd_steps, drifts)[-n:]
        bad_steps = len({step for step, _, value in odd_steps if not math.isfinite(float(value))})
        expected = torch.full((3,), -0.1 * (STEPS - bad_steps) * n * (n + 1) / 2)
        expected[1] -= 0.1 * sum(float(value) for *_, value in odd_steps if math.isfinite(float(value)))
        for rank, (weight, bytes_sent) in enumerate(outcomes):
            close = isinstance(weight, torch.Tensor) and torch.allclose(weight, expected)
            assert close or rank != drifts, (
                f"group rank {rank} had another weight than 0, and keeps it in a bad step: broadcast the weight itself"
            )
            assert close, f"{n} ranks, (step, rank, value) {odd_steps}: group rank {rank} has {weight}, not {expected}"
            calls, first = ([record.collective for record in each.records] for each in (bytes_sent, outcomes[0][1]))
            assert calls == first, f"group rank {rank} calls other collectives than rank 0"
        fetched = outcomes[0][1].select("broadcast").calls
        assert fetched == bad_steps, (
            f"{fetched} broadcasts for {bad_steps} bad steps: get the weights then, and only then"
        )
        sent_by_0 = outcomes[0][1].select("broadcast").bytes
        assert sent_by_0 == fetched * (n - 1) * 12, (
            f"rank 0 broadcasts {sent_by_0} bytes in {fetched} bad steps, not its weights, 12 bytes to each other rank"
        )
