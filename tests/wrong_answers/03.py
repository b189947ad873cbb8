"""Wrong answers that the checks of notebook 03 must catch. Three of them hang, which costs the ranks' timeout each."""

# %% 03.1 fake: the values by hand, without communication
def every_collective(group) -> dict:
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    gathered = [torch.full((2,), r + 1.0) for r in range(n)]
    powers = [sum(((r + 1) * torch.tensor([1.0, 2.0])) ** (j + 1) for r in range(n)) for j in range(n)]
    return {
        "broadcast": torch.arange(1.0, 6.0),
        "reduce": torch.full((3,), n * (n + 1) / 2),
        "all_reduce": torch.full((3,), n * (n + 1) / 2),
        "gather": gathered if rank == 0 else None,
        "all_gather": gathered,
        "scatter": torch.full((2,), 10.0 * (rank + 1)),
        "reduce_scatter": powers[rank],
    }

# %% 03.1 all_gather instead of gather
def every_collective(group) -> dict:
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    whole = torch.arange(1.0, 6.0) if rank == 0 else torch.zeros(5)
    to_reduce, to_all_reduce = torch.full((3,), rank + 1.0), torch.full((3,), rank + 1.0)
    mine = torch.full((2,), rank + 1.0)
    shards = [torch.full((2,), 10.0 * (r + 1)) for r in range(n)] if rank == 0 else None
    powers = [((rank + 1) * torch.tensor([1.0, 2.0])) ** (j + 1) for j in range(n)]
    dist.broadcast(whole, group_src=0, group=group)
    dist.reduce(to_reduce, group_dst=0, group=group)
    dist.all_reduce(to_all_reduce, group=group)
    all_gathered, shard, summed = [torch.empty(2) for _ in range(n)], torch.empty(2), torch.empty(2)
    dist.all_gather(all_gathered, mine, group=group)
    dist.scatter(shard, shards, group_src=0, group=group)
    dist.reduce_scatter(summed, powers, group=group)
    gathered = all_gathered if rank == 0 else None
    results = whole, to_reduce, to_all_reduce, gathered, all_gathered, shard, summed
    return dict(
        zip(("broadcast", "reduce", "all_reduce", "gather", "all_gather", "scatter", "reduce_scatter"), results)
    )

# %% 03.1 one tensor many times in the list that all_gather fills
all_gathered = [torch.empty(2) for _ in range(n)]
=>
all_gathered, shard, summed = [torch.empty(2)] * n, torch.empty(2), torch.empty(2)
---
shard = torch.empty(2) =>
summed = torch.empty(2) =>
---
return {
    "broadcast": whole,
    "reduce": to_reduce,
    "all_reduce": to_all_reduce,
    "gather": gathered,
    "all_gather": all_gathered,
    "scatter": shard,
    "reduce_scatter": summed,
}
=>
results = whole, to_reduce, to_all_reduce, gathered, all_gathered, shard, summed
return dict(
    zip(("broadcast", "reduce", "all_reduce", "gather", "all_gather", "scatter", "reduce_scatter"), results)
)

# %% 03.1 reduces to the last rank
to_reduce, group_dst=0 => to_reduce, group_dst=n - 1
---
all_gathered = [torch.empty(2) for _ in range(n)]
=>
all_gathered, shard, summed = [torch.empty(2) for _ in range(n)], torch.empty(2), torch.empty(2)
---
shard = torch.empty(2) =>
summed = torch.empty(2) =>
---
return {
    "broadcast": whole,
    "reduce": to_reduce,
    "all_reduce": to_all_reduce,
    "gather": gathered,
    "all_gather": all_gathered,
    "scatter": shard,
    "reduce_scatter": summed,
}
=>
results = whole, to_reduce, to_all_reduce, gathered, all_gathered, shard, summed
return dict(
    zip(("broadcast", "reduce", "all_reduce", "gather", "all_gather", "scatter", "reduce_scatter"), results)
)

