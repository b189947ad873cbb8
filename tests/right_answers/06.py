"""Right answers in another style than the solutions, that the checks of notebook 06 must accept."""

# %% 06.1 into one tensor, and by a product with the transpose
def split_matmul(x: torch.Tensor, weight: torch.Tensor, how: str, group) -> torch.Tensor:
    n, rank = group.size(), group.rank()
    if how == "rows":
        columns = x.shape[1] // n
        own = slice(rank * columns, (rank + 1) * columns)
        total = x[:, own] @ weight[:, own].t()
        dist.all_reduce(total, op=dist.ReduceOp.SUM, group=group)
        return total
    mine = x @ weight.chunk(n)[rank].t()
    of_all = [torch.zeros_like(mine) for _ in range(n)]
    dist.all_gather(of_all, mine.contiguous(), group=group)
    return torch.cat(of_all, 1)

# %% 06.1 rows by a reduce-scatter and an all-gather
def split_matmul(x: torch.Tensor, weight: torch.Tensor, how: str, group) -> torch.Tensor:
    from course_lib.collectives.into_tensor import all_gather_into_tensor, reduce_scatter_tensor

    if how == "columns":
        part = F.linear(x, cut(weight, group, 0))
        pieces = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(pieces, part, group=group)
        return torch.cat(pieces, dim=-1)
    part = F.linear(cut(x, group, -1), cut(weight, group, 1))
    own = part.new_empty(part.numel() // group.size())
    reduce_scatter_tensor(own, part.flatten(), group=group)
    whole = torch.empty_like(part)
    all_gather_into_tensor(whole.view(-1), own, group=group)
    return whole

# %% 06.2 other copies
class CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.members = group
        return x.view(x.shape)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        summed = torch.empty_like(gradient, memory_format=torch.contiguous_format).copy_(gradient)
        dist.all_reduce(summed, op=dist.ReduceOp.SUM, group=ctx.members)
        return summed, None


class SumOverGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        summed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        summed.copy_(x)
        dist.all_reduce(summed, op=dist.ReduceOp.SUM, group=group)
        return summed

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        return gradient, None

# %% 06.3 by einsum, the sum on its way first
def mlp_backward(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, grad_y: torch.Tensor, group) -> tuple:
    u = torch.einsum("nh,fh->nf", x, a)
    grad_u = torch.einsum("nh,hf->nf", grad_y, b) * silu_gradient(u)
    grad_x = torch.einsum("nf,fh->nh", grad_u, a)
    sum_of_x = dist.all_reduce(grad_x, group=group, async_op=True)
    grad_a = torch.einsum("nf,nh->fh", grad_u, x)
    grad_b = torch.einsum("nh,nf->hf", grad_y, u * u.sigmoid())
    sum_of_x.wait()
    return grad_x, grad_a, grad_b

# %% 06.2 f returns x itself
return x.view_as(x) => return x

# %% 06.4 a sum of products
class ColumnMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, weight) for weight in weights)

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor) -> tuple:
        x, *weights = ctx.saved_tensors
        flat_x = x.reshape(-1, x.shape[-1])
        flat = [gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients]
        total = None
        if ctx.needs_input_grad[0]:
            total = torch.mm(flat[0], weights[0])
            for gradient, weight in list(zip(flat, weights))[1:]:
                total += torch.mm(gradient, weight)
            on_its_way = dist.all_reduce(total, group=ctx.group, async_op=True)
        of_weights = []
        for wanted, gradient in zip(ctx.needs_input_grad[2:], flat):
            of_weights.append(torch.mm(gradient.t(), flat_x) if wanted else None)
        if total is not None:
            on_its_way.wait()
            total = total.reshape(x.shape)
        return (total, None, *of_weights)

# %% 06.5 by a product
def forward_at_once(self: RowParallelLinear, x: torch.Tensor) -> torch.Tensor:
    partial = torch.matmul(x, self.weight.transpose(0, 1))
    whole = self.output_reduce(partial, self.group)
    if self.bias is not None:
        whole = whole + self.bias.to(whole.dtype)
    return whole

