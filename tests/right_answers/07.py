"""Right answers in another style than the solutions, that the checks of notebook 07 must accept."""

# %% 07.1 waits at once
class GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part: torch.Tensor, group) -> torch.Tensor:
        pieces, arriving = start_gather(part, group)
        ctx.group, ctx.ranks = group, group.size()
        arriving.wait()
        return join_by_rank(pieces)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        mine, leaving = start_reduce_scatter(split_by_rank(gradient, ctx.ranks), ctx.group)
        leaving.wait()
        return (mine, None)


class ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, summand: torch.Tensor, group) -> torch.Tensor:
        mine, leaving = start_reduce_scatter(split_by_rank(summand, dist.get_world_size(group)), group)
        ctx.members = group
        leaving.wait()
        return mine

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        pieces, arriving = start_gather(gradient, ctx.members)
        arriving.wait()
        return (join_by_rank(pieces), None)

# %% 07.2 two cases
class GatheredMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part: torch.Tensor, group, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        ctx.save_for_backward(part, *weights)
        pieces, work = start_gather(part, group)
        work.wait()
        x = join_by_rank(pieces)
        return tuple(F.linear(x, weight) for weight in weights)

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor) -> tuple:
        part, *weights = ctx.saved_tensors
        for_x, for_weights = ctx.needs_input_grad[0], ctx.needs_input_grad[2:]
        flat = [gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients]
        gathered = start_gather(part, ctx.group) if True in for_weights else None
        scattered = None
        if for_x:
            summed = flat[0].mm(weights[0])
            for gradient, weight in list(zip(flat, weights))[1:]:
                summed += gradient.mm(weight)
            summed = summed.view(*gradients[0].shape[:-1], summed.shape[-1])
            scattered = start_reduce_scatter(split_by_rank(summed, ctx.group.size()), ctx.group)
        of_weights = [None for _ in weights]
        if gathered:
            gathered[1].wait()
            x = join_by_rank(gathered[0])
            x = x.view(-1, x.shape[-1])
            for place, wanted in enumerate(for_weights):
                if wanted:
                    of_weights[place] = torch.mm(flat[place].t(), x)
        if scattered:
            scattered[1].wait()
        return (scattered[0] if scattered else None, None, *of_weights)

# %% 07.3 by sets
def diagnose(differing: list[str], ratios: dict[str, float]) -> str:
    if len(differing) > 0:
        return "norms left out"
    off = {name for name, ratio in ratios.items() if not 0.999 <= ratio <= 1.001}
    norms = {name for name in off if "norm" in name}
    if off - norms:
        return "g"
    return "norms averaged" if off else "right"

