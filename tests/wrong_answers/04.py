"""Wrong answers that the checks of notebook 04 must catch. None of them hangs."""

# %% 04.1 rounds down: a silently smaller batch
def accumulation_steps(batch_tokens, seq, micro_batch, dp):
    return batch_tokens // (seq * micro_batch * dp)

# %% 04.1 rounds up
def accumulation_steps(batch_tokens, seq, micro_batch, dp):
    return -(-batch_tokens // (seq * micro_batch * dp))

# %% 04.1 at least one step, whatever comes out
def accumulation_steps(batch_tokens, seq, micro_batch, dp):
    return max(1, batch_tokens // (seq * micro_batch * dp))

# %% 04.1 forgets the other GPUs
def accumulation_steps(batch_tokens, seq, micro_batch, dp):
    steps, rest = divmod(batch_tokens, seq * micro_batch)
    if rest:
        raise ValueError(f"{batch_tokens} tokens do not divide")
    return steps

# %% 04.1 takes tokens for sequences
def accumulation_steps(batch_tokens, seq, micro_batch, dp):
    steps, rest = divmod(batch_tokens, micro_batch * dp)
    if rest:
        raise ValueError(f"{batch_tokens} tokens do not divide")
    return steps

# %% 04.1 cuts the last sequence off
def accumulation_steps(batch_tokens, seq, micro_batch, dp):
    steps, rest = divmod(batch_tokens // seq, micro_batch * dp)
    if rest or not steps:
        raise ValueError(f"{batch_tokens} tokens do not divide")
    return steps

# %% 04.1 does not ask whether the GPUs divide the micro-batches
def accumulation_steps(batch_tokens, seq, micro_batch, dp):
    sequences, rest = divmod(batch_tokens, seq)
    if rest or sequences % micro_batch or sequences < micro_batch * dp:
        raise ValueError(f"{batch_tokens} tokens do not divide")
    return sequences // micro_batch // dp

# %% 04.1 a float
def accumulation_steps(batch_tokens, seq, micro_batch, dp):
    if batch_tokens % (seq * micro_batch * dp):
        raise ValueError(f"{batch_tokens} tokens do not divide")
    return batch_tokens / (seq * micro_batch * dp)

# %% 04.1 an error without a message
def accumulation_steps(batch_tokens, seq, micro_batch, dp):
    if batch_tokens % (seq * micro_batch * dp):
        raise ValueError
    return batch_tokens // (seq * micro_batch * dp)

# %% 04.1 prints the reason and returns nothing
def accumulation_steps(batch_tokens, seq, micro_batch, dp):
    if batch_tokens % (seq * micro_batch * dp):
        print("the tokens do not divide")
        return None
    return batch_tokens // (seq * micro_batch * dp)

# %% 04.2 a sum instead of a mean
parameter.grad /= dist.get_world_size(group) =>

# %% 04.2 reduces the parameter instead of its gradient
parameter.grad, group => parameter.data, group
parameter.grad /= dist.get_world_size => parameter.data /= dist.get_world_size

# %% 04.2 divides by the world instead of the group
dist.get_world_size(group) => dist.get_world_size()

# %% 04.2 divides, and sends nothing
dist.all_reduce(parameter.grad, group=group) =>

# %% 04.2 only rank 0 has the mean
dist.all_reduce(parameter.grad, group=group) => dist.reduce(parameter.grad, group_dst=0, group=group)

# %% 04.3 once through the ring only
gigabytes_sent = 63 / 64 * 2 * 8.03

# %% 04.3 of all GPUs together
gigabytes_sent = 64 * 2 * 63 / 64 * 2 * 8.03

# %% 04.3 float32 gradients
gigabytes_sent = 2 * 63 / 64 * 4 * 8.03

# %% 04.3 parameters instead of bytes
gigabytes_sent = 2 * 63 / 64 * 8.03

# %% 04.3 gradients once to each other GPU
gigabytes_sent = 63 * 2 * 8.03

# %% 04.3 in GiB
gigabytes_sent = 2 * 63 / 64 * 2 * 8.03e9 / 2**30

# %% 04.3 bytes
gigabytes_sent = 2 * 63 / 64 * 2 * 8.03e9

# %% 04.3 nothing
gigabytes_sent = None

# %% 04.3 a word
gigabytes_sent = "31.6"

# %% 04.4 no overlap: the hook takes notes, finish() starts everything
works, n => ready, n
---
works.append(dist.all_reduce(parameter.grad, group=group, async_op=True))
=>
ready.append(parameter)
---
def finish():
=>
def finish():
    works = [dist.all_reduce(parameter.grad, group=group, async_op=True) for parameter in ready]
---
works.clear() => ready.clear()

# %% 04.4 fake: nothing starts before the last hook, then all at once
works, n = [], dist.get_world_size(group)
=>
works, ready, n = [], [], dist.get_world_size(group)
last = next(module.parameters())
---
works.append(dist.all_reduce(parameter.grad, group=group, async_op=True))
=>
ready.append(parameter)
if parameter is last:
    works.extend(dist.all_reduce(parameter.grad, group=group, async_op=True) for parameter in ready)
    ready.clear()

# %% 04.4 reduces the parameter instead of its gradient
parameter.grad /= n => parameter.data /= n
parameter.grad, group => parameter.data, group

# %% 04.4 a sum instead of a mean
parameter.grad /= n =>

# %% 04.5 one bucket for all
def make_buckets(parameters, bucket_bytes):
    parameters = list(reversed(list(parameters)))
    return [parameters] if parameters else []

# %% 04.5 a bucket for each parameter
def make_buckets(parameters, bucket_bytes):
    return [[parameter] for parameter in reversed(list(parameters))]

# %% 04.5 from the first parameter to the last
reversed(list(parameters)) => parameters

# %% 04.5 the model's order, and then the buckets from behind
reversed(list(parameters)) => parameters
---
return sorted(buckets, key=lambda bucket: position[bucket[-1]])
=>
return buckets[::-1]

# %% 04.5 a bucket is closed when it is above the limit already
size + parameter.nbytes > bucket_bytes => size > bucket_bytes

# %% 04.5 counts elements instead of bytes
parameter.nbytes > bucket_bytes => parameter.numel() > bucket_bytes
bucket, size + parameter.nbytes => bucket, size + parameter.numel()

# %% 04.5 forgets to add up the size
bucket, size + parameter.nbytes => bucket, size + 0

# %% 04.5 dtypes are mixed
parameter.dtype, parameter.device => parameter.device

# %% 04.5 reduce groups are mixed
parameter.device, placement_of(parameter).reduce_group => parameter.device

# %% 04.5 in the order in which buckets are opened
return sorted(buckets, key=lambda bucket: position[bucket[-1]])
=>
return buckets

# %% 04.5 sorted by each bucket's first parameter
[-1] => [0]

# %% 04.5 only one bucket is open at a time: another kind closes it
def make_buckets(parameters, bucket_bytes):
    buckets, size, before = [], 0, None
    for parameter in reversed(list(parameters)):
        kind = (parameter.dtype, parameter.device, placement_of(parameter).reduce_group)
        if kind != before or size + parameter.nbytes > bucket_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size, before = size + parameter.nbytes, kind
    return buckets

# %% 04.5 any earlier bucket with room takes a parameter
def make_buckets(parameters, bucket_bytes):
    buckets = []
    for parameter in reversed(list(parameters)):
        kind = (parameter.dtype, parameter.device, placement_of(parameter).reduce_group)
        for bucket in buckets:
            first = bucket[0]
            same = kind == (first.dtype, first.device, placement_of(first).reduce_group)
            if same and sum(p.nbytes for p in bucket) + parameter.nbytes <= bucket_bytes:
                bucket.append(parameter)
                break
        else:
            buckets.append([parameter])
    return buckets

# %% 04.5 reads an iterator twice: the second time it is empty
def make_buckets(parameters, bucket_bytes):
    kinds = {(p.dtype, p.device, placement_of(p).reduce_group) for p in parameters}
    buckets, sizes = {kind: [[]] for kind in kinds}, dict.fromkeys(kinds, 0)
    for parameter in reversed(list(parameters)):
        kind = (parameter.dtype, parameter.device, placement_of(parameter).reduce_group)
        if sizes[kind] + parameter.nbytes > bucket_bytes and buckets[kind][-1]:
            buckets[kind].append([])
            sizes[kind] = 0
        buckets[kind][-1].append(parameter)
        sizes[kind] += parameter.nbytes
    return [bucket for of_kind in buckets.values() for bucket in of_kind]

# %% 04.6 forgets the zeros: what an earlier step left is added up
self.parameters if self.missing else () => self.parameters
self.views[parameter].zero_() =>
---
self.sent = self.outgoing()
=>
self.sent = self.flat
if self.reduce_dtype != self.flat.dtype:
    self.sent = self.flat.to(self.reduce_dtype).mul_(self.copy_scale)

# %% 04.6 forgets the flag of a missing parameter
self.parameters if self.missing else () => self.parameters
---
        self.flags[i] = 0
self.sent = self.outgoing()
=>
self.sent = self.flat
if self.reduce_dtype != self.flat.dtype:
    self.sent = self.flat.to(self.reduce_dtype).mul_(self.copy_scale)

# %% 04.6 a flag for each missing parameter, by its place among the missing
self.parameters if self.missing else () => p for p in self.parameters if p in self.missing
---
self.sent = self.outgoing()
=>
self.sent = self.flat
if self.reduce_dtype != self.flat.dtype:
    self.sent = self.flat.to(self.reduce_dtype).mul_(self.copy_scale)

# %% 04.6 zeros for a gradient of earlier micro-batches
def launch(self: Bucket):
    self.flags.fill_(1)
    for i, parameter in enumerate(self.parameters):
        if parameter in self.missing:
            self.views[parameter].zero_()
            self.flags[i] = 0
    self.sent = self.flat
    if self.reduce_dtype != self.flat.dtype:
        self.sent = self.flat.to(self.reduce_dtype).mul_(self.copy_scale)
    self.work = dist.all_reduce(self.sent, group=self.group, async_op=True)

# %% 04.6 the late gradient is not scaled
self.parameters if self.missing else () => self.parameters
self.store(parameter, self.scale) => self.store(parameter, 1.0)
---
self.sent = self.outgoing()
=>
self.sent = self.flat
if self.reduce_dtype != self.flat.dtype:
    self.sent = self.flat.to(self.reduce_dtype).mul_(self.copy_scale)

# %% 04.6 scales the whole buffer once more
self.parameters if self.missing else () => self.parameters
---
self.sent = self.outgoing()
=>
self.flat.mul_(1 / self.group.size())
self.sent = self.flat
if self.reduce_dtype != self.flat.dtype:
    self.sent = self.flat.to(self.reduce_dtype).mul_(self.copy_scale)

# %% 04.6 scales nothing in the copy
self.parameters if self.missing else () => self.parameters
---
self.sent = self.outgoing()
=>
self.sent = self.flat
if self.reduce_dtype != self.flat.dtype:
    self.sent = self.flat.to(self.reduce_dtype)

# %% 04.6 always sends the buffer itself, in its own dtype
self.parameters if self.missing else () => self.parameters
self.sent = self.outgoing() => self.sent = self.flat

# %% 04.6 always adds in float32
self.parameters if self.missing else () => self.parameters
---
self.sent = self.outgoing()
=>
self.sent = self.flat
if self.flat.dtype != torch.float32:
    self.sent = self.flat.to(torch.float32).mul_(self.copy_scale)

# %% 04.6 copies the late gradient, which is no view then and stays this rank's own
self.parameters if self.missing else () => self.parameters
self.store(parameter, self.scale) => self.views[parameter].copy_(parameter.grad).mul_(self.scale)
---
self.sent = self.outgoing()
=>
self.sent = self.flat
if self.reduce_dtype != self.flat.dtype:
    self.sent = self.flat.to(self.reduce_dtype).mul_(self.copy_scale)

# %% 04.6 gives a missing parameter zeros as its gradient
self.parameters if self.missing else () => self.parameters
---
self.sent = self.outgoing()
=>
        parameter.grad = self.views[parameter]
self.sent = self.flat
if self.reduce_dtype != self.flat.dtype:
    self.sent = self.flat.to(self.reduce_dtype).mul_(self.copy_scale)

# %% 04.6 an all-reduce for each parameter, and one for the flags
def launch(self: Bucket):
    self.flags.fill_(1)
    for i, parameter in enumerate(self.parameters):
        if parameter in self.missing and parameter.grad is not None:
            self.store(parameter, self.scale)
        elif parameter in self.missing:
            self.views[parameter].zero_()
            self.flags[i] = 0
    self.sent = self.flat
    if self.reduce_dtype != self.flat.dtype:
        self.sent = self.flat.to(self.reduce_dtype).mul_(self.copy_scale)
    for part in self.sent.split([*(parameter.numel() for parameter in self.parameters), len(self.parameters)]):
        self.work = dist.all_reduce(part, group=self.group, async_op=True)

# %% 04.6 does not keep the work: nobody can wait for it
def launch(self: Bucket):
    self.flags.fill_(1)
    for i, parameter in enumerate(self.parameters):
        if parameter in self.missing and parameter.grad is not None:
            self.store(parameter, self.scale)
        elif parameter in self.missing:
            self.views[parameter].zero_()
            self.flags[i] = 0
    self.sent = self.flat
    if self.reduce_dtype != self.flat.dtype:
        self.sent = self.flat.to(self.reduce_dtype).mul_(self.copy_scale)
    dist.all_reduce(self.sent, group=self.group, async_op=True)

# %% 04.6 an all-reduce that is not asynchronous
def launch(self: Bucket):
    self.flags.fill_(1)
    for i, parameter in enumerate(self.parameters):
        if parameter in self.missing and parameter.grad is not None:
            self.store(parameter, self.scale)
        elif parameter in self.missing:
            self.views[parameter].zero_()
            self.flags[i] = 0
    self.sent = self.flat
    if self.reduce_dtype != self.flat.dtype:
        self.sent = self.flat.to(self.reduce_dtype).mul_(self.copy_scale)
    self.work = dist.all_reduce(self.sent, group=self.group)

# %% 04.6 leaves all flags as they were
def launch(self: Bucket):
    for i, parameter in enumerate(self.parameters):
        if parameter in self.missing and parameter.grad is not None:
            self.store(parameter, self.scale)
        elif parameter in self.missing:
            self.views[parameter].zero_()
    self.sent = self.flat
    if self.reduce_dtype != self.flat.dtype:
        self.sent = self.flat.to(self.reduce_dtype).mul_(self.copy_scale)
    self.work = dist.all_reduce(self.sent, group=self.group, async_op=True)

# %% 04.6 scales the buffer while it is in flight
def launch(self: Bucket):
    self.flags.fill_(1)
    for i, parameter in enumerate(self.parameters):
        if parameter in self.missing and parameter.grad is not None:
            self.store(parameter, self.scale)
        elif parameter in self.missing:
            self.views[parameter].zero_()
            self.flags[i] = 0
    self.sent = self.flat
    if self.reduce_dtype != self.flat.dtype:
        self.sent = self.flat.to(self.reduce_dtype).mul_(self.copy_scale)
    self.work = dist.all_reduce(self.sent, group=self.group, async_op=True)
    self.sent.mul_(1 / self.group.size())

# %% 04.7 no overlap: everything is left to finish()
def add(self: Reducer, parameter, final):
    bucket = self.bucket_of[parameter]
    bucket.store(parameter, bucket.scale if final else 1.0)
    if final:
        bucket.missing.remove(parameter)

# %% 04.7 fake: nothing is launched before the last gradient, then all buckets at once
def add(self: Reducer, parameter, final):
    bucket = self.bucket_of[parameter]
    bucket.store(parameter, bucket.scale if final else 1.0)
    if final:
        bucket.missing.remove(parameter)
        if self.launches_early and not any(bucket.missing for bucket in self.buckets):
            for bucket in self.buckets:
                bucket.launch()
            self.launched = len(self.buckets)

# %% 04.7 mode naive launches early as well
self.launches_early and self.launched => self.launched

# %% 04.7 a sum instead of a mean: never scales
bucket.scale if final else 1.0 => 1.0

# %% 04.7 the parameter stays missing: nothing is ever complete
bucket.missing.remove(parameter) =>

# %% 04.7 copies into the buffer, and leaves the gradient a fresh tensor
bucket.store(parameter, bucket.scale if final else 1.0)
=>
bucket.views[parameter].copy_(parameter.grad).mul_(bucket.scale if final else 1.0)

# %% 04.7 synchronises on every micro-batch
bucket.store(parameter, bucket.scale if final else 1.0)
=>
bucket.store(parameter, 1.0)
if not final:
    dist.all_reduce(parameter.grad, group=bucket.group)
    parameter.grad.div_(bucket.group.size())
    return
bucket.views[parameter].mul_(bucket.scale)

# %% 04.7 forgets the earlier micro-batches
bucket.store(parameter, bucket.scale if final else 1.0)
=>
if final:
    bucket.store(parameter, bucket.scale)
else:
    parameter.grad = None

# %% 04.8 the mean over ranks instead of over tokens
micro_batches = list(micro_batches) =>
---
dist.all_reduce(tokens, group=dp.group)
tokens = tokens.clamp(min=1) / dp.group.size()
=>
tokens = tokens.clamp(min=1)

# %% 04.8 each micro-batch has the same weight
def parallel_accumulate(dp, micro_batches, dtype=torch.float32, loss_of=summed_loss):
    count, total = len(micro_batches), 0.0
    for number, part in enumerate(micro_batches):
        dp.synchronizes = number == count - 1
        tokens = (part[1] != IGNORED).sum().clamp(min=1) * count
        total = total + accumulate(dp, [part], dtype, tokens, loss_of) / dp.group.size()
    dp.finish()
    dist.all_reduce(total, group=dp.group)
    return total

# %% 04.8 divides by all ranks' tokens, and DataParallel by N once more
micro_batches = list(micro_batches) =>
(min=1) / dp.group.size() => (min=1)
---
total = (total + accumulate(dp, micro_batches[-1:], dtype, tokens, loss_of)) / dp.group.size()
=>
total = total + accumulate(dp, micro_batches[-1:], dtype, tokens, loss_of)

# %% 04.8 a rank without targets counts as one token
micro_batches = list(micro_batches)
tokens = torch.stack([(targets != IGNORED).sum() for _, targets in micro_batches]).sum().float()
=>
tokens = torch.stack([(targets != IGNORED).sum() for _, targets in micro_batches]).sum().float().clamp(min=1)

# %% 04.8 synchronises on every micro-batch
def parallel_accumulate(dp, micro_batches, dtype=torch.float32, loss_of=summed_loss):
    tokens = torch.stack([(targets != IGNORED).sum() for _, targets in micro_batches]).sum().float()
    dist.all_reduce(tokens, group=dp.group)
    tokens = tokens.clamp(min=1) / dp.group.size()
    total = 0.0
    for part in micro_batches:
        total = total + accumulate(dp, [part], dtype, tokens, loss_of) / dp.group.size()
        dp.finish()
    dist.all_reduce(total, group=dp.group)
    return total

# %% 04.9 compares with rank 0
def first_drift(norms):
    for step in range(len(norms[0])):
        usual = norms[0][step]
        for rank, run in enumerate(norms):
            if abs(run[step] / usual - 1) > 1e-4:
                return step, rank
    return None

# %% 04.9 compares with the mean, which the culprit moves
def first_drift(norms):
    for step in range(len(norms[0])):
        usual = np.mean([run[step] for run in norms])
        for rank, run in enumerate(norms):
            if abs(run[step] / usual - 1) > 1e-4:
                return step, rank
    return None

# %% 04.9 compares with the smallest
def first_drift(norms):
    for step in range(len(norms[0])):
        usual = min(run[step] for run in norms)
        for rank, run in enumerate(norms):
            if abs(run[step] / usual - 1) > 1e-4:
                return step, rank
    return None

# %% 04.9 rank first
def first_drift(norms):
    for step in range(len(norms[0])):
        usual = np.median([run[step] for run in norms])
        for rank, run in enumerate(norms):
            if abs(run[step] / usual - 1) > 1e-4:
                return rank, step
    return None

# %% 04.9 the step before, in which the mistake was made
def first_drift(norms):
    for step in range(len(norms[0])):
        usual = np.median([run[step] for run in norms])
        for rank, run in enumerate(norms):
            if abs(run[step] / usual - 1) > 1e-4:
                return step - 1, rank
    return None

# %% 04.9 counts ranks from 1
def first_drift(norms):
    for step in range(len(norms[0])):
        usual = np.median([run[step] for run in norms])
        for rank, run in enumerate(norms):
            if abs(run[step] / usual - 1) > 1e-4:
                return step, rank + 1
    return None

# %% 04.9 compares with the same rank's step before
def first_drift(norms):
    for step in range(1, len(norms[0])):
        for rank, run in enumerate(norms):
            if abs(run[step] / run[step - 1] - 1) > 0.2:
                return step, rank
    return None

# %% 04.9 the last step, where the replicas are farthest apart
def first_drift(norms):
    last = len(norms[0]) - 1
    usual = np.median([run[last] for run in norms])
    rank = int(np.argmax([abs(run[last] - usual) for run in norms]))
    return last, rank

# %% 04.9 never finds anything
def first_drift(norms):
    return None

# %% 04.9 fake: knows the figure above
def first_drift(norms):
    return 6, 2

# %% 04.9 rank by rank, each compared with all the others' means: the first rank that differs from anybody
def first_drift(norms):
    for rank, run in enumerate(norms):
        others = [other for other in norms if other is not run]
        for step, norm in enumerate(run):
            if any(abs(norm / other[step] - 1) > 1e-4 for other in others):
                return step, rank
    return None

# %% 04.9 a tenth more or less is taken for noise
def first_drift(norms):
    for step in range(len(norms[0])):
        usual = np.median([run[step] for run in norms])
        for rank, run in enumerate(norms):
            if abs(run[step] / usual - 1) > 0.1:
                return step, rank
    return None

# %% 04.9 only a norm above the others' counts
def first_drift(norms):
    for step in range(len(norms[0])):
        usual = np.median([run[step] for run in norms])
        for rank, run in enumerate(norms):
            if run[step] / usual - 1 > 1e-4:
                return step, rank
    return None

# %% 04.10 a plain sum: blind to exchanged elements
def find_diverged_params(module, group=None):
    named = [*module.named_parameters(), *module.named_buffers()]
    numbers = torch.stack([tensor.detach().double().sum() for _, tensor in named])
    extremes = torch.stack([numbers, -numbers])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    return [name for (name, _), spread in zip(named, extremes.sum(0).tolist()) if spread != 0]

# %% 04.10 parameters only
def find_diverged_params(module, group=None):
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    named, numbers = [*module.named_parameters()], []
    for _, tensor in named:
        bits = tensor.detach().contiguous().view(integers[tensor.element_size()]).flatten()
        number = torch.zeros((), dtype=torch.int64)
        for piece in bits.split(2**20):
            places = torch.arange(1, len(piece) + 1)
            number = 31 * number + (piece.long() * places).sum()
        numbers.append(number)
    extremes = torch.stack(numbers + [-number for number in numbers])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    largest, smallest = extremes.chunk(2)
    return [name for (name, _), spread in zip(named, (largest + smallest).tolist(), strict=True) if spread != 0]

# %% 04.10 a tolerance that hides what is small
def find_diverged_params(module, group=None):
    named = [*module.named_parameters(), *module.named_buffers()]
    numbers = torch.stack(
        [
            (tensor.detach().double().flatten() * torch.arange(1, tensor.numel() + 1).double().cos()).sum()
            for _, tensor in named
        ]
    )
    extremes = torch.stack([numbers, -numbers])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    return [name for (name, _), spread in zip(named, extremes.sum(0).tolist()) if abs(spread) > 0.1]

# %% 04.10 all names as soon as one differs
def find_diverged_params(module, group=None):
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    named, numbers = [*module.named_parameters(), *module.named_buffers()], []
    for _, tensor in named:
        bits = tensor.detach().contiguous().view(integers[tensor.element_size()]).flatten()
        number = torch.zeros((), dtype=torch.int64)
        for piece in bits.split(2**20):
            places = torch.arange(1, len(piece) + 1)
            number = 31 * number + (piece.long() * places).sum()
        numbers.append(number)
    extremes = torch.stack(numbers + [-number for number in numbers])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    largest, smallest = extremes.chunk(2)
    return [name for name, _ in named] if (largest + smallest).any() else []

# %% 04.10 the largest number only: whoever has it sees nothing
def find_diverged_params(module, group=None):
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    named, numbers = [*module.named_parameters(), *module.named_buffers()], []
    for _, tensor in named:
        bits = tensor.detach().contiguous().view(integers[tensor.element_size()]).flatten()
        number = torch.zeros((), dtype=torch.int64)
        for piece in bits.split(2**20):
            places = torch.arange(1, len(piece) + 1)
            number = 31 * number + (piece.long() * places).sum()
        numbers.append(number)
    extremes = torch.stack(numbers + [-number for number in numbers])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    largest, smallest = extremes.chunk(2)
    mine = torch.stack(numbers)
    return [name for (name, _), here, there in zip(named, mine, largest, strict=True) if here != there]

# %% 04.10 only rank 0 knows
def find_diverged_params(module, group=None):
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    named, numbers = [*module.named_parameters(), *module.named_buffers()], []
    for _, tensor in named:
        bits = tensor.detach().contiguous().view(integers[tensor.element_size()]).flatten()
        number = torch.zeros((), dtype=torch.int64)
        for piece in bits.split(2**20):
            places = torch.arange(1, len(piece) + 1)
            number = 31 * number + (piece.long() * places).sum()
        numbers.append(number)
    extremes = torch.stack(numbers + [-number for number in numbers])
    dist.reduce(extremes, group_dst=0, op=dist.ReduceOp.MAX, group=group)
    largest, smallest = extremes.chunk(2)
    return [name for (name, _), spread in zip(named, (largest + smallest).tolist(), strict=True) if spread != 0]

# %% 04.10 broadcasts the whole model
def find_diverged_params(module, group=None):
    named = [*module.named_parameters(), *module.named_buffers()]
    differs = torch.zeros(len(named))
    for i, (_, tensor) in enumerate(named):
        firsts = tensor.detach().clone()
        dist.broadcast(firsts, group_src=0, group=group)
        own, firsts = (values.reshape(-1).view(torch.uint8) for values in (tensor.detach(), firsts))
        differs[i] = not torch.equal(firsts, own)
    dist.all_reduce(differs, op=dist.ReduceOp.MAX, group=group)
    return [name for (name, _), other in zip(named, differs.tolist()) if other]

# %% 04.10 never finds anything
def find_diverged_params(module, group=None):
    named = [*module.named_parameters(), *module.named_buffers()]
    return []

# %% 04.11 forward counts as well: 6 FLOPs a parameter
gradient_bytes / (2 * tokens) => gradient_bytes * 2 / (6 * tokens)

# %% 04.11 backward counts once: 2 FLOPs a parameter
(2 * tokens) => tokens

# %% 04.11 each gradient is sent once
2 * tokens => 4 * tokens

# %% 04.11 forgets the ring's share
(dp - 1) / dp * peak => peak

# %% 04.11 one GPU receives from all others
(dp - 1) / dp * peak => (dp - 1) * peak

# %% 04.11 elements are counted as bytes, as in the playbook
return gradient_bytes => return 1

# %% 04.11 always BF16
return gradient_bytes => return 2

# %% 04.11 upside down
def overlap_ratio(tokens, dp, bandwidth, peak, gradient_bytes=2):
    return 2 * tokens / gradient_bytes * dp / max(1, dp - 1) * bandwidth / peak

# %% 04.11 bits
return gradient_bytes => return 8 * gradient_bytes

# %% 04.11 all GPUs' tokens
* tokens => * tokens * dp

# %% 04.11 a promise that it is hidden: never above 1
def overlap_ratio(tokens, dp, bandwidth, peak, gradient_bytes=2):
    return min(1.0, gradient_bytes / (2 * tokens) * (dp - 1) / dp * peak / bandwidth)

# %% 04.11 one byte a gradient by default
def overlap_ratio(tokens, dp, bandwidth, peak, gradient_bytes=1):
    return gradient_bytes / (2 * tokens) * (dp - 1) / dp * peak / bandwidth

# %% 04.12 ignores divisibility
def recipe(sequences, gpus, largest_micro_batch):
    return gpus, largest_micro_batch, sequences // (gpus * largest_micro_batch)

# %% 04.12 ignores divisibility, with one step at least
def recipe(sequences, gpus, largest_micro_batch):
    return gpus, largest_micro_batch, max(1, sequences // (gpus * largest_micro_batch))

# %% 04.12 the largest micro-batch first, then the most GPUs
def recipe(sequences, gpus, largest_micro_batch):
    for micro_batch in range(largest_micro_batch, 0, -1):
        for dp in range(gpus, 0, -1):
            steps, rest = divmod(sequences, dp * micro_batch)
            if rest == 0:
                return dp, micro_batch, steps

# %% 04.12 the smallest micro-batch
def recipe(sequences, gpus, largest_micro_batch):
    for dp in range(min(gpus, sequences), 0, -1):
        if sequences % dp == 0:
            return dp, 1, sequences // dp

# %% 04.12 all GPUs or none
def recipe(sequences, gpus, largest_micro_batch):
    for micro_batch in range(largest_micro_batch, 0, -1):
        steps, rest = divmod(sequences, gpus * micro_batch)
        if rest == 0:
            return gpus, micro_batch, steps

# %% 04.12 halves the micro-batch only
def recipe(sequences, gpus, largest_micro_batch):
    for dp in range(min(gpus, sequences), 0, -1):
        micro_batch = largest_micro_batch
        while micro_batch > 0:
            if sequences % (dp * micro_batch) == 0:
                return dp, micro_batch, sequences // (dp * micro_batch)
            micro_batch //= 2

# %% 04.12 halves the number of GPUs
def recipe(sequences, gpus, largest_micro_batch):
    dp = min(gpus, sequences)
    while dp > 0:
        for micro_batch in range(largest_micro_batch, 0, -1):
            if sequences % (dp * micro_batch) == 0:
                return dp, micro_batch, sequences // (dp * micro_batch)
        dp //= 2

# %% 04.12 the largest common divisor as micro-batch
def recipe(sequences, gpus, largest_micro_batch):
    import math

    for dp in range(min(gpus, sequences), 0, -1):
        if sequences % dp == 0:
            micro_batch = math.gcd(sequences // dp, largest_micro_batch)
            return dp, micro_batch, sequences // dp // micro_batch

# %% 04.12 steps and micro-batch exchanged
return dp, micro_batch, steps => return dp, steps, micro_batch

# %% 04.12 accumulates in place of GPUs: the fewest first
min(gpus, sequences), 0, -1 => 1, gpus + 1

# %% 04.12 as many micro-batches as fit, whatever is left over
def recipe(sequences, gpus, largest_micro_batch):
    dp = min(gpus, sequences)
    micro_batch = min(largest_micro_batch, sequences // dp)
    return dp, micro_batch, sequences // (dp * micro_batch)

# %% 04.1 an assertion instead of a ValueError
def accumulation_steps(batch_tokens, seq, micro_batch, dp):
    assert batch_tokens % (seq * micro_batch * dp) == 0, "does not divide"
    return batch_tokens // (seq * micro_batch * dp)

# %% 04.2 the default group instead of the given one
parameter.grad, group=group => parameter.grad

# %% 04.4 the hook starts the all-reduce and waits for it at once
works.append(dist.all_reduce(parameter.grad, group=group, async_op=True))
=>
dist.all_reduce(parameter.grad, group=group, async_op=True).wait()
---
for work in works:
    work.wait()
works.clear()
=>
pass

# %% 04.4 finish() does not wait
for work in works:
    work.wait()
=>

# %% 04.4 finish() waits for the last all-reduce only
for work in works:
    work.wait()
=>
works[-1].wait()

# %% 04.4 the hook divides the gradient while it is in flight
def start(parameter):
=>
def start(parameter):
    works.append(dist.all_reduce(parameter.grad, group=group, async_op=True))
---
works.append(dist.all_reduce(parameter.grad, group=group, async_op=True)) =>

# %% 04.4 the default group instead of the given one
group=group, async_op => async_op

# %% 04.5 one bucket for each kind, whatever its size
if bucket is None or size + parameter.nbytes > bucket_bytes:
=>
if bucket is None:

# %% 04.5 a bucket that is exactly full is too full
parameter.nbytes > bucket_bytes => parameter.nbytes >= bucket_bytes

# %% 04.5 four bytes for every element
parameter.nbytes > bucket_bytes => 4 * parameter.numel() > bucket_bytes
bucket, size + parameter.nbytes => bucket, size + 4 * parameter.numel()

# %% 04.6 scales in 16 bits, then converts
self.parameters if self.missing else () => self.parameters
---
self.sent = self.outgoing()
=>
self.sent = self.flat
if self.reduce_dtype != self.flat.dtype:
    self.sent = self.flat.mul_(self.copy_scale).to(self.reduce_dtype)

# %% 04.6 never sets a flag to 1
self.flags.fill_(1)
for i, parameter in enumerate(self.parameters if self.missing else ()):
=>
for i, parameter in enumerate(self.parameters):
---
self.sent = self.outgoing()
=>
self.sent = self.flat
if self.reduce_dtype != self.flat.dtype:
    self.sent = self.flat.to(self.reduce_dtype).mul_(self.copy_scale)

# %% 04.6 starts the all-reduce and waits for it
def launch(self: Bucket):
    self.flags.fill_(1)
    for i, parameter in enumerate(self.parameters):
        if parameter in self.missing and parameter.grad is not None:
            self.store(parameter, self.scale)
        elif parameter in self.missing:
            self.views[parameter].zero_()
            self.flags[i] = 0
    self.sent = self.flat
    if self.reduce_dtype != self.flat.dtype:
        self.sent = self.flat.to(self.reduce_dtype).mul_(self.copy_scale)
    self.work = dist.all_reduce(self.sent, group=self.group, async_op=True)
    self.work.wait()

# %% 04.6 the default group instead of the given one
def launch(self: Bucket):
    self.flags.fill_(1)
    for i, parameter in enumerate(self.parameters):
        if parameter in self.missing and parameter.grad is not None:
            self.store(parameter, self.scale)
        elif parameter in self.missing:
            self.views[parameter].zero_()
            self.flags[i] = 0
    self.sent = self.flat
    if self.reduce_dtype != self.flat.dtype:
        self.sent = self.flat.to(self.reduce_dtype).mul_(self.copy_scale)
    self.work = dist.all_reduce(self.sent, async_op=True)

# %% 04.7 launches out of order: each bucket as soon as it is complete
def add(self: Reducer, parameter, final):
    bucket = self.bucket_of[parameter]
    bucket.store(parameter, bucket.scale if final else 1.0)
    if final:
        bucket.missing.remove(parameter)
        if self.launches_early and not bucket.missing:
            bucket.launch()
            self.launched += 1

# %% 04.7 if instead of while: one bucket at most for each gradient
while self.launches_early => if self.launches_early

# %% 04.7 waits for each bucket that it launches
self.buckets[self.launched].launch()
=>
self.buckets[self.launched].launch()
self.buckets[self.launched].work.wait()

# %% 04.7 stores the final gradient only
bucket.store(parameter, bucket.scale if final else 1.0)
=>
if not final:
    return
bucket.store(parameter, bucket.scale)

# %% 04.8 forgets finish()
micro_batches = list(micro_batches) =>
---
dp.finish()
=>

# %% 04.8 the default group instead of dp's
micro_batches = list(micro_batches) =>
dist.all_reduce(tokens, group=dp.group) => dist.all_reduce(tokens, group=None)
dist.all_reduce(total, group=dp.group) => dist.all_reduce(total, group=None)

# %% 04.8 no clamp: no rank has a target, and all divide by zero
micro_batches = list(micro_batches) =>
tokens.clamp(min=1) => tokens

# %% 04.8 no no_sync()
micro_batches = list(micro_batches) =>
---
with dp.no_sync():
    total = accumulate(dp, micro_batches[:-1], dtype, tokens, loss_of)
=>
total = accumulate(dp, micro_batches[:-1], dtype, tokens, loss_of)

# %% 04.9 compares with the largest
def first_drift(norms):
    for step in range(len(norms[0])):
        usual = max(run[step] for run in norms)
        for rank, run in enumerate(norms):
            if abs(run[step] / usual - 1) > 1e-4:
                return step, rank
    return None

# %% 04.9 equal means equal to the last digit
def first_drift(norms):
    for step in range(len(norms[0])):
        usual = np.median([run[step] for run in norms])
        for rank, run in enumerate(norms):
            if run[step] != usual:
                return step, rank
    return None

# %% 04.10 the default group instead of the given one
def find_diverged_params(module, group=None):
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    named, numbers = [*module.named_parameters(), *module.named_buffers()], []
    for _, tensor in named:
        bits = tensor.detach().contiguous().view(integers[tensor.element_size()]).flatten()
        number = torch.zeros((), dtype=torch.int64)
        for piece in bits.split(2**20):
            places = torch.arange(1, len(piece) + 1)
            number = 31 * number + (piece.long() * places).sum()
        numbers.append(number)
    extremes = torch.stack(numbers + [-number for number in numbers])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    largest, smallest = extremes.chunk(2)
    return [name for (name, _), spread in zip(named, (largest + smallest).tolist(), strict=True) if spread != 0]

# %% 04.10 one float32 number
def find_diverged_params(module, group=None):
    named = [*module.named_parameters(), *module.named_buffers()]
    numbers = torch.stack(
        [
            (tensor.detach().float().flatten() * torch.arange(1, tensor.numel() + 1).float().cos()).sum()
            for _, tensor in named
        ]
    )
    extremes = torch.stack([numbers, -numbers])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    return [name for (name, _), spread in zip(named, extremes.sum(0).tolist()) if spread != 0]

# %% 04.12 powers of two only
def recipe(sequences, gpus, largest_micro_batch):
    dp = 2 ** (min(gpus, sequences).bit_length() - 1)
    while dp > 0:
        for micro_batch in range(largest_micro_batch, 0, -1):
            if sequences % (dp * micro_batch) == 0:
                return dp, micro_batch, sequences // (dp * micro_batch)
        dp //= 2

# %% 04.2 in an order that chance decides
def average_gradients(module, group=None):
    import random

    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    random.shuffle(gradients)
    for gradient in gradients:
        dist.all_reduce(gradient, group=group)
        gradient /= dist.get_world_size(group)

# %% 04.3 twice the gradients, without (N-1)/N
gigabytes_sent = 2 * 2 * 8.03

# %% 04.8 ignores dtype
[:-1], dtype, tokens, loss_of => [:-1], tokens=tokens, loss_of=loss_of
[-1:], dtype, tokens, loss_of => [-1:], tokens=tokens, loss_of=loss_of

# %% 04.8 ignores dtype in the last micro-batch
[-1:], dtype, tokens, loss_of => [-1:], tokens=tokens, loss_of=loss_of

# %% 04.8 ignores loss_of
[:-1], dtype, tokens, loss_of => [:-1], dtype, tokens
[-1:], dtype, tokens, loss_of => [-1:], dtype, tokens

# %% 04.9 the median of numbers and NaN is NaN: rank 0 is accused
def first_drift(norms):
    for step in range(len(norms[0])):
        usual = np.median([run[step] for run in norms])
        for rank, run in enumerate(norms):
            if not abs(run[step] / usual - 1) <= 1e-4:
                return step, rank
    return None

# %% 04.9 NaN differs from nothing
def first_drift(norms):
    for step in range(len(norms[0])):
        usual = np.nanmedian([run[step] for run in norms])
        for rank, run in enumerate(norms):
            if abs(run[step] / usual - 1) > 1e-4:
                return step, rank
    return None

# %% 04.9 NaN on all ranks is taken for a drift
def first_drift(norms):
    for step in range(len(norms[0])):
        usual = np.nanmedian([run[step] for run in norms])
        for rank, run in enumerate(norms):
            if not abs(run[step] / usual - 1) <= 1e-4:
                return step, rank
    return None

# %% 04.10 a NaN that all ranks share hides what else differs
def find_diverged_params(module, group=None):
    named = [*module.named_parameters(), *module.named_buffers()]
    weights = [torch.arange(1, tensor.numel() + 1) for _, tensor in named]
    sums = [(t.detach().double().flatten() * w).sum() for (_, t), w in zip(named, weights, strict=True)]
    sums = torch.stack(sums).nan_to_num(0)
    extremes = torch.cat([sums, -sums])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    largest, smallest = extremes.chunk(2)
    return [name for (name, _), spread in zip(named, (largest + smallest).tolist(), strict=True) if spread != 0]

# %% 04.1 asks of the micro-batch and of the GPUs, each alone
def accumulation_steps(batch_tokens, seq, micro_batch, dp):
    sequences, rest = divmod(batch_tokens, seq)
    if rest or sequences % micro_batch or sequences % dp or sequences < micro_batch * dp:
        raise ValueError(f"{sequences} sequences do not divide")
    return sequences // (micro_batch * dp)

# %% 04.1 does not ask whether micro-batches come out
def accumulation_steps(batch_tokens, seq, micro_batch, dp):
    sequences, rest = divmod(batch_tokens, seq)
    if rest or sequences % dp or sequences < micro_batch * dp:
        raise ValueError(f"{sequences} sequences do not divide")
    return sequences // dp // micro_batch

# %% 04.1 a message without numbers
def accumulation_steps(batch_tokens, seq, micro_batch, dp):
    if batch_tokens % (seq * micro_batch * dp):
        raise ValueError("the tokens do not divide")
    return batch_tokens // (seq * micro_batch * dp)

# %% 04.2 a parameter without a gradient gets zeros
if parameter.grad is not None:
=>
if parameter.requires_grad:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)

# %% 04.2 one flat copy in float32, whatever the gradients' dtypes
def average_gradients(module, group=None):
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    flat = torch.cat([gradient.float().flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size(group)
    for gradient, mean in zip(gradients, flat.split([gradient.numel() for gradient in gradients])):
        gradient.copy_(mean.view_as(gradient))

# %% 04.2 without a group it does nothing
for parameter in module.parameters(): => for parameter in module.parameters() if group else ():

# %% 04.4 makes frozen parameters trainable
if parameter.requires_grad:
    parameter.register_post_accumulate_grad_hook(start)
=>
parameter.requires_grad_(True)
parameter.register_post_accumulate_grad_hook(start)

# %% 04.4 a parameter that backward does not reach gets zeros
works.clear()
=>
works.clear()
for parameter in module.parameters():
    if parameter.requires_grad and parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)

# %% 04.4 finish() divides old gradients as well
parameter.grad /= n =>
---
works.clear()
=>
works.clear()
for parameter in module.parameters():
    if parameter.grad is not None:
        parameter.grad /= n

# %% 04.4 without a group it does nothing
if parameter.requires_grad: => if group and parameter.requires_grad:

# %% 04.5 all parameters with a reduce_group in one kind
placement_of(parameter).reduce_group => placement_of(parameter).reduce_group is not None

# %% 04.5 devices are mixed
parameter.device, placement_of => placement_of

# %% 04.5 another device closes the open bucket
parameter.device, placement_of => placement_of
or size => or bucket[0].device != parameter.device or size

# %% 04.5 a huge one gets a bucket of its own, and the open one stays open
bucket, size = filling.get(kind, (None, 0))
=>
bucket, size = filling.get(kind, (None, 0))
if parameter.nbytes > bucket_bytes:
    buckets.append([parameter])
    continue

# %% 04.6 takes a gradient in its view for what an earlier step has left
def launch(self: Bucket):
    self.flags.fill_(1)
    for i, parameter in enumerate(self.parameters):
        view = self.views[parameter]
        if parameter in self.missing and parameter.grad is not None and parameter.grad is not view:
            self.store(parameter, self.scale)
        elif parameter in self.missing:
            view.zero_()
            self.flags[i] = 0
    self.sent = self.outgoing()
    self.work = dist.all_reduce(self.sent, group=self.group, async_op=True)

# %% 04.6 takes a gradient in its view for scaled
def launch(self: Bucket):
    self.flags.fill_(1)
    for i, parameter in enumerate(self.parameters):
        if parameter in self.missing and parameter.grad is self.views[parameter]:
            continue
        elif parameter in self.missing and parameter.grad is not None:
            self.store(parameter, self.scale)
        elif parameter in self.missing:
            self.views[parameter].zero_()
            self.flags[i] = 0
    self.sent = self.outgoing()
    self.work = dist.all_reduce(self.sent, group=self.group, async_op=True)

# %% 04.6 scales a late gradient by 1/N, whatever self.scale is
self.parameters if self.missing else () => self.parameters
---
self.store(parameter, self.scale)
=>
in_place = self.reduce_dtype == self.flat.dtype
self.store(parameter, 1 / self.group.size() if in_place else 1.0)

# %% 04.7 scales by 1/N, whatever bucket.scale is
bucket.scale if => 1 / bucket.group.size() if

# %% 04.8 counts tokens in BF16
micro_batches = list(micro_batches)
tokens = torch.stack([(targets != IGNORED).sum() for _, targets in micro_batches]).sum().float()
=>
tokens = torch.stack([(targets != IGNORED).sum() for _, targets in micro_batches]).sum().bfloat16()
---
tokens.clamp => tokens.float().clamp

# %% 04.8 counts tokens in dtype
micro_batches = list(micro_batches)
tokens = torch.stack([(targets != IGNORED).sum() for _, targets in micro_batches]).sum().float()
=>
tokens = torch.stack([(targets != IGNORED).sum() for _, targets in micro_batches]).sum().to(dtype)
---
tokens.clamp => tokens.float().clamp

# %% 04.8 returns the loss in dtype
micro_batches = list(micro_batches) =>
return total => return total.to(dtype)

# %% 04.9 within an absolute 1e-4
1e-4 * abs(usual) => 1e-4

# %% 04.9 np.isclose, whose absolute tolerance hides small norms
abs(norm - usual) > 1e-4 * abs(usual) => not np.isclose(norm, usual, rtol=1e-4)

# %% 04.9 relative below 1, absolute above
abs(usual) => min(1, abs(usual))

# %% 04.10 what a checkpoint keeps only
def find_diverged_params(module, group=None):
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    named, numbers = list(module.state_dict(keep_vars=True).items()), []
    for _, tensor in named:
        bits = tensor.detach().contiguous().view(integers[tensor.element_size()]).flatten()
        number = torch.zeros((), dtype=torch.int64)
        for piece in bits.split(2**20):
            places = torch.arange(1, len(piece) + 1)
            number = 31 * number + (piece.long() * places).sum()
        numbers.append(number)
    extremes = torch.stack(numbers + [-number for number in numbers])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    largest, smallest = extremes.chunk(2)
    return [name for (name, _), spread in zip(named, (largest + smallest).tolist(), strict=True) if spread != 0]

# %% 04.10 takes NaN for 0
def find_diverged_params(module, group=None):
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    named, numbers = [*module.named_parameters(), *module.named_buffers()], []
    for _, tensor in named:
        bits = tensor.detach().nan_to_num().contiguous().view(integers[tensor.element_size()]).flatten()
        number = torch.zeros((), dtype=torch.int64)
        for piece in bits.split(2**20):
            places = torch.arange(1, len(piece) + 1)
            number = 31 * number + (piece.long() * places).sum()
        numbers.append(number)
    extremes = torch.stack(numbers + [-number for number in numbers])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    largest, smallest = extremes.chunk(2)
    return [name for (name, _), spread in zip(named, (largest + smallest).tolist(), strict=True) if spread != 0]

# %% 04.10 takes -0 for 0
def find_diverged_params(module, group=None):
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    named, numbers = [*module.named_parameters(), *module.named_buffers()], []
    for _, tensor in named:
        bits = (tensor.detach() + 0).to(tensor.dtype).contiguous().view(integers[tensor.element_size()]).flatten()
        number = torch.zeros((), dtype=torch.int64)
        for piece in bits.split(2**20):
            places = torch.arange(1, len(piece) + 1)
            number = 31 * number + (piece.long() * places).sum()
        numbers.append(number)
    extremes = torch.stack(numbers + [-number for number in numbers])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    largest, smallest = extremes.chunk(2)
    return [name for (name, _), spread in zip(named, (largest + smallest).tolist(), strict=True) if spread != 0]

# %% 04.10 the pieces' sums are added up, and all have the same weights
def find_diverged_params(module, group=None):
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    named, numbers = [*module.named_parameters(), *module.named_buffers()], []
    for _, tensor in named:
        bits = tensor.detach().contiguous().view(integers[tensor.element_size()]).flatten()
        number = torch.zeros((), dtype=torch.int64)
        for piece in bits.split(2**20):
            places = torch.arange(1, len(piece) + 1)
            number = number + (piece.long() * places).sum()
        numbers.append(number)
    extremes = torch.stack(numbers + [-number for number in numbers])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    largest, smallest = extremes.chunk(2)
    return [name for (name, _), spread in zip(named, (largest + smallest).tolist(), strict=True) if spread != 0]

# %% 04.10 weights that repeat every 1,000 places
def find_diverged_params(module, group=None):
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    named, numbers = [*module.named_parameters(), *module.named_buffers()], []
    for _, tensor in named:
        bits = tensor.detach().contiguous().view(integers[tensor.element_size()]).flatten()
        number = torch.zeros((), dtype=torch.int64)
        for piece in bits.split(2**20):
            places = torch.arange(1, len(piece) + 1) % 1000
            number = 31 * number + (piece.long() * places).sum()
        numbers.append(number)
    extremes = torch.stack(numbers + [-number for number in numbers])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    largest, smallest = extremes.chunk(2)
    return [name for (name, _), spread in zip(named, (largest + smallest).tolist(), strict=True) if spread != 0]

# %% 04.10 a whole tensor at once in int64
def find_diverged_params(module, group=None):
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    named, numbers = [*module.named_parameters(), *module.named_buffers()], []
    for _, tensor in named:
        bits = tensor.detach().contiguous().view(integers[tensor.element_size()]).flatten()
        number = torch.zeros((), dtype=torch.int64)
        for piece in bits.split(2**30):
            places = torch.arange(1, len(piece) + 1)
            number = 31 * number + (piece.long() * places).sum()
        numbers.append(number)
    extremes = torch.stack(numbers + [-number for number in numbers])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    largest, smallest = extremes.chunk(2)
    return [name for (name, _), spread in zip(named, (largest + smallest).tolist(), strict=True) if spread != 0]

# %% 04.1 forgets to return
return steps =>

# %% 04.1 a message with other numbers than those that do not divide
def accumulation_steps(batch_tokens, seq, micro_batch, dp):
    if batch_tokens % (seq * micro_batch * dp):
        raise ValueError(f"the batch does not divide by {seq} x {micro_batch} x {dp}")
    return batch_tokens // (seq * micro_batch * dp)

# %% 04.3 in megabytes
gigabytes_sent = 2 * 63 / 64 * 2 * 8.03e3

# %% 04.4 forgets to return finish
return finish =>

# %% 04.5 forgets to return
return sorted(buckets, key=lambda bucket: position[bucket[-1]]) =>

# %% 04.5 returns a single list of parameters
return sorted(buckets, key=lambda bucket: position[bucket[-1]]) => return list(position)

# %% 04.5 parameters with their places
bucket.append(parameter) => bucket.append((position[parameter], parameter))
return sorted(buckets, key=lambda bucket: position[bucket[-1]]) => return sorted(buckets, key=lambda bucket: bucket[-1][0])

# %% 04.5 the bucket that is being filled at the end is left out
def make_buckets(parameters, bucket_bytes):
    buckets, bucket, size = [], [], 0
    for parameter in reversed(list(parameters)):
        if bucket and size + parameter.nbytes > bucket_bytes:
            buckets.append(bucket)
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.nbytes
    return buckets

# %% 04.6 does not keep what it sends
self.sent = self.outgoing() =>
dist.all_reduce(self.sent => dist.all_reduce(self.outgoing()

# %% 04.7 scales the gradients of earlier micro-batches too
bucket.scale if final else 1.0 => bucket.scale

# %% 04.7 in mode naive the parameter stays missing
if final:
    bucket.missing.remove(parameter)
=>
if final and self.launches_early:
    bucket.missing.remove(parameter)

# %% 04.7 the gradient of an earlier micro-batch leaves missing too
if final:
    bucket.missing.remove(parameter)
=>
bucket.missing.discard(parameter)
if final:

# %% 04.8 forgets to return
return total =>

# %% 04.9 returns the step alone
return step, rank => return step

# %% 04.11 forgets to return
return gradient_bytes => ratio = gradient_bytes

# %% 04.12 returns the steps alone
return dp, micro_batch, steps => return steps

# %% 04.4 sends a copy in float32, twice the bytes of a BF16 gradient
works, n = [], dist.get_world_size(group) => works, n, wide = [], dist.get_world_size(group), []
---
    parameter.grad /= n
    works.append(dist.all_reduce(parameter.grad, group=group, async_op=True))
=>
    wide.append((parameter, parameter.grad.float() / n))
    works.append(dist.all_reduce(wide[-1][1], group=group, async_op=True))
---
works.clear()
=>
for parameter, gradient in wide:
    parameter.grad.copy_(gradient)
works.clear()
wide.clear()

# %% 04.4 knows where new works begin, and keeps the old ones with their gradients
works, n = [], dist.get_world_size(group) => works, n, done = [], dist.get_world_size(group), []
for work in works: => for work in works[len(done):]:
works.clear() => done.extend(works[len(done):])

# %% 04.6 sets no flags where no parameter is missing
self.flags.fill_(1) => self.flags.fill_(1) if self.missing else None

# %% 04.9 the third of the sorted norms, the median of four only
np.median(column) => sorted(column)[2]

# %% 04.9 looks at four ranks
[run[step] for run in norms] => [run[step] for run in norms[:4]]

# %% 04.9 divides by a norm, and leaves out norms of 0
if abs(norm - usual) > 1e-4 * abs(usual): => if usual and abs(norm / usual - 1) > 1e-4:

# %% 04.10 looks at the first chunk only
.split(2**20): => .split(2**20)[:1]:

# %% 04.10 looks at the first two chunks only
.split(2**20): => .split(2**20)[:2]:

# %% 04.10 compares what is left of the values in float32
tensor.detach().contiguous().view(INTEGERS[tensor.element_size()]) => tensor.detach().float().contiguous().view(torch.int32)

# %% 04.10 compares what is left of the values in BF16
tensor.detach().contiguous().view(INTEGERS[tensor.element_size()]) => tensor.detach().bfloat16().contiguous().view(torch.int16)

# %% 04.12 accumulates seven times at most
if rest == 0: => if rest == 0 and steps < 8:
