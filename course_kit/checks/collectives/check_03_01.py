"""Check of exercise 03.1: `every_collective` calls each of seven collectives once, in a group of three ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch

from course_kit.checks.collectives.watched import RANKS, SECONDS
from course_kit.labs.collectives import among
from course_kit.ranks import shared

EXPECTED: dict[str, list] = {  # of ranks 0, 1, 2; a reduce leaves the other ranks' tensors in any state
    "broadcast": [[1, 2, 3, 4, 5]] * 3,
    "reduce": [[6, 6, 6]],
    "all_reduce": [[6, 6, 6]] * 3,
    "gather": [[[1, 1], [2, 2], [3, 3]], None, None],
    "all_gather": [[[1, 1], [2, 2], [3, 3]]] * 3,
    "scatter": [[10, 10], [20, 20], [30, 30]],
    "reduce_scatter": [[6, 12], [14, 56], [36, 288]],
}


def check(every_collective: Callable) -> None:
    """Assert calls and results of every_collective(group) on the last three ranks."""
    ranks = shared(RANKS)
    with ranks.within(SECONDS):
        outcomes = ranks(among, 3, every_collective)[1:]
    for rank, (got, bytes_sent) in enumerate(outcomes):
        for name, expected in EXPECTED.items():
            assert isinstance(got, dict) and name in got, f"group rank {rank}: the result has no '{name}'"
            count = bytes_sent.select(name).calls
            assert count == 1, f"group rank {rank} called {name} {count} times; once was asked for"
            if rank < len(expected):
                value = got[name]
                plain = [part.tolist() for part in value] if isinstance(value, (list, tuple)) else value
                plain = plain.tolist() if isinstance(plain, torch.Tensor) else plain
                assert plain == expected[rank], f"group rank {rank}, {name}: got {plain}, expected {expected[rank]}"