# %% 03.1 reduce-scatter of this rank's own powers, by an all-reduce and a cut
def every_collective(group) -> dict:
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    whole = torch.arange(1.0, 6.0) if rank == 0 else torch.zeros(5)
    to_reduce, to_all_reduce = torch.full((3,), rank + 1.0), torch.full((3,), rank + 1.0)
    mine = torch.full((2,), rank + 1.0)
    shards = [torch.full((2,), 10.0 * (r + 1)) for r in range(n)] if rank == 0 else None
    powers = torch.stack([((rank + 1) * torch.tensor([1.0, 2.0])) ** (j + 1) for j in range(n)])
    dist.broadcast(whole, group_src=0, group=group)
    dist.reduce(to_reduce, group_dst=0, group=group)
    dist.all_reduce(to_all_reduce, group=group)
    gathered = [torch.empty(2) for _ in range(n)] if rank == 0 else None
    dist.gather(mine, gathered, group_dst=0, group=group)
    all_gathered, shard = [torch.empty(2) for _ in range(n)], torch.empty(2)
    dist.all_gather(all_gathered, mine, group=group)
    dist.scatter(shard, shards, group_src=0, group=group)
    dist.all_reduce(powers, group=group)
    results = whole, to_reduce, to_all_reduce, gathered, all_gathered, shard, powers[rank]
    return dict(
        zip(("broadcast", "reduce", "all_reduce", "gather", "all_gather", "scatter", "reduce_scatter"), results)
    )

# %% 03.1 forgets a result
def every_collective(group) -> dict:
    rank = dist.get_rank(group)
    whole = torch.arange(1.0, 6.0) if rank == 0 else torch.zeros(5)
    dist.broadcast(whole, group_src=0, group=group)
    return {"broadcast": whole}

# %% 03.1 names the roots by their numbers among all ranks
def every_collective(group) -> dict:
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    whole = torch.arange(1.0, 6.0) if rank == 0 else torch.zeros(5)
    to_reduce, to_all_reduce = torch.full((3,), rank + 1.0), torch.full((3,), rank + 1.0)
    mine = torch.full((2,), rank + 1.0)
    shards = [torch.full((2,), 10.0 * (r + 1)) for r in range(n)] if rank == 0 else None
    powers = [((rank + 1) * torch.tensor([1.0, 2.0])) ** (j + 1) for j in range(n)]
    dist.broadcast(whole, src=0, group=group)
    dist.reduce(to_reduce, dst=0, group=group)
    dist.all_reduce(to_all_reduce, group=group)
    gathered = [torch.empty(2) for _ in range(n)] if rank == 0 else None
    dist.gather(mine, gathered, dst=0, group=group)
    all_gathered, shard, summed = [torch.empty(2) for _ in range(n)], torch.empty(2), torch.empty(2)
    dist.all_gather(all_gathered, mine, group=group)
    dist.scatter(shard, shards, src=0, group=group)
    dist.reduce_scatter(summed, powers, group=group)
    results = whole, to_reduce, to_all_reduce, gathered, all_gathered, shard, summed
    return dict(
        zip(("broadcast", "reduce", "all_reduce", "gather", "all_gather", "scatter", "reduce_scatter"), results)
    )

# %% 03.2 what rank 0 sends and receives
star_mb_4, star_mb_512 = 24, 4088

# %% 03.2 counts rank 0 as a receiver of its own: too much with four ranks
star_mb_4, star_mb_512 = 16, 2048

# %% 03.2 does not grow
star_mb_4, star_mb_512 = 12, 12

# %% 03.2 messages instead of MB
star_mb_4, star_mb_512 = 3, 511

# %% 03.2 nothing
star_mb_4 = star_mb_512 = None

# %% 03.2 words
star_mb_4, star_mb_512 = "12", "2044"

# %% 03.3 a star: the source sends to each
def tree_broadcast(tensor, src=0, group=None):
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    if rank == src:
        for other in range(n):
            if other != src:
                dist.send(tensor, group_dst=other, group=group)
    else:
        dist.recv(tensor, group_src=src, group=group)

# %% 03.3 the source is always rank 0
def tree_broadcast(tensor, src=0, group=None):
    rank, n, have = dist.get_rank(group), dist.get_world_size(group), 1
    while have < n:
        if rank < have and rank + have < n:
            dist.send(tensor, group_dst=rank + have, group=group)
        elif have <= rank < 2 * have:
            dist.recv(tensor, group_src=rank - have, group=group)
        have *= 2

# %% 03.3 dist.broadcast
def tree_broadcast(tensor, src=0, group=None):
    dist.broadcast(tensor, group_src=src, group=group)

