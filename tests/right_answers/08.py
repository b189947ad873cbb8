"""Right answers in another style than the solutions, that the checks of notebook 08 must accept."""

# %% 08.1 a mask
def top_k_gates(scores: torch.Tensor, ranking: torch.Tensor, k: int) -> torch.Tensor:
    places = torch.topk(ranking, k, dim=-1)[1]
    mask = torch.zeros_like(scores).scatter_(-1, places, 1.0)
    least = torch.finfo(scores.dtype).tiny
    kept = scores * mask
    if k != 1:
        kept = kept / kept.sum(dim=-1, keepdim=True).clamp_min(least)
    return torch.where(mask > 0, kept.clamp_min(least), torch.zeros_like(kept))

# %% 08.2 by number, a list of parts
def loop_experts(experts: Experts, x: torch.Tensor, gates: torch.Tensor, choices: int) -> torch.Tensor:
    x, gate, up, down = experts.weights(x)
    parts = x.new_zeros(x.shape, dtype=gates.dtype)
    for number in range(gates.shape[1]):
        (rows,) = torch.where(gates.detach()[:, number] != 0)
        chosen = x.index_select(0, rows)
        hidden = swiglu(chosen @ gate[number].t(), chosen @ up[number].t())
        made = (hidden @ down[number].t()) * gates[rows, number].unsqueeze(1)
        parts = torch.index_add(parts, 0, rows, made.to(parts.dtype))
    return parts.to(x.dtype)