# %% 06.6 layer by layer
def project_together(x: torch.Tensor, layers: list[ColumnParallelLinear]) -> tuple[torch.Tensor, ...]:
    weights, biases = [], []
    for layer in layers:
        weight, bias = layer.weight, layer.bias
        if layer.replicas:
            weight = copy_to_group(weight, layer.replicas.copies)
            bias = bias if bias is None else copy_to_group(bias, layer.replicas.copies)
        weights.append(weight)
        biases.append(bias)
    first = layers[0]
    x, *weights = as_autocast(x, *weights)
    made = []
    for out, bias in zip(first.matmul.apply(x, first.group, *weights), biases):
        made.append(out if bias is None else out + bias.to(out.dtype))
    return tuple(made)

# %% 06.7 zeros where another rank has the row
def forward(self: VocabParallelEmbedding, tokens: torch.Tensor) -> torch.Tensor:
    last = self.shard.start + self.shard.size
    here = (tokens >= self.shard.start) & (tokens < last)
    places = torch.where(here, tokens - self.shard.start, 0)
    found = F.embedding(places, self.weight)
    return self.output_reduce(torch.where(here.unsqueeze(-1), found, torch.zeros_like(found)), self.group)

# %% 06.8 two sums side by side
class VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: torch.Tensor, targets: torch.Tensor, shard: TensorShard) -> torch.Tensor:
        ctx.dtype = logits.dtype
        top = logits.max(dim=1).values.float()
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=shard.group)
        rows, elsewhere = local_rows(targets, shard)
        kept = logits.float() - top.unsqueeze(1) if logits.dtype == torch.float32 else logits - top.unsqueeze(1)
        both = torch.zeros(2, len(logits), dtype=torch.float32, device=logits.device)
        both[1] = torch.where(elsewhere, 0.0, kept.gather(1, rows.unsqueeze(1)).squeeze(1))
        kept.exp_()
        both[0] = kept.sum(dim=1)
        dist.all_reduce(both, op=dist.ReduceOp.SUM, group=shard.group)
        if ctx.needs_input_grad[0]:  # softmax, and 1 less at the target
            kept /= both[0].unsqueeze(1)
            kept[torch.arange(len(rows), device=rows.device), rows] -= (~elsewhere).to(kept.dtype)
            ctx.save_for_backward(kept)
        return both[0].log() - both[1]

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        (kept,) = ctx.saved_tensors
        kept *= gradient.unsqueeze(1)
        return kept.to(ctx.dtype), None, None

# %% 06.8 each rank's logsumexp, and then that of all
class VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: torch.Tensor, targets: torch.Tensor, shard: TensorShard) -> torch.Tensor:
        ctx.dtype = logits.dtype
        own = logits.float().logsumexp(1)
        largest = own.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=shard.group)
        rows, elsewhere = local_rows(targets, shard)
        of_target = logits.gather(1, rows[:, None])[:, 0].float().masked_fill_(elsewhere, 0.0)
        sums = torch.stack([(own - largest).exp(), of_target])
        dist.all_reduce(sums, group=shard.group)
        total = largest + sums[0].log()
        if ctx.needs_input_grad[0]:  # softmax, and 1 less at the target
            softmax = (logits - total[:, None]).exp_()
            softmax.scatter_add_(1, rows[:, None], (elsewhere.float() - 1)[:, None])
            ctx.save_for_backward(softmax)
        return total - sums[1]

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        (softmax,) = ctx.saved_tensors
        return softmax.mul_(gradient[:, None]).to(ctx.dtype), None, None

# %% 06.8 keeps the logits, and makes the exponentials again
if ctx.needs_input_grad[0]:  # softmax, and 1 less at the target
    grad.div_(total[:, None]).scatter_add_(1, rows[:, None], (elsewhere.to(grad.dtype) - 1)[:, None])
    ctx.save_for_backward(grad)
=>
ctx.save_for_backward(logits, largest, total, rows, elsewhere)
---
(grad,) = ctx.saved_tensors
=>
logits, largest, total, rows, elsewhere = ctx.saved_tensors
grad = (logits - largest[:, None]).exp_().div_(total[:, None])
grad.scatter_add_(1, rows[:, None], (elsewhere.to(grad.dtype) - 1)[:, None])

# %% 06.9 by names
from course_lib.tensor_parallel.linear import project_together


