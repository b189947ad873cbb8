"""The shards that a rank keeps of a bucket in ZeRO stages 1 and 2: of the gradient, and of the optimizer's tensors.

In a backward that synchronizes, gradients fill full buffers, and each buffer is reduce-scattered as soon as it is full.
Several such backwards accumulate in the shards. Stage 1 has a full buffer per bucket, stage 2 has two for all buckets.
(Rajbhandari et al. 2020, ZeRO, §5.1, §5.2; §6.2 for the buffers of constant size.)
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from course_lib.collectives.into_tensor import all_gather_into_tensor
from course_lib.data_parallel.buckets import Reducer
from course_lib.data_parallel.gradient_owner import LocalGradient, UpdatedTensor
from course_lib.single_gpu.placement import placement_of
from course_lib.zero.shards import ALIGNED, FlatLayout, GradientBuffer, divide_factors, is_unused


class BufferPool:
    """`count` buffers of `numel` elements, with the dtype and device of `like`, which all buckets share."""

    def __init__(self, numel: int, like: torch.Tensor, count: int = 2):
        self.numel, self.like, self.count = numel, like, count
        self.free = [like.new_empty(numel) for _ in range(count)]
        self.sending: deque[GradientShard] = deque()  # buckets whose buffer is being sent, the oldest first

    # exercise 05.7
    def take(self) -> torch.Tensor:
        """Return a free buffer; it may be the buffer of the oldest bucket that is being sent, after its collect().

        If none is free and none is being sent, because gradients came in an unusual order, allocate one more.
        """
        while not self.free and self.sending:
            self.sending.popleft().collect()  # gives its buffer back
        return self.free.pop() if self.free else self.like.new_empty(self.numel)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Return a buffer to the pool, which keeps at most `count`."""
        if len(self.free) < self.count:
            self.free.append(buffer)


class GradientShard:
    """This rank's shard of a bucket's mean gradient: `gradient` [shard_numel], the sum over the ranks times
    `gradient_divide_factor`.
    """

    scale = 1.0  # for the Reducer: gradients are not scaled when they are stored, but as divide_factors says
    gradient: torch.Tensor

    def __init__(
        self,
        parameters: list[nn.Parameter],
        group: dist.ProcessGroup,
        gradient_divide_factor: float,
        dtype: torch.dtype | None,
    ):
        self.parameters, self.group = parameters, group
        self.layout = FlatLayout(parameters, group, ALIGNED)
        self.full_grads = GradientBuffer(parameters, self.layout)
        self.like = parameters[0].detach().new_empty(0, dtype=dtype)
        self.pre_scale, self.post_scale = divide_factors(self.like.dtype, gradient_divide_factor)
        self.used: set[nn.Parameter] = set()  # parameters whose gradient this rank has made since the last clear()
        self.missing = set(parameters)  # parameters whose gradient this backward has not made yet
        self.reduced = False  # True if `gradient` holds a sum since the last clear()
        self.pool: BufferPool | None = None
        self.accumulated_grad: torch.Tensor | None = None
        self.work: dist.Work | None = None

    def reserve(self, pool: BufferPool | None) -> None:
        """Allocate memory for gradients: with a pool for the shard, else for the full bucket, reduced in place."""
        self.pool, layout = pool, self.layout
        self.gradient = self.like.new_zeros(layout.shard_numel if pool else layout.padded)
        if pool is None:
            self.full_grads.attach(self.gradient)
            self.gradient = layout.local_shard(self.gradient)

    def attach_buffer(self) -> None:
        """Attach a buffer, before the first gradient of a backward, and set aside the sum of earlier backwards."""
        if self.reduced and self.accumulated_grad is None and not self.full_grads.stored:
            self.accumulated_grad = self.gradient.clone()
        if self.full_grads.buffer is None and self.pool is not None:
            self.full_grads.attach(self.pool.take())

    def store(self, parameter: nn.Parameter, scale: float = 1.0) -> None:
        """Move a gradient that backward has made to the full buffer."""
        self.attach_buffer()
        self.full_grads.store(parameter)
        self.used.add(parameter)

    def launch(self) -> None:
        """Start the reduce-scatter."""
        self.attach_buffer()
        self.full_grads.fill_missing()
        if self.pre_scale != 1.0 and self.full_grads.buffer is not None:
            self.full_grads.buffer.mul_(self.pre_scale)
        self.work = self.full_grads.send(self.gradient)
        if self.pool:
            self.pool.sending.append(self)

    def collect(self) -> None:
        """Wait for the reduce-scatter, add the earlier backwards' sum, and return the buffer to the pool."""
        if self.work is None:
            return
        self.work.wait()
        if self.post_scale != 1.0:
            self.gradient.mul_(self.post_scale)
        if self.accumulated_grad is not None:
            self.gradient.add_(self.accumulated_grad)
        self.work, self.accumulated_grad, self.reduced = None, None, True
        self.full_grads.stored.clear()
        if self.pool and self.full_grads.buffer is not None:
            if self in self.pool.sending:
                self.pool.sending.remove(self)
            self.pool.give_back(self.full_grads.buffer)
            self.full_grads.attach(None)

    def finish(self) -> None:
        """Wait for the reduce-scatter; the next gradient belongs to another backward."""
        self.collect()
        self.missing = set(self.parameters)

    def local_gradient(self) -> LocalGradient:
        """Return the shard with its group, and one of its weights, which all have the same placement."""
        weight = self.parameters[0]
        return LocalGradient(self.gradient, weight, self.group, placement_of(weight).norm_groups)

    def clear(self) -> None:
        """Drop the gradient."""
        self.reduced, self.accumulated_grad = False, None
        self.full_grads.stored.clear()
        self.used.clear()