# %% 03.3 one step only
def tree_broadcast(tensor, src=0, group=None):
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    index = (rank - src) % n
    if index == 0 and n > 1:
        dist.send(tensor, group_dst=(rank + 1) % n, group=group)
    elif index == 1:
        dist.recv(tensor, group_src=src, group=group)

# %% 03.3 the same tree, but the farthest child first: the deepest rank waits for a third step
def tree_broadcast(tensor, src=0, group=None):
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    index = (rank - src) % n
    if index:
        parent = index - 2 ** (index.bit_length() - 1)
        dist.recv(tensor, group_src=(parent + src) % n, group=group)
    for bit in reversed(range(index.bit_length(), n.bit_length())):
        if index + 2**bit < n:
            dist.send(tensor, group_dst=(index + 2**bit + src) % n, group=group)

# %% 03.3 sends the tensor in two halves
def tree_broadcast(tensor, src=0, group=None):
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    for part in tensor.tensor_split(2):
        index, have = (rank - src) % n, 1
        while have < n:
            if index < have and index + have < n:
                dist.send(part, group_dst=(rank + have) % n, group=group)
            elif have <= index < 2 * have:
                dist.recv(part, group_src=(rank - have) % n, group=group)
            have *= 2

# %% 03.3 powers of two only: with three ranks, one sends to a rank that is not there and hangs
if index < have and index + have < n: => if index < have:

# %% 03.3 takes ranks of the group for ranks among all
tensor, group_dst => tensor, dst
tensor, group_src => tensor, src

# %% 03.3 everything as float32: long whole numbers lose their last digits
def tree_broadcast(tensor, src=0, group=None):
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    index, have, carried = (rank - src) % n, 1, tensor.float()
    while have < n:
        if index < have and index + have < n:
            dist.send(carried, group_dst=(rank + have) % n, group=group)
        elif have <= index < 2 * have:
            dist.recv(carried, group_src=(rank - have) % n, group=group)
        have *= 2
    if index:
        tensor.copy_(carried)

# %% 03.3 receives into float32, whatever is sent
index, have = (rank - src) % n, 1 => index, have, received = (rank - src) % n, 1, torch.empty(tensor.shape)
---
dist.recv(tensor, group_src=(rank - have) % n, group=group)
=>
dist.recv(received, group_src=(rank - have) % n, group=group)
tensor.copy_(received)

# %% 03.4 whole tensors go round: right sums, N times the bytes
def ring_reduce_scatter(tensor, group=None):
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    passing = tensor.clone()
    for _ in range(n - 1):
        received = torch.empty_like(tensor)
        exchange(passing, received, group)
        tensor.add_(received)
        passing = received
    return tensor.view(-1).tensor_split(n)[rank]

# %% 03.4 an all-reduce, then cut
def ring_reduce_scatter(tensor, group=None):
    dist.all_reduce(tensor, group=group)
    return tensor.view(-1).tensor_split(dist.get_world_size(group))[dist.get_rank(group)]

# %% 03.4 no ring: each shard straight to its owner, as many bytes in as many steps
def ring_reduce_scatter(tensor, group=None):
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    shards = tensor.view(-1).tensor_split(n)
    for step in range(1, n):
        received = torch.empty_like(shards[rank])
        to, by = (rank + step) % n, (rank - step) % n
        sending = dist.isend(shards[to], group_dst=to, group=group)
        dist.recv(received, group_src=by, group=group)
        sending.wait()
        shards[rank].add_(received)
    return shards[rank]

# %% 03.4 each rank ends with the next one's shard, as in many textbooks
def ring_reduce_scatter(tensor, group=None):
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    shards = tensor.view(-1).tensor_split(n)
    buffer = torch.empty_like(shards[0])
    for step in range(n - 1):
        added = shards[(rank - step - 1) % n]
        received = buffer[: added.numel()]
        exchange(shards[(rank - step) % n], received, group)
        added.add_(received)
    return shards[(rank + 1) % n]

# %% 03.4 returns the right place after the wrong schedule
partial, added = shards[(rank - step - 1) % n], shards[(rank - step - 2) % n] => added = shards[(rank - step - 1) % n]
exchange(partial, received, group) => exchange(shards[(rank - step) % n], received, group)