# %% 07.4 by names, and by the functional norm
class SequenceParallelNorm(SplitNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = copy_to_group(self.weight, self.group)
        return torch.rms_norm(x, list(weight.shape), weight, self.eps)


def apply_sequence_parallel(
    model: nn.Module, group: dist.ProcessGroup | None = None, reduce_group: dist.ProcessGroup | None = None
) -> nn.Module:
    group = group or dist.group.WORLD
    check_sequence_parallel(model, group)
    model.applied["sequence_parallel"] = group
    for module in list(model.modules()):
        if isinstance(module, ColumnParallelLinear):
            module.matmul = GatheredMatmul
        if isinstance(module, RowParallelLinear) or isinstance(module, VocabParallelEmbedding):
            module.output_reduce = reduce_scatter_sequence
    for block in model.blocks:
        if reduce_group is not None:
            for child in block.children():
                if isinstance(child, nn.RMSNorm):
                    placement_of(child.weight).reduce_group = reduce_group
            continue
        for name in [name for name, child in block.named_children() if isinstance(child, nn.RMSNorm)]:
            setattr(block, name, SequenceParallelNorm(getattr(block, name), group))
    for name, child in list(model.named_children()):
        if isinstance(child, nn.RMSNorm) and reduce_group is not None:
            placement_of(child.weight).reduce_group = reduce_group
        elif isinstance(child, nn.RMSNorm):
            setattr(model, name, SequenceParallelNorm(child, group))
    model.register_forward_pre_hook(require_positions, with_kwargs=True)
    return model

# %% 07.5 from the sizes
# Set shapes: what rank 0 of 4 holds at each place, (TP, TP + SP).
PLACES = ["after the embedding", "after a norm", "into the product of q", "q", "into o", "after o", "gate", "logits"]
shapes = {"after the embedding": ((2, 16, 48), (2, 4, 48))}
b, s, h, t = 2, 16, 48, 4
whole, part, quarter, logits = (b, s, h), (b, s // t, h), (b, s, h // t), (b, s, 25)
for place in ("after a norm", "after o"):
    shapes[place] = whole, part
shapes["into the product of q"] = whole, whole
for place in ("q", "into o"):
    shapes[place] = quarter, quarter
shapes["gate"] = shapes["logits"] = logits, logits

# %% 07.6 two weights
def merge(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    both = torch.logaddexp(lse, part_lse)
    out.mul_(torch.exp(lse - both)[..., None]).add_(part.to(out.dtype) * torch.exp(part_lse - both)[..., None])
    lse.copy_(both)

# %% 07.7 softmax, and products of matrices
def plain_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    z = scores(q, k, causal)  # [b, kv, g, s, s']
    p = z.softmax(dim=-1).to(v.dtype)
    out = p @ v.permute(0, 2, 1, 3).unsqueeze(2)  # [b, kv, g, s, d]
    b, kv, g, s, d = out.shape
    return out.permute(0, 3, 1, 2, 4).reshape(b, s, kv * g, d), z.logsumexp(-1).permute(0, 3, 1, 2).reshape(b, s, kv * g)


def plain_backward(gradient, q, k, v, out, lse, causal: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    def of_rows(x: torch.Tensor) -> torch.Tensor:  # [b, s, a] as [b, kv, g, s]
        return by_group(x, k).permute(0, 2, 3, 1)

    def heads_first(x):  # [b, s, kv, g, d] as [b, kv, g, s, d]
        return x.permute(0, 2, 3, 1, 4)

    keys, values = (x.permute(0, 2, 1, 3).unsqueeze(2) for x in (k, v))  # [b, kv, 1, s', d]
    queries, grads = (heads_first(by_group(x, k)) for x in (q, gradient))
    p = torch.exp(scores(q, k, causal) - of_rows(lse).unsqueeze(-1))
    grad_v = (p.to(grads.dtype).transpose(-1, -2) @ grads).sum(2).permute(0, 2, 1, 3)
    grad_p = grads.to(p.dtype) @ values.to(p.dtype).transpose(-1, -2)
    row_sums = of_rows(torch.sum(gradient.to(p.dtype) * out, dim=-1)).unsqueeze(-1)
    grad_z = (p * (grad_p - row_sums) * q.shape[-1] ** -0.5).to(q.dtype)
    grad_q = (grad_z @ keys).permute(0, 3, 1, 2, 4).reshape(q.shape)
    grad_k = (grad_z.transpose(-1, -2) @ queries).sum(2).permute(0, 2, 1, 3)
    return grad_q, grad_k, grad_v

# %% 07.8 row by row, joined where they see the same
def visible(own: tuple[int, ...], other: tuple[int, ...], causal: bool = True) -> list[AttentionTile]:
    if own == other or not causal:
        return [AttentionTile(slice(0, len(own)), slice(0, len(other)), causal)]
    pieces = []
    for row, chunk in enumerate(own):
        seen = len([each for each in other if each < chunk])
        if not seen:
            continue
        last = pieces[-1] if pieces else None
        if last and last.rows.stop == row and last.columns.stop == seen:
            pieces[-1] = AttentionTile(slice(last.rows.start, row + 1), slice(0, seen), False)
        else:
            pieces.append(AttentionTile(slice(row, row + 1), slice(0, seen), False))
    return pieces

# %% 07.9 one way and the other, each started by itself
def start_exchange(tensor: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, list[dist.Work]]:
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    into = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    pairs = ((dist.irecv, into, rank + n - 1), (dist.isend, tensor, rank + 1))
    return into, dist.batch_isend_irecv([dist.P2POp(how, what, group=group, group_peer=at % n) for how, what, at in pairs])


def ring_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: dist.ProcessGroup,
    causal: bool,
    attention: AttentionBlock,
    order: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    n, source = group.size(), group.rank()
    own = chunks_of(source, n, order)
    tokens = q.shape[1] // len(own)
    out, lse = initial_out_lse(q)
    here = torch.stack((k, v))
    for left in range(n - 1, -1, -1):
        coming, works = (None, ()) if left == 0 else start_exchange(here, group)
        seen = in_tokens(visible(own, chunks_of(source, n, order), causal), tokens)
        attend(q, here[0], here[1], seen, attention, out, lse)
        [work.wait() for work in works]
        here, source = coming, (source - 1) % n
    return out.to(q.dtype), lse

# %% 07.10 gradients that follow their keys
def ring_backward(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    group: dist.ProcessGroup,
    causal: bool,
    attention: AttentionBlock,
    order: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    n, source = group.size(), group.rank()
    own = chunks_of(source, n, order)
    tokens = q.shape[1] // len(own)
    here = torch.stack((k, v))
    grad_q = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
    mine = torch.zeros(here.shape, dtype=lse.dtype, device=q.device)
    seen = in_tokens(visible(own, own, causal), tokens)
    coming, works = start_exchange(here, group) if n > 1 else (here, [])
    attend_backward(gradient, q, k, v, out, lse, seen, attention, grad_q, mine[0], mine[1])
    travelling, sent, on_their_way = None, None, []
    for left in range(n - 2, -1, -1):
        for work in works:
            work.wait()
        here, source = coming, (source - 1) % n
        coming, works = start_exchange(here, group) if left else (None, [])
        grads = torch.zeros(here.shape, dtype=lse.dtype, device=q.device)
        seen = in_tokens(visible(own, chunks_of(source, n, order), causal), tokens)
        attend_backward(gradient, q, here[0], here[1], out, lse, seen, attention, grad_q, grads[0], grads[1])
        for work in on_their_way:
            work.wait()
        sent = grads if travelling is None else grads.add_(travelling)
        travelling, on_their_way = start_exchange(sent, group)
    for work in on_their_way:
        work.wait()
    if travelling is not None:
        mine.add_(travelling)
    grad_k, grad_v = mine.to(k.dtype).unbind()
    return grad_q.to(q.dtype), grad_k, grad_v

# %% 07.11 by an index
def to_zigzag(whole: torch.Tensor, ranks: int) -> torch.Tensor:
    chunks = [chunk for rank in range(ranks) for chunk in (rank, 2 * ranks - 1 - rank)]
    pieces = whole.chunk(2 * ranks, dim=1)
    return torch.cat([pieces[chunk] for chunk in chunks], dim=1)


def from_zigzag(split: torch.Tensor, ranks: int) -> torch.Tensor:
    chunks = [chunk for rank in range(ranks) for chunk in (rank, 2 * ranks - 1 - rank)]
    pieces = dict(zip(chunks, split.chunk(2 * ranks, dim=1)))
    return torch.cat([pieces[chunk] for chunk in sorted(pieces)], dim=1)

# %% 07.12 the own part first, the others in order
def all_gather_forward(q, k, v, group, causal: bool, attention: AttentionBlock, order: str):
    n, rank = group.size(), group.rank()
    own = chunks_of(rank, n, order)
    tokens = q.shape[1] // len(own)
    gathered, work = start_gather(torch.cat((k, v), dim=0), group)
    out, lse = initial_out_lse(q)
    attend(q, k, v, in_tokens(visible(own, own, causal), tokens), attention, out, lse)
    work.wait()
    for source in [other for other in range(n) if other != rank]:
        keys, values = gathered[source].split(len(k))
        seen = in_tokens(visible(own, chunks_of(source, n, order), causal), tokens)
        attend(q, keys, values, seen, attention, out, lse)
    return out.to(q.dtype), lse


def all_gather_backward(gradient, q, k, v, out, lse, group, causal: bool, attention: AttentionBlock, order: str):
    n, rank = group.size(), group.rank()
    own = chunks_of(rank, n, order)
    tokens = q.shape[1] // len(own)
    gathered, work = start_gather(torch.cat((k, v), dim=0), group)
    grad_q = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
    of_all = torch.zeros(gathered.shape, dtype=lse.dtype, device=q.device)
    for source in sorted(range(n), key=lambda other: other != rank):
        if source != rank:
            work.wait()
        keys, values = gathered[source].split(len(k)) if source != rank else (k, v)
        grad_k, grad_v = of_all[source].split(len(k))
        seen = in_tokens(visible(own, chunks_of(source, n, order), causal), tokens)
        attend_backward(gradient, q, keys, values, out, lse, seen, attention, grad_q, grad_k, grad_v)
    mine, work = start_reduce_scatter(of_all, group)
    work.wait()
    grad_k, grad_v = mine.to(k.dtype).split(len(k))
    return grad_q.to(q.dtype), grad_k, grad_v

# %% 07.13 packed by rank
class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, pieces: torch.Tensor, group) -> torch.Tensor:
        ctx.members = group
        sent = pieces.contiguous()
        came = torch.zeros_like(sent)
        dist.all_to_all_single(came, sent, group=group)
        return came

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        return AllToAll.apply(gradient, ctx.members), None


def ulysses_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    causal: bool = True,
    attention: AttentionBlock = FUSED_BLOCK,
    order: str = "zigzag",
) -> torch.Tensor:
    group, (q, k, v) = group or dist.group.WORLD, check_qkv(q, k, v, order)
    check_heads(q.shape[2], k.shape[2], group.size())
    n = group.size()
    if n > k.shape[2]:
        k, v = (x.repeat_interleave(n // x.shape[2], dim=2) for x in (k, v))
    widths = [x.shape[2] // n for x in (q, k, v)]
    for_rank = [torch.cat([x.chunk(n, dim=2)[rank] for x in (q, k, v)], dim=2) for rank in range(n)]
    came = AllToAll.apply(torch.stack(for_rank), group)  # [n, b, s/n, heads, d]
    whole = from_order(torch.cat(came.unbind(), dim=1), n, order)
    q, k, v = torch.split(whole, widths, dim=2)
    out = BlockAttention.apply(q, k, v, attention, causal)
    parts = torch.stack(to_order(out, n, order).chunk(n, dim=1))
    return torch.cat(AllToAll.apply(parts, group).unbind(), dim=2)

# %% 07.14 in bytes first
# Set megabytes_sent: of a rank in forward, by method.
megabytes_sent = {"ring": None, "all_gather": None, "ulysses": None}
tokens, width = 131072 // 8, 128 * 2
passed = 7 * tokens * 2 * 8 * width / 10**6
megabytes_sent["ring"] = megabytes_sent["all_gather"] = passed
megabytes_sent["ulysses"] = tokens * (32 + 8 + 8 + 32) * width * 7 / 8 / 10**6

# %% 07.15 the positions by name
def fill_positions(model: nn.Module, args: tuple, kwargs: dict, group: dist.ProcessGroup, order: str) -> tuple:
    require_positions(model, args, kwargs)
    tokens, places = forward_inputs(args, kwargs)
    if places is not None:
        return (tokens, places), {}
    return (tokens, local_positions(tokens.shape[1], group, order, tokens.device)), {}


def apply_context_parallel(
    model: nn.Module,
    group: dist.ProcessGroup | None = None,
    method: str = "ring",
    order: str = "zigzag",
    attention: AttentionBlock = FUSED_BLOCK,
) -> nn.Module:
    group = group or dist.group.WORLD
    check_context_parallel(model, group, method, order)
    model.applied["context_parallel"] = group
    for block in model.blocks:
        block.attention.core = functools.partial(METHODS[method], attention=attention, order=order, group=group)

    def fill(module, args, kwargs):
        return fill_positions(module, args, kwargs, group, order)

    model.register_forward_pre_hook(fill, with_kwargs=True)
    return model

# %% 07.16 two times
def exchange_ratio(
    tokens: int,
    heads: int,
    kv_heads: int,
    bandwidth: float,
    peak: float,
    element_bytes: int = 2,
    causal: bool = True,
) -> float:
    sent_s = 2 * kv_heads * element_bytes / bandwidth  # of a token, for each number of a head
    work_s = 4 * heads * tokens / peak / (2 if causal else 1)
    return sent_s / work_s
