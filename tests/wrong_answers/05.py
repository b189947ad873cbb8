"""Wrong answers that the checks of notebook 05 must catch. None of them hangs."""

# %% 05.1 everything is over 8 in every stage
gb_of_stage = {0: 112.0, 1: 14.0, 2: 14.0, 3: 14.0}
best_of_stage_2 = 8

# %% 05.1 stage 1 shares out nothing but its 12 bytes, and forgets the other 4
gb_of_stage = {0: 112.0, 1: 10.5, 2: 26.25, 3: 14.0}
best_of_stage_2 = 8

# %% 05.1 without master weights
gb_of_stage = {0: 112.0, 1: 35.0, 2: 22.75, 3: 10.5}
best_of_stage_2 = 8

# %% 05.1 stage 2 shares out the gradients alone
gb_of_stage = {0: 112.0, 1: 38.5, 2: 99.75, 3: 14.0}
best_of_stage_2 = 8

# %% 05.1 in GiB
gb_of_stage = {0: 112.0, 1: 35.9, 2: 24.4, 3: 13.0}
best_of_stage_2 = 8

# %% 05.1 stages 2 and 3 mixed up
gb_of_stage = {0: 112.0, 1: 38.5, 2: 14.0, 3: 26.25}
best_of_stage_2 = 8

# %% 05.1 the factor of stage 1
gb_of_stage = {0: 112.0, 1: 38.5, 2: 26.25, 3: 14.0}
best_of_stage_2 = 4

# %% 05.1 the factor on 8 ranks
gb_of_stage = {0: 112.0, 1: 38.5, 2: 26.25, 3: 14.0}
best_of_stage_2 = 4.266666666666667

# %% 05.1 no limit to the factor
gb_of_stage = {0: 112.0, 1: 38.5, 2: 26.25, 3: 14.0}
best_of_stage_2 = float("inf")

# %% 05.1 words
gb_of_stage = {0: 112.0, 1: "38.5", 2: "26.25", 3: "14"}
best_of_stage_2 = 8

# %% 05.2 counts from the beginning of the buffer
def span(self: FlatLayout, i):
    begin, end = self.rank * self.shard_numel, (self.rank + 1) * self.shard_numel
    return max(begin, self.starts[i]), max(min(end, self.starts[i] + self.shapes[i].numel()), self.starts[i])

# %% 05.2 does not cut off what comes before the tensor
def span(self: FlatLayout, i):
    first, numel = self.rank * self.shard_numel - self.starts[i], self.shapes[i].numel()
    return min(first, numel), min(first + self.shard_numel, numel)

# %% 05.2 does not cut off what comes after the tensor
def span(self: FlatLayout, i):
    first = self.rank * self.shard_numel - self.starts[i]
    return max(first, 0), max(first + self.shard_numel, 0)

# %% 05.2 the last element is counted in
self.shard_numel, 0 => self.shard_numel - 1, 0

# %% 05.2 whole tensors: they belong to the rank where they begin
def span(self: FlatLayout, i):
    is_mine = self.starts[i] // self.shard_numel == self.rank
    return 0, self.shapes[i].numel() * is_mine

# %% 05.2 each tensor is cut in equal pieces by itself
def span(self: FlatLayout, i):
    numel = self.shapes[i].numel()
    return numel * self.rank // self.world_size, numel * (self.rank + 1) // self.world_size

# %% 05.2 a first and a number of elements
def span(self: FlatLayout, i):
    first, numel = self.rank * self.shard_numel - self.starts[i], self.shapes[i].numel()
    first, last = min(max(first, 0), numel), min(max(first + self.shard_numel, 0), numel)
    return first, last - first

# %% 05.2 rank 0 gets the rest, not the padding
def span(self: FlatLayout, i):
    size = self.numel // self.world_size
    first, numel = self.rank * size - self.starts[i], self.shapes[i].numel()
    return min(max(first, 0), numel), min(max(first + size, 0), numel)

# %% 05.2 None where it owns nothing
def span(self: FlatLayout, i):
    first, numel = self.rank * self.shard_numel - self.starts[i], self.shapes[i].numel()
    first, last = min(max(first, 0), numel), min(max(first + self.shard_numel, 0), numel)
    return (first, last) if first < last else None

# %% 05.3 fake: plain data parallelism, with all states on each rank
from course_lib.zero.optimizer import dist


def zero_1_step(layout, values, gradient, update):
    dist.all_reduce(gradient, group=layout.group)
    update(values, gradient / layout.world_size)

