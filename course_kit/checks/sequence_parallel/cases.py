"""Trials in groups of different sizes, several in one call of the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from course_kit.ranks import shared

Case = tuple[int, Callable, *tuple[Any, ...]]  # ranks of a group, a function, its arguments


def each_case(cases: list[Case]) -> list:
    """On a rank: function(group, *args) of each case (n, function, *args), in groups of n consecutive ranks."""
    world = dist.group.WORLD
    sizes = {n for n, *_ in cases if n < world.size()}
    groups = {n: dist.new_subgroups(group_size=n)[0] for n in sorted(sizes)} | {world.size(): world}
    found = [function(groups[n], *args) for n, function, *args in cases]
    dist.barrier()
    return found


def told_of(*calls: list[Case]) -> Iterator[tuple]:
    """Yield what the ranks return in each case, by case; one call of the ranks for each list of cases.

    Each call is made when it is asked for: what the first one shows to be wrong is not tried in the others.
    """
    for cases in calls:
        yield from zip(*shared(4)(each_case, cases), strict=True)
