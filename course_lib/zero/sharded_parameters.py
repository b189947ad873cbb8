"""Parameters of which every rank keeps a shard, and which are unsharded only while they are used (ZeRO stage 3).

An FSDP unit, for instance a transformer block, has its parameters in flat buffers. gather: allocate the memory of the
buffer, and start the all-gather that fills it. free: release the memory, while the tensors that autograd has saved
still point to it; the next gather makes them valid again. Gradients go to a flat buffer too, and from there by
reduce-scatter to the ranks that own them. (Rajbhandari et al. 2020, ZeRO, §5.3; Zhao et al. 2023, "PyTorch FSDP",
VLDB, §3.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from course_lib.collectives.into_tensor import all_gather_into_tensor
from course_lib.single_gpu.placement import FlatShard, Placement, placement_of
from course_lib.zero.parameters import Slot, swap_parameters
from course_lib.zero.shards import ALIGNED, FlatLayout, GradientBuffer, divide_factors, is_unused


class Encoding(NamedTuple):
    """How parameters are sent. encode(shard [n]) returns a payload, 1-D and of the same length on every rank;
    decode(payloads [N, len], out [N, n]) writes the values that the payloads encode.
    """

    encode: Callable[[torch.Tensor], torch.Tensor]
    decode: Callable[[torch.Tensor, torch.Tensor], None]


class GatheredBuffer:
    """The unsharded values of a `shard`, [padded], while they are gathered. After free() they have no memory."""

    def __init__(self, layout: FlatLayout, shard: torch.Tensor, dtype: torch.dtype, encoding: Encoding | None):
        self.layout, self.shard, self.encoding = layout, shard, encoding
        self.values = torch.empty(layout.padded, dtype=dtype, device=shard.device)
        self.nbytes = self.values.untyped_storage().nbytes()
        self.gathered = False  # True from the start of the all-gather
        self.work: dist.Work | None = None
        self.payloads: torch.Tensor | None = None

    # exercise 05.9
    def gather(self) -> None:
        """Allocate the memory of `values`, and start the all-gather of all ranks' shards; do nothing if it has started.

        The shard is sent in the dtype of `values`, or as the encoding's payload. `work` is the all-gather.
        """
        if not self.gathered:
            self.gathered = True
            self.values.untyped_storage().resize_(self.nbytes)
            if self.encoding is None:
                local = self.layout.local_shard(self.values)
                local.copy_(self.shard)
                self.work = all_gather_into_tensor(self.values, local, group=self.layout.group, async_op=True)
            else:
                payload = self.encoding.encode(self.shard)
                self.payloads = payload.new_empty(self.layout.world_size * len(payload))
                self.work = all_gather_into_tensor(self.payloads, payload, group=self.layout.group, async_op=True)

    def wait(self) -> None:
        """Wait for the all-gather, if one is in flight."""
        if self.work is not None:
            self.work.wait()
            if self.encoding is not None and self.payloads is not None:
                rows = self.layout.world_size
                self.encoding.decode(self.payloads.view(rows, -1), self.values.view(rows, -1))
            self.work = self.payloads = None

    # exercise 05.9
    def free(self) -> None:
        """Free the memory, even while there are views of it; wait first for an all-gather that is in flight."""
        self.wait()
        self.values.untyped_storage().resize_(0)
        self.gathered = False


class PendingReduction(NamedTuple):
    """A reduce-scatter in flight; `buffer` must live until its end. all_reduces: whether the replicas' sum follows."""

    work: dist.Work
    buffer: torch.Tensor
    shard: torch.Tensor
    all_reduces: bool