# %% 08.3 the choices by a stable sort
def sorted_choices(gates: torch.Tensor, choices: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    chosen = gates.detach() != 0  # [t, E]
    numbers = chosen.t().flatten().to(torch.int8).argsort(descending=True, stable=True)[:choices]
    expert = torch.div(numbers, len(gates), rounding_mode="floor")
    return expert, numbers - expert * len(gates), chosen.sum(dim=0).cumsum(dim=0).to(torch.int32)


def grouped_experts(experts: Experts, x: torch.Tensor, gates: torch.Tensor, choices: int) -> torch.Tensor:
    x, *weights = experts.weights(x)
    expert, token, ends = sorted_choices(gates, choices)
    rows = x[token]
    gated, raised = (grouped_matmul(rows, weight, ends) for weight in weights[:2])
    out = grouped_matmul(swiglu(gated, raised), weights[2], ends)
    out = out * gates[token, expert].unsqueeze(1)
    return AddByToken.apply(out, token, x.shape[0]).to(x.dtype)

# %% 08.4 batches of products
def batched_experts(experts: Experts, x: torch.Tensor, gates: torch.Tensor, slots: int) -> torch.Tensor:
    x, gate, up, down = experts.weights(x)
    best = torch.topk(gates, min(slots, x.shape[0]), dim=0)
    token, row_gates = best.indices.t(), best.values.t()  # [E, slots]
    rows = x[token]
    hidden = swiglu(torch.bmm(rows, gate.mT), torch.bmm(rows, up.mT))
    out = torch.bmm(hidden, down.mT) * row_gates.unsqueeze(-1)
    return AddByToken.apply(out.reshape(-1, x.shape[1]), token.reshape(-1), x.shape[0]).to(x.dtype)

# %% 08.5 another order
def run_local_experts(x: torch.Tensor, gates: torch.Tensor, routing: Routing, experts: Experts) -> torch.Tensor:
    flat_x, flat_gates = x.reshape(-1, x.shape[-1]), gates.reshape(-1, gates.shape[-1])
    tokens = flat_x.shape[0]
    if routing.capacity is not None:
        return batched_experts(experts, flat_x, flat_gates, routing.slots(tokens)).reshape(x.shape)
    return experts(flat_x, flat_gates, tokens * routing.top_k).reshape(x.shape)


def apply_moe(
    model: Transformer,
    experts: int,
    top_k: int,
    ffn_hidden: int | None = None,
    shared: int = 0,
    seed: int = 0,
    **routing,
) -> Transformer:
    check_moe(model, experts, top_k, **routing)
    for number, block in enumerate(model.blocks):
        old = block.mlp.down_proj.weight
        with torch.device(old.device):
            mixture = MoE(model.config, experts, top_k, ffn_hidden=ffn_hidden, shared=shared, **routing)
        for parameter in mixture.parameters():
            parameter.data = parameter.data.to(dtype=old.dtype)
        for name, parameter in mixture.named_parameters():
            init_parameter(f"blocks.{number}.mlp.{name}", parameter, model.config, seed)
        block.mlp = mixture
    sizes = {"top_k": top_k, "ffn_hidden": ffn_hidden, "shared": shared}
    model.active_config = active_config(model.config, sizes)
    return model

# %% 08.6 layers of both kinds
def mixture_params(
    config: ModelConfig,
    experts: int,
    top_k: int,
    ffn_hidden: int | None = None,
    shared: int = 0,
    dense_layers: int = 0,
    attention: int | None = None,
) -> tuple[int, int]:
    parts, h = parameter_parts(config), config.hidden
    of_expert = 3 * h * (config.ffn_hidden if ffn_hidden is None else ffn_hidden)
    around = parts["norms"] + (attention if attention is not None else parts["q_o"] + parts["kv"])
    outside = sum(parts[name] for name in ("embedding", "head", "final_norm"))

    def total(of_each_layer):
        mixed = (config.layers - dense_layers) * (around + h * experts + of_expert * (of_each_layer + shared))
        return outside + mixed + dense_layers * (around + parts["mlp"])

    return total(experts), total(top_k)

# %% 08.7 read off by hand
# Set diagnosis: for each letter one of "sound", "detached", "rewarded", "normalized".
diagnosis = {"A": None, "B": None, "C": None, "D": None}
diagnosis = {}
for letter in lab_runs:
    _, counts, norms = lab_runs[letter]
    tokens = counts[:, 1].sum(axis=1)
    share = counts[-10:, 1].mean(axis=0).max() / tokens.max()
    still = bool((norms < 1e-6).all())
    diagnosis[letter] = (
        ("normalized" if tokens.max() == 1024 else "detached") if still else ("rewarded" if share > 0.4 else "sound")
    )

# %% 08.8 by a product of vectors
def balance_loss(scores: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    experts = counts.numel()
    probabilities = scores / scores.sum(dim=-1, keepdim=True)
    mean = probabilities.reshape(-1, experts).mean(dim=0)
    frequencies = counts.to(mean.dtype) / counts.sum()
    return experts * torch.dot(frequencies, mean)


def z_loss(logits: torch.Tensor) -> torch.Tensor:
    return torch.mean(torch.logsumexp(logits, dim=-1) ** 2)

# %% 08.9 both in one place
class RouterLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gates: torch.Tensor, extra: torch.Tensor, counts: torch.Tensor, router: Router) -> torch.Tensor:
        ctx.of_router = router, counts
        return gates.view(gates.shape)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        router, counts = ctx.of_router
        if router.counts is None:
            router.counts = counts.clone()
        else:
            router.counts = router.counts + counts
        return gradient, torch.full((), router.loss_weight, dtype=gradient.dtype, device=gradient.device), None, None

# %% 08.10 a table that is filled
@torch.no_grad()
def take_counts(model: nn.Module) -> torch.Tensor:
    routers = routers_of(model)
    if len(routers) == 0:
        return torch.empty(0, 0, dtype=torch.int64)
    table = torch.zeros(len(routers), routers[0].bias.numel(), dtype=torch.int64, device=routers[0].bias.device)
    for row, router in zip(table, routers):
        if router.counts is not None:
            row += router.counts
        router.counts = None
    group = routers[0].batch_group
    if group:
        dist.all_reduce(table, op=dist.ReduceOp.SUM, group=group)
    return table


@torch.no_grad()
def update_bias(model: nn.Module, counts: torch.Tensor, rate: float) -> None:
    for router, row in zip(routers_of(model), counts):
        excess = row - row.float().mean()
        router.bias -= rate * torch.sign(excess)

# %% 08.11 where, and the tokens in a row
def within_capacity(gates: torch.Tensor, slots: int) -> torch.Tensor:
    flat = gates.detach().reshape(-1, gates.shape[-1])
    before = torch.cumsum((flat > 0).int(), dim=0).reshape(gates.shape)
    return torch.where(before > slots, torch.zeros_like(gates), gates)

# %% 08.12 a list of buffers, and the last one waited for first
def start(self: AsyncAllToAll, tensors, reverse=False):
    lists = self.sends, self.receives
    goes, comes = reversed(lists) if reverse else lists
    shapes = [(sum(comes), *tensor.shape[1:]) for tensor in tensors]
    came = [torch.empty(shape, dtype=x.dtype, device=x.device) for shape, x in zip(shapes, tensors)]
    splits = {"output_split_sizes": comes, "input_split_sizes": goes}
    for to, x in zip(came, tensors):
        work = dist.all_to_all_single(to, x.contiguous(), **splits, group=self.group, async_op=True)
        self.pending.append((work, to))
    return tuple(came)


def wait(self: AsyncAllToAll):
    came = []
    while self.pending:
        work, rows = self.pending.pop()
        work.wait()
        came.insert(0, rows)
    return tuple(came)

# %% 08.13 one index into tokens and ranks
def dispatch_and_combine(
    x: torch.Tensor,
    gates: torch.Tensor,
    choices: int | None,
    group: dist.ProcessGroup,
    compute: Callable,
    overlap_with: Callable | None = None,
) -> torch.Tensor:
    (x,), n = as_autocast(x), group.size()
    by_rank_gates = gates.view(len(gates), n, gates.shape[1] // n).transpose(0, 1)  # [n, t, E/n]
    chosen = by_rank_gates.detach() != 0
    goes = chosen.any(dim=-1)  # [n, t]
    sends, receives, arriving = read_sizes(goes.sum(dim=1), chosen.sum(dim=1).sum(dim=1), group)
    number = torch.nonzero_static(goes.flatten(), size=sum(sends)).flatten()
    token = number % len(x)
    sent_gates = by_rank_gates.flatten(0, 1).index_select(0, number)
    rows = x.float().index_select(0, token).to(x.dtype)
    came, came_gates = send_rows(group, sends, receives, rows, sent_gates, overlap_with=overlap_with)
    made = compute(came, came_gates, arriving)
    (back,) = send_rows(group, receives, sends, made)
    return torch.zeros_like(x, dtype=torch.float32).index_add(0, token, back.float()).to(x.dtype)

# %% 08.14 by a product of shares
# Set copies: by (experts, k, ranks), how many other ranks a token goes to on average.
copies = {(8, 2, 4): None, (8, 2, 8): None, (256, 8, 8): None}
for experts, k, ranks in copies:
    outside, none = experts - experts // ranks, 1.0
    for drawn in range(k):
        none *= (outside - drawn) / (experts - drawn)
    copies[experts, k, ranks] = (ranks - 1) * (1 - none)

# %% 08.15 by an additive mask
def within_nodes(ranking: torch.Tensor, nodes: int, limit: int, k: int) -> torch.Tensor:
    size = ranking.shape[-1] // nodes
    parts = ranking.view(*ranking.shape[:-1], nodes, size)
    strength = parts.topk(math.ceil(k / limit), dim=-1)[0].sum(dim=-1)
    best = strength.topk(limit, dim=-1)[1]
    outside = torch.ones_like(strength, dtype=torch.bool).scatter_(-1, best, False)
    return torch.where(outside.repeat_interleave(size, dim=-1), -math.inf, ranking)

# %% 08.16 weight by weight
def apply_expert_parallel(
    model: Transformer,
    group: dist.ProcessGroup | list[dist.ProcessGroup] | None = None,
    reduce_group: dist.ProcessGroup | None = None,
    batch_group: dist.ProcessGroup | None = None,
    tp_group: dist.ProcessGroup | None = None,
) -> Transformer:
    groups = list(group) if isinstance(group, (list, tuple)) else [group or dist.group.WORLD]
    layers = [block.mlp for block in model.blocks if isinstance(block.mlp, MoE)]
    check_expert_parallel(model, groups, batch_group, tp_group)
    batch_group, reduce_group = batch_group or groups[0], reduce_group or dist.new_subgroups(group_size=1)[0]
    model.applied["expert_parallel"] = groups[0] if len(groups) == 1 else None
    for mixture in layers:
        if "sequence_parallel" in model.applied:  # each tensor-parallel rank routes a shard of a sequence
            mixture.router.sequence_shards = model.applied["sequence_parallel"].size()
    for mixture in layers:
        enter, leave = tp_boundary(model, tp_group)
        for name in ("gate_proj", "up_proj", "down_proj"):
            linear = getattr(mixture.experts, name)
            cuts = [(each, 0) for each in groups]
            if tp_group is not None:
                cuts.append((tp_group, 2 if name == "down_proj" else 1))
            weight = shard_nested(linear.weight, cuts)
            placement_of(weight).reduce_group = reduce_group
            linear.weight = weight
        mixture.router.batch_group = batch_group
        placement_of(mixture.router.weight).reduce_group = batch_group
        run = mixture.experts
        for place in range(len(groups) - 1, -1, -1):
            run = functools.partial(dispatch_and_combine, compute=run, group=groups[place])
        mixture.run = functools.partial(run_expert_parallel, output_reduce=leave, input_gather=enter, compute=run)
    return model

# %% 08.17 two times of a number
def dispatch_ratio(
    copies: float,
    top_k: int,
    ffn_hidden: int,
    bandwidth: float,
    peak: float,
    dispatch_bytes: float = 2,
    combine_bytes: float = 2,
) -> float:
    exchange_s = copies * (dispatch_bytes + combine_bytes) / bandwidth
    products_s = 2 * 3 * ffn_hidden * top_k / peak
    return exchange_s / products_s
