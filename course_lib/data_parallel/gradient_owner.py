"""The interface of DataParallel, ZeroOptimizer and FullyShard: each reduces the gradients of a model's parameters.

The pipeline, gradient clipping, checkpoints and dry runs use a `GradientOwner`, so none of them asks for a ZeRO stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn

from course_lib.single_gpu.placement import placement_of


class LocalGradient(NamedTuple):
    """A gradient that this rank has after `finish()`.

    weight: the parameter that it belongs to, or one of several with the same placement. group: the ranks that hold the
    shards of the same flat tensor; None: the gradient has the shape of its weight. norm_groups: the groups that split
    the weight itself, the last split first.
    """

    gradient: torch.Tensor
    weight: nn.Parameter
    group: dist.ProcessGroup | None
    norm_groups: tuple[dist.ProcessGroup, ...]


class UpdatedTensor(NamedTuple):
    """A tensor that this rank's optimizer updates, and the weights whose elements it holds.

    spans: the elements of each weight (flattened) that `tensor` [elements] holds, one weight after the other. A single
    None: `tensor` is the one weight.
    """

    tensor: torch.Tensor
    weights: Sequence[nn.Parameter]
    spans: Sequence[tuple[int, int] | None] = (None,)

    def split(self, value: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return a view per weight of `value`, which has the shape of `tensor`: the weight's elements."""
        sizes = [span[1] - span[0] for span in self.spans if span is not None]
        return value[: sum(sizes)].split(sizes) if sizes else [value]


class GradientOwner(Protocol):
    """The object that reduces the gradients of a model's parameters. All methods but `no_sync` are collective or free
    of communication: every rank of `group` calls them in the same order.
    """

    group: dist.ProcessGroup

    @property
    def supports_no_sync(self) -> bool:
        """False if every backward must reduce its gradients (ZeRO stage 2)."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward accumulates gradients without reducing them."""

    def finish(self) -> None:
        """Wait for the gradients, after the last backward of a step: each is the mean over `group`."""

    def wait(self) -> None:
        """Wait, between steps, until all parameters have their values, and free the gathered ones."""

    def updated_tensors(self) -> Iterable[UpdatedTensor]:
        """Yield the tensors that this rank's optimizer updates. They hold the weights in full precision."""

    def all_gather_params(self) -> None:
        """Give the parameters the values of the updated tensors, after these have been written."""

    def local_gradients(self) -> list[LocalGradient]:
        """Return the gradients that this rank has, after `finish()`."""

    def full_weights(self) -> Iterable[tuple[nn.Parameter, torch.Tensor]]:
        """Yield each parameter with its unsharded values. Collective; one flat buffer at a time."""

    def extra_memory(self) -> dict[str, list[torch.Tensor]]:
        """Return, by category of `MemoryProfile`, tensors that are neither parameters nor optimizer states."""


def module_gradients(module: nn.Module) -> list[LocalGradient]:
    """Return the gradients in the `.grad` of a module's parameters, which may be local shards of `fully_shard`."""
    gradients = []
    for weight in module.parameters():
        if weight.grad is not None:
            placement = placement_of(weight)
            flat, groups = placement.flat_shard, placement.norm_groups
            group, norm_groups = (flat.group, groups[1:]) if flat else (None, groups)
            gradients.append(LocalGradient(weight.grad, weight, group, norm_groups))
    return gradients