def apply_tensor_parallel(
    model: Transformer, group: dist.ProcessGroup | None = None, chunks: int = 1, gather_logits: bool = False
) -> Transformer:
    group, config = group_or_world(group), model.config
    check_model(model, group)
    model.applied["tensor_parallel"] = group
    copies = group.size() // config.kv_heads
    replicas = replicas_of(group, copies) if copies > 1 else None
    share_head_norms(model, group)
    column = {"q_proj": None, "k_proj": replicas, "v_proj": replicas, "gate_proj": None, "up_proj": None}
    for block in model.blocks:
        for module in [*block.modules()]:
            if module is not block.attention and not isinstance(module, MLP):
                continue
            for name, child in [*module.named_children()]:
                if name in column:
                    setattr(module, name, ColumnParallelLinear(child, group, column[name]))
                elif name in ("o_proj", "down_proj"):
                    setattr(module, name, RowParallelLinear(child, group, chunks))
            module.project_layers = lambda x, layers: project_together(x, layers)
    if model.embedding is not None:
        model.embedding = VocabParallelEmbedding(model.embedding, group)
    if model.head is not None:
        head = ColumnParallelLinear(model.head, group, gather_output=gather_logits)
        if config.tied and model.embedding is not None:
            head.weight = model.embedding.weight
        model.head = head
    return model

# %% 06.10 step by step
# Set gigabytes_sent: what each of 8 GPUs sends in a forward and backward.
sums = 4 * 32 + 2
bytes_of_one = 8192 * 4096 * 2
gigabytes_sent = sums * bytes_of_one * 2 * (8 - 1) / 8 / 10**9

# %% 06.11 from what differs
import math


def diagnose(first_loss: float, expected: float, differing: list[str]) -> str:
    norms = [name for name in differing if "norm" in name]
    if not math.isclose(first_loss, expected, rel_tol=1e-4):
        return "row layer"
    elif norms:
        return "f"
    elif differing:
        return "copies"
    return "right"

# %% 06.12 the chunks put together
class RowMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup, weight: torch.Tensor, chunks: int) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        rows = x.reshape(-1, x.shape[-1])
        sums = torch.empty(rows.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
        waiting, start = [], 0
        for part in rows.chunk(chunks):
            end = start + part.shape[0]
            torch.matmul(part, weight.t(), out=sums[start:end])
            waiting.append(dist.all_reduce(sums[start:end], group=group, async_op=True))
            start = end
        [work.wait() for work in waiting]
        return sums.reshape(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        x, weight = ctx.saved_tensors
        row = gradient.flatten(0, -2)
        grad_x = (row @ weight).view_as(x) if ctx.needs_input_grad[0] else None
        grad_weight = row.t() @ x.flatten(0, -2) if ctx.needs_input_grad[2] else None
        return grad_x, None, grad_weight, None

# %% 06.13 the state after one draw
@contextlib.contextmanager
def local_rng(group: dist.ProcessGroup | None = None):
    group = group or dist.group.WORLD
    after = {}
    for generator in generators():
        own_seed = zlib.crc32(bytes([group.rank() % 256, group.rank() // 256]) + bytes(generator.get_state().tolist()))
        torch.rand((), device=generator.device, generator=generator)
        after[generator] = generator.get_state()
        generator.manual_seed(own_seed)
    try:
        yield
    finally:
        for generator in after:
            generator.set_state(after[generator])

# %% 06.13 torch.distributed's rank in the group
group.rank() => dist.get_rank(group)

# %% 06.14 a dictionary
def pack(self: PartitionedCheckpoint, tensor: torch.Tensor):
    if tensor.numel() == 0 or not tensor.requires_grad:
        return tensor
    flat = tensor.detach().reshape(-1)
    shard = TensorShard.of(len(flat), self.group)
    return {"part": shard.cut(flat).clone(), "shard": shard, "shape": tensor.shape}


def unpack(self: PartitionedCheckpoint, kept) -> torch.Tensor:
    if isinstance(kept, torch.Tensor):
        return kept
    return kept["shard"].gather(kept["part"]).reshape(kept["shape"])

# %% 06.15 two times
def all_reduce_ratio(
    hidden: int, tp: int, bandwidth: float, peak: float, layer_params: int | None = None, element_bytes: int = 2
) -> float:
    if layer_params is None:
        layer_params = 12 * hidden * hidden
    of_a_token = 2 * 2 * (tp - 1) / tp * hidden * element_bytes / bandwidth
    products = 2 * layer_params / tp / peak
    return of_a_token / products
