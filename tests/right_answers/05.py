"""Right answers in another style than the solutions, that the checks of notebook 05 must accept."""


# %% 05.1 by the terms
gb_of_stage = {0: 112.0, 1: None, 2: None, 3: None}  # GB a rank, 7e9 parameters, 8 ranks, Adam in mixed precision
best_of_stage_2 = None  # stage 0 over stage 2, for very many ranks
billions, ranks = 7, 8
gb_of_stage = {stage: 0.0 for stage in range(4)}
for part, dealt_from in ((2, 3), (2, 2), (12, 1)):
    for stage in gb_of_stage:
        gb_of_stage[stage] += billions * part / (ranks if stage >= dealt_from else 1)
best_of_stage_2 = 16 / 2


# %% 05.2 the part that two intervals share
import itertools

import torch
import torch.distributed as dist
from torch import nn

from course_lib.collectives.into_tensor import all_gather_into_tensor, reduce_scatter_tensor


class FlatLayout:
    """Where `tensors` lie in a flat buffer, and which part of it this rank of `group` owns.

    numel: elements of all tensors; shard_numel: of each rank's piece; padded: of the whole buffer. strides: a tensor
    keeps its order of elements in memory, which may not be row by row (channels_last).
    """

    def __init__(self, tensors: list[torch.Tensor], group: dist.ProcessGroup):
        self.group, self.rank, self.world_size = group, group.rank(), group.size()
        self.shapes = [tensor.shape for tensor in tensors]
        self.strides = [torch.empty_like(tensor, device="meta").stride() for tensor in tensors]  # dense
        *self.starts, self.numel = itertools.accumulate((tensor.numel() for tensor in tensors), initial=0)
        self.shard_numel = -(-self.numel // self.world_size)
        self.padded = self.shard_numel * self.world_size

    def own(self, buffer: torch.Tensor) -> torch.Tensor:
        """This rank's piece [shard_numel] of a whole buffer [padded]."""
        return buffer.narrow(0, self.rank * self.shard_numel, self.shard_numel)

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """All tensors, in their shapes, as views of a whole buffer [padded]."""
        places = zip(self.starts, self.shapes, self.strides, strict=True)
        return [buffer[start:].as_strided(shape, strides) for start, shape, strides in places]

    def span(self, i: int) -> tuple[int, int]:
        """First and last (exclusive) element of tensor i that this rank owns; the same twice where it owns none."""
        start, end = self.starts[i], self.starts[i] + self.shapes[i].numel()
        own_start = self.rank * self.shard_numel
        first = min(max(start, own_start), end)
        last = max(min(end, own_start + self.shard_numel), first)
        return first - start, last - start

    def pieces(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """Of each tensor what this rank owns [elements], as views of its shard [shard_numel]."""
        pieces = []
        for i, start in enumerate(self.starts):
            first, last = self.span(i)
            place = start + first - self.rank * self.shard_numel if first < last else 0
            pieces.append(shard.narrow(0, place, last - first))
        return pieces

    def shard_of(self, tensors: list[torch.Tensor | None]) -> torch.Tensor:
        """This rank's shard [shard_numel] of whole tensors; zeros for a None."""
        shard = next(tensor for tensor in tensors if tensor is not None).new_zeros(self.shard_numel)
        for i, (piece, tensor) in enumerate(zip(self.pieces(shard), tensors, strict=True)):
            if tensor is not None:
                piece.copy_(self.cut(i, tensor))
        return shard

    def cut(self, i: int, tensor: torch.Tensor) -> torch.Tensor:
        """What this rank owns [elements] of tensor i, whose values are those of `tensor`."""
        laid_out = torch.empty_strided(self.shapes[i], self.strides[i], dtype=tensor.dtype, device=tensor.device)
        first, last = self.span(i)
        return laid_out.copy_(tensor).as_strided((self.shapes[i].numel(),), (1,))[first:last]

    def gather(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """All tensors, whole, of the shards [shard_numel] of all ranks. Collective."""
        buffer = shard.new_empty(self.padded)
        all_gather_into_tensor(buffer, shard, group=self.group)
        return self.views(buffer)


# %% 05.3 the mean in place
def zero_1_step(layout: FlatLayout, values: torch.Tensor, gradient: torch.Tensor, update) -> None:
    """`values` [padded] become the new parameters, on all ranks of layout.group; gradient: [padded], of this rank."""
    mine = layout.own(values)
    total = torch.empty_like(mine)
    reduce_scatter_tensor(total, gradient, group=layout.group)
    total.div_(layout.group.size())
    update(mine, total)
    all_gather_into_tensor(values, mine.clone(), group=layout.group)


# %% 05.4 lists by group
def global_norm(gradients: list[tuple[torch.Tensor, dist.ProcessGroup | None]]) -> torch.Tensor:
    """The norm of one long vector whose parts lie on many ranks: a float32 scalar.

    gradients: this rank's parts, each with the group whose ranks' squares are added up (see norm_group); None: this
    rank has all of it. Two ranks get the same norm if their groups are the same.
    """
    by_group = {}
    for gradient, group in gradients:
        by_group.setdefault(group, []).append(gradient)
    total = 0
    for group, members in by_group.items():
        norms = torch.stack([torch.linalg.vector_norm(each, dtype=torch.float32) for each in members])
        square = torch.sum(norms * norms)
        if group is not None:
            dist.all_reduce(square, op=dist.ReduceOp.SUM, group=group)
        total = total + square
    return torch.sqrt(total)


# %% 05.5 step by step
import math


def diagnose(pieces: list[list[float]], used: list[list[float]]) -> str | None:
    """ "right", "own part" or "sum of norms": what the ranks have clipped by; None: something else."""
    def near(step, expected):
        return all(math.isclose(u, e, rel_tol=1e-3) for u, e in zip(step, expected))

    steps = list(zip(zip(*pieces), zip(*used)))  # (of each rank its piece, of each rank what it used)
    if all(near(u, [math.sqrt(sum(p * p for p in piece))] * len(u)) for piece, u in steps):
        return "right"
    if all(near(u, piece) for piece, u in steps):
        return "own part"
    if all(near(u, [sum(piece)] * len(u)) for piece, u in steps):
        return "sum of norms"
    return None


# %% 05.6 names what is there
class GradientBuffer:
    """Whole gradients of `parameters` in a flat buffer, on their way to the ranks that own them."""

    def __init__(self, parameters: list[nn.Parameter], layout: FlatLayout):
        self.parameters, self.layout = parameters, layout
        self.attach(None)

    def attach(self, buffer: torch.Tensor | None) -> None:
        """Gradients go to `buffer` [padded or more] from now on; None: there is none, and no memory for one."""
        self.buffer = buffer
        views = [] if buffer is None else self.layout.views(buffer)
        self.views = dict(zip(self.parameters, views, strict=False))
        self.stored: set[nn.Parameter] = set()  # those whose gradient is in the buffer

    def store(self, parameter: nn.Parameter) -> None:
        """Move `parameter.grad` to its view, or add it to what is there already; `.grad` is None afterwards."""
        gradient, parameter.grad = parameter.grad, None
        view = self.views[parameter]
        if parameter not in self.stored:
            self.stored.add(parameter)
            view.copy_(gradient)
        else:
            view += gradient

    def send(self, shard: torch.Tensor) -> dist.Work:
        """Start the reduce-scatter: the sum over the ranks of this rank's piece goes to `shard` [shard_numel].

        Zeros take the place of gradients that this rank has not, and fill the padding.
        """
        for parameter in self.parameters:
            if parameter not in self.stored:
                self.views[parameter].fill_(0)
        buffer = self.buffer.narrow(0, 0, self.layout.padded)
        buffer.narrow(0, self.layout.numel, self.layout.padded - self.layout.numel).fill_(0)
        return reduce_scatter_tensor(shard, buffer, group=self.layout.group, async_op=True)


# %% 05.7 until there is one
import copy
from collections import deque

import torch
from torch import nn

from course_lib.data_parallel.buckets import Reducer, make_buckets


class BufferPool:
    """`count` buffers of `numel` elements, of the dtype and on the device of `like`, which all buckets take in turn."""

    def __init__(self, numel: int, like: torch.Tensor, count: int = 2):
        self.numel, self.like, self.count = numel, like, count
        self.free = [like.new_empty(numel) for _ in range(count)]
        self.sending = deque()  # buckets whose buffer is being sent, the oldest first

    def take(self) -> torch.Tensor:
        """A free buffer; it may be that of the oldest bucket that is being sent, after its collect().

        Where none is being sent, because gradients came in an unusual order, one more is made.
        """
        while not self.free:
            if not self.sending:
                return torch.empty(self.numel, dtype=self.like.dtype, device=self.like.device)
            oldest = self.sending.popleft()
            oldest.collect()
        return self.free.pop(0)

    def give_back(self, buffer: torch.Tensor) -> None:
        """It may be taken again; what is beyond `count` is dropped."""
        if len(self.free) < self.count:
            self.free.append(buffer)


# %% 05.8 by number, from the last
class ZeroOptimizer(GradientRounds, torch.optim.Optimizer):
    """`optimizer_cls` whose gradients, states and master weights are shared out over the ranks of `group`.

    `loss.backward(); zero.clip_grad_norm_(1.0); zero.step(); zero.zero_grad()` steps by the mean gradient. Backward's
    gradients leave `.grad` at once. stage 1: they stay whole, in buckets; stage 2: two buckets at a time are whole.
    With a module, all-gathers overlap its next forward; whoever else reads parameters calls wait() before. All ranks
    run as many backwards, and with several a step (outside of no_sync()) use the same parameters, or call finish()
    after each. What no rank has used counts as having a gradient of 0.

    param_groups: the module's parameters, with options; bucket_mb: MB (10**6 bytes) of parameters a bucket; grad_dtype:
    of gradients in buckets, on their way and between micro-batches; offload: the states are on the host, which does the
    update; **kwargs: the optimizer's. A parameter's `reduce_group` is read as by DataParallel.

    Raises ValueError, on all ranks, for arguments that make no sense and for different models or arguments.
    """

    def __init__(
        self,
        module_or_params,
        optimizer_cls: type[torch.optim.Optimizer],
        group: dist.ProcessGroup | None = None,
        stage: int = 1,
        *,
        param_groups: list[dict] | None = None,
        bucket_mb: float = 25,
        grad_dtype: torch.dtype | None = None,
        offload: bool = False,
        **kwargs,
    ):
        groups = parameter_groups(module_or_params, param_groups)
        trained = [parameter for each in groups for parameter in each["params"]]
        self.module = module_or_params if isinstance(module_or_params, nn.Module) else None
        module = nn.ParameterList(trained) if self.module is None else self.module
        self.group, self.stage, self.synchronizes = group or dist.group.WORLD, stage, True
        choices = {"optimizer_cls": optimizer_cls.__name__, "stage": stage, "bucket_mb": bucket_mb}
        sizes = param_groups and [len(each["params"]) for each in groups]
        choices |= {"grad_dtype": grad_dtype, "offload": offload, "param_groups": sizes}
        check_same_model(module, self.group, choices)
        check_choices(module, optimizer_cls, stage, bucket_mb, trained)
        broadcast_from_first(module, self.group)
        buckets = split_into_buckets(module, groups, bucket_mb)
        self.gradients, self.shards, own = [], [], [[] for _ in groups]
        for number, parameters in buckets:
            reduce_group = getattr(parameters[0], "reduce_group", self.group)
            self.gradients.append(GradientShard(parameters, reduce_group, 1 / self.group.size(), grad_dtype))
            self.shards.append(OptimizerShard(parameters, reduce_group, offload))
            own[number].append(self.shards[-1].shard)
        reserve(self.gradients, [number for number, _ in buckets], stage)
        self.optimizer = optimizer_cls([g | {"params": p} for g, p in zip(groups, own, strict=True)], **kwargs)
        super().__init__(groups, self.optimizer.defaults)
        self.reducer = ShardReducer({p: name for name, p in module.named_parameters()}, self.gradients)
        watch(self)

    def add_param_group(self, param_group: dict) -> None:
        """For __init__ alone; later it raises RuntimeError, since buckets are made once."""
        if hasattr(self, "reducer"):
            raise RuntimeError("no parameter group can be added: make a new ZeroOptimizer, with param_groups")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure=None):
        """Update this rank's pieces, those of the first layers first, and send each as soon as it is done."""
        with torch.enable_grad():
            result = closure() if closure else None
        self.finish()
        if any(shard.moved for shard in self.shards):
            raise RuntimeError("parameters have moved (module.to(), assign=True): make the ZeroOptimizer afterwards")
        for ours, inner in zip(self.param_groups, self.optimizer.param_groups, strict=True):  # a scheduler changes ours
            inner.update((key, value) for key, value in ours.items() if key != "params")
        for number in range(len(self.shards) - 1, -1, -1):
            self.shards[number].step(self.optimizer, self.gradients[number].gradient)
            self.shards[number].gather()
        if self.module is None:
            for shard in self.shards:
                shard.wait()
        return result

    def wait(self) -> None:
        """Until all parameters have their new values. The module's own forward and state_dict do it by themselves."""
        for shard in self.shards:
            shard.wait()

    @torch.no_grad()
    def take_values(self) -> None:
        """Make the shards anew from the parameters. A module's load_state_dict does it by itself."""
        self.wait()
        for shard in self.shards:
            shard.shard.copy_(shard.own_values)

    def state_dict(self) -> dict:
        """The whole state, on the CPU of every rank: that of `optimizer_cls` in one process. Collective.

        Parameters of less than 32 bits have their float32 values in it too, as "master".
        """
        return whole_state(self)

    def load_state_dict(self, state_dict: dict) -> None:
        """Take over a state of any world size and stage, or of `optimizer_cls` in one process. Collective.

        Load the module's own state before. Raises ValueError where it is no state of these parameters; nothing is
        changed then.
        """
        check_states(self.param_groups, state_dict)
        load_state(self, state_dict)


# %% 05.9 what is sent, then where to
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn


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

    def gather(self) -> None:
        """Have the memory, and start the all-gather of all ranks' shards in it; or nothing, where that is done."""
        if self.gathered:
            return
        self.values.untyped_storage().resize_(self.nbytes)
        group = self.layout.group
        if self.encoding is not None:
            sent = self.encoding.encode(self.shard)
            into = self.payloads = sent.new_empty(sent.numel() * group.size())
        else:
            into, sent = self.values, self.layout.own(self.values)
            sent.copy_(self.shard)
        self.work = all_gather_into_tensor(into, sent, group=group, async_op=True)
        self.gathered = True

    def wait(self) -> None:
        """Until the values are there, if they are on their way."""
        if self.work is not None:
            self.work.wait()
            if self.encoding is not None:
                rows = self.layout.world_size
                self.encoding.decode(self.payloads.view(rows, -1), self.values.view(rows, -1))
            self.work = self.payloads = None

    def free(self) -> None:
        """Give the memory back, whoever still has a view of it."""
        if self.work is not None:
            self.wait()
        self.gathered = False
        self.values.untyped_storage().resize_(0)


# %% 05.10 the terms written out
gathers = None  # all-gathers of a step
times_data_parallel = None  # bytes of stage 3 over bytes of data parallelism
gathers = 7 + 8
times_data_parallel = 3 / 2


# %% 05.11 the unit before this one
class FullyShard(UnitRunner):
    """What `fully_shard` returns: `loss(model(x)).backward(); model.finish(); optimizer.step()`.

    All ranks run the same units in the same order. state_dict() has this rank's pieces; the whole: full_state_dict.
    """

    def forward(self, *args, **kwargs):
        """What the module returns; floating-point arguments are cast to compute_dtype."""
        whole = [] if self.unfinished else [self.root]  # the root stays between micro-batches
        self.send_all()  # of an earlier micro-batch
        for unit in [*self.units, *whole]:  # of a forward without a backward: the pieces may have changed since
            unit.free()
        for unit in [self.root, *(self.ran or self.units)[:1]]:
            unit.gather()
        self.root.wait()
        self.ran = []
        if self.compute_dtype is not None:
            args, kwargs = tree_map(self.cast, (args, kwargs))
        out = self.module(*args, **kwargs)
        for unit in self.ran[-1:]:
            unit.successor = None
        kept = [self.root, *self.ran[-1:]] if torch.is_grad_enabled() else []
        for unit in [*self.units, self.root]:
            if unit not in kept:
                unit.free()
        return out

    def cast(self, value):
        """A floating-point tensor in compute_dtype, anything else as it is."""
        floating = torch.is_tensor(value) and value.is_floating_point()
        return value.to(self.compute_dtype) if floating else value

    @property
    def unfinished(self) -> bool:
        """Whether there are gradients since the last finish()."""
        return bool(self.open or self.sent or self.root.has_gradients)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise RuntimeError where an optimizer of these parameters steps before finish()."""
        own = {piece for unit in [*self.units, self.root] for part in unit.parts for piece in part.sharded}
        if self.unfinished and not own.isdisjoint(p for group in optimizer.param_groups for p in group["params"]):
            raise RuntimeError("optimizer.step() before finish(): call finish() after a step's last backward")

    def before_backward(self, unit: Unit) -> None:
        """Have the unit whole; send the gradients of the one before it in backward; have the next one on its way."""
        if unit in self.open:
            return
        earlier = self.open
        unit.gather()
        self.send(earlier)
        self.open = [unit]
        if unit in self.ran[1:]:
            self.ran[self.ran.index(unit) - 1].gather()
        unit.wait()


# %% 05.12 sorted anew
import bisect

ALIGNMENT = 512  # bytes: the sizes that PyTorch's allocator hands out are multiples of it


class Arena:
    """`nbytes` of memory, handed out in blocks. holes: what is free, as (start, end); taken: sizes by address."""

    def __init__(self, nbytes: float):
        self.holes: list[tuple[int, float]] = [(0, nbytes)]
        self.taken: dict[int, int] = {}

    def no_hole(self, size: int) -> MemoryError:
        """The error for a block that fits nowhere."""
        free = [(end - start) / 2**20 for start, end in self.holes]
        return MemoryError(
            f"{size / 2**20:,.1f} MiB wanted; free are {sum(free):,.1f} MiB, but in {len(free)} holes, the largest of "
            f"{max(free, default=0):,.1f}"
        )

    def take(self, nbytes: int) -> int:
        """The address of a new block of at least nbytes: best fit. Raises MemoryError where no hole is large enough."""
        size = (nbytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        best = None
        for number, (start, end) in enumerate(self.holes):
            if end - start >= size and (best is None or end - start < self.holes[best][1] - self.holes[best][0]):
                best = number
        if best is None:
            raise self.no_hole(size)
        start, end = self.holes.pop(best)
        if end > start + size:
            self.holes.insert(best, (start + size, end))
        self.taken[start] = size
        return start

    def give_back(self, address: int) -> None:
        """Free the block at `address`, one with the holes that it touches. Raises KeyError where there is none."""
        size = self.taken.pop(address)
        holes = []
        for start, end in sorted([*self.holes, (address, address + size)]):
            if holes and holes[-1][1] == start:
                holes[-1] = (holes[-1][0], end)
            else:
                holes.append((start, end))
        self.holes[:] = holes


# %% 05.13 as a sum
# Set percent_lost: how much larger the arena must be than the peak of live bytes.
percent_lost = 10 + 4


# %% 05.14 two times
def gather_ratio(tokens: int, dp: int, bandwidth: float, peak: float, param_bytes: float = 2) -> float:
    """Time of a unit's all-gather over that of its forward; up to 1 prefetch can hide it.

    tokens: of a GPU's micro-batch; bandwidth: bytes a second of a GPU (bus bandwidth); peak: floating-point operations
    a second. The Ultra-Scale Playbook, appendix A3, with bytes in place of elements.
    """
    sent_s = param_bytes * (dp - 1) / dp / bandwidth  # of one parameter
    forward_s = 2 * tokens / peak
    return sent_s / forward_s
