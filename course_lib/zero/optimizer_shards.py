"""What a rank keeps of a bucket under ZeRO stages 1 and 2: its piece of the gradient and of what the optimizer updates.

A backward that synchronizes is a round: gradients fill whole buffers, each is reduce-scattered as soon as it is full,
and rounds add up in the pieces. Stage 1 has a whole buffer for every bucket. Stage 2 has two for all of them.
(Rajbhandari et al. 2020, ZeRO, §5.1, §5.2; §6.2 for the buffers of constant size.)
"""

from __future__ import annotations

import copy
from collections import deque

import torch
from torch import nn

from course_lib.collectives.into_tensor import all_gather_into_tensor
from course_lib.data_parallel.buckets import Reducer, make_buckets
from course_lib.single_gpu.placement import placement_of
from course_lib.zero.shards import ALIGNED, FlatLayout, GradientBuffer, divide_factors, is_unused


class BufferPool:
    """`count` buffers of `numel` elements, of the dtype and on the device of `like`, which all buckets take in turn."""

    def __init__(self, numel: int, like: torch.Tensor, count: int = 2):
        self.numel, self.like, self.count = numel, like, count
        self.free = [like.new_empty(numel) for _ in range(count)]
        self.sending = deque()  # buckets whose buffer is being sent, the oldest first

    # exercise 05.7
    def take(self) -> torch.Tensor:
        """Return a free buffer; it may be that of the oldest bucket that is being sent, after its collect().

        If none is free and none is being sent, because gradients came in an unusual order, make one more.
        """
        while not self.free and self.sending:
            self.sending.popleft().collect()  # gives its buffer back
        return self.free.pop() if self.free else self.like.new_empty(self.numel)

    def give_back(self, buffer: torch.Tensor) -> None:
        """It may be taken again; what is beyond `count` is dropped."""
        if len(self.free) < self.count:
            self.free.append(buffer)


class GradientShard:
    """This rank's piece of a bucket's mean gradient: `gradient` [shard_numel], the sum over the ranks times `mean`."""

    scale = 1.0  # for the Reducer: gradients are not scaled when they are stored, but as divide_factors says

    def __init__(self, parameters: list[nn.Parameter], group, mean: float, dtype: torch.dtype | None):
        self.parameters, self.group = parameters, group
        self.layout = FlatLayout(parameters, group, ALIGNED)
        self.full_grads = GradientBuffer(parameters, self.layout)
        self.like = parameters[0].detach().new_empty(0, dtype=dtype)
        self.pre_scale, self.post_scale = divide_factors(self.like.dtype, mean)
        self.used: set[nn.Parameter] = set()  # those whose gradient this rank has made since the last clear()
        self.missing = set(parameters)  # those whose gradient this round has not made yet
        self.reduced = False  # whether `gradient` holds something since the last clear()
        self.pool = self.carried = self.work = None

    def reserve(self, pool: BufferPool | None) -> None:
        """Room for gradients: with a pool for the piece alone, else for all of the bucket, reduced in place."""
        self.pool, layout = pool, self.layout
        self.gradient = self.like.new_zeros(layout.shard_numel if pool else layout.padded)
        if pool is None:
            self.full_grads.attach(self.gradient)
            self.gradient = layout.local_shard(self.gradient)

    def open(self) -> None:
        """Before the first gradient of a round: have a buffer, and put aside what earlier rounds have summed up."""
        if self.reduced and self.carried is None and not self.full_grads.stored:
            self.carried = self.gradient.clone()
        if self.full_grads.buffer is None:
            self.full_grads.attach(self.pool.take())

    def store(self, parameter: nn.Parameter, scale: float = 1.0) -> None:
        """Move a gradient that backward has made to the whole buffer."""
        self.open()
        self.full_grads.store(parameter)
        self.used.add(parameter)

    def launch(self) -> None:
        """Start the reduce-scatter."""
        self.open()
        self.full_grads.fill_missing()
        if self.pre_scale != 1.0:
            self.full_grads.buffer.mul_(self.pre_scale)
        self.work = self.full_grads.send(self.gradient)
        if self.pool:
            self.pool.sending.append(self)

    def collect(self) -> None:
        """Wait for the reduce-scatter: the piece of the mean is there, and the whole buffer is free."""
        if self.work is None:
            return
        self.work.wait()
        if self.post_scale != 1.0:
            self.gradient.mul_(self.post_scale)
        if self.carried is not None:
            self.gradient.add_(self.carried)
        self.work, self.carried, self.reduced = None, None, True
        self.full_grads.stored.clear()
        if self.pool:
            if self in self.pool.sending:
                self.pool.sending.remove(self)
            self.pool.give_back(self.full_grads.buffer)
            self.full_grads.attach(None)

    def finish(self) -> None:
        """The round ends."""
        self.collect()
        self.missing = set(self.parameters)

    def clear(self) -> None:
        """Forget the gradient."""
        self.reduced, self.carried = False, None
        self.full_grads.stored.clear()
        self.used.clear()


