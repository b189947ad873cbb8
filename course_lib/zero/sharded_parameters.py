"""Parameters of which every rank keeps a piece, and which are whole only while they are used (ZeRO stage 3).

A unit, a transformer block for instance, has its parameters in one flat buffer. gather: its memory is claimed, and an
all-gather fills it. free: its memory is given back, while the tensors that autograd has saved go on pointing to it;
the next gather makes them right again. Gradients go to a flat buffer too, and from there to the ranks that own them.
(Rajbhandari et al. 2020, ZeRO, §5.3; Zhao et al. 2023, "PyTorch FSDP", VLDB, §3.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from course_lib.collectives.into_tensor import all_gather_into_tensor
from course_lib.single_gpu.placement import FlatShard, Placement, placement_of
from course_lib.zero.shards import ALIGNED, FlatLayout, GradientBuffer, divide_factors, is_unused


class Encoding(NamedTuple):
    """How parameters travel. encode(shard [n]) makes a payload, 1-D and as long on every rank; decode(payloads
    [N, len], out [N, n]) writes the values that they stand for.
    """

    encode: Callable[[torch.Tensor], torch.Tensor]
    decode: Callable[[torch.Tensor, torch.Tensor], None]


class GatheredBuffer:
    """The whole values of a `shard`, [padded], while they are gathered. After free() there is no memory behind them."""

    def __init__(self, layout: FlatLayout, shard: torch.Tensor, dtype: torch.dtype, encoding: Encoding | None):
        self.layout, self.shard, self.encoding = layout, shard, encoding
        self.values = torch.empty(layout.padded, dtype=dtype, device=shard.device)
        self.nbytes = self.values.untyped_storage().nbytes()
        self.gathered = False  # or on its way
        self.work = self.payloads = None

    # exercise 05.9
    def gather(self) -> None:
        """Claim the memory of `values`, and start the all-gather of all ranks' shards; do nothing if it is done.

        The shard travels in the dtype of `values`, or as the encoding's payload. `work` is the all-gather.
        """
        if not self.gathered:
            self.gathered = True
            self.values.untyped_storage().resize_(self.nbytes)
            if self.encoding is None:
                own = self.layout.local_shard(self.values)
                own.copy_(self.shard)
                self.work = all_gather_into_tensor(self.values, own, group=self.layout.group, async_op=True)
            else:
                payload = self.encoding.encode(self.shard)
                self.payloads = payload.new_empty(self.layout.world_size * len(payload))
                self.work = all_gather_into_tensor(self.payloads, payload, group=self.layout.group, async_op=True)

    def wait(self) -> None:
        """Until the values are there, if they are on their way."""
        if self.work is not None:
            self.work.wait()
            if self.encoding is not None:
                rows = self.layout.world_size
                self.encoding.decode(self.payloads.view(rows, -1), self.values.view(rows, -1))
            self.work = self.payloads = None

    # exercise 05.9
    def free(self) -> None:
        """Give the memory back, even while there are views of it; wait first for an all-gather that is under way."""
        self.wait()
        self.values.untyped_storage().resize_(0)
        self.gathered = False


class ShardedParameters:
    """Parameters of one unit that are alike in dtype, device, group, and in being trained.

    sharded: of each the piece that this rank keeps [elements], a view of `shard` [shard_numel]; whole: of each all
    values, while they are gathered. places: of each parameter (full name, module, name there), more than one where it
    is shared. encoding: an Encoding, or a function of this object that makes one. make(name, like): a whole parameter.
    """

    def __init__(self, parameters, places, group, mean: float, compute_dtype, reduce_dtype, encoding, make):
        first, self.slots, self.trained = parameters[0], places, parameters[0].requires_grad
        self.layout = FlatLayout(parameters, group, ALIGNED)
        device = torch.get_default_device() if first.is_meta else first.device
        self.shard = torch.zeros(self.layout.shard_numel, dtype=first.dtype, device=device)
        self.sharded_params = []
        for i, (parameter, piece) in enumerate(zip(parameters, self.layout.local_views(self.shard), strict=True)):
            whole = make(places[i][0][0], parameter) if parameter.is_meta else parameter.detach()
            piece.copy_(self.layout.local_elements(i, whole))
            self.sharded_params.append(nn.Parameter(piece, self.trained))
            flat = FlatShard(group, self.layout.span(i), parameter.shape)
            given = placement_of(parameter)  # the parameter may be a shard of its own (notebook 06)
            self.sharded_params[i].placement = Placement(given.tensor_shard, flat_shard=flat)
        dtype = compute_dtype if compute_dtype and first.is_floating_point() else first.dtype
        encoding = encoding(self) if callable(encoding) else encoding
        self.buffer = GatheredBuffer(self.layout, self.shard, dtype, encoding)
        views = self.layout.views(self.buffer.values.data)  # .data: to autograd, a gather is no change of the weights
        self.unsharded_params = [nn.Parameter(view, self.trained) for view in views]
        self.buffer.free()
        self.gradients = GradientBuffer(self.unsharded_params, self.layout)
        self.reduce_dtype, self.sent = reduce_dtype or dtype, []
        self.pre_scale, self.post_scale = divide_factors(self.reduce_dtype, mean)
        self.used: set[nn.Parameter] = set()  # those of `whole` whose gradient this rank has made since finish()
        self.replicas: dist.ProcessGroup | None = None  # the ranks of other groups that keep the same pieces
        self.replicates = True  # whether the sum over them follows that over the group
        self.carried = self.replicating = None
        self.register(self.sharded_params)

    def join(self, *groups) -> None:
        """The pieces belong to the gradient whose norm is summed over these groups, one after the other."""
        for piece in self.sharded_params:
            placement_of(piece).norm_groups = groups

    def register(self, parameters: list[nn.Parameter]) -> None:
        """Have the modules use these."""
        for parameter, places in zip(parameters, self.slots, strict=True):
            for _, module, name in places:
                module._parameters[name] = parameter

    def wait(self) -> None:
        """The modules have whole parameters from here on."""
        self.buffer.wait()
        self.register(self.unsharded_params)

    def free(self) -> None:
        """The modules have pieces from here on."""
        if self.buffer.gathered:
            self.register(self.sharded_params)
            self.buffer.free()

    @property
    def has_gradients(self) -> bool:
        """Whether a backward has left gradients that have not been sent."""
        return bool(self.gradients.stored) or any(parameter.grad is not None for parameter in self.unsharded_params)

    def store(self, parameters: list[nn.Parameter]) -> None:
        """Take gradients that backward has made, and add them to what has been taken before, in reduce_dtype."""
        if self.gradients.buffer is None:
            self.gradients.attach(self.shard.new_empty(self.layout.padded, dtype=self.reduce_dtype))
        for parameter in parameters:
            self.gradients.store(parameter)

    def launch(self) -> None:
        """Start the reduce-scatter of the gradients that backward has made; what comes later is for another one."""
        self.store([parameter for parameter in self.unsharded_params if parameter.grad is not None])
        self.used |= self.gradients.stored
        self.gradients.fill_missing()
        if self.pre_scale != 1.0:
            self.gradients.buffer.mul_(self.pre_scale)
        piece = self.shard.new_empty(self.layout.shard_numel, dtype=self.reduce_dtype)
        self.sent.append((self.gradients.send(piece), self.gradients.buffer, piece, self.replicates))
        self.gradients.attach(None)

    def collect(self) -> None:
        """Wait for what has been sent, and add this rank's piece of the mean to the pieces' `.grad`: at once, or when
        the replicas' have been added.
        """
        while self.sent:
            work, _, piece, replicates = self.sent.pop(0)
            work.wait()
            gradient = piece.to(self.shard.dtype).mul_(self.post_scale)
            if self.replicas is None:
                self.add(gradient)
                continue
            self.carried = gradient if self.carried is None else self.carried.add_(gradient)
            if replicates:
                self.replicate()

    def replicate(self) -> None:
        """Start the all-reduce over the replicas of what this rank has summed up."""
        if self.carried is not None:
            self.settle()
            self.replicating = dist.all_reduce(self.carried, group=self.replicas, async_op=True), self.carried
            self.carried = None

    def settle(self) -> None:
        """Wait for it."""
        if self.replicating is not None:
            work, gradient = self.replicating
            work.wait()
            self.add(gradient)
            self.replicating = None

    def add(self, gradient: torch.Tensor) -> None:
        """Add a flat gradient [shard_numel] to the local shards' `.grad`, which stays None if no rank has a gradient.
        The host reads the latter from the device, only for parameters that this rank has not used.
        """
        for parameter, whole, part in zip(
            self.sharded_params, self.unsharded_params, self.layout.local_views(gradient), strict=True
        ):
            if parameter.grad is not None:
                parameter.grad.add_(part)
            elif part.numel() and (whole in self.used or not is_unused(part)):
                parameter.grad = part


class FSDPUnit:
    """Modules whose parameters are gathered and freed together. successor: the unit that ran next, the last time."""

    def __init__(self, modules: list[nn.Module], parts: list[ShardedParameters]):
        self.modules, self.flat_params, self.successor = modules, parts, None

    @property
    def has_gradients(self) -> bool:
        """Whether a backward has left gradients that have not been sent."""
        return any(part.has_gradients for part in self.flat_params)

    def gather(self) -> None:
        """Start the all-gather of what is not whole."""
        for part in self.flat_params:
            part.buffer.gather()

    def wait(self) -> None:
        """Until the modules have whole parameters."""
        for part in self.flat_params:
            part.wait()

    def free(self) -> None:
        """The modules have pieces, and the memory of the whole is given back."""
        for part in self.flat_params:
            part.free()

    def launch(self) -> None:
        """Start the reduce-scatter of the gradients."""
        for part in self.flat_params:
            if part.trained:
                part.launch()

    def collect(self) -> None:
        """Wait for the reduce-scatters, and add the pieces to `.grad`."""
        for part in self.flat_params:
            part.collect()


def find_blocks(module: nn.Module) -> list[list[nn.Module]]:
    """Units of a module, each a list of modules: every member of a ModuleList, and what stands between such lists.

    Of an nn.Sequential: every member. Other modules without a ModuleList are one unit.
    """
    if isinstance(module, nn.Sequential):
        return [[child] for child in module.children()]
    units, between = [], []
    for child in module.children():
        if not any(isinstance(inner, nn.ModuleList) for inner in child.modules()):
            between.append(child)
            continue
        units, between = [*units, between], []
        units += [[member] for member in child.children()] if isinstance(child, nn.ModuleList) else find_blocks(child)
    return [unit for unit in [*units, between] if unit]