# %% 05.3 fake: all states on each rank, in the traffic of stage 1
def zero_1_step(layout, values, gradient, update):
    shard, whole = gradient.new_empty(layout.shard_numel), torch.empty_like(gradient)
    reduce_scatter_tensor(shard, gradient, group=layout.group)
    all_gather_into_tensor(whole, shard / layout.world_size, group=layout.group)
    update(values, whole)

# %% 05.3 fake: updates all pieces one after the other
def zero_1_step(layout, values, gradient, update):
    shard, whole = gradient.new_empty(layout.shard_numel), torch.empty_like(gradient)
    reduce_scatter_tensor(shard, gradient, group=layout.group)
    all_gather_into_tensor(whole, shard / layout.world_size, group=layout.group)
    for piece, mean in zip(values.chunk(layout.world_size), whole.chunk(layout.world_size), strict=True):
        update(piece, mean)

# %% 05.3 an all-reduce in place of the reduce-scatter
from course_lib.zero.optimizer import dist


def zero_1_step(layout, values, gradient, update):
    dist.all_reduce(gradient, group=layout.group)
    update(layout.local_shard(values), layout.local_shard(gradient) / layout.world_size)
    all_gather_into_tensor(values, layout.local_shard(values), group=layout.group)

# %% 05.3 a sum instead of a mean
shard / layout.world_size => shard