# %% 03.4 even sizes only: the rest of the division is forgotten
def ring_reduce_scatter(tensor, group=None):
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    size = tensor.numel() // n
    shards = [tensor.view(-1)[r * size : (r + 1) * size] for r in range(n)]
    for step in range(n - 1):
        added = shards[(rank - step - 2) % n]
        received = torch.empty_like(added)
        exchange(shards[(rank - step - 1) % n], received, group)
        added.add_(received)
    return shards[rank]

# %% 03.4 the other way round: sends to the previous rank
def ring_reduce_scatter(tensor, group=None):
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    shards = tensor.view(-1).tensor_split(n)
    for step in range(n - 1):
        added = shards[(rank + step + 2) % n]
        received = torch.empty_like(added)
        sending = dist.isend(shards[(rank + step + 1) % n], group_dst=(rank - 1) % n, group=group)
        dist.recv(received, group_src=(rank + 1) % n, group=group)
        sending.wait()
        added.add_(received)
    return shards[rank]

# %% 03.4 adds up in a copy, so that the shard is not a view of the tensor
def ring_reduce_scatter(tensor, group=None):
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    shards = tensor.view(-1).clone().tensor_split(n)
    for step in range(n - 1):
        added = shards[(rank - step - 2) % n]
        received = torch.empty_like(added)
        exchange(shards[(rank - step - 1) % n], received, group)
        added.add_(received)
    return shards[rank]

# %% 03.4 works in a copy of the whole tensor, and copies it back
def ring_reduce_scatter(tensor, group=None):
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    copy = tensor.view(-1).clone()
    shards = copy.tensor_split(n)
    for step in range(n - 1):
        added = shards[(rank - step - 2) % n]
        received = torch.empty_like(added)
        exchange(shards[(rank - step - 1) % n], received, group)
        added.add_(received)
    tensor.view(-1).copy_(copy)
    return tensor.view(-1).tensor_split(n)[rank]

# %% 03.4 returns a copy of its shard
def ring_reduce_scatter(tensor, group=None):
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    shards = tensor.view(-1).tensor_split(n)
    for step in range(n - 1):
        added = shards[(rank - step - 2) % n]
        received = torch.empty_like(added)
        exchange(shards[(rank - step - 1) % n], received, group)
        added.add_(received)
    return shards[rank].clone()

# %% 03.4 a buffer for each step: together as much as the tensor less a shard
def ring_reduce_scatter(tensor, group=None):
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    shards = tensor.view(-1).tensor_split(n)
    buffers = [torch.empty_like(shards[(rank - step - 2) % n]) for step in range(n - 1)]
    for step, received in enumerate(buffers):
        exchange(shards[(rank - step - 1) % n], received, group)
        shards[(rank - step - 2) % n].add_(received)
    return shards[rank]

# %% 03.4 an all-reduce where it is alone
def ring_reduce_scatter(tensor, group=None):
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    if n == 1:
        dist.all_reduce(tensor, group=group)
    shards = tensor.view(-1).tensor_split(n)
    for step in range(n - 1):
        added = shards[(rank - step - 2) % n]
        received = torch.empty_like(added)
        exchange(shards[(rank - step - 1) % n], received, group)
        added.add_(received)
    return shards[rank]

# %% 03.5 dist.all_gather
def ring_all_gather(tensor, group=None):
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    shards = list(tensor.view(-1).tensor_split(n))
    largest = shards[0].numel()
    padded = [torch.zeros(largest, dtype=tensor.dtype) for _ in range(n)]
    mine = torch.zeros(largest, dtype=tensor.dtype)
    mine[: shards[rank].numel()] = shards[rank]
    dist.all_gather(padded, mine, group=group)
    for shard, got in zip(shards, padded):
        shard.copy_(got[: shard.numel()])

# %% 03.5 whole tensors go round: right values, too many bytes
def ring_all_gather(tensor, group=None):
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    received = torch.empty_like(tensor)
    for step in range(n - 1):
        exchange(tensor, received, group)
        shard = (rank - step - 1) % n
        tensor.view(-1).tensor_split(n)[shard].copy_(received.view(-1).tensor_split(n)[shard])

