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
class FlatLayout(FlatTensors):
    """Where `tensors` lie in a flat buffer, and which part of it this rank of `group` owns.

    numel: elements of all tensors; shard_numel: of each rank's piece; padded: of the whole buffer. strides: a tensor
    keeps its order of elements in memory, which may not be row by row (channels_last).
    """

    def span(self, i: int) -> tuple[int, int]:
        """First and last (exclusive) element of tensor i that this rank owns; the same twice where it owns none."""
        start, end = self.starts[i], self.starts[i] + self.shapes[i].numel()
        own_start = self.rank * self.shard_numel
        first = min(max(start, own_start), end)
        last = max(min(end, own_start + self.shard_numel), first)
        return first - start, last - start


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
class ZeroOptimizer(ShardedOptimizer):
    """`optimizer_cls` whose gradients, states and master weights are shared out over the ranks of `group`.

    `loss.backward(); zero.clip_grad_norm_(1.0); zero.step(); zero.zero_grad()` steps by the mean gradient. Backward's
    gradients leave `.grad` at once. stage 1: they stay whole, in buckets; stage 2: two buckets at a time are whole.
    With a module, all-gathers overlap its next forward; call wait() before you read parameters elsewhere. All ranks
    run as many backwards, and with several a step (outside of no_sync()) use the same parameters, or call finish()
    after each. What no rank has used counts as having a gradient of 0.
    """

    @torch.no_grad()
    def step(self, closure=None):
        """Update this rank's pieces, by one call for all, and send them, those of the first layers first."""
        with torch.enable_grad():
            result = closure() if closure else None
        self.finish()
        if any(shard.moved for shard in self.shards):
            raise RuntimeError("parameters have moved (module.to(), assign=True): make the ZeroOptimizer afterwards")
        for ours, inner in zip(self.param_groups, self.optimizer.param_groups, strict=True):  # a scheduler changes ours
            inner.update((key, value) for key, value in ours.items() if key != "params")
        for number in range(len(self.shards)):
            self.shards[number].take(self.gradients[number].gradient)
        self.optimizer.step()
        for number in range(len(self.shards) - 1, -1, -1):
            self.shards[number].gather()
        if self.module is None:
            for shard in self.shards:
                shard.wait()
        return result


# %% 05.9 what is sent, then where to
class GatheredBuffer(WholeBuffer):
    """The whole values of a `shard`, [padded], while they are gathered. After free() there is no memory behind them."""

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

    def free(self) -> None:
        """Give the memory back, also where there still are views of it."""
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


class Arena(FreeList):
    """`nbytes` of memory, handed out in blocks. holes: what is free, as (start, end); taken: sizes by address."""

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


# %% 05.13 the logits on top of what is alive
percent_lost = 2.0 / 15.67 * 100



# %% 05.14 two times
def gather_ratio(tokens: int, dp: int, bandwidth: float, peak: float, param_bytes: float = 2) -> float:
    """Time of a unit's all-gather over that of its forward; up to 1 prefetch can hide it.

    tokens: of a GPU's micro-batch; bandwidth: bytes a second of a GPU (bus bandwidth); peak: floating-point operations
    a second. The Ultra-Scale Playbook, appendix A3, with bytes in place of elements.
    """
    sent_s = param_bytes * (dp - 1) / dp / bandwidth  # of one parameter
    forward_s = 2 * tokens / peak
    return sent_s / forward_s