# %% 05.3 divides by the world instead of the group
def zero_1_step(
=>
from course_lib.zero.optimizer import dist


def zero_1_step(
---
layout.world_size => dist.get_world_size()

# %% 05.3 its own gradient instead of the mean
shard / layout.world_size => layout.local_shard(gradient) / layout.world_size

# %% 05.3 updates a copy
shard = gradient.new_empty(layout.shard_numel)
=>
shard, own = gradient.new_empty(layout.shard_numel), layout.local_shard(values).clone()
---
layout.local_shard(values), shard => own, shard

# %% 05.3 gathers before it updates
def zero_1_step(layout, values, gradient, update):
    shard = gradient.new_empty(layout.shard_numel)
    reduce_scatter_tensor(shard, gradient, group=layout.group)
    all_gather_into_tensor(values, layout.local_shard(values), group=layout.group)
    update(layout.local_shard(values), shard / layout.world_size)

# %% 05.3 gathers nothing
all_gather_into_tensor(values, layout.local_shard(values), group=layout.group) =>

# %% 05.3 room for the whole buffer where a piece arrives
shard = gradient.new_empty(layout.shard_numel)
=>
shard = torch.empty_like(gradient)
---
shard / layout.world_size => layout.local_shard(shard) / layout.world_size

# %% 05.3 divides by 3
shard / layout.world_size => shard / 3

# %% 05.3 sends a copy of the gradient
reduce_scatter_tensor(shard, gradient, group=layout.group) => reduce_scatter_tensor(shard, gradient.clone(), group=layout.group)

# %% 05.3 gathers into a new buffer
all_gather_into_tensor(values, layout.local_shard(values), group=layout.group)
=>
full = values.clone()
all_gather_into_tensor(full, layout.local_shard(values), group=layout.group)
values.copy_(full)

# %% 05.3 float32 shard
gradient.new_empty(layout.shard_numel) => torch.empty(layout.shard_numel)

# %% 05.4 fake: the norm of its own part
def global_norm(gradients):
    return torch.stack([torch.linalg.vector_norm(g, dtype=torch.float32) for g, _ in gradients]).norm()

# %% 05.4 adds up norms
def global_norm(gradients):
    norms = {}
    for gradient, group in gradients:
        square = torch.linalg.vector_norm(gradient, dtype=torch.float32).square()
        norms[group] = norms.get(group, 0) + square
    norms = {group: square.sqrt() for group, square in norms.items()}
    for group, norm in norms.items():
        if group is not None:
            dist.all_reduce(norm, group=group)
    return sum(norms.values())

# %% 05.4 adds up the norms of the ranks, and the squares of the groups
def global_norm(gradients):
    squares = {}
    for gradient, group in gradients:
        square = torch.linalg.vector_norm(gradient, dtype=torch.float32).square()
        squares[group] = squares.get(group, 0) + square
    for group, square in squares.items():
        if group is not None:
            norm = square.sqrt()
            dist.all_reduce(norm, group=group)
            squares[group] = norm.square()
    return sum(squares.values()).sqrt()

# %% 05.4 everything over all ranks: what is whole counts on each
def global_norm(gradients):
    square = sum(torch.linalg.vector_norm(g, dtype=torch.float32).square() for g, _ in gradients)
    dist.all_reduce(square)
    return square.sqrt()

# %% 05.4 all-reduces what is whole as well
def global_norm(gradients):
    squares = {}
    for gradient, group in gradients:
        squares[group] = squares.get(group, 0) + torch.linalg.vector_norm(gradient, dtype=torch.float32).square()
    for group, square in squares.items():
        dist.all_reduce(square, group=group)
    return sum(squares.values()).sqrt()

# %% 05.4 an all-reduce for each tensor
def global_norm(gradients):
    squares = []
    for gradient, group in gradients:
        square = torch.linalg.vector_norm(gradient, dtype=torch.float32).square()
        if group is not None:
            dist.all_reduce(square, group=group)
        squares.append(square)
    return torch.stack(squares).sum().sqrt()

# %% 05.4 sends a number for each tensor
def global_norm(gradients):
    squares = {}
    for gradient, group in gradients:
        square = torch.linalg.vector_norm(gradient, dtype=torch.float32).square()
        squares.setdefault(group, []).append(square)
    total = 0
    for group, several in squares.items():
        several = torch.stack(several)
        if group is not None:
            dist.all_reduce(several, group=group)
        total = total + several.sum()
    return total.sqrt()

# %% 05.4 squares in the dtype of the gradients
def global_norm(gradients):
    squares = {}
    for gradient, group in gradients:
        squares[group] = squares.get(group, 0) + gradient.square().sum().float()
    for group, square in squares.items():
        if group is not None:
            dist.all_reduce(square, group=group)
    return sum(squares.values()).sqrt()

# %% 05.4 a number of Python
def global_norm(gradients):
    squares = {}
    for gradient, group in gradients:
        squares[group] = squares.get(group, 0) + torch.linalg.vector_norm(gradient, dtype=torch.float32).square()
    for group, square in squares.items():
        if group is not None:
            dist.all_reduce(square, group=group)
    return sum(squares.values()).sqrt().item()

# %% 05.4 the norm in the dtype of the first gradient
def global_norm(gradients):
    squares = {}
    for gradient, group in gradients:
        squares[group] = squares.get(group, 0) + torch.linalg.vector_norm(gradient, dtype=torch.float32).square()
    for group, square in squares.items():
        if group is not None:
            dist.all_reduce(square, group=group)
    return sum(squares.values()).sqrt().to(gradients[0][0].dtype)

# %% 05.4 reads each norm on the host
def global_norm(gradients):
    squares = {}
    for gradient, group in gradients:
        squares[group] = squares.get(group, 0) + torch.linalg.vector_norm(gradient, dtype=torch.float32).item() ** 2
    for group in squares:
        if group is not None:
            square = torch.tensor(squares[group])
            dist.all_reduce(square, group=group)
            squares[group] = square
    return torch.tensor(float(sum(squares.values())) ** 0.5)

# %% 05.4 one long copy
norms = torch._foreach_norm(local, dtype=torch.float32)  # few kernel launches for all
squares.append(torch.stack(norms).square().sum())
=>
squares.append(torch.cat([each.flatten().float() for each in local]).square().sum())

# %% 05.5 looks at the first step only
def diagnose(shards, used):
    shards, used = np.array(shards), np.array(used)
    right, total = np.sqrt((shards**2).sum(axis=0)), shards.sum(axis=0)
    for word, expected in {"right": right, "own part": shards, "sum of norms": total}.items():
        if np.allclose(used[:, 0], expected[..., 0], rtol=1e-3, atol=0):
            return word
    return None

# %% 05.5 looks at rank 0 only
def diagnose(shards, used):
    shards, used = np.array(shards), np.array(used)
    right, total = np.sqrt((shards**2).sum(axis=0)), shards.sum(axis=0)
    for word, expected in {"right": right, "own part": shards[0], "sum of norms": total}.items():
        if np.allclose(used[0], expected, rtol=1e-3, atol=0):
            return word
    return None

# %% 05.5 one step that fits is enough
def diagnose(shards, used):
    shards, used = np.array(shards), np.array(used)
    right, total = np.sqrt((shards**2).sum(axis=0)), shards.sum(axis=0)
    for word, expected in {"right": right, "own part": shards, "sum of norms": total}.items():
        if np.isclose(used, expected, rtol=1e-3, atol=0).any():
            return word
    return None

# %% 05.5 the nearest explanation, however far
def diagnose(shards, used):
    shards, used = np.array(shards), np.array(used)
    right, total = np.sqrt((shards**2).sum(axis=0)), shards.sum(axis=0)
    explanations = {"right": right, "own part": shards, "sum of norms": total}
    return min(explanations, key=lambda word: np.abs(used - explanations[word]).max())

# %% 05.5 fake: asks only whether the ranks agree
def diagnose(shards, used):
    shards, used = np.array(shards), np.array(used)
    right, total = np.sqrt((shards**2).sum(axis=0)), shards.sum(axis=0)
    if not np.allclose(used, used[0], rtol=1e-3, atol=0):
        return "own part"
    return "right" if np.allclose(used, right, rtol=1e-3, atol=0) else "sum of norms"

# %% 05.5 forgets the root
def diagnose(shards, used):
    shards, used = np.array(shards), np.array(used)
    right, total = np.sqrt((shards**2).sum(axis=0)), shards.sum(axis=0)
    for word, expected in {"right": right**2, "own part": shards, "sum of norms": total}.items():
        if np.allclose(used, expected, rtol=1e-3, atol=0):
            return word
    return None

# %% 05.5 the right norm is the largest
def diagnose(shards, used):
    shards, used = np.array(shards), np.array(used)
    right, total = np.sqrt((shards**2).sum(axis=0)), shards.sum(axis=0)
    for word, expected in {"right": shards.max(axis=0), "own part": shards, "sum of norms": total}.items():
        if np.allclose(used, expected, rtol=1e-3, atol=0):
            return word
    return None

# %% 05.5 the words of two explanations mixed up
def diagnose(shards, used):
    shards, used = np.array(shards), np.array(used)
    right, total = np.sqrt((shards**2).sum(axis=0)), shards.sum(axis=0)
    for word, expected in {"right": total, "own part": shards, "sum of norms": right}.items():
        if np.allclose(used, expected, rtol=1e-3, atol=0):
            return word
    return None

# %% 05.5 equal means equal to the last digit
def diagnose(shards, used):
    shards, used = np.array(shards), np.array(used)
    right, total = np.sqrt((shards**2).sum(axis=0)), shards.sum(axis=0)
    for word, expected in {"right": right, "own part": shards, "sum of norms": total}.items():
        if (used == expected).all():
            return word
    return None

# %% 05.5 a tolerance of 5 percent
def diagnose(shards, used):
    shards, used = np.array(shards), np.array(used)
    right, total = np.sqrt((shards**2).sum(axis=0)), shards.sum(axis=0)
    for word, expected in {"right": right, "own part": shards, "sum of norms": total}.items():
        if np.allclose(used, expected, rtol=0.05, atol=0):
            return word
    return None

# %% 05.5 loose tolerance
rtol=1e-3 => rtol=5e-3

# %% 05.6 gradients are not freed
parameter.grad = None =>

# %% 05.6 the gradient becomes a view of the buffer, and stays
parameter.grad = None => parameter.grad = self.views[parameter]

# %% 05.6 fake: .grad is None, but somebody still has the gradient
self.stored.add(parameter)
=>
self.stored.add(parameter)
self.kept = [*getattr(self, "kept", []), parameter.grad]

# %% 05.6 the second gradient replaces the first
def store(self: GradientBuffer, parameter):
    self.views[parameter].copy_(parameter.grad)
    self.stored.add(parameter)
    parameter.grad = None

# %% 05.6 old numbers in place of missing gradients
def send(self: GradientBuffer, shard):
    whole = self.buffer[: self.layout.padded]
    whole[self.layout.numel :].zero_()
    return reduce_scatter_tensor(shard, whole, group=self.layout.group, async_op=True)

# %% 05.6 old numbers in the padding
def send(self: GradientBuffer, shard):
    for parameter, view in self.views.items():
        if parameter not in self.stored:
            view.zero_()
    whole = self.buffer[: self.layout.padded]
    return reduce_scatter_tensor(shard, whole, group=self.layout.group, async_op=True)

# %% 05.6 sends the whole buffer, which is longer than the layout
def send(self: GradientBuffer, shard):
    for parameter, view in self.views.items():
        if parameter not in self.stored:
            view.zero_()
    return reduce_scatter_tensor(shard, self.buffer, group=self.layout.group, async_op=True)

# %% 05.6 zeroes the buffer to its end, beyond its layout
def send(self: GradientBuffer, shard):
    for parameter, view in self.views.items():
        if parameter not in self.stored:
            view.zero_()
    whole = self.buffer[: self.layout.padded]
    self.buffer[self.layout.numel :].zero_()
    return reduce_scatter_tensor(shard, whole, group=self.layout.group, async_op=True)

# %% 05.6 waits
def send(self: GradientBuffer, shard):
    for parameter, view in self.views.items():
        if parameter not in self.stored:
            view.zero_()
    whole = self.buffer[: self.layout.padded]
    whole[self.layout.numel :].zero_()
    work = reduce_scatter_tensor(shard, whole, group=self.layout.group, async_op=True)
    work.wait()
    return work

# %% 05.6 fake: an all-reduce in place of the reduce-scatter
def send(self: GradientBuffer, shard):
    for parameter, view in self.views.items():
        if parameter not in self.stored:
            view.zero_()
    whole, layout = self.buffer[: self.layout.padded], self.layout
    whole[layout.numel :].zero_()
    work = dist.all_reduce(whole, group=layout.group, async_op=True)

    class Later:
        def wait(self):
            work.wait()
            shard.copy_(layout.local_shard(whole))

    return Later()

# %% 05.6 a mean instead of the sum
def send(self: GradientBuffer, shard):
    for parameter, view in self.views.items():
        if parameter not in self.stored:
            view.zero_()
    whole = self.buffer[: self.layout.padded]
    whole[self.layout.numel :].zero_()
    whole.div_(self.layout.world_size)
    return reduce_scatter_tensor(shard, whole, group=self.layout.group, async_op=True)

# %% 05.6 sends a copy of the bucket
full = self.buffer[: self.layout.padded] => full = self.buffer[: self.layout.padded].clone()

# %% 05.6 flattens by view
self.views[parameter].copy_(parameter.grad) => self.views[parameter].view(-1).copy_(parameter.grad.view(-1))

# %% 05.6 clears stored
return reduce_scatter_tensor(shard, full, group=self.layout.group, async_op=True)
=>
work = reduce_scatter_tensor(shard, full, group=self.layout.group, async_op=True)
self.stored.clear()
return work

# %% 05.7 fake: a new buffer each time
def take(self: BufferPool):
    return self.like.new_empty(self.numel)

# %% 05.7 fake: collects the oldest, and makes a new buffer all the same
def take(self: BufferPool):
    while not self.free and self.sending:
        self.sending.popleft().collect()
    if self.free:
        self.free.pop()
    return self.like.new_empty(self.numel)

# %% 05.7 a new buffer instead of waiting
def take(self: BufferPool):
    return self.free.pop() if self.free else self.like.new_empty(self.numel)

# %% 05.7 collects the newest
self.sending.popleft().collect()  # gives its buffer back => self.sending.pop().collect()

# %% 05.7 what has been collected stays in `sending`
self.sending.popleft().collect()  # gives its buffer back => self.sending[0].collect()

# %% 05.7 if instead of while
while not self.free and self.sending: => if not self.free and self.sending:

# %% 05.7 collects one, and takes for granted that its buffer comes back
def take(self: BufferPool):
    if not self.free and not self.sending:
        return self.like.new_empty(self.numel)
    if not self.free:
        self.sending.popleft().collect()
    return self.free.pop()

# %% 05.7 a free buffer stays free
self.free.pop() => self.free[-1]

# %% 05.7 takes for granted that something is being sent
def take(self: BufferPool):
    while not self.free:
        self.sending.popleft().collect()
    return self.free.pop()

# %% 05.7 a further buffer of another dtype
self.like.new_empty => torch.empty

# %% 05.7 the pool grows by each further buffer
def take(self: BufferPool):
    while not self.free and self.sending:
        self.sending.popleft().collect()
    if not self.free:
        self.count += 1
        return self.like.new_empty(self.numel)
    return self.free.pop()

# %% 05.7 buffer on the default device
self.like.new_empty(self.numel) => torch.empty(self.numel, dtype=self.like.dtype)

# %% 05.7 ten
self.like.new_empty(self.numel) => self.like.new_empty(10)

# %% 05.7 keeps all buffers
return self.free.pop() if self.free else self.like.new_empty(self.numel)
=>
buffer = self.free.pop() if self.free else self.like.new_empty(self.numel)
self.made = [*getattr(self, "made", []), buffer]
return buffer

# %% 05.8 in the order of backward: the last layers first
reversed(self.shards) => self.shards

# %% 05.8 an update for each bucket
for bucket, shard in zip(self.gradients, self.shards, strict=True):
    shard.set_grad(bucket.gradient)
self.optimizer.step()
for shard in reversed(self.shards):
    shard.gather()
=>
for bucket, shard in zip(reversed(self.gradients), reversed(self.shards), strict=True):
    shard.set_grad(bucket.gradient)
    self.optimizer.step()
    shard.gather()

# %% 05.8 gathers before it updates
self.optimizer.step()
for shard in reversed(self.shards):
    shard.gather()
=>
for shard in reversed(self.shards):
    shard.gather()
self.optimizer.step()

# %% 05.8 waits for each gather
shard.gather()
=>
shard.gather()
shard.wait()

# %% 05.8 waits at the end, with a module too
if self.module is None:
    self.wait()
=>
self.wait()

# %% 05.8 nobody waits where there is no module
if self.module is None:
    self.wait()
=>

# %% 05.8 waits for the last bucket only
self.wait() => shard.wait()

# %% 05.8 without a module it waits for each gather
    shard.gather()
if self.module is None:
    self.wait()
=>
    shard.gather()
    if self.module is None:
        shard.wait()

# %% 05.8 no gathers
for shard in reversed(self.shards):
    shard.gather()
=>

# %% 05.8 updates by sums instead of means
bucket.gradient => bucket.gradient * self.group.size()

# %% 05.8 the last bucket has no gradient
zip(self.gradients, self.shards, strict=True) => zip(self.gradients[:-1], self.shards)

# %% 05.8 always SGD, with what it knows of the settings
self.optimizer.step()
=>
settings = self.param_groups[0]
if not hasattr(self, "sgd"):
    pieces = [shard.shard for shard in self.shards]
    self.sgd = torch.optim.SGD(pieces, settings["lr"], momentum=settings.get("momentum", 0.9))
self.sgd.step()

# %% 05.8 always AdamW
self.optimizer.step()
=>
if not hasattr(self, "adam"):
    self.adam = torch.optim.AdamW([shard.shard for shard in self.shards], self.param_groups[0]["lr"])
self.adam.step()

# %% 05.8 all settings but lr and momentum are dropped
self.optimizer.step()
=>
for group in self.optimizer.param_groups:
    group.update((key, value) for key, value in (("betas", (0.9, 0.999)), ("eps", 1e-8)) if key in group)
    group["weight_decay"] = 0.01 if "betas" in group else 0.0
self.optimizer.step()

# %% 05.8 weight_decay is dropped
self.optimizer.step()
=>
for group in self.optimizer.param_groups:
    group["weight_decay"] = 0.0
self.optimizer.step()

# %% 05.8 copies each gradient
shard.set_grad(bucket.gradient) => shard.set_grad(bucket.gradient.clone())

# %% 05.8 keeps gradients
shard.set_grad(bucket.gradient)
=>
shard.set_grad(bucket.gradient)
self.last = [each.gradient.clone() for each in self.gradients]

# %% 05.9 fake: free() resizes nothing
self.values.untyped_storage().resize_(0) =>

# %% 05.9 fake: free() drops its view, and gather() makes a new buffer
self.values.untyped_storage().resize_(self.nbytes)
=>
self.values = torch.empty(self.layout.padded, dtype=self.values.dtype)
---
self.values.untyped_storage().resize_(0)
=>
self.values = self.values.new_empty(0)

# %% 05.9 fake: keeps a copy of all values
if not self.gathered:
=>
self.whole = torch.empty_like(self.values)
if not self.gathered:

# %% 05.9 free() does not wait, and may crash
self.wait() =>

# %% 05.9 free() waits when the memory is gone already, and may crash
def free(self: GatheredBuffer):
    self.values.untyped_storage().resize_(0)
    if self.encoding is None:
        self.wait()
    self.work = self.payloads = None
    self.gathered = False

# %% 05.9 free() forgets the work instead of waiting, and may crash
self.wait()
=>
self.work = self.payloads = None

# %% 05.9 free() leaves it gathered
self.gathered = False =>

# %% 05.9 gather() waits
def gather(self: GatheredBuffer):
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
        self.wait()

# %% 05.9 gather() gathers each time
if not self.gathered:
    self.gathered = True
=>
self.wait()  # for one that is under way: else it would write to memory that free() has given back
if True:
    self.gathered = True

# %% 05.9 the encoding is passed over
def gather(self: GatheredBuffer):
    if not self.gathered:
        self.gathered = True
        self.values.untyped_storage().resize_(self.nbytes)
        local = self.layout.local_shard(self.values)
        local.copy_(self.shard)
        self.work = all_gather_into_tensor(self.values, local, group=self.layout.group, async_op=True)

# %% 05.9 a row of the payloads for each rank, which gloo does not take
self.layout.world_size * len(payload) => self.layout.world_size, payload.numel()

# %% 05.9 sends the shard in its own dtype
local = self.layout.local_shard(self.values)
local.copy_(self.shard)
self.work = all_gather_into_tensor(self.values, local, group=self.layout.group, async_op=True)
=>
self.work = all_gather_into_tensor(self.values, self.shard, group=self.layout.group, async_op=True)

# %% 05.9 four bytes each
self.values.untyped_storage().resize_(self.nbytes) => self.values.untyped_storage().resize_(4 * self.values.numel())

# %% 05.9 keeps payloads after free
self.wait()
self.values.untyped_storage().resize_(0)
=>
self.last = self.payloads
self.wait()
self.values.untyped_storage().resize_(0)

# %% 05.9 payload without dtype
self.payloads = payload.new_empty(self.layout.world_size * len(payload)) => self.payloads = torch.empty(self.layout.world_size * len(payload), dtype=torch.uint8)

# %% 05.10 the last unit is gathered twice as well
gathers = 16
times_data_parallel = 1.5

# %% 05.10 forward only
gathers = 8
times_data_parallel = 1.5

# %% 05.10 blocks only
gathers = 11
times_data_parallel = 1.5

# %% 05.10 the first and the last are kept
gathers = 14
times_data_parallel = 1.5

# %% 05.10 as many bytes as data parallelism
gathers = 15
times_data_parallel = 1.0

# %% 05.10 elements instead of a multiple
gathers = 15
times_data_parallel = 3.0

# %% 05.10 no gather before backward
gathers = 15
times_data_parallel = 0.75

# %% 05.10 a word
gathers = 15
times_data_parallel = "half as much again"

# %% 05.11 no prefetch
def pre_backward(self: FullyShard, unit):
    if unit in self.unreduced:
        return
    unit.gather()
    self.send(self.unreduced)
    self.unreduced = [unit]
    unit.wait()

# %% 05.11 prefetches after it has waited
self.unreduced = [unit]
=>
self.unreduced = [unit]
unit.wait()
---
unit.wait() =>

# %% 05.11 prefetches in the order of forward
if position > 0: => if position + 1 < len(self.forward_order):
self.forward_order[position - 1].gather() => self.forward_order[position + 1].gather()

# %% 05.11 gathers everything at once
def pre_backward(self: FullyShard, unit):
    if unit in self.unreduced:
        return
    unit.gather()
    self.send(self.unreduced)
    self.unreduced = [unit]
    for other in reversed(self.forward_order):
        other.gather()
    unit.wait()

# %% 05.11 the hook works each time it fires
if unit in self.unreduced:
    return
=>

# %% 05.11 never sends before the end
self.send(self.unreduced)
self.unreduced = [unit]
=>
self.unreduced.append(unit)

# %% 05.11 sends the unit whose backward begins
self.send(self.unreduced) => self.send([unit])

# %% 05.11 prefetches before it sends
def pre_backward(self: FullyShard, unit):
    if unit in self.unreduced:
        return
    unit.gather()
    position = self.forward_order.index(unit) if unit in self.forward_order else 0
    if position > 0:
        self.forward_order[position - 1].gather()
    self.send(self.unreduced)
    self.unreduced = [unit]
    unit.wait()

# %% 05.11 before the first unit comes the last
if position > 0:
    self.forward_order[position - 1].gather()
=>
self.forward_order[position - 1].gather()

# %% 05.11 takes for granted that the unit has run
(unit) if unit in self.forward_order else 0 => (unit)

# %% 05.11 finish takes the root's gradients without waiting for them
    unit.wait()
=>
    unit.wait()


def finish(self: FullyShard):
    self.send_all()
    for flat in self.root.flat_params:
        for sent in flat.in_flight:
            flat.add_grad(sent.shard.to(flat.shard.dtype).mul_(flat.post_scale))
        flat.in_flight.clear()
    for unit in self.reducing:
        unit.collect()
    self.reducing = []
    for flat in self.flat_params:
        flat.used.clear()
    self.wait()

# %% 05.11 forward does not wait for the root's values
    unit.wait()
=>
    unit.wait()


def gather_root(self: FullyShard):
    self.root.gather()
    for flat in self.root.flat_params:
        flat.register(flat.unsharded_params)

# %% 05.11 removes from forward_order
unit.wait()
=>
if unit in self.forward_order: self.forward_order.remove(unit)
unit.wait()

# %% 05.12 first fit
min(fitting, key=lambda hole: hole[1] - hole[0]) => fitting[0]

# %% 05.12 of equal holes the last
fitting, key => reversed(fitting), key

# %% 05.12 sizes are rounded down
-(-nbytes // ALIGNMENT) => max(nbytes // ALIGNMENT, 1)

# %% 05.12 a hole must be larger than the block
start >= size => start > size

# %% 05.12 no split: the whole hole is handed out
[where : where + 1] = [(start + size, end)] if start + size < end else [] => [where : where + 1] = []
self.taken[start] = size => self.taken[start] = end - start

# %% 05.12 a hole that a block fills stays, with no bytes
where = self.holes.index((start, end))
self.holes[where : where + 1] = [(start + size, end)] if start + size < end else []
=>
self.holes[self.holes.index((start, end))] = start + size, end

# %% 05.12 returns nothing where no hole is large enough
raise self.no_hole(size) => return None

# %% 05.12 does not ask whether a hole is large enough
if not fitting:
    raise self.no_hole(size)
=>

# %% 05.12 no coalescing
def give_back(self: Arena, address: int) -> None:
    start, end = address, address + self.taken.pop(address)
    bisect.insort(self.holes, (start, end))

# %% 05.12 coalesces with one neighbour, not with both
def give_back(self: Arena, address: int) -> None:
    start, end = address, address + self.taken.pop(address)
    for hole in self.holes:
        if hole[1] == start or hole[0] == end:
            self.holes.remove(hole)
            start, end = min(start, hole[0]), max(end, hole[1])
            break
    bisect.insort(self.holes, (start, end))

# %% 05.12 fake: asks only whether enough is free in sum
def take(self: Arena, nbytes: int) -> int:
    size = -(-nbytes // ALIGNMENT) * ALIGNMENT
    if sum(end - start for start, end in self.holes) < size:
        raise self.no_hole(size)
    fitting = [(start, end) for start, end in self.holes if end - start >= size] or self.holes
    start, end = min(fitting, key=lambda hole: hole[1] - hole[0])
    where = self.holes.index((start, end))
    self.holes[where : where + 1] = [(start + size, end)] if start + size < end else []
    self.taken[start] = size
    return start

# %% 05.12 unknown addresses are passed over
start, end = address, address + self.taken.pop(address)
=>
start, end = address, address + self.taken.pop(address, 0)
if start == end:
    return

# %% 05.13 none is lost
percent_lost = 0

# %% 05.13 three percent, as on the 8B
percent_lost = 3

# %% 05.13 a third
percent_lost = 33

# %% 05.13 a factor, not percent
percent_lost = 1.14

# %% 05.13 a fraction
percent_lost = 0.136

# %% 05.13 no number
percent_lost = "14%"

# %% 05.14 elements instead of bytes, as in the playbook
return param_bytes => return 1

# %% 05.14 all of the bytes, not (N-1)/N
(dp - 1) / dp * peak => peak

# %% 05.14 once to each of the others
(dp - 1) / dp * peak => (dp - 1) * peak

# %% 05.14 an all-reduce instead of an all-gather
return param_bytes => return 2 * param_bytes

# %% 05.14 the forward over the gather
def gather_ratio(tokens, dp, bandwidth, peak, param_bytes=2):
    ratio = param_bytes / (2 * tokens) * max(dp - 1, 1) / dp * peak / bandwidth
    return 1 / ratio

# %% 05.14 the operations of backward
2 * tokens => 4 * tokens

# %% 05.14 forgets the tokens
param_bytes / (2 * tokens) => param_bytes / 2

# %% 05.14 bandwidth over peak
peak / bandwidth => bandwidth / peak

# %% 05.14 two bytes, whatever the dtype
return param_bytes => return 2

# %% 05.14 prints the ratio
def gather_ratio(tokens, dp, bandwidth, peak, param_bytes=2):
    print(param_bytes / (2 * tokens) * (dp - 1) / dp * peak / bandwidth)

# %% 05.14 small model
tokens) => min(tokens, 8192))
