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
def span(self: FlatLayout, i: int) -> tuple[int, int]:
    start, end = self.starts[i], self.starts[i] + self.shapes[i].numel()
    own_start = self.rank * self.shard_numel
    first = min(max(start, own_start), end)
    last = max(min(end, own_start + self.shard_numel), first)
    return first - start, last - start

# %% 05.3 the mean in place
def zero_1_step(layout: FlatLayout, values: torch.Tensor, gradient: torch.Tensor, update) -> None:
    mine = layout.local_shard(values)
    total = torch.empty_like(mine)
    reduce_scatter_tensor(total, gradient, group=layout.group)
    total.div_(layout.group.size())
    update(mine, total)
    all_gather_into_tensor(values, mine.clone(), group=layout.group)

# %% 05.3 the mean in float32
update(layout.local_shard(values), shard / layout.world_size) => update(layout.local_shard(values), shard.float() / layout.world_size)

# %% 05.4 lists by group
def global_norm(gradients: list[tuple[torch.Tensor, dist.ProcessGroup | None]]) -> torch.Tensor:
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


def diagnose(shards: list[list[float]], used: list[list[float]]) -> str | None:
    def near(step, expected):
        return all(math.isclose(u, e, rel_tol=1e-3) for u, e in zip(step, expected))

    steps = list(zip(zip(*shards), zip(*used)))  # (of each rank its piece, of each rank what it used)
    if all(near(u, [math.sqrt(sum(p * p for p in piece))] * len(u)) for piece, u in steps):
        return "right"
    if all(near(u, piece) for piece, u in steps):
        return "own part"
    if all(near(u, [sum(piece)] * len(u)) for piece, u in steps):
        return "sum of norms"
    return None

# %% 05.6 names what is there
def store(self: GradientBuffer, parameter: nn.Parameter) -> None:
    gradient, parameter.grad = parameter.grad, None
    view = self.views[parameter]
    if parameter not in self.stored:
        self.stored.add(parameter)
        view.copy_(gradient)
    else:
        view += gradient


def send(self: GradientBuffer, shard: torch.Tensor) -> dist.Work:
    for parameter in self.parameters:
        if parameter not in self.stored:
            self.views[parameter].fill_(0)
    buffer = self.buffer.narrow(0, 0, self.layout.padded)
    buffer.narrow(0, self.layout.numel, self.layout.padded - self.layout.numel).fill_(0)
    return reduce_scatter_tensor(shard, buffer, group=self.layout.group, async_op=True)

# %% 05.7 until there is one
def take(self: BufferPool) -> torch.Tensor:
    while not self.free:
        if not self.sending:
            return torch.empty(self.numel, dtype=self.like.dtype, device=self.like.device)
        oldest = self.sending.popleft()
        oldest.collect()
    return self.free.pop(0)

# %% 05.8 by number, from the last
for bucket, shard in zip(self.gradients, self.shards, strict=True):
    shard.set_grad(bucket.gradient)
self.optimizer.step()
for shard in reversed(self.shards):
    shard.gather()
if self.module is None:
    self.wait()
=>
for number in range(len(self.shards)):
    self.shards[number].set_grad(self.gradients[number].gradient)
self.optimizer.step()
for number in range(len(self.shards) - 1, -1, -1):
    self.shards[number].gather()
if self.module is None:
    for shard in self.shards:
        shard.wait()

# %% 05.9 what is sent, then where to
def gather(self: GatheredBuffer) -> None:
    if self.gathered:
        return
    self.values.untyped_storage().resize_(self.nbytes)
    group = self.layout.group
    if self.encoding is not None:
        sent = self.encoding.encode(self.shard)
        into = self.payloads = sent.new_empty(sent.numel() * group.size())
    else:
        into, sent = self.values, self.layout.local_shard(self.values)
        sent.copy_(self.shard)
    self.work = all_gather_into_tensor(into, sent, group=group, async_op=True)
    self.gathered = True


def free(self: GatheredBuffer) -> None:
    if self.work is not None:
        self.wait()
    self.gathered = False
    self.values.untyped_storage().resize_(0)

# %% 05.10 the terms written out
gathers = 15
times_data_parallel = 1.5
=>
gathers = 7 + 8
times_data_parallel = 3 / 2

# %% 05.11 the unit before this one
def pre_backward(self: FullyShard, unit: FSDPUnit) -> None:
    if unit in self.unreduced:
        return
    earlier = self.unreduced
    unit.gather()
    self.send(earlier)
    self.unreduced = [unit]
    if unit in self.forward_order[1:]:
        self.forward_order[self.forward_order.index(unit) - 1].gather()
    unit.wait()

# %% 05.12 sorted anew
def take(self: Arena, nbytes: int) -> int:
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


def give_back(self: Arena, address: int) -> None:
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
    sent_s = param_bytes * (dp - 1) / dp / bandwidth  # of one parameter
    forward_s = 2 * tokens / peak
    return sent_s / forward_s
