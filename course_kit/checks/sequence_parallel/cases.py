"""Trials in groups of different sizes, several in one call of the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from course_kit.ranks import shared
from course_kit.typed import world

Case = tuple[Any, ...]  # ranks of a group, a function, its arguments


def each_case(cases: list[Case]) -> list:
    """On a rank: return function(group, *args) of each case (n, function, *args), in groups of n consecutive ranks."""
    all_ranks = world()
    sizes = {n for n, *_ in cases if n < all_ranks.size()}
    groups = {n: dist.new_subgroups(group_size=n)[0] for n in sorted(sizes)} | {all_ranks.size(): all_ranks}
    result = [function(groups[n], *args) for n, function, *args in cases]
    dist.barrier()
    return result


def retained_tensors(result: torch.Tensor) -> int:
    """Return how many tensors the autograd.Function that made `result` keeps for backward, saved or as attributes."""
    context = cast(Any, result.grad_fn)
    values = [*context.saved_tensors, *vars(context).values()]
    return sum(torch.is_tensor(each) for each in tree_leaves(values))


def results_of(*calls: list[Case]) -> Iterator[tuple]:
    """Yield the ranks' results of each case, with one call of the ranks for each list of cases.

    The calls are lazy: an error in the first call saves the time of the later ones.
    """
    for cases in calls:
        yield from zip(*shared(4)(each_case, cases), strict=True)