class ShardReducer(Reducer):
    """Starts the buckets in the same order on all ranks, as Reducer; each backward that synchronizes is a round.

    A parameter's second gradient begins a new round: ranks that use different parameters need finish() between rounds.
    """

    def __init__(self, names: dict[nn.Parameter, str], buckets: list[GradientShard]):
        self.names, self.buckets, self.launched, self.launches_early = names, buckets, 0, True
        self.bucket_of = {parameter: bucket for bucket in buckets for parameter in bucket.parameters}

    def add(self, parameter: nn.Parameter, final: bool) -> None:
        """Take a gradient that backward has made; `final`: send it once its bucket is full."""
        if parameter not in self.bucket_of[parameter].missing:
            self.finish()  # that was the backward before
        self.check_gradient(parameter)
        super().add(parameter, final)


COUNTERS = ("step", "mu_product", "eta", "mu")  # states of torch.optim that are a number, whatever the parameter


class OptimizerShard:
    """A bucket's values in one flat buffer, and `shard`: this rank's piece, a float32 parameter for the optimizer.

    values: [padded], in compute_dtype, or as the parameters are; shard: [shard_numel], the piece itself where the
    values have 32 bits, else a master copy of what the parameters were; with `offload`, a copy on the host.
    """

    def __init__(self, parameters: list[nn.Parameter], group, offload: bool, compute_dtype: torch.dtype | None = None):
        self.parameters, first = parameters, parameters[0].detach()
        self.layout = FlatLayout(parameters, group, ALIGNED)
        self.values = first.new_zeros(self.layout.padded, dtype=compute_dtype)
        self.own_values = self.layout.local_shard(self.values)
        dtype = torch.promote_types(first.dtype, torch.float32)
        self.is_copy = offload or dtype != self.values.dtype
        piece = self.layout.shard_of([each.detach() for each in parameters]) if self.is_copy else self.own_values
        self.shard = nn.Parameter(piece.to("cpu" if offload else first.device, dtype))
        for parameter, view in zip(parameters, self.layout.views(self.values), strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        self.work, self.held = None, []

    @property
    def moved(self) -> bool:
        """Whether a parameter is no longer a view of `values`: somebody has given it another memory."""
        own = self.values.untyped_storage()._cdata  # not data_ptr(): fake tensors have none
        return any(parameter.untyped_storage()._cdata != own for parameter in self.parameters)

    def set_grad(self, gradient: torch.Tensor) -> None:
        """Have a gradient of the piece [shard_numel] ready for the optimizer."""
        self.wait()
        self.shard.grad = gradient.to(self.shard.device, self.shard.dtype)

    @torch.no_grad()
    def hold(self, bucket: GradientShard, optimizer: torch.optim.Optimizer) -> None:
        """Remember, before a step, the values and states of each parameter without a gradient on this rank.

        gather() restores them if no rank had a gradient: `torch.optim` leaves such a parameter alone. Only its step
        counter advances, which it shares with its bucket.
        """
        self.held = []
        if bucket.used.issuperset(self.parameters):
            return
        gradients = self.layout.local_views(bucket.gradient)
        before = {name: self.layout.local_views(value) for name, value in self.updated(optimizer).items()}
        for i, parameter in enumerate(self.parameters):
            if parameter not in bucket.used:
                copies = {name: pieces[i].clone() for name, pieces in before.items()}
                self.held.append((i, is_unused(gradients[i]), copies, optimizer))

    def updated(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """Return the tensors [shard_numel] that a step changes: the shard, as "", and its states by name."""
        states = optimizer.state.get(self.shard, {}).items()
        alike = {name: value for name, value in states if torch.is_tensor(value) and value.shape == self.shard.shape}
        return {"": self.shard.detach()} | alike

    def release(self) -> None:
        """Restore, after a step, what `hold` has remembered. A state that this step has made began with 0, and weight
        decay may have changed it.
        """
        for i, unused, before, optimizer in self.held:
            decays = any(group.get("weight_decay") for group in optimizer.param_groups)
            for name, value in self.updated(optimizer).items():
                piece = self.layout.local_views(value)[i]
                if name in before or decays:
                    old = before.get(name, torch.zeros_like(piece))
                    piece.copy_(torch.where(unused.to(piece.device), old, piece))
        self.held = []

    @torch.no_grad()
    def gather(self) -> None:
        """Start the all-gather of the values, and let go of the gradient that has made them."""
        self.release()
        self.shard.grad = None
        if self.is_copy:
            self.own_values.copy_(self.shard)
        self.work = all_gather_into_tensor(self.values, self.own_values, group=self.layout.group, async_op=True)

    def wait(self) -> None:
        """Until all values are there."""
        if self.work is not None:
            self.work.wait()
            self.work = None

    def whole_states(self, optimizer: torch.optim.Optimizer) -> dict[str, list]:
        """The optimizer's state by name: of each parameter the whole, on the CPU. Collective."""
        states, wholes = dict(optimizer.state.get(self.shard, {})), {}
        if self.shard.dtype != self.values.dtype:
            states["master"] = self.shard.detach()
        for name, value in states.items():
            if torch.is_tensor(value) and value.shape == self.shard.shape:
                found = self.layout.gather(value.to(self.values.device))
                wholes[name] = [whole.to("cpu", copy=True) for whole in found]
            else:  # a counter
                wholes[name] = [copy.deepcopy(value) for _ in self.parameters]
        return wholes

    def own_states(self, states: list[dict]) -> dict:
        """Of each parameter's whole state: this rank's piece, by name."""
        own, shapes = {}, [parameter.shape for parameter in self.parameters]
        for name in sorted({name for state in states for name, value in state.items() if value is not None}):
            values = [state.get(name) for state in states]
            found = [(value, shape) for value, shape in zip(values, shapes, strict=True) if value is not None]
            alike = all(torch.is_tensor(value) and value.shape == shape for value, shape in found)
            sharded = alike and name not in COUNTERS
            own[name] = self.layout.shard_of(values) if sharded else copy.deepcopy(found[0][0])
        return own


def split_into_buckets(module: nn.Module, groups: list[dict], bucket_mb: float) -> list[tuple[int, list[nn.Parameter]]]:
    """(number of the parameter group, parameters) of each bucket, in the order in which backward completes them."""
    place = {parameter: i for i, parameter in enumerate(module.parameters())}
    buckets = []
    for number, group in enumerate(groups):
        kinds: dict[tuple, list[nn.Parameter]] = {}  # a bucket's norm is taken as a whole
        for parameter in sorted(group["params"], key=place.get):
            kinds.setdefault(placement_of(parameter).norm_groups, []).append(parameter)
        buckets += [(number, each) for alike in kinds.values() for each in make_buckets(alike, bucket_mb * 1e6)]
    return sorted(buckets, key=lambda bucket: -place[bucket[1][-1]])


def reserve(gradients: list[GradientShard], numbers: list[int], stage: int) -> None:
    """Preallocate all that gradients need; in stage 2, two buffers for each kind of bucket, as large as its largest.

    numbers: of each bucket's parameter group. One bucket of a kind is filled at a time, while another one is sent.
    """
    pools = {}
    for bucket, number in sorted(zip(gradients, numbers, strict=True), key=lambda pair: -pair[0].layout.padded):
        kind = (
            bucket.like.dtype,
            bucket.like.device,
            bucket.group,
            placement_of(bucket.parameters[0]).norm_groups,
            number,
        )
        if stage == 2 and kind not in pools:
            pools[kind] = BufferPool(bucket.layout.padded, bucket.like)
        bucket.reserve(pools.get(kind))