# %% 03.5 no ring: its own shard straight to everyone
def ring_all_gather(tensor, group=None):
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    shards = tensor.view(-1).tensor_split(n)
    for step in range(1, n):
        sending = dist.isend(shards[rank], group_dst=(rank + step) % n, group=group)
        dist.recv(shards[(rank - step) % n], group_src=(rank - step) % n, group=group)
        sending.wait()

# %% 03.5 always sends its own shard
(rank - step) % n => rank

# %% 03.5 even sizes only
shards = tensor.view(-1).tensor_split(n)
=>
size = tensor.numel() // n
shards = [tensor.view(-1)[r * size : (r + 1) * size] for r in range(n)]

# %% 03.5 fills in a copy
shards = tensor.view(-1).tensor_split(n) => shards = tensor.view(-1).clone().tensor_split(n)

# %% 03.5 goes on until its own shard is back: a step too many
for step in range(n - 1): => for step in range(n):

# %% 03.5 works in a copy of the whole tensor, and copies it back
def ring_all_gather(tensor, group=None):
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    copy = tensor.view(-1).clone()
    shards = copy.tensor_split(n)
    for step in range(n - 1):
        exchange(shards[(rank - step) % n], shards[(rank - step - 1) % n], group)
    tensor.view(-1).copy_(copy)

# %% 03.5 a copy of all shards one by one
def ring_all_gather(tensor, group=None):
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    shards = [shard.clone() for shard in tensor.view(-1).tensor_split(n)]
    for step in range(n - 1):
        exchange(shards[(rank - step) % n], shards[(rank - step - 1) % n], group)
    for shard, got in zip(tensor.view(-1).tensor_split(n), shards):
        shard.copy_(got)

# %% 03.6 dist.all_reduce
def ring_all_reduce(tensor, group=None):
    dist.all_reduce(tensor, group=group)

# %% 03.6 the mean
def ring_all_reduce(tensor, group=None):
    ring_reduce_scatter(tensor, group)
    ring_all_gather(tensor, group)
    tensor.copy_(tensor / dist.get_world_size(group))

# %% 03.6 no all-gather
def ring_all_reduce(tensor, group=None):
    ring_reduce_scatter(tensor, group)

# %% 03.6 a star
from course_kit.labs.collectives import star_all_reduce


def ring_all_reduce(tensor, group=None):
    star_all_reduce(group, tensor)

# %% 03.6 a copy that is never written back
def ring_all_reduce(tensor, group=None):
    flat = tensor.reshape(-1).clone()
    ring_reduce_scatter(flat, group)
    ring_all_gather(flat, group)
    return flat.view_as(tensor)

# %% 03.6 whole tensors go round, once
def ring_all_reduce(tensor, group=None):
    passing = tensor.clone()
    for _ in range(dist.get_world_size(group) - 1):
        received = torch.empty_like(tensor)
        exchange(passing, received, group)
        tensor.add_(received)
        passing = received

# %% 03.6 gathers twice
def ring_all_reduce(tensor, group=None):
    ring_reduce_scatter(tensor, group)
    ring_all_gather(tensor, group)
    ring_all_gather(tensor, group)

# %% 03.6 the whole tensor at once
def ring_all_reduce(tensor, group=None):
    ring_reduce_scatter(tensor, group)
    ring_all_gather(tensor, group)

