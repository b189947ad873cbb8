"""Right answers in another style than the solutions, that the checks of notebook 03 must accept."""

# %% 03.1 result by result
def every_collective(group) -> dict:
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    whole = torch.arange(1.0, 6.0) if rank == 0 else torch.zeros(5)  # to broadcast
    to_reduce, to_all_reduce = torch.full((3,), rank + 1.0), torch.full((3,), rank + 1.0)
    mine = torch.full((2,), rank + 1.0)  # to gather and to all_gather
    shards = [torch.full((2,), 10.0 * (r + 1)) for r in range(n)] if rank == 0 else None  # to scatter
    powers = [((rank + 1) * torch.tensor([1.0, 2.0])) ** (j + 1) for j in range(n)]  # to reduce_scatter
    results = {"gather": None, "all_gather": list(torch.zeros(n, 2).unbind())}
    results["scatter"], results["reduce_scatter"] = torch.zeros_like(mine), torch.zeros_like(mine)
    dist.all_reduce(to_all_reduce, op=dist.ReduceOp.SUM, group=group)
    dist.reduce(to_reduce, group_dst=0, op=dist.ReduceOp.SUM, group=group)
    dist.broadcast(whole, group_src=0, group=group)
    dist.all_gather(results["all_gather"], mine, group=group)
    if rank == 0:
        results["gather"] = [torch.zeros_like(mine) for _ in range(n)]
    dist.gather(mine, gather_list=results["gather"], group_dst=0, group=group)
    dist.scatter(results["scatter"], scatter_list=shards, group_src=0, group=group)
    dist.reduce_scatter(results["reduce_scatter"], powers, group=group)
    return results | {"broadcast": whole, "reduce": to_reduce, "all_reduce": to_all_reduce}

# %% 03.2 by the others
star_mb_4, star_mb_512 = ((ranks - 1) * 4 for ranks in (4, 512))

# %% 03.3 by the bits of the place, receive first
def tree_broadcast(tensor: torch.Tensor, src: int = 0, group=None) -> None:
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    place, bit = (rank - src + n) % n, 1
    while bit < n and not place & bit:
        bit <<= 1
    if place:
        dist.recv(tensor, group_src=(rank - bit + n) % n, group=group)
    bit >>= 1
    while bit:
        if place + bit < n:
            dist.send(tensor, group_dst=(rank + bit) % n, group=group)
        bit >>= 1

# %% 03.4 the number of the shard goes down by one
def ring_reduce_scatter(tensor: torch.Tensor, group=None) -> torch.Tensor:
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    shards = tensor.view(-1).tensor_split(n)
    memory = tensor.new_empty(max(shard.numel() for shard in shards))
    number = rank - 1
    for _ in range(1, n):
        following = shards[(number - 1) % n]
        theirs = memory.narrow(0, 0, following.numel())
        exchange(shards[number % n], theirs, group)
        following += theirs
        number -= 1
    return shards[rank]

# %% 03.5 passes on what has just come
def ring_all_gather(tensor: torch.Tensor, group=None) -> None:
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    shards = tensor.view(-1).tensor_split(n)
    latest = shards[rank]
    for place in range(rank - 1, rank - n, -1):
        exchange(latest, shards[place % n], group)
        latest = shards[place % n]

# %% 03.6 by offsets
def ring_all_reduce(tensor: torch.Tensor, group=None) -> None:
    flat = tensor.view(tensor.numel())
    for start in range(0, len(flat), CHUNK):
        chunk = flat[start : start + CHUNK]
        ring_reduce_scatter(chunk, group=group)
        ring_all_gather(chunk, group=group)

# %% 03.7 by what is sent
def bandwidths(collective: str, size: int, seconds: float, world_size: int) -> tuple[float, float]:
    if collective in ("broadcast", "reduce"):
        crossed = size
    elif collective in ("all_gather", "reduce_scatter", "all_to_all"):
        crossed = size * (world_size - 1) / world_size
    elif collective == "all_reduce":
        crossed = 2 * size * (world_size - 1) / world_size
    else:
        raise ValueError(f"collective {collective!r} is none of the six")
    return size / seconds, crossed / seconds

