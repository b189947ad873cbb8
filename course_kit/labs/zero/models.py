"""Small models of notebook 05, bytes of storages, and functions that run in a group of the first ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from course_lib.single_gpu.model import ModelConfig

TINY = ModelConfig(2, 48, 4, 2, 100, 97, tied=True)  # odd sizes on purpose
EIGHT_UNITS = ModelConfig(6, 96, 4, 2, 256, 100)  # embedding, six blocks, norm and head
WIDE = ModelConfig(2, 256, 8, 4, 704, 512, tied=True)  # 1.6 million parameters
MiB, GiB = 2**20, 2**30


def storage_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Return the bytes of the distinct storages of some tensors; None counts 0."""
    sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(sizes.values())


def in_group(n: int, function: Callable, *args):
    """Return function(group, *args) in a group of the first n ranks; the other ranks run it in a group of their own.

    An answer that uses the default group by mistake gets wrong numbers, not a deadlock.
    """
    all_ranks = list(range(dist.get_world_size()))
    groups = [dist.new_group(members) for members in (all_ranks[:n], all_ranks[n:]) if members]
    group = groups[dist.get_rank() >= n]
    result = function(group, *args)
    dist.barrier(group)
    return result
