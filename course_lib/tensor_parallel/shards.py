"""Which part of a whole parameter a rank has, and how parts are made from wholes and wholes from parts.

A parameter that is split has a placement with its `tensor_shard` and `norm_groups`, the groups over which squares are
added up for the norm of the full gradient (shards.clip_grad_norm_). PyTorch drops it where it makes new parameters
(to_empty, load_state_dict with assign=True): use `materialize`, and load into what is there. A model on the meta device
is split there, and then filled: one full parameter at a time is made, and a rank's shard of it is kept.
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
    """`size` indices of dimension `dim`, from `start` on, of a tensor that has `whole`."""

    group: dist.ProcessGroup  # its ranks have a part each, in order
    dim: int
    full_size: int
    start: int
    size: int

    @classmethod
    def of(cls, whole: int, group: dist.ProcessGroup, dim: int = 0) -> TensorShard:
        """This rank's part: ceil(whole / ranks) indices, except that the last ranks may have fewer."""
        per_rank = -(-whole // group.size())
        start = min(group.rank() * per_rank, whole)
        return cls(group, dim, whole, start, min(per_rank, whole - start))

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole tensor: a view."""
        return tensor.narrow(self.dim, self.start, self.size)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """The whole tensor, from the parts of all ranks. Collective."""
        per_rank, own = -(-self.full_size // self.group.size()), part.movedim(self.dim, 0)
        padded = own.new_zeros(per_rank, *own.shape[1:])
        padded[: self.size] = own
        whole = own.new_empty(per_rank * self.group.size(), *own.shape[1:])
        all_gather_into_tensor(whole, padded, group=self.group)
        return whole[: self.full_size].movedim(0, self.dim).contiguous()

    def full_shape(self, part: torch.Tensor) -> list[int]:
        """The shape of the whole tensor."""
        return [self.full_size if dim == self.dim % part.dim() else size for dim, size in enumerate(part.shape)]


def leaves_empty_shard(whole: int, ranks: int) -> bool:
    """Whether the last of so many ranks has no index of `whole`."""
    return (ranks - 1) * -(-whole // ranks) >= whole


def shard_parameter(parameter: nn.Parameter, shard: TensorShard) -> nn.Parameter:
    """A new parameter with this rank's part of `parameter`, on the same device, which may be meta."""
    part = shard.cut(parameter.detach()).clone(memory_format=torch.contiguous_format)
    part = nn.Parameter(part, parameter.requires_grad)
    placement_of(part).tensor_shard, placement_of(part).norm_groups = shard, (shard.group,)
    return part


def shard_init(model: nn.Module, init: Callable[[str, torch.Tensor], None]) -> Callable[[str, torch.Tensor], None]:
    """The `init(name, tensor)` of a split model, from the unsplit one's: it makes one whole tensor, and cuts it."""
    named = model.named_parameters(remove_duplicate=False)
    shards = {
        name: placement_of(parameter).tensor_shard for name, parameter in named if placement_of(parameter).tensor_shard
    }

    @torch.no_grad()
    def fill(name: str, tensor: torch.Tensor) -> None:
        if name not in shards:
            return init(name, tensor)
        whole = tensor.new_empty(shards[name].full_shape(tensor))
        init(name, whole)
        tensor.copy_(shards[name].cut(whole))

    return fill


@torch.no_grad()
def materialize(model: nn.Module, init: Callable[[str, torch.Tensor], None]) -> nn.Module:
    """Put the parameters and buffers of a meta-device model on the default device, filled by init(name, whole tensor).

    One whole tensor is there at a time. Returns the model. Not collective.
    """
    fill = shard_init(model, init)
    for parameter, places in parameter_slots(model).items():
        real = nn.Parameter(torch.empty_like(parameter, device=torch.get_default_device()), parameter.requires_grad)
        vars(real).update(vars(parameter) | vars(real))  # what is said of the parameter, not where it is (fake tensors)
        fill(places[0][0], real)
        for _, owner, name in places:
            owner.register_parameter(name, real)
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=torch.get_default_device())
                fill(f"{path}.{name}" if path else name, module._buffers[name])
    return model


@torch.no_grad()
def gather_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state_dict of the unsplit model, on the CPU of every rank; one tensor is gathered at a time. Collective.

    Not of a model that fully_shard has wrapped: its parameters are pieces of parts.
    """
    named, state = dict(model.named_parameters(remove_duplicate=False)), {}
    for name, tensor in model.state_dict().items():
        shard = placement_of(named.get(name, tensor)).tensor_shard
        state[plain_name(name)] = (shard.gather(tensor) if shard else tensor).to("cpu", copy=True)
    return state