# %% 03.8 by the normal equations
def fit_alpha_beta(sizes: list[int], seconds: list[float]) -> tuple[float, float]:
    largest = max(sizes)
    rows = [(1 / took, size / largest / took) for size, took in zip(sizes, seconds)]
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = (sum(row[i] for row in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    alpha, whole = (a * bb - b * ab) / determinant, (aa * b - ab * a) / determinant
    return alpha, largest / whole

# %% 03.9 added up
without_ms, with_ms = sum([5] * 9 + [40] * 3), sum([40] * 12)

# %% 03.10 both at once
def shift(tensor: torch.Tensor, group=None) -> torch.Tensor:
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    received = tensor.clone()
    if n > 1:
        send = dist.P2POp(dist.isend, tensor, group=group, group_peer=(rank + 1) % n)
        receive = dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % n)
        for request in dist.batch_isend_irecv([send, receive]):
            request.wait()
    return received

# %% 03.11 one by one
guilty_call = "broadcast"
guilty_rank = 2

# %% 03.12 the largest flag
def train(gradients: list[torch.Tensor], group=None) -> torch.Tensor:
    weight = torch.zeros(3)
    for gradient in gradients:
        skip = torch.tensor([int(not torch.isfinite(gradient).all())])
        dist.all_reduce(skip, op=dist.ReduceOp.MAX, group=group)
        if skip.item():
            dist.broadcast(weight, group_src=0, group=group)
            continue
        summed = gradient.clone()
        dist.all_reduce(summed, group=group)
        weight.sub_(summed, alpha=0.1)
    return weight

# %% 03.1 tuples of tensors
def every_collective(group) -> dict:
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    whole = torch.arange(1.0, 6.0) if rank == 0 else torch.zeros(5)
    first, summed, mine = torch.full((3,), rank + 1.0), torch.full((3,), rank + 1.0), torch.full((2,), rank + 1.0)
    collected, everyone = [torch.empty(2) for _ in range(n)], [torch.empty(2) for _ in range(n)]
    shard, own = torch.empty(2), torch.empty(2)
    dist.broadcast(whole, group_src=0, group=group)
    dist.reduce(first, group_dst=0, group=group)
    dist.all_reduce(summed, group=group)
    dist.gather(mine, collected if rank == 0 else None, group_dst=0, group=group)
    dist.all_gather(everyone, mine, group=group)
    shards = [torch.full((2,), 10.0 * (r + 1)) for r in range(n)]
    dist.scatter(shard, shards if rank == 0 else None, group_src=0, group=group)
    dist.reduce_scatter(own, [((rank + 1) * torch.tensor([1.0, 2.0])) ** (j + 1) for j in range(n)], group=group)
    return {
        "broadcast": whole,
        "reduce": first,
        "all_reduce": summed,
        "gather": tuple(collected) if rank == 0 else None,
        "all_gather": tuple(everyone),
        "scatter": shard,
        "reduce_scatter": own,
    }

# %% 03.2 numbers of NumPy
import numpy as np

star_mb_4, star_mb_512 = np.array([3, 511]) * 4

# %% 03.12 tests the sum: no second collective
def train(gradients: list[torch.Tensor], group=None) -> torch.Tensor:
    weight = torch.zeros(3)
    for gradient in gradients:
        dist.all_reduce(gradient, group=group)
        if gradient.isfinite().all():
            weight = weight - 0.1 * gradient
        else:
            dist.broadcast(weight, group_src=0, group=group)
    return weight

# %% 03.13 PyTorch's all-reduce across the nodes
def two_level_all_reduce(tensor: torch.Tensor, inside, across) -> None:
    own = ring_reduce_scatter(tensor, group=inside)
    dist.all_reduce(own, group=across)
    ring_all_gather(tensor, group=inside)

# %% 03.13 in chunks, by the ranks' own slices
def two_level_all_reduce(tensor: torch.Tensor, inside, across) -> None:
    flat = tensor.view(-1)
    for start in range(0, flat.numel(), CHUNK):
        chunk = flat[start : start + CHUNK]
        ring_reduce_scatter(chunk, inside)
        ring_all_reduce(chunk.tensor_split(dist.get_world_size(inside))[dist.get_rank(inside)], across)
        ring_all_gather(chunk, inside)