class ShardedParameters:
    """Parameters of one FSDP unit that have the same dtype, device, group and placement, in one flat buffer.

    sharded_params: the local shard [elements] of each parameter, a view of `shard` [shard_numel]; unsharded_params: all
    values of each, while they are gathered. slots: the slots of each parameter, see `parameter_slots`.
    gradient_divide_factor: the sum of the gradients is multiplied by it. encoding: an Encoding, or a function of this
    object that returns one. make(name, like): returns a full parameter for one on the meta device.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        slots: list[list[Slot]],
        group: dist.ProcessGroup,
        gradient_divide_factor: float,
        compute_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
        encoding: Encoding | Callable[[ShardedParameters], Encoding | None] | None,
        make: Callable[[str, torch.Tensor], torch.Tensor],
    ):
        first, self.slots, self.trained = parameters[0], slots, parameters[0].requires_grad
        self.layout = FlatLayout(parameters, group, ALIGNED)
        device = torch.get_default_device() if first.is_meta else first.device
        self.shard = torch.zeros(self.layout.shard_numel, dtype=first.dtype, device=device)
        self.sharded_params: list[nn.Parameter] = []
        for i, (parameter, local) in enumerate(zip(parameters, self.layout.local_views(self.shard), strict=True)):
            full = make(slots[i][0].path, parameter) if parameter.is_meta else parameter.detach()
            local.copy_(self.layout.local_elements(i, full))
            shard = nn.Parameter(local, self.trained)
            flat = FlatShard(group, self.layout.span(i), parameter.shape)
            placement = placement_of(parameter)  # of the shard that another transform has made
            vars(shard)["placement"] = Placement(placement.tensor_shard, flat_shard=flat, decays=placement.decays)
            self.sharded_params.append(shard)
        dtype = compute_dtype if compute_dtype and first.is_floating_point() else first.dtype
        encoding = encoding(self) if callable(encoding) else encoding
        self.buffer = GatheredBuffer(self.layout, self.shard, dtype, encoding)
        views = self.layout.views(self.buffer.values.data)  # .data: to autograd, a gather does not change the weights
        self.unsharded_params = [nn.Parameter(view, self.trained) for view in views]
        self.buffer.free()
        self.gradients = GradientBuffer(self.unsharded_params, self.layout)
        self.reduce_dtype = reduce_dtype or dtype
        self.in_flight: list[PendingReduction] = []
        self.pre_scale, self.post_scale = divide_factors(self.reduce_dtype, gradient_divide_factor)
        self.used: set[nn.Parameter] = set()  # unsharded parameters whose gradient this rank has made since finish()
        self.replicas: dist.ProcessGroup | None = None  # the ranks of other groups that keep the same shards (HSDP)
        self.all_reduces = True  # whether the sum over the replicas follows that over the group
        self.accumulated_grad: torch.Tensor | None = None  # [shard_numel], not yet summed over the replicas
        self.all_reduce: tuple[dist.Work, torch.Tensor] | None = None  # over the replicas, in flight
        self.register(self.sharded_params)

    def set_norm_groups(self, *groups: dist.ProcessGroup) -> None:
        """Set the groups over which the squares of these shards' gradients are summed, one after the other."""
        for shard in self.sharded_params:
            placement_of(shard).norm_groups = groups

    def register(self, parameters: Sequence[nn.Parameter]) -> None:
        """Make the modules use these parameters."""
        swap_parameters(self.slots, parameters)

    def wait(self) -> None:
        """Wait for the all-gather, and make the modules use the unsharded parameters."""
        self.buffer.wait()
        self.register(self.unsharded_params)

    def free(self) -> None:
        """Make the modules use the local shards, and free the unsharded parameters."""
        if self.buffer.gathered:
            self.register(self.sharded_params)
            self.buffer.free()

    @property
    def has_gradients(self) -> bool:
        """True if a backward has made gradients that have not been sent."""
        return bool(self.gradients.stored) or any(parameter.grad is not None for parameter in self.unsharded_params)

    def store(self, parameters: Sequence[nn.Parameter]) -> None:
        """Move gradients that backward has made to the flat buffer, or add them to it, in reduce_dtype."""
        if self.gradients.buffer is None:
            self.gradients.attach(self.shard.new_empty(self.layout.padded, dtype=self.reduce_dtype))
        for parameter in parameters:
            self.gradients.store(parameter)

    def launch(self) -> None:
        """Start the reduce-scatter of the gradients that backward has made; later ones need another reduce-scatter."""
        self.store([parameter for parameter in self.unsharded_params if parameter.grad is not None])
        self.used |= self.gradients.stored
        self.gradients.fill_missing()
        buffer = self.gradients.buffer
        assert buffer is not None, "store() attaches a buffer"
        if self.pre_scale != 1.0:
            buffer.mul_(self.pre_scale)
        shard = self.shard.new_empty(self.layout.shard_numel, dtype=self.reduce_dtype)
        self.in_flight.append(PendingReduction(self.gradients.send(shard), buffer, shard, self.all_reduces))
        self.gradients.attach(None)

    def collect(self) -> None:
        """Wait for the reduce-scatters, and add this rank's shard of the mean to `.grad` of the local shards: at once,
        or after the all-reduce over the replicas.
        """
        while self.in_flight:
            work, _, shard, all_reduces = self.in_flight.pop(0)
            work.wait()
            gradient = shard.to(self.shard.dtype).mul_(self.post_scale)
            if self.replicas is None:
                self.add_grad(gradient)
                continue
            self.accumulated_grad = gradient if self.accumulated_grad is None else self.accumulated_grad.add_(gradient)
            if all_reduces:
                self.all_reduce_grads()

    def all_reduce_grads(self) -> None:
        """Start the all-reduce of the accumulated gradient over the replicas."""
        if self.accumulated_grad is not None:
            self.wait_all_reduce()
            work = dist.all_reduce(self.accumulated_grad, group=self.replicas, async_op=True)
            self.all_reduce, self.accumulated_grad = (work, self.accumulated_grad), None

    def wait_all_reduce(self) -> None:
        """Wait for the all-reduce over the replicas, and add its result to `.grad`."""
        if self.all_reduce is not None:
            work, gradient = self.all_reduce
            work.wait()
            self.add_grad(gradient)
            self.all_reduce = None

    def add_grad(self, gradient: torch.Tensor) -> None:
        """Add a flat gradient [shard_numel] to the local shards' `.grad`, which stays None if no rank has a gradient.
        The host reads the latter from the device, only for parameters that this rank has not used.
        """
        views = self.layout.local_views(gradient)
        for parameter, unsharded, local in zip(self.sharded_params, self.unsharded_params, views, strict=True):
            if parameter.grad is not None:
                parameter.grad.add_(local)
            elif local.numel() and (unsharded in self.used or not is_unused(local)):
                parameter.grad = local


