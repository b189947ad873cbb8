"""Shards of shards: a parameter that is split over one group, and each shard over another, along any dimensions.

An expert's matrices are split over the nodes, over the ranks of a node, and along their width over tensor-parallel
ranks. The placement of such a parameter has a NestedShard, where the placement of a parameter split once has a
TensorShard.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from course_lib.single_gpu.placement import placement_of
from course_lib.tensor_parallel.shards import TensorShard, shard_parameter


class NestedShard(NamedTuple):
    """A shard of a shard, and so on: the `tensor_shard` of a parameter that is split more than once."""

    shards: tuple[TensorShard, ...]  # the first cuts the full tensor

    @property
    def full_size(self) -> tuple[int, ...]:
        """The size of the split dimension before each cut."""
        return tuple(shard.full_size for shard in self.shards)

    @property
    def start(self) -> tuple[int, ...]:
        """The first index of each cut."""
        return tuple(shard.start for shard in self.shards)

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of a full tensor, as a view."""
        return functools.reduce(lambda outer, shard: shard.cut(outer), self.shards, tensor)

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """Return the full tensor, given the local shard of each rank. Collective."""
        return functools.reduce(lambda inner, shard: shard.gather(inner), reversed(self.shards), local)

    def full_shape(self, local: torch.Tensor) -> list[int]:
        """Return the shape of the full tensor."""
        like = torch.empty(local.shape, device="meta")
        for shard in reversed(self.shards):
            like = torch.empty(shard.full_shape(like), device="meta")
        return list(like.shape)


def shard_nested(parameter: nn.Parameter, cuts: list[tuple[dist.ProcessGroup, int]]) -> nn.Parameter:
    """Return a new parameter with this rank's shard of `parameter`, cut over each (group, dimension)."""
    shards = []
    for group, dim in cuts:
        shards.append(TensorShard.of(parameter.shape[dim], group, dim))
        parameter = shard_parameter(parameter, shards[-1])
    placement_of(parameter).tensor_shard = NestedShard(tuple(shards))
    placement_of(parameter).norm_groups = tuple(group for group, _ in reversed(cuts))
    return parameter
