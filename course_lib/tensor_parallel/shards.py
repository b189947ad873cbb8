"""Shards of parameters: which indices of a full tensor a rank holds, and how to cut and to gather them.

The placement of a sharded parameter has its `tensor_shard` and `norm_groups`, the groups over which squares are summed
for the norm of the full gradient (shards.clip_grad_norm_). PyTorch drops the placement when it creates new parameters
(to_empty, load_state_dict with assign=True): use `materialize`, and load into existing parameters. A model on the meta
device is sharded there and filled afterwards: one full parameter at a time is created, and a rank keeps its shard.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from course_lib.collectives.into_tensor import all_gather_into_tensor
from course_lib.single_gpu.model import plain_name
from course_lib.single_gpu.placement import placement_of
from course_lib.zero.parameters import parameter_slots


class TensorShard(NamedTuple):
    """The indices `start` to `start + size - 1` of dimension `dim`, of a full tensor that has `full_size`."""

    group: dist.ProcessGroup  # its ranks hold one shard each, in order
    dim: int
    full_size: int
    start: int
    size: int

    @classmethod
    def of(cls, full_size: int, group: dist.ProcessGroup, dim: int = 0) -> TensorShard:
        """Return this rank's shard: ceil(full_size / ranks) indices, except that the last ranks may have fewer."""
        per_rank = -(-full_size // group.size())
        start = min(group.rank() * per_rank, full_size)
        return cls(group, dim, full_size, start, min(per_rank, full_size - start))

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of a full tensor, as a view."""
        return tensor.narrow(self.dim, self.start, self.size)

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """Return the full tensor, given the local shard of each rank. Collective."""
        per_rank, local = -(-self.full_size // self.group.size()), local.movedim(self.dim, 0)
        padded = local.new_zeros(per_rank, *local.shape[1:])
        padded[: self.size] = local
        full = local.new_empty(per_rank * self.group.size(), *local.shape[1:])
        all_gather_into_tensor(full, padded, group=self.group)
        return full[: self.full_size].movedim(0, self.dim).contiguous()

    def full_shape(self, local: torch.Tensor) -> list[int]:
        """Return the shape of the full tensor."""
        return [self.full_size if dim == self.dim % local.dim() else size for dim, size in enumerate(local.shape)]


def leaves_empty_shard(full_size: int, ranks: int) -> bool:
    """Return True if the last rank's shard of `full_size` indices is empty."""
    return (ranks - 1) * -(-full_size // ranks) >= full_size


def shard_parameter(parameter: torch.Tensor, shard: TensorShard) -> nn.Parameter:
    """Return a new parameter with this rank's shard of `parameter`, on the same device, which may be meta."""
    values = shard.cut(parameter.detach()).clone(memory_format=torch.contiguous_format)
    local = nn.Parameter(values, parameter.requires_grad)
    placement_of(local).tensor_shard, placement_of(local).norm_groups = shard, (shard.group,)
    return local


def shard_init(model: nn.Module, init: Callable[[str, torch.Tensor], None]) -> Callable[[str, torch.Tensor], None]:
    """Return `init(name, tensor)` for a sharded model, given the unsharded model's: fill a full tensor, and cut it."""
    named = model.named_parameters(remove_duplicate=False)
    placed = ((name, placement_of(parameter).tensor_shard) for name, parameter in named)
    shards = {name: shard for name, shard in placed if shard}

    @torch.no_grad()
    def fill(name: str, tensor: torch.Tensor) -> None:
        if name not in shards:
            return init(name, tensor)
        full = tensor.new_empty(shards[name].full_shape(tensor))
        init(name, full)
        tensor.copy_(shards[name].cut(full))

    return fill


@torch.no_grad()
def materialize(model: nn.Module, init: Callable[[str, torch.Tensor], None]) -> nn.Module:
    """Put the parameters and buffers of a meta-device model on the default device, filled by init(name, full tensor).

    At most one full tensor exists at a time. Returns the model. Not collective.
    """
    fill = shard_init(model, init)
    for parameter, slots in parameter_slots(model).items():
        real = nn.Parameter(torch.empty_like(parameter, device=torch.get_default_device()), parameter.requires_grad)
        vars(real).update(vars(parameter) | vars(real))  # attributes, but not the device that a fake tensor keeps there
        fill(slots[0][0], real)
        for _, owner, name in slots:
            owner.register_parameter(name, real)
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=torch.get_default_device())
                fill(f"{path}.{name}" if path else name, module._buffers[name])
    return model


@torch.no_grad()
def gather_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the unsharded model's state_dict, on the CPU of every rank; one tensor is gathered at a time. Collective.

    Does not support a model that fully_shard has wrapped, whose parameters are shards of shards.
    """
    named, state = dict(model.named_parameters(remove_duplicate=False)), {}
    for name, tensor in model.state_dict().items():
        shard = placement_of(named.get(name, tensor)).tensor_shard
        state[plain_name(name)] = (shard.gather(tensor) if shard else tensor).to("cpu", copy=True)
    return state
