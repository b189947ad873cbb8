"""Placement of a parameter in the full tensor of the unsplit model: the one attribute that transforms set on it.

    placement_of(norm.weight).reduce_group = tp_group        # set by apply_*, read by DataParallel, ZeRO and clipping

A parameter without a placement holds a full tensor, and all ranks of a data-parallel group reduce its gradient.
PyTorch drops attributes when it makes new parameters (`to_empty`, `load_state_dict` with assign=True).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist


class ShardSpec(Protocol):
    """The indices of a full tensor that a rank has: a TensorShard, or a NestedShard if it is split more than once."""

    @property
    def full_size(self) -> Any:
        """Size of the full tensor along the dimension that is split, or sizes, one per split."""

    @property
    def start(self) -> Any:
        """First index of this rank along that dimension, or one per split."""

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of a full tensor, as a view."""

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """Return the full tensor, given the shard of each rank. Collective."""

    def full_shape(self, local: torch.Tensor) -> list[int]:
        """Return the shape of the full tensor."""


class FlatShard(NamedTuple):
    """Elements span[0] to span[1] - 1 of a tensor of `full_shape`: what `fully_shard` keeps on this rank of `group`."""

    group: dist.ProcessGroup
    span: tuple[int, int]
    full_shape: torch.Size


@dataclass
class Placement:
    """How a parameter is sharded, where its gradient is reduced, and how it counts in the gradient norm.

    tensor_shard: the indices that this rank has; None: all. reduce_group: the ranks with the same values, which reduce
    the gradient together; None: the wrapper's ranks (DataParallel, ZeroOptimizer, fully_shard). norm_groups: the
    groups over which squares are summed for the norm of the full gradient, the last split first. flat_shard: the
    elements that fully_shard leaves on this rank. stages: numbers of the pipeline stages that hold it; None: one.
    decays: whether it may have weight decay.
    """

    tensor_shard: ShardSpec | None = None
    reduce_group: dist.ProcessGroup | None = None
    norm_groups: tuple[dist.ProcessGroup, ...] = ()
    flat_shard: FlatShard | None = None
    stages: tuple[int, ...] | None = None
    decays: bool = True


def placement_of(parameter: torch.Tensor) -> Placement:
    """Return the placement of a parameter or buffer, to read or to change. The first call attaches an empty one."""
    attributes = vars(parameter)
    if "placement" not in attributes:
        attributes["placement"] = Placement()
    return attributes["placement"]
