"""Parts of parts: a parameter that is cut over one group, and each part over another, along the same dimension or not.

An expert's matrices go over the nodes, over the ranks of a node, and along their width over tensor-parallel ranks. A
NestedShard stands where a parameter that is cut once has a TensorShard.
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
    """A part of a part, and so on: the `tensor_shard` of a parameter that is cut more than once."""

    shards: tuple[TensorShard, ...]  # the first cuts the whole tensor

    @property
    def full_size(self) -> tuple[int, ...]:
        """The sizes that were cut."""
        return tuple(shard.full_size for shard in self.shards)

    @property
    def start(self) -> tuple[int, ...]:
        """Where each cut begins."""
        return tuple(shard.start for shard in self.shards)

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole tensor: a view."""
        return functools.reduce(lambda part, shard: shard.cut(part), self.shards, tensor)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """The whole tensor, from the parts of all ranks. Collective."""
        return functools.reduce(lambda part, shard: shard.gather(part), reversed(self.shards), part)

    def full_shape(self, part: torch.Tensor) -> list[int]:
        """The shape of the whole tensor."""
        like = torch.empty(part.shape, device="meta")
        for shard in reversed(self.shards):
            like = torch.empty(shard.full_shape(like), device="meta")
        return list(like.shape)


def shard_nested(parameter: nn.Parameter, cuts: list[tuple[dist.ProcessGroup, int]]) -> nn.Parameter:
    """A new parameter with this rank's part of `parameter`, cut over each (group, dimension) in turn."""
    shards = []
    for group, dim in cuts:
        shards.append(TensorShard.of(parameter.shape[dim], group, dim))
        parameter = shard_parameter(parameter, shards[-1])
    placement_of(parameter).tensor_shard = NestedShard(tuple(shards))
    placement_of(parameter).norm_groups = tuple(group for group, _ in reversed(cuts))
    return parameter