class ShardReducer(Reducer):
    """Starts the buckets in the same order on all ranks, as Reducer does, in each backward that synchronizes.

    A parameter's second gradient begins a new reduction: ranks that use different parameters need finish() in between.
    """

    def __init__(self, names: dict[nn.Parameter, str], buckets: Sequence[GradientShard]):
        self.names, self.buckets, self.launched, self.launches_early = names, buckets, 0, True
        self.bucket_of = {parameter: bucket for bucket in buckets for parameter in bucket.parameters}

    def add(self, parameter: nn.Parameter, final: bool) -> None:
        """Store a gradient that backward has made; if it is final, launch the buckets that are ready."""
        if parameter not in self.bucket_of[parameter].missing:
            self.finish()  # the previous backward
        self.check_gradient(parameter)
        super().add(parameter, final)


COUNTERS = ("step", "mu_product", "eta", "mu")  # states of torch.optim that are a number, whatever the parameter


class SavedState(NamedTuple):
    """Values and states of a parameter before a step. unused: see `is_unused`, a bool scalar."""

    number: int
    unused: torch.Tensor
    values: dict[str, torch.Tensor]
    optimizer: torch.optim.Optimizer


class OptimizerShard:
    """A bucket's values in one flat buffer, and `shard`: this rank's shard, a float32 parameter for the optimizer.

    values: [padded], in compute_dtype, or in the parameters' dtype; shard: [shard_numel], a view of `values` if these
    have 32 bits, else a master copy of the parameters as they were given; with `offload`, a copy on the host.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        group: dist.ProcessGroup,
        offload: bool,
        compute_dtype: torch.dtype | None = None,
    ):
        self.parameters, first = parameters, parameters[0].detach()
        self.layout = FlatLayout(parameters, group, ALIGNED)
        self.values = first.new_zeros(self.layout.padded, dtype=compute_dtype)
        self.local_values = self.layout.local_shard(self.values)
        dtype = torch.promote_types(first.dtype, torch.float32)
        self.is_copy = offload or dtype != self.values.dtype
        local = self.layout.shard_of([each.detach() for each in parameters]) if self.is_copy else self.local_values
        self.shard = nn.Parameter(local.to("cpu" if offload else first.device, dtype))
        for parameter, view in zip(parameters, self.layout.views(self.values), strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        self.work: dist.Work | None = None
        self.saved: list[SavedState] = []

    @property
    def moved(self) -> bool:
        """True if a parameter is no longer a view of `values`, because its `.data` has been replaced."""
        storage = self.values.untyped_storage()._cdata  # not data_ptr(): fake tensors have none
        return any(parameter.untyped_storage()._cdata != storage for parameter in self.parameters)

    def updated_tensor(self) -> UpdatedTensor:
        """Return the shard and the parameters whose elements it holds."""
        return UpdatedTensor(self.shard, self.parameters, [self.layout.span(i) for i in range(len(self.parameters))])

    def set_grad(self, gradient: torch.Tensor) -> None:
        """Set the gradient [shard_numel] with which the optimizer updates the shard."""
        self.wait()
        self.shard.grad = gradient.to(self.shard.device, self.shard.dtype)

    @torch.no_grad()
    def save_unused(self, bucket: GradientShard, optimizer: torch.optim.Optimizer) -> None:
        """Save, before a step, the values and states of each parameter without a gradient on this rank.

        gather() restores them if no rank had a gradient: `torch.optim` leaves such a parameter alone. Only its step
        counter advances, which it shares with its bucket.
        """
        self.saved = []
        if bucket.used.issuperset(self.parameters):
            return
        gradients = self.layout.local_views(bucket.gradient)
        before = {name: self.layout.local_views(value) for name, value in self.updated(optimizer).items()}
        for i, parameter in enumerate(self.parameters):
            if parameter not in bucket.used:
                copies = {name: views[i].clone() for name, views in before.items()}
                self.saved.append(SavedState(i, is_unused(gradients[i]), copies, optimizer))

    def updated(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """Return the tensors [shard_numel] that a step changes: the shard, as "", and its states by name."""
        states = optimizer.state.get(self.shard, {}).items()
        alike = {name: value for name, value in states if torch.is_tensor(value) and value.shape == self.shard.shape}
        return {"": self.shard.detach()} | alike

    def restore_unused(self) -> None:
        """Restore, after a step, what `save_unused` has saved. A state that this step has made began with 0, and weight
        decay may have changed it.
        """
        for i, unused, before, optimizer in self.saved:
            decays = any(group.get("weight_decay") for group in optimizer.param_groups)
            for name, value in self.updated(optimizer).items():
                view = self.layout.local_views(value)[i]
                if name in before or decays:
                    old = before.get(name, torch.zeros_like(view))
                    view.copy_(torch.where(unused.to(view.device), old, view))
        self.saved = []

    @torch.no_grad()
    def gather(self) -> None:
        """Start the all-gather of the values, and drop the gradient."""
        self.restore_unused()
        self.shard.grad = None
        if self.is_copy:
            self.local_values.copy_(self.shard)
        self.work = all_gather_into_tensor(self.values, self.local_values, group=self.layout.group, async_op=True)

    def wait(self) -> None:
        """Wait for the all-gather, if one is in flight."""
        if self.work is not None:
            self.work.wait()
            self.work = None

    def full_states(self, optimizer: torch.optim.Optimizer) -> dict[str, list]:
        """Return the optimizer's state by name, on the CPU: one unsharded tensor per parameter. Collective."""
        states, full = dict(optimizer.state.get(self.shard, {})), {}
        if self.shard.dtype != self.values.dtype:
            states["master"] = self.shard.detach()
        for name, value in states.items():
            if torch.is_tensor(value) and value.shape == self.shard.shape:
                gathered = self.layout.gather(value.to(self.values.device))
                full[name] = [tensor.to("cpu", copy=True) for tensor in gathered]
            else:  # a counter
                full[name] = [copy.deepcopy(value) for _ in self.parameters]
        return full

    def local_states(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        """Return this rank's shard of the state by name, given the unsharded state of each parameter."""
        local: dict[str, Any] = {}
        shapes = [parameter.shape for parameter in self.parameters]
        for name in sorted({name for state in states for name, value in state.items() if value is not None}):
            values = [state.get(name) for state in states]
            given = [(value, shape) for value, shape in zip(values, shapes, strict=True) if value is not None]
            alike = all(torch.is_tensor(value) and value.shape == shape for value, shape in given)
            sharded = alike and name not in COUNTERS
            local[name] = self.layout.shard_of(values) if sharded else copy.deepcopy(given[0][0])
        return local