class FSDPUnit:
    """Modules whose parameters are gathered and freed together.

    flat_params: their parameters, one ShardedParameters per dtype, device, group and placement. successor: the unit
    that ran next in the last forward.
    """

    def __init__(self, modules: list[nn.Module], flat_params: list[ShardedParameters]):
        self.modules, self.flat_params = modules, flat_params
        self.successor: FSDPUnit | None = None

    @property
    def has_gradients(self) -> bool:
        """True if a backward has made gradients that have not been sent."""
        return any(flat.has_gradients for flat in self.flat_params)

    def gather(self) -> None:
        """Start the all-gathers of the parameters that are not gathered yet."""
        for flat in self.flat_params:
            flat.buffer.gather()

    def wait(self) -> None:
        """Wait for the all-gathers, and make the modules use the unsharded parameters."""
        for flat in self.flat_params:
            flat.wait()

    def free(self) -> None:
        """Make the modules use the local shards, and free the unsharded parameters."""
        for flat in self.flat_params:
            flat.free()

    def launch(self) -> None:
        """Start the reduce-scatters of the gradients."""
        for flat in self.flat_params:
            if flat.trained:
                flat.launch()

    def collect(self) -> None:
        """Wait for the reduce-scatters, and add the results to `.grad` of the local shards."""
        for flat in self.flat_params:
            flat.collect()


def find_blocks(module: nn.Module) -> list[list[nn.Module]]:
    """Return the default units of a module, each a list of modules: every member of a ModuleList, and the modules
    between such lists.

    In an nn.Sequential every member is a unit. A module without a ModuleList is a part of one unit.
    """
    if isinstance(module, nn.Sequential):
        return [[child] for child in module.children()]
    units: list[list[nn.Module]] = []
    between: list[nn.Module] = []
    for child in module.children():
        if not any(isinstance(inner, nn.ModuleList) for inner in child.modules()):
            between.append(child)
            continue
        units, between = [*units, between], []
        units += [[member] for member in child.children()] if isinstance(child, nn.ModuleList) else find_blocks(child)
    return [unit for unit in [*units, between] if unit]