# %% 03.6 leaves out the last chunk, which is shorter
def ring_all_reduce(tensor, group=None):
    flat = tensor.view(-1)
    for start in range(0, max(1, flat.numel() // CHUNK), 1):
        ring_reduce_scatter(flat[start * CHUNK : (start + 1) * CHUNK], group)
        ring_all_gather(flat[start * CHUNK : (start + 1) * CHUNK], group)

# %% 03.6 works in a copy of the whole tensor, and copies it back
def ring_all_reduce(tensor, group=None):
    copy = tensor.clone()
    for chunk in copy.view(-1).split(2**22):
        ring_reduce_scatter(chunk, group)
        ring_all_gather(chunk, group)
    tensor.copy_(copy)

# %% 03.6 chunks of a size of its own
(CHUNK) => (500)

# %% 03.7 the factor of all-reduce for all
def bandwidths(collective, size, seconds, world_size):
    return size / seconds, size / seconds * 2 * (world_size - 1) / world_size

# %% 03.7 an all-reduce passes each shard once only
def bandwidths(collective, size, seconds, world_size):
    once = (world_size - 1) / world_size
    factors = {"all_reduce": once, "reduce_scatter": once, "all_gather": once, "all_to_all": once}
    factors |= {"broadcast": 1, "reduce": 1}
    if collective not in factors:
        raise ValueError(collective)
    return size / seconds, size / seconds * factors[collective]

# %% 03.7 bus bandwidth first
def bandwidths(collective, size, seconds, world_size):
    once = (world_size - 1) / world_size
    factors = {"all_reduce": 2 * once, "reduce_scatter": once, "all_gather": once, "all_to_all": once}
    factors |= {"broadcast": 1, "reduce": 1}
    if collective not in factors:
        raise ValueError(collective)
    return size / seconds * factors[collective], size / seconds

# %% 03.7 in GB a second
def bandwidths(collective, size, seconds, world_size):
    once = (world_size - 1) / world_size
    factors = {"all_reduce": 2 * once, "reduce_scatter": once, "all_gather": once, "all_to_all": once}
    factors |= {"broadcast": 1, "reduce": 1}
    if collective not in factors:
        raise ValueError(collective)
    return size / seconds / 1e9, size / seconds / 1e9 * factors[collective]

# %% 03.7 four ranks for ever
def bandwidths(collective, size, seconds, world_size):
    factors = {"all_reduce": 1.5, "reduce_scatter": 0.75, "all_gather": 0.75, "all_to_all": 0.75}
    factors |= {"broadcast": 1, "reduce": 1}
    if collective not in factors:
        raise ValueError(collective)
    return size / seconds, size / seconds * factors[collective]

# %% 03.7 size is a shard for all_gather and reduce_scatter
def bandwidths(collective, size, seconds, world_size):
    n = world_size
    factors = {"all_reduce": 2 * (n - 1) / n, "reduce_scatter": n - 1, "all_gather": n - 1, "all_to_all": (n - 1) / n}
    factors |= {"broadcast": 1, "reduce": 1}
    if collective not in factors:
        raise ValueError(collective)
    return size / seconds, size / seconds * factors[collective]

# %% 03.7 broadcast and reduce leave out the root
def bandwidths(collective, size, seconds, world_size):
    once = (world_size - 1) / world_size
    if collective not in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce"):
        raise ValueError(collective)
    return size / seconds, size / seconds * (2 * once if collective == "all_reduce" else once)

# %% 03.7 takes any other collective for a broadcast
def bandwidths(collective, size, seconds, world_size):
    once = (world_size - 1) / world_size
    factors = {"all_reduce": 2 * once, "reduce_scatter": once, "all_gather": once, "all_to_all": once}
    return size / seconds, size / seconds * factors.get(collective, 1)

# %% 03.7 the dictionary's own error for an unknown collective
def bandwidths(collective, size, seconds, world_size):
    once = (world_size - 1) / world_size
    factors = {"all_reduce": 2 * once, "reduce_scatter": once, "all_gather": once, "all_to_all": once}
    factors |= {"broadcast": 1, "reduce": 1}
    return size / seconds, size / seconds * factors[collective]

# %% 03.7 a factor for gather and scatter too
def bandwidths(collective, size, seconds, world_size):
    once = (world_size - 1) / world_size
    factors = {"all_reduce": 2 * once, "reduce_scatter": once, "all_gather": once, "all_to_all": once}
    factors |= {"broadcast": 1, "reduce": 1, "gather": once, "scatter": once}
    if collective not in factors:
        raise ValueError(collective)
    return size / seconds, size / seconds * factors[collective]

# %% 03.8 absolute errors
import numpy as np


def fit_alpha_beta(sizes, seconds):
    slope, alpha = np.polyfit(sizes, seconds, 1)
    return alpha, 1 / slope

# %% 03.8 weighs the squares by 1/t instead of the errors
import numpy as np


def fit_alpha_beta(sizes, seconds):
    slope, alpha = np.polyfit(sizes, seconds, 1, w=1 / np.sqrt(seconds))
    return alpha, 1 / slope

# %% 03.8 beta from the two largest, alpha from what they leave
def fit_alpha_beta(sizes, seconds):
    beta = (sizes[-1] - sizes[-2]) / (seconds[-1] - seconds[-2])
    return seconds[-1] - sizes[-1] / beta, beta

# %% 03.8 a line through the two smallest: noise for a bandwidth
def fit_alpha_beta(sizes, seconds):
    beta = (sizes[1] - sizes[0]) / (seconds[1] - seconds[0])
    return seconds[0] - sizes[0] / beta, beta

# %% 03.8 a line through the smallest and the largest
def fit_alpha_beta(sizes, seconds):
    beta = (sizes[-1] - sizes[0]) / (seconds[-1] - seconds[0])
    return seconds[0] - sizes[0] / beta, beta

# %% 03.8 the smallest time and the best bandwidth
def fit_alpha_beta(sizes, seconds):
    return min(seconds), max(size / time_s for size, time_s in zip(sizes, seconds))

# %% 03.8 a line in logarithms
import numpy as np


def fit_alpha_beta(sizes, seconds):
    slope, log_alpha = np.polyfit(np.log(sizes), np.log(seconds), 1)
    return np.exp(log_alpha), 1 / slope

# %% 03.8 seconds a byte
import numpy as np


def fit_alpha_beta(sizes, seconds):
    size, time_s = np.array(sizes, dtype=float), np.array(seconds)
    matrix = np.stack([1 / time_s, size / 1e6 / time_s], axis=1)
    alpha, seconds_a_mb = np.linalg.lstsq(matrix, np.ones(len(sizes)), rcond=None)[0]
    return alpha, seconds_a_mb / 1e6

# %% 03.8 bandwidth first
import numpy as np


def fit_alpha_beta(sizes, seconds):
    size, time_s = np.array(sizes, dtype=float), np.array(seconds)
    matrix = np.stack([1 / time_s, size / 1e6 / time_s], axis=1)
    alpha, seconds_a_mb = np.linalg.lstsq(matrix, np.ones(len(sizes)), rcond=None)[0]
    return 1e6 / seconds_a_mb, alpha

# %% 03.9 nobody waits for anybody
without_ms, with_ms = 165, 165

# %% 03.9 the other way round
without_ms, with_ms = 480, 165

# %% 03.9 hiccups do not count
without_ms, with_ms = 60, 60

# %% 03.9 everyone pays for every hiccup, barrier or not
without_ms, with_ms = 480, 480

# %% 03.9 the sum over the ranks
without_ms, with_ms = 660, 1920

# %% 03.9 the hiccup's 40 ms are added to the step's 5
without_ms, with_ms = 12 * 5 + 3 * 40, 12 * 45

# %% 03.9 in seconds
without_ms, with_ms = 0.165, 0.48

# %% 03.9 nothing
without_ms = with_ms = None

# %% 03.10 still the deadlock: hangs
sending = dist.isend => dist.send
sending.wait() =>

# %% 03.10 an all-gather
def shift(tensor, group=None):
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    everyones = [torch.empty_like(tensor) for _ in range(n)]
    dist.all_gather(everyones, tensor, group=group)
    return everyones[(rank - 1) % n]

# %% 03.10 its own tensor, so nothing can hang
def shift(tensor, group=None):
    return tensor.clone()

# %% 03.10 the next rank's tensor
rank + 1 => rank - 1
rank - 1 => rank + 1

# %% 03.10 receives into the tensor that it is sending
def shift(tensor, group=None):
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    if n == 1:
        return tensor.clone()
    before = tensor.clone()
    sending = dist.isend(before, group_dst=(rank + 1) % n, group=group)
    dist.recv(tensor, group_src=(rank - 1) % n, group=group)
    sending.wait()
    return tensor

# %% 03.10 on one rank no copy
return tensor.clone() => return tensor

# %% 03.10 sends to itself where it is alone
if n == 1:
    return tensor.clone()
=>
---
dist.recv(received, group_src=(rank - 1) % n, group=group)
=>
dist.irecv(received, group_src=(rank - 1) % n, group=group).wait()

# %% 03.10 takes ranks of the group for ranks among all
group_dst => dst
group_src => src

# %% 03.10 sends float32
received = torch.empty_like(tensor) => received = torch.empty(tensor.shape)
tensor, group_dst => tensor.float(), group_dst
return received => return received.to(tensor.dtype)

# %% 03.10 returns one row of numbers, whatever the shape
received = torch.empty_like(tensor) => received = torch.empty(tensor.numel(), dtype=tensor.dtype)

# %% 03.11 accuses rank 0, which waits for the sum
guilty_rank, guilty_call = 0, "broadcast"

# %% 03.11 accuses the call in which the others wait
guilty_rank, guilty_call = 2, "all_reduce"

# %% 03.11 accuses nobody
guilty_rank = guilty_call = None

# %% 03.12 fetches the weights in every step
if bad.item() > 0:
    dist.broadcast(weight, group_src=0, group=group)
else:
=>
dist.broadcast(weight, group_src=0, group=group)
if bad.item() == 0:

# %% 03.12 never fetches the weights
if bad.item() > 0:
    dist.broadcast(weight, group_src=0, group=group)
else:
=>
if bad.item() == 0:

# %% 03.12 only the bad rank leaves out its update
def train(gradients, group=None):
    weight = torch.zeros(3)
    for gradient in gradients:
        finite = gradient.isfinite().all()
        dist.all_reduce(gradient.nan_to_num_(0), group=group)
        if finite:
            weight -= 0.1 * gradient
    return weight

# %% 03.12 leaves a step out only where all ranks are bad
dist.all_reduce(bad, group=group) => dist.all_reduce(bad, op=dist.ReduceOp.MIN, group=group)

# %% 03.12 gives up at the first bad gradient
else:
    dist.all_reduce(gradient, group=group)
    weight -= 0.1 * gradient
=>
    break
dist.all_reduce(gradient, group=group)
weight -= 0.1 * gradient

# %% 03.12 updates with the mean
weight -= 0.1 * gradient => weight -= 0.1 * gradient / dist.get_world_size(group)

# %% 03.12 each rank decides by its own gradient: hangs
bad = (~gradient.isfinite().all()).float().reshape(1)
dist.all_reduce(bad, group=group)
if bad.item() > 0:
=>
if not gradient.isfinite().all():

# %% 03.12 fetches the decision instead of the weights
weight, group_src => bad, group_src

# %% 03.12 fetches the weights from the last rank
weight = torch.zeros(3) => weight, last = torch.zeros(3), dist.get_world_size(group) - 1
group_src=0 => group_src=last

# %% 03.12 broadcasts a copy of the weight, and goes on with its own
weight, group_src => weight.clone(), group_src

# %% 03.12 a test for NaN, which lets infinity pass
(~gradient.isfinite().all()) => gradient.isnan().any()

# %% 03.12 fetches the weights from rank 0 of all
group_src => src

# %% 03.12 tests the norm, which overflows earlier than the gradient
gradient.isfinite().all => gradient.square().sum().isfinite

# %% 03.13 the whole tensor goes across the nodes
def two_level_all_reduce(tensor, inside, across):
    ring_all_reduce(tensor, inside)
    ring_all_reduce(tensor, across)

# %% 03.13 one ring over all ranks
def two_level_all_reduce(tensor, inside, across):
    ring_all_reduce(tensor)

# %% 03.13 does not collect the shards
def two_level_all_reduce(tensor, inside, across):
    ring_all_reduce(ring_reduce_scatter(tensor, inside), across)

# %% 03.13 does not add up across the nodes
def two_level_all_reduce(tensor, inside, across):
    ring_reduce_scatter(tensor, inside)
    ring_all_gather(tensor, inside)

# %% 03.13 the two groups exchanged
def two_level_all_reduce(tensor, inside, across):
    ring_all_reduce(ring_reduce_scatter(tensor, across), inside)
    ring_all_gather(tensor, across)

# %% 03.13 an all-reduce inside the node, cut, and gathered again: half as much again inside
def two_level_all_reduce(tensor, inside, across):
    dist.all_reduce(tensor, group=inside)
    shard = tensor.view(-1).tensor_split(dist.get_world_size(inside))[dist.get_rank(inside)]
    dist.all_reduce(shard, group=across)
    ring_all_gather(tensor, inside)

# %% 03.13 works in a copy of the whole tensor, and copies it back
def two_level_all_reduce(tensor, inside, across):
    copy = tensor.clone()
    ring_all_reduce(ring_reduce_scatter(copy, inside), across)
    ring_all_gather(copy, inside)
    tensor.copy_(copy)

# %% 03.13 adds up in float32 across the nodes
ring_all_reduce(shard, across) => wide = shard.float(); ring_all_reduce(wide, across); shard.copy_(wide)
