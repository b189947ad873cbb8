"""Wrong answers that the checks of notebook 07 must catch. None of them hangs."""

# %% 07.1 g: gathers, and cuts in backward
local, work = start_reduce_scatter(split_by_rank(gradient, ctx.group.size()), ctx.group)
work.wait()
return local, None
=>
return split_by_rank(gradient, ctx.group.size())[ctx.group.rank()].contiguous(), None

# %% 07.1 g: gathers, and averages in backward
return local, None => return local / ctx.group.size(), None

# %% 07.1 g over all ranks instead of the group
ctx.group = group
shards, work = start_gather(local, group)
=>
ctx.group = dist.group.WORLD
shards, work = start_gather(local, dist.group.WORLD)

# %% 07.1 g* over all ranks instead of the group
ctx.group = group
local, work = start_reduce_scatter(split_by_rank(summand, group.size()), group)
=>
group = ctx.group = dist.group.WORLD
local, work = start_reduce_scatter(split_by_rank(summand, group.size()), group)

# %% 07.1 g: parts are laid behind one another without join_by_rank
return join_by_rank(shards)
=>
return shards.view(len(local), -1, *local.shape[2:])

# %% 07.1 g*: keeps its own tokens' gradient to itself in backward
return GatherSequence.apply(gradient, ctx.group), None
=>
n = ctx.group.size()
shards = gradient.new_zeros(n, *gradient.shape)
shards[ctx.group.rank()] = gradient
return join_by_rank(shards), None

# %% 07.1 g*: all-reduces, then cuts
class ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, summand: torch.Tensor, group) -> torch.Tensor:
        ctx.group = group
        total = summand.clone()
        dist.all_reduce(total, group=group)
        return split_by_rank(total, group.size())[group.rank()].contiguous()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        return GatherSequence.apply(gradient, ctx.group), None

# %% 07.1 g*: a mean instead of the sum
return local
=>
return local / group.size()

# %% 07.1 g*: scatters parts of the batch, not of the sequence
local, work = start_reduce_scatter(split_by_rank(summand, group.size()), group)
=>
n = group.size()
local = (len(summand), summand.shape[1] // n, *summand.shape[2:])
local, work = start_reduce_scatter(summand.reshape(n, *local), group)

# %% 07.1 g keeps its input for a backward that needs none
    ctx.group = group
    shards, work = start_gather(local, group)
=>
    ctx.group = group
    ctx.save_for_backward(local)
    shards, work = start_gather(local, group)

# %% 07.1 gathers BF16 in float32
    shards, work = start_gather(local, group)
    work.wait()
    return join_by_rank(shards)
=>
    shards, work = start_gather(local.to(torch.promote_types(local.dtype, torch.float32)), group)
    work.wait()
    return join_by_rank(shards).to(local.dtype)

# %% 07.1 g keeps the gathered tokens in ctx
    return join_by_rank(shards)
=>
    ctx.full = join_by_rank(shards)
    return ctx.full

# %% 07.2 waits for the gathered x at once
shards, gathering = start_gather(local, ctx.group)
=>
shards, gathering = start_gather(local, ctx.group)
gathering.wait()
---
grad_x = rows[0] @ weights[0]
for row, weight in zip(rows[1:], weights[1:], strict=True):
    grad_x.addmm_(row, weight)
=>
grad_x = sum(row @ weight for row, weight in zip(rows, weights, strict=True))

# %% 07.2 waits for the reduce-scatter at once
grad_x = rows[0] @ weights[0]
for row, weight in zip(rows[1:], weights[1:], strict=True):
    grad_x.addmm_(row, weight)
=>
grad_x = sum(row @ weight for row, weight in zip(rows, weights, strict=True))
---
grad_local, scattering = start_reduce_scatter(grad_x, ctx.group)
=>
grad_local, scattering = start_reduce_scatter(grad_x, ctx.group)
scattering.wait()

# %% 07.2 gathers x after the product for x's gradient
if any(needed):
    shards, gathering = start_gather(local, ctx.group)
=>
---
grad_x = rows[0] @ weights[0]
for row, weight in zip(rows[1:], weights[1:], strict=True):
    grad_x.addmm_(row, weight)
=>
grad_x = sum(row @ weight for row, weight in zip(rows, weights, strict=True))
---
    grad_local, scattering = start_reduce_scatter(grad_x, ctx.group)
if any(needed):
=>
    grad_local, scattering = start_reduce_scatter(grad_x, ctx.group)
if any(needed):
    shards, gathering = start_gather(local, ctx.group)

# %% 07.2 gathers x where no weight wants a gradient
grad_local = None
grad_weights: list[torch.Tensor | None] = [None] * len(weights)
if any(needed):
=>
grad_local = None
grad_weights: list[torch.Tensor | None] = [None] * len(weights)
if True:
---
grad_x = rows[0] @ weights[0]
for row, weight in zip(rows[1:], weights[1:], strict=True):
    grad_x.addmm_(row, weight)
=>
grad_x = sum(row @ weight for row, weight in zip(rows, weights, strict=True))
---
    grad_local, scattering = start_reduce_scatter(grad_x, ctx.group)
if any(needed):
=>
    grad_local, scattering = start_reduce_scatter(grad_x, ctx.group)
if True:

# %% 07.2 gathers twice
grad_x = rows[0] @ weights[0]
for row, weight in zip(rows[1:], weights[1:], strict=True):
    grad_x.addmm_(row, weight)
=>
grad_x = sum(row @ weight for row, weight in zip(rows, weights, strict=True))
---
    grad_local, scattering = start_reduce_scatter(grad_x, ctx.group)
if any(needed):
=>
    grad_local, scattering = start_reduce_scatter(grad_x, ctx.group)
if any(needed):
    gathering.wait()
    shards, gathering = start_gather(local, ctx.group)

# %% 07.2 a reduce-scatter for each weight
grad_x = rows[0] @ weights[0]
for row, weight in zip(rows[1:], weights[1:], strict=True):
    grad_x.addmm_(row, weight)
grad_x = split_by_rank(grad_x.unflatten(0, gradients[0].shape[:-1]), ctx.group.size())
grad_local, scattering = start_reduce_scatter(grad_x, ctx.group)
=>
grad_local, sent = 0, []
for row, weight in zip(rows, weights, strict=True):
    grad_x = split_by_rank((row @ weight).unflatten(0, gradients[0].shape[:-1]), ctx.group.size())
    sent.append(start_reduce_scatter(grad_x, ctx.group))
---
scattering.wait()
=>
for local, work in sent:
    work.wait()
    grad_local = grad_local + local

# %% 07.2 cuts x's gradient instead of summing it
grad_x = rows[0] @ weights[0]
for row, weight in zip(rows[1:], weights[1:], strict=True):
    grad_x.addmm_(row, weight)
=>
grad_x = sum(row @ weight for row, weight in zip(rows, weights, strict=True))
---
grad_local, scattering = start_reduce_scatter(grad_x, ctx.group)
=>
grad_local = grad_x[ctx.group.rank()].contiguous()
---
if ctx.needs_input_grad[0]:
    scattering.wait()
=>

# %% 07.2 a weight's gradient from the own tokens alone
grad_x = rows[0] @ weights[0]
for row, weight in zip(rows[1:], weights[1:], strict=True):
    grad_x.addmm_(row, weight)
=>
grad_x = sum(row @ weight for row, weight in zip(rows, weights, strict=True))
---
x = join_by_rank(shards).flatten(0, -2)  # [b*s, in]
=>
x = local.flatten(0, -2)
rows = [split_by_rank(g, ctx.group.size())[ctx.group.rank()].flatten(0, -2) for g in gradients]

# %% 07.2 multiplies for weights that want nothing
grad_x = rows[0] @ weights[0]
for row, weight in zip(rows[1:], weights[1:], strict=True):
    grad_x.addmm_(row, weight)
=>
grad_x = sum(row @ weight for row, weight in zip(rows, weights, strict=True))
---
if need else None for row, need in zip(rows, needed, strict=True) => for row in rows

# %% 07.2 fake: keeps the gathered x
class GatheredMatmul(OnceDifferentiable):
    @staticmethod
    def forward(ctx, local: torch.Tensor, group, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        shards, work = start_gather(local, group)
        work.wait()
        x = join_by_rank(shards)
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, weight) for weight in weights)

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor) -> tuple:
        x, *weights = ctx.saved_tensors
        needed, rows = ctx.needs_input_grad[2:], [gradient.flatten(0, -2) for gradient in gradients]  # [b*s, out]
        grad_local = None
        if ctx.needs_input_grad[0]:
            grad_x = sum(row @ weight for row, weight in zip(rows, weights, strict=True))
            grad_x = split_by_rank(grad_x.unflatten(0, gradients[0].shape[:-1]), ctx.group.size())
            grad_local, scattering = start_reduce_scatter(grad_x, ctx.group)
        grad_weights = [row.t() @ x.flatten(0, -2) if need else None for row, need in zip(rows, needed, strict=True)]
        if ctx.needs_input_grad[0]:
            scattering.wait()
        return grad_local, None, *grad_weights

# %% 07.2 does not wait for the reduce-scatter
grad_x = rows[0] @ weights[0]
for row, weight in zip(rows[1:], weights[1:], strict=True):
    grad_x.addmm_(row, weight)
=>
grad_x = sum(row @ weight for row, weight in zip(rows, weights, strict=True))
---
if ctx.needs_input_grad[0]:
    scattering.wait()
=>

# %% 07.2 gradients of weights by float32 matmuls
row.t() @ x if need => row.float().t() @ x.float() if need

# %% 07.2 the gradient of x is sent in float32
grad_x = rows[0] @ weights[0] => grad_x = (rows[0] @ weights[0]).to(torch.promote_types(rows[0].dtype, torch.float32))
grad_x.addmm_(row, weight) => grad_x += (row @ weight)

# %% 07.3 always right
def diagnose(differing, ratios):
    return "norms left out" if differing else "right"

# %% 07.3 fake: knows the order of the four runs
asked = []


def diagnose(differing, ratios):
    asked.append(differing)
    return ("norms averaged", "g", "right", "norms left out")[(len(asked) - 1) % 4]

# %% 07.3 looks for a quarter, whatever the ranks
def diagnose(differing, ratios):
    if differing:
        return "norms left out"
    if all(abs(ratio - 1) < 1e-3 for ratio in ratios.values()):
        return "right"
    return "norms averaged" if abs(ratios["norm.weight"] - 1 / 4) < 1e-3 else "g"

# %% 07.3 leaves no room for rounding
abs(ratio - 1) > 1e-3 => ratio != 1

# %% 07.3 any norm that is off is taken for averaging
all => any

# %% 07.3 averaging and leaving out mixed up
return "norms left out" => return "norms averaged"
return "norms averaged" => return "norms left out"

# %% 07.3 looks at the ratios alone
if differing:
    return "norms left out"
=>

# %% 07.3 counts the wrong parameters of this small model
all(name.endswith("norm.weight") for name in wrong) => len(wrong) < 6

# %% 07.4 the norms' gradients are left out
copy_to_group(self.weight, self.group) => self.weight

# %% 07.4 the norms' gradients are averaged
class SequenceParallelNorm(SplitNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = self.group.size()
        own = self.weight / n + (self.weight - self.weight / n).detach()
        return F.rms_norm(x, self.weight.shape, copy_to_group(own, self.group), self.eps)

# %% 07.4 the last norm is forgotten
for parent in (*model.blocks, model): => for parent in model.blocks:

# %% 07.4 norms through f and reduce_group
if reduce_group is None:
    setattr(parent, name, SequenceParallelNorm(norm, group))
else:
=>
setattr(parent, name, SequenceParallelNorm(norm, group))
if reduce_group is not None:

# %% 07.4 reduce_group is ignored
if reduce_group is None:
    setattr(parent, name, SequenceParallelNorm(norm, group))
else:
    placement_of(norm.weight).reduce_group = reduce_group
=>
setattr(parent, name, SequenceParallelNorm(norm, group))

# %% 07.4 reduce_group: the tensor-parallel ranks alone
placement_of(norm.weight).reduce_group = reduce_group => placement_of(norm.weight).reduce_group = group

# %% 07.4 the norm's eps is forgotten
(self.weight, self.group), self.eps => (self.weight, self.group)

# %% 07.4 fake: norms of gathered tokens, on every rank
from course_lib.tensor_parallel.regions import gather_from_group
from course_lib.tensor_parallel.shards import TensorShard


class SequenceParallelNorm(SplitNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shard = TensorShard.of(x.shape[1] * self.group.size(), self.group, 1)
        weight = copy_to_group(self.weight, self.group)
        return shard.cut(F.rms_norm(gather_from_group(x, shard), self.weight.shape, weight, self.eps))

# %% 07.4 hooks on weights, which a model from the meta device loses
def sum_of(gradient, group):
    total = gradient.clone()
    dist.all_reduce(total, group=group)
    return total


def apply_sequence_parallel(model, group=None, reduce_group=None):
    group = group or dist.group.WORLD
    check_sequence_parallel(model, group)
    model.applied["sequence_parallel"] = group
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear):
            module.matmul = GatheredMatmul
        elif isinstance(module, (RowParallelLinear, VocabParallelEmbedding)):
            module.output_reduce = reduce_scatter_sequence
    for parent in (*model.blocks, model):
        for name, norm in list(parent.named_children()):
            if not isinstance(norm, nn.RMSNorm):
                continue
            if reduce_group is None:
                norm.weight.register_hook(lambda gradient: sum_of(gradient, group))
            else:
                placement_of(norm.weight).reduce_group = reduce_group
    model.register_forward_pre_hook(require_positions, with_kwargs=True)
    return model

# %% 07.4 a norm sums over all ranks instead of the group
self.group => dist.group.WORLD

# %% 07.4 a norm in BF16 returns float32
copy_to_group(self.weight, self.group), self.eps) => copy_to_group(self.weight, self.group), self.eps).float()

# %% 07.4 norms get copies of the weights
SequenceParallelNorm(norm, group) => SequenceParallelNorm(__import__("copy").deepcopy(norm), group)

# %% 07.5 every place has a part of the tokens
shapes = {"after the embedding": ((2, 16, 48), (2, 4, 48))}
PLACES = ["after the embedding", "after a norm", "into the product of q", "q", "into o", "after o", "gate", "logits"]
shapes |= {
    "after a norm": ((2, 16, 48), (2, 4, 48)),
    "into the product of q": ((2, 16, 48), (2, 4, 48)),
    "q": ((2, 16, 12), (2, 4, 12)),
    "into o": ((2, 16, 12), (2, 4, 12)),
    "after o": ((2, 16, 48), (2, 4, 48)),
    "gate": ((2, 16, 25), (2, 4, 25)),
    "logits": ((2, 16, 25), (2, 4, 25)),
}

# %% 07.5 what comes out of o is whole
# Set shapes: what rank 0 of 4 holds at each place, (TP, TP + SP).
=>
shapes = {"after the embedding": ((2, 16, 48), (2, 4, 48))}
---
shapes = {"after the embedding": ((2, 16, 48), (2, 4, 48))} =>
"after o": ((2, 16, 48), (2, 4, 48)), => "after o": ((2, 16, 48), (2, 16, 48)),

# %% 07.5 logits and the feed-forward layer are whole with tensor parallelism
shapes = {"after the embedding": ((2, 16, 48), (2, 4, 48))}
PLACES = ["after the embedding", "after a norm", "into the product of q", "q", "into o", "after o", "gate", "logits"]
shapes |= {
    "after a norm": ((2, 16, 48), (2, 4, 48)),
    "into the product of q": ((2, 16, 48), (2, 16, 48)),
    "q": ((2, 16, 12), (2, 16, 12)),
    "into o": ((2, 16, 12), (2, 16, 12)),
    "after o": ((2, 16, 48), (2, 4, 48)),
    "gate": ((2, 16, 100), (2, 16, 25)),
    "logits": ((2, 16, 97), (2, 16, 25)),
}

# %% 07.5 the places of one column are missing
shapes = {"after the embedding": ((2, 16, 48), (2, 4, 48))}
PLACES = ["after the embedding", "after a norm", "into the product of q", "q", "into o", "after o", "gate", "logits"]
shapes |= {place: ((2, 16, 48),) for place in PLACES[1:]}

# %% 07.6 weighs by the new lse
def merge(out, lse, block_out, block_lse):
    torch.logaddexp(lse, block_lse, out=lse)
    out.lerp_(block_out.to(out.dtype), torch.sigmoid(block_lse - lse)[..., None])

# %% 07.6 a mean without weights
def merge(out, lse, block_out, block_lse):
    weight = torch.where(lse.isinf(), 1.0, 0.5)
    out.lerp_(block_out.to(out.dtype), weight[..., None])
    torch.logaddexp(lse, block_lse, out=lse)

# %% 07.6 sums of exponentials, which overflow
def merge(out, lse, block_out, block_lse):
    old, new = lse.exp(), block_lse.exp()
    out.copy_((out * old[..., None] + block_out * new[..., None]) / (old + new)[..., None])
    lse.copy_((old + new).log())

# %% 07.6 sums in the piece's dtype
def merge(out, lse, block_out, block_lse):
    total = out.to(block_out.dtype).lerp(block_out, torch.sigmoid(block_lse - lse)[..., None].to(block_out.dtype))
    out.copy_(total)
    torch.logaddexp(lse, block_lse, out=lse)

# %% 07.6 weights in the piece's dtype
def merge(out, lse, block_out, block_lse):
    weight = torch.sigmoid(block_lse - lse)[..., None].to(block_out.dtype)
    out.copy_(out * (1 - weight) + block_out * weight)
    torch.logaddexp(lse, block_lse, out=lse)

# %% 07.6 returns what it should change
def merge(out, lse, block_out, block_lse):
    weight = torch.sigmoid(block_lse - lse)[..., None]
    return out + weight * (block_out - out), torch.logaddexp(lse, block_lse)

# %% 07.6 the larger lse instead of the sum's
torch.logaddexp(lse, block_lse, out=lse) => torch.maximum(lse, block_lse, out=lse)

# %% 07.6 spoils the piece
def merge(out, lse, block_out, block_lse):
    new = torch.logaddexp(lse, block_lse)
    out.mul_((lse - new).exp()[..., None]).add_(block_out.mul_((block_lse - new).exp()[..., None].to(block_out.dtype)))
    lse.copy_(new)

# %% 07.6 the running maximum starts at 0
def merge(out, lse, block_out, block_lse):
    m = torch.maximum(lse, block_lse).clamp(min=0)
    a, b = (lse - m).exp(), (block_lse - m).exp()
    out.copy_((out * a[..., None] + block_out.to(out.dtype) * b[..., None]) / (a + b)[..., None])
    lse.copy_(m + (a + b).log())

# %% 07.6 merges in float32, whatever it is given
def merge(out, lse, block_out, block_lse):
    w = torch.sigmoid(block_lse - lse).float()
    out.copy_(out.float().lerp(block_out.float(), w[..., None]))
    lse.copy_(torch.logaddexp(lse.float(), block_lse.float()))

# %% 07.6 the weight is rounded to the dtype of the block
out.lerp_(block_out.to(out.dtype), torch.sigmoid(block_lse - lse)[..., None]) => out.copy_(out + torch.sigmoid(block_lse - lse)[..., None].to(block_out.dtype) * (block_out - out))

# %% 07.7 backward with the block's own lse
def plain_backward(gradient, q, k, v, out, lse, causal):
    def of_rows(x):
        return by_group(x, k).permute(0, 2, 3, 1)

    p = scores(q, k, causal).softmax(-1)
    grad = by_group(gradient, k)
    grad_v = torch.einsum("bkgqs,bqkgd->bskd", p.to(grad.dtype), grad)
    grad_p = torch.einsum("bqkgd,bskd->bkgqs", grad, v)
    grad_z = p * (grad_p - of_rows((gradient * out).sum(-1))[..., None]) / math.sqrt(q.shape[-1])
    grad_z = grad_z.to(q.dtype)
    grad_q = torch.einsum("bkgqs,bskd->bqkgd", grad_z, k).flatten(2, 3)
    grad_k = torch.einsum("bkgqs,bqkgd->bskd", grad_z, by_group(q, k))
    return grad_q, grad_k, grad_v

# %% 07.7 backward with the block's own out in D
def plain_backward(gradient, q, k, v, out, lse, causal):
    def of_rows(x):
        return by_group(x, k).permute(0, 2, 3, 1)

    out = plain_forward(q, k, v, causal)[0]
    p = (scores(q, k, causal) - of_rows(lse)[..., None]).exp()
    grad = by_group(gradient, k)
    grad_v = torch.einsum("bkgqs,bqkgd->bskd", p.to(grad.dtype), grad)
    grad_p = torch.einsum("bqkgd,bskd->bkgqs", grad, v)
    grad_z = p * (grad_p - of_rows((gradient * out).sum(-1))[..., None]) / math.sqrt(q.shape[-1])
    grad_z = grad_z.to(q.dtype)
    grad_q = torch.einsum("bkgqs,bskd->bqkgd", grad_z, k).flatten(2, 3)
    grad_k = torch.einsum("bkgqs,bqkgd->bskd", grad_z, by_group(q, k))
    return grad_q, grad_k, grad_v

# %% 07.7 backward without D
def plain_backward(gradient, q, k, v, out, lse, causal):
    def of_rows(x):
        return by_group(x, k).permute(0, 2, 3, 1)

    p = (scores(q, k, causal) - of_rows(lse)[..., None]).exp()
    grad = by_group(gradient, k)
    grad_v = torch.einsum("bkgqs,bqkgd->bskd", p.to(grad.dtype), grad)
    grad_p = torch.einsum("bqkgd,bskd->bkgqs", grad, v)
    grad_z = p * (grad_p) / math.sqrt(q.shape[-1])
    grad_z = grad_z.to(q.dtype)
    grad_q = torch.einsum("bkgqs,bskd->bqkgd", grad_z, k).flatten(2, 3)
    grad_k = torch.einsum("bkgqs,bqkgd->bskd", grad_z, by_group(q, k))
    return grad_q, grad_k, grad_v

# %% 07.7 backward: D from the block's probabilities
def plain_backward(gradient, q, k, v, out, lse, causal):
    def of_rows(x):
        return by_group(x, k).permute(0, 2, 3, 1)

    p = (scores(q, k, causal) - of_rows(lse)[..., None]).exp()
    grad = by_group(gradient, k)
    grad_v = torch.einsum("bkgqs,bqkgd->bskd", p.to(grad.dtype), grad)
    grad_p = torch.einsum("bqkgd,bskd->bkgqs", grad, v)
    grad_z = p * (grad_p - (p * grad_p).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
    grad_z = grad_z.to(q.dtype)
    grad_q = torch.einsum("bkgqs,bskd->bqkgd", grad_z, k).flatten(2, 3)
    grad_k = torch.einsum("bkgqs,bqkgd->bskd", grad_z, by_group(q, k))
    return grad_q, grad_k, grad_v

# %% 07.7 backward without 1/sqrt(d)
def plain_backward(gradient, q, k, v, out, lse, causal):
    def of_rows(x):
        return by_group(x, k).permute(0, 2, 3, 1)

    p = (scores(q, k, causal) - of_rows(lse)[..., None]).exp()
    grad = by_group(gradient, k)
    grad_v = torch.einsum("bkgqs,bqkgd->bskd", p.to(grad.dtype), grad)
    grad_p = torch.einsum("bqkgd,bskd->bkgqs", grad, v)
    grad_z = p * (grad_p - of_rows((gradient * out).sum(-1))[..., None])
    grad_z = grad_z.to(q.dtype)
    grad_q = torch.einsum("bkgqs,bskd->bqkgd", grad_z, k).flatten(2, 3)
    grad_k = torch.einsum("bkgqs,bqkgd->bskd", grad_z, by_group(q, k))
    return grad_q, grad_k, grad_v

# %% 07.7 backward: dP takes the heads in another order
def plain_backward(gradient, q, k, v, out, lse, causal):
    def of_rows(x):
        return by_group(x, k).permute(0, 2, 3, 1)

    p = (scores(q, k, causal) - of_rows(lse)[..., None]).exp()
    grad = by_group(gradient, k)
    grad_v = torch.einsum("bkgqs,bqkgd->bskd", p.to(grad.dtype), grad)
    mixed = gradient.unflatten(2, (-1, k.shape[2])).transpose(2, 3)
    grad_p = torch.einsum("bqkgd,bskd->bkgqs", mixed, v)
    grad_z = p * (grad_p - of_rows((gradient * out).sum(-1))[..., None]) / math.sqrt(q.shape[-1])
    grad_z = grad_z.to(q.dtype)
    grad_q = torch.einsum("bkgqs,bskd->bqkgd", grad_z, k).flatten(2, 3)
    grad_k = torch.einsum("bkgqs,bqkgd->bskd", grad_z, by_group(q, k))
    return grad_q, grad_k, grad_v

# %% 07.7 backward: a K/V head gets the gradient of one of its heads
def plain_backward(gradient, q, k, v, out, lse, causal):
    def of_rows(x):
        return by_group(x, k).permute(0, 2, 3, 1)

    p = (scores(q, k, causal) - of_rows(lse)[..., None]).exp()
    grad = by_group(gradient, k)
    grad_v = torch.einsum("bkgqs,bqkgd->bskd", p.to(grad.dtype), grad)
    grad_p = torch.einsum("bqkgd,bskd->bkgqs", grad, v)
    grad_z = p * (grad_p - of_rows((gradient * out).sum(-1))[..., None]) / math.sqrt(q.shape[-1])
    grad_z = grad_z.to(q.dtype)
    grad_q = torch.einsum("bkgqs,bskd->bqkgd", grad_z, k).flatten(2, 3)
    grad_k = torch.einsum("bkqs,bqkd->bskd", grad_z[:, :, 0], by_group(q, k)[:, :, :, 0])
    return grad_q, grad_k, grad_v

# %% 07.7 forward: lse [b, a, s]
def plain_forward(q, k, v, causal):
    z = scores(q, k, causal)
    lse = z.logsumexp(-1)
    p = (z - lse[..., None]).exp().to(v.dtype)
    out = torch.einsum("bkgqs,bskd->bqkgd", p, v).flatten(2, 3)
    return out, lse.flatten(1, 2)


def plain_backward(gradient, q, k, v, out, lse, causal):
    def of_rows(x):
        return by_group(x, k).permute(0, 2, 3, 1)

    p = (scores(q, k, causal) - of_rows(lse)[..., None]).exp()
    grad = by_group(gradient, k)
    grad_v = torch.einsum("bkgqs,bqkgd->bskd", p.to(grad.dtype), grad)
    grad_p = torch.einsum("bqkgd,bskd->bkgqs", grad, v)
    grad_z = p * (grad_p - of_rows((gradient * out).sum(-1))[..., None]) / math.sqrt(q.shape[-1])
    grad_z = grad_z.to(q.dtype)
    grad_q = torch.einsum("bkgqs,bskd->bqkgd", grad_z, k).flatten(2, 3)
    grad_k = torch.einsum("bkgqs,bqkgd->bskd", grad_z, by_group(q, k))
    return grad_q, grad_k, grad_v

# %% 07.7 forward: fake: PyTorch's attention, and no lse
from course_kit.labs.context_parallel import F


def plain_forward(q, k, v, causal):
    of_heads = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(*of_heads, is_causal=causal, enable_gqa=True).transpose(1, 2)
    return out, torch.zeros_like(out[..., 0])


def plain_backward(gradient, q, k, v, out, lse, causal):
    def of_rows(x):
        return by_group(x, k).permute(0, 2, 3, 1)

    p = (scores(q, k, causal) - of_rows(lse)[..., None]).exp()
    grad = by_group(gradient, k)
    grad_v = torch.einsum("bkgqs,bqkgd->bskd", p.to(grad.dtype), grad)
    grad_p = torch.einsum("bqkgd,bskd->bkgqs", grad, v)
    grad_z = p * (grad_p - of_rows((gradient * out).sum(-1))[..., None]) / math.sqrt(q.shape[-1])
    grad_z = grad_z.to(q.dtype)
    grad_q = torch.einsum("bkgqs,bskd->bqkgd", grad_z, k).flatten(2, 3)
    grad_k = torch.einsum("bkgqs,bqkgd->bskd", grad_z, by_group(q, k))
    return grad_q, grad_k, grad_v

# %% 07.7 fake: backward by autograd through the block alone
def plain_backward(gradient, q, k, v, out, lse, causal):
    with torch.enable_grad():
        tensors = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(plain_forward(*tensors, causal)[0], tensors, gradient)

# %% 07.7 the maximum begins at 0
lse = z.logsumexp(-1)  # [b, kv, g, s]
=>
m = z.amax(-1).clamp(min=0)
lse = (z - m[..., None]).exp().sum(-1).log() + m  # [b, kv, g, s]

# %% 07.7 backward divides two exponentials
p = (scores(q, k, causal) - of_rows(lse)[..., None]).exp() => p = scores(q, k, causal).exp() / of_rows(lse)[..., None].exp()

# %% 07.7 D in BF16
(gradient.to(p.dtype) * out).sum(-1) => (gradient * out.to(gradient.dtype)).sum(-1)

# %% 07.7 dP in BF16
grad.to(p.dtype), v.to(p.dtype)) => grad, v)

# %% 07.8 the own chunks without a mask
(0, len(key_chunks)), causal => (0, len(key_chunks)), False

# %% 07.8 forgets the own chunks' causal pieces
if not causal or query_chunks == key_chunks: => if not causal:

# %% 07.8 own and other the same: several pieces
if not causal or query_chunks == key_chunks: => if not causal:
---
tiles, seen = [], [sum(key_chunk < query_chunk for key_chunk in key_chunks) for query_chunk in query_chunks]
=>
tiles, seen = [], [sum(key_chunk < query_chunk for key_chunk in key_chunks) for query_chunk in query_chunks]
if query_chunks == key_chunks:
    tiles = [AttentionTile(slice(i, i + 1), slice(i, i + 1), True) for i in range(len(query_chunks))]

# %% 07.8 a piece for each pair of chunks
def visible(query_chunks, key_chunks, causal=True):
    if not causal or query_chunks == key_chunks:
        return [AttentionTile(slice(0, len(query_chunks)), slice(0, len(key_chunks)), causal)]
    pairs = itertools.product(range(len(query_chunks)), range(len(key_chunks)))
    return [AttentionTile(slice(i, i + 1), slice(j, j + 1), False) for i, j in pairs if key_chunks[j] < query_chunks[i]]

# %% 07.8 a piece for each chunk of queries
def visible(query_chunks, key_chunks, causal=True):
    if not causal or query_chunks == key_chunks:
        return [AttentionTile(slice(0, len(query_chunks)), slice(0, len(key_chunks)), causal)]
    seen = [sum(chunk < query_chunk for chunk in key_chunks) for query_chunk in query_chunks]
    return [AttentionTile(slice(i, i + 1), slice(0, count), False) for i, count in enumerate(seen) if count]

# %% 07.8 numbers of chunks instead of places
(rows[0], rows[-1] + 1), slice(0, count) => (query_chunks[rows[0]], query_chunks[rows[-1]] + 1), slice(0, key_chunks[count - 1] + 1)

# %% 07.8 not causal: still causal
if not causal or query_chunks == key_chunks: => if query_chunks == key_chunks:

# %% 07.8 whole parts only: all of an earlier rank, nothing of a later one
def visible(query_chunks, key_chunks, causal=True):
    if not causal or query_chunks == key_chunks:
        return [AttentionTile(slice(0, len(query_chunks)), slice(0, len(key_chunks)), causal)]
    if key_chunks[0] < query_chunks[0]:
        return [AttentionTile(slice(0, len(query_chunks)), slice(0, len(key_chunks)), False)]
    return []

# %% 07.8 fake: everything, for all queries
def visible(query_chunks, key_chunks, causal=True):
    return [AttentionTile(slice(0, len(query_chunks)), slice(0, len(key_chunks)), causal and query_chunks == key_chunks)]

# %% 07.9 fake: an all-gather, and the loop over what it brought
def ring_forward(q, k, v, group, causal, attention, order):
    rank, n = group.rank(), group.size()
    local_chunks = chunks_of(rank, n, order)
    chunk, (out, lse) = q.shape[1] // len(local_chunks), initial_out_lse(q)
    parts, work = start_gather(torch.stack([k, v]), group)
    work.wait()
    for step in range(n):
        tiles = visible(local_chunks, chunks_of((rank - step) % n, n, order), causal)
        attend(q, *parts[(rank - step) % n], in_tokens(tiles, chunk), attention, out, lse)
    return out.to(q.dtype), lse

# %% 07.9 fake: an all-gather hidden behind a ring for show
chunk, kv, (out, lse) = q.shape[1] // len(local_chunks), torch.stack([k, v]), initial_out_lse(q)
=>
chunk, kv, (out, lse) = q.shape[1] // len(local_chunks), torch.stack([k, v]), initial_out_lse(q)
parts, work = start_gather(kv, group)
work.wait()
---
kv[0], kv[1] => *parts[(rank - step) % n]

# %% 07.9 waits before it attends
arriving, works = start_exchange(kv, group) if step < n - 1 else (kv.new_empty(0), [])
=>
arriving, works = start_exchange(kv, group) if step < n - 1 else (kv.new_empty(0), [])
for work in works:
    work.wait()
---
for work in works:
    work.wait()
=>

# %% 07.9 collects all parts first, and attends at the end
def ring_forward(q, k, v, group, causal, attention, order):
    rank, n = group.rank(), group.size()
    local_chunks = chunks_of(rank, n, order)
    chunk, kv, (out, lse) = q.shape[1] // len(local_chunks), torch.stack([k, v]), initial_out_lse(q)
    parts = []
    for step in range(n):
        arriving, works = start_exchange(kv, group) if step < n - 1 else (None, [])
        parts.append(kv)
        for work in works:
            work.wait()
        kv = arriving
    for step, kv in enumerate(parts):
        tiles = visible(local_chunks, chunks_of((rank - step) % n, n, order), causal)
        attend(q, *kv, in_tokens(tiles, chunk), attention, out, lse)
    return out.to(q.dtype), lse

# %% 07.9 four times the bytes
[k, v] => [k, v] * 4

# %% 07.9 k and v travel apart
torch.stack([k, v]) => (k, v)
---
arriving, works = start_exchange(kv, group) if step < n - 1 else (kv.new_empty(0), [])
=>
arriving, works = [], []
for tensor in kv if step < n - 1 else ():
    part, work = start_exchange(tensor, group)
    arriving, works = [*arriving, part], [*works, *work]

# %% 07.9 an exchange too many
(kv, group) if step < n - 1 else (kv.new_empty(0), []) => (kv, group)

# %% 07.9 sends to the rank before
rank + 1 => rank - 1
rank - 1 => rank + 1
rank - step => rank + step

# %% 07.9 takes what arrives for the next rank's
rank - step => rank + step

# %% 07.9 fake: all keys, whole, on every rank
tiles = visible(local_chunks, chunks_of((rank - step) % n, n, order), causal)
attend(q, kv[0], kv[1], in_tokens(tiles, chunk), attention, out, lse)
=>
source = chunks_of((rank - step) % n, n, order)
whole = slice(0, q.shape[1])
part, part_lse = initial_out_lse(q)
attend(q, kv[0], kv[1], [in_tokens(visible(local_chunks, source, False), chunk)[0]], attention, part, part_lse)
for rows, columns, inside in in_tokens(visible(local_chunks, source, causal), chunk):
    attend(q, kv[0], kv[1], [(rows, columns, inside)], attention, out, lse)

# %% 07.9 contiguous posing as zig-zag
local_chunks = chunks_of(rank, n, order) => local_chunks = chunks_of(rank, n, "contiguous")
n, n, order => n, n, "contiguous"

# %% 07.9 out stays in float32
return out.to(q.dtype), lse => return out, lse

# %% 07.9 lse is rounded to the dtype of q
return out.to(q.dtype), lse => return out.to(q.dtype), lse.to(q.dtype)

# %% 07.9 keeps all shards that come by
    kv = arriving
=>
    every = [*every, kv] if step else [kv]
    kv = arriving

# %% 07.10 the gradients of k and v stay where they are made
if step == 0:
    grad_local = grad_kv
else:
    for work in grad_works:
        work.wait()
    if passing is not None:
        grad_kv += passing
    outgoing = grad_kv  # is read until the next step waits: it must not be freed before
    passing, grad_works = start_exchange(outgoing, group)
=>
grad_local = grad_kv if step == 0 else grad_local + grad_kv
---
for work in grad_works:
    work.wait()
if passing is not None:
    grad_local += passing
=>

# %% 07.10 the last hop home is missing
outgoing = grad_kv  # is read until the next step waits: it must not be freed before
passing, grad_works = start_exchange(outgoing, group)
=>
passing, grad_works = start_exchange(grad_kv, group) if step < n - 1 else (grad_kv, [])

# %% 07.10 the own share is forgotten
outgoing = grad_kv  # is read until the next step waits: it must not be freed before
passing, grad_works = start_exchange(outgoing, group)
=>
passing, grad_works = start_exchange(grad_kv, group)
---
grad_local += passing => grad_local = passing

# %% 07.10 fake: an all-gather and a reduce-scatter
def ring_backward(gradient, q, k, v, out, lse, group, causal, attention, order):
    rank, n = group.rank(), group.size()
    local_chunks = chunks_of(rank, n, order)
    chunk, grad_q = q.shape[1] // len(local_chunks), torch.zeros_like(q, dtype=lse.dtype)
    parts, work = start_gather(torch.stack([k, v]), group)
    work.wait()
    grads = torch.zeros_like(parts, dtype=lse.dtype)
    for source in range(n):
        tiles = in_tokens(visible(local_chunks, chunks_of(source, n, order), causal), chunk)
        attend_backward(gradient, q, *parts[source], out, lse, tiles, attention, grad_q, *grads[source])
    grad_local, work = start_reduce_scatter(grads, group)
    work.wait()
    return grad_q.to(q.dtype), *grad_local.to(k.dtype)

# %% 07.10 fake: the ring for the keys, an all-reduce for their gradients
def ring_backward(gradient, q, k, v, out, lse, group, causal, attention, order):
    rank, n = group.rank(), group.size()
    local_chunks = chunks_of(rank, n, order)
    chunk, kv = q.shape[1] // len(local_chunks), torch.stack([k, v])
    grad_q, grad_local, passing, grad_works = torch.zeros_like(q, dtype=lse.dtype), None, None, []
    grads = torch.zeros(n, *kv.shape, dtype=lse.dtype)
    for step in range(n):
        arriving, works = start_exchange(kv, group) if step < n - 1 else (None, [])
        tiles = in_tokens(visible(local_chunks, chunks_of((rank - step) % n, n, order), causal), chunk)
        grad_kv = torch.zeros_like(kv, dtype=lse.dtype)
        attend_backward(gradient, q, *kv, out, lse, tiles, attention, grad_q, *grad_kv)
        grads[(rank - step) % n] = grad_kv
        for work in works:
            work.wait()
        kv = arriving
    dist.all_reduce(grads, group=group)
    return grad_q.to(q.dtype), *grads[rank].to(k.dtype)

# %% 07.10 waits for keys and values before it attends
arriving, works = start_exchange(kv, group) if step < n - 1 else (kv.new_empty(0), [])
=>
arriving, works = start_exchange(kv, group) if step < n - 1 else (kv.new_empty(0), [])
for work in works:
    work.wait()
---
    outgoing = grad_kv  # is read until the next step waits: it must not be freed before
    passing, grad_works = start_exchange(outgoing, group)
for work in works:
    work.wait()
=>
    passing, grad_works = start_exchange(grad_kv, group)

# %% 07.10 waits for each sum at once
outgoing = grad_kv  # is read until the next step waits: it must not be freed before
passing, grad_works = start_exchange(outgoing, group)
=>
passing, grad_works = start_exchange(grad_kv, group)
for work in grad_works:
    work.wait()
grad_works = []

# %% 07.10 sums in the dtype of k
(kv, dtype=lse.dtype) => (kv)
---
outgoing = grad_kv  # is read until the next step waits: it must not be freed before
passing, grad_works = start_exchange(outgoing, group)
=>
passing, grad_works = start_exchange(grad_kv, group)

# %% 07.10 gradients in float32, whatever k is
outgoing = grad_kv  # is read until the next step waits: it must not be freed before
passing, grad_works = start_exchange(outgoing, group)
=>
passing, grad_works = start_exchange(grad_kv, group)
---
grad_q.to(q.dtype), *grad_local.to(k.dtype) => grad_q, *grad_local

# %% 07.10 gradients of k and v travel apart
    grad_kv += passing
outgoing = grad_kv  # is read until the next step waits: it must not be freed before
passing, grad_works = start_exchange(outgoing, group)
=>
    grad_kv += torch.stack(passing)
(of_k, first), (of_v, second) = (start_exchange(each.clone(), group) for each in grad_kv)
passing, grad_works = [of_k, of_v], [*first, *second]
---
grad_local += passing => grad_local += torch.stack(passing)

# %% 07.10 each part with an lse of its own
attend_backward(gradient, q, kv[0], kv[1], out, lse, tiles, attention, grad_q, grad_kv[0], grad_kv[1])
=>
part, own_lse = initial_out_lse(q)
attend(q, kv[0], kv[1], tiles, attention, part, own_lse)
attend_backward(gradient, q, *kv, out, own_lse.nan_to_num(neginf=0.0), tiles, attention, grad_q, *grad_kv)
---
outgoing = grad_kv  # is read until the next step waits: it must not be freed before
passing, grad_works = start_exchange(outgoing, group)
=>
passing, grad_works = start_exchange(grad_kv, group)

# %% 07.10 sums the gradient of q in BF16
torch.zeros_like(q, dtype=lse.dtype), None => torch.zeros_like(q), None

# %% 07.10 rounds the traveling sum at each hop
grad_kv += passing => grad_kv = (grad_kv + passing).to(kv.dtype).to(lse.dtype)

# %% 07.10 keeps all shards that come by
grad_works: list[dist.Work] = [] => grad_works, kept = [], []
kv = arriving => kept, kv = [*kept, kv], arriving

# %% 07.11 contiguous posing as zig-zag
def to_zigzag(full, ranks):
    return full.clone()


def from_zigzag(split, ranks):
    return split.clone()

# %% 07.11 chunks r and n + r
second.flip(1) => second
late.flip(1) => late

# %% 07.11 the tokens of a late chunk are reversed too
second.flip(1) => second.flip(1, 2)
late.flip(1) => late.flip(1, 2)

# %% 07.11 striped: a token for each rank in turn
def to_zigzag(full, ranks):
    return full.unflatten(1, (-1, ranks)).transpose(1, 2).flatten(1, 2)


def from_zigzag(split, ranks):
    return split.unflatten(1, (ranks, -1)).transpose(1, 2).flatten(1, 2)

# %% 07.11 neighbouring chunks
torch.stack([first, second.flip(1)], dim=2).flatten(1, 3) => torch.cat([first, second.flip(1)], dim=1).flatten(1, 2)
(1, (ranks, 2, -1)).unbind(2) => (1, (2, ranks, -1)).unbind(1)

# %% 07.11 from_zigzag is to_zigzag
def from_zigzag(split, ranks):
    return to_zigzag(split, ranks)

# %% 07.11 from_zigzag: late chunks are not turned round
late.flip(1) => late

# %% 07.11 from_zigzag does nothing
def from_zigzag(split, ranks):
    return split

# %% 07.11 the late chunk first
first, second.flip(1) => second.flip(1), first
early, late = split.unflatten => late, early = split.unflatten

# %% 07.11 three dimensions only
.flatten(1, 3) => .reshape(full.shape[0], full.shape[1], -1)

# %% 07.11 cuts the graph
return torch.stack([first, second.flip(1)], dim=2).flatten(1, 3) => return torch.stack([first, second.flip(1)], dim=2).flatten(1, 3).detach()

# %% 07.12 forward waits before it attends
shards, work = start_gather(torch.cat([k, v]), group)  # [n, 2b, s/n, kv, d]
for step in range(n):
    source = (rank - step) % n
    if step == 1:
        work.wait()
=>
shards, work = start_gather(torch.cat([k, v]), group)  # [n, 2b, s/n, kv, d]
work.wait()
for step in range(n):
    source = (rank - step) % n

# %% 07.12 forward: k and v are gathered apart
def all_gather_forward(q, k, v, group, causal, attention, order):
    rank, n = group.rank(), group.size()
    local_chunks, (out, lse) = chunks_of(rank, n, order), initial_out_lse(q)
    (all_k, first), (all_v, work) = start_gather(k, group), start_gather(v, group)
    for step in range(n):
        source = (rank - step) % n
        if step == 1:
            first.wait()
            work.wait()
        keys, values = (k, v) if step == 0 else (all_k[source], all_v[source])
        tiles = in_tokens(visible(local_chunks, chunks_of(source, n, order), causal), q.shape[1] // len(local_chunks))
        attend(q, keys, values, tiles, attention, out, lse)
    return out.to(q.dtype), lse

# %% 07.12 forward: fake: a ring
def all_gather_forward(q, k, v, group, causal, attention, order):
    return ring_forward(q, k, v, group, causal, attention, order)

# %% 07.12 forward: fake: all scores of all queries, whole on every rank
def all_gather_forward(q, k, v, group, causal, attention, order):
    n = group.size()
    shards, work = start_gather(torch.cat([q, k.repeat(1, 1, 2, 1), v.repeat(1, 1, 2, 1)]), group)
    work.wait()
    whole = from_order(join_by_rank(shards), n, order)
    kv = k.shape[2]
    all_q, all_k, all_v = whole.chunk(3)
    out, lse = attention.forward(all_q, all_k[:, :, :kv], all_v[:, :, :kv], causal)
    return tuple(split_by_rank(to_order(x, n, order), n)[group.rank()] for x in (out, lse))

# %% 07.12 forward: all scores, then a mask
def all_gather_forward(q, k, v, group, causal, attention, order):
    rank, n = group.rank(), group.size()
    local_chunks, (out, lse) = chunks_of(rank, n, order), initial_out_lse(q)
    shards, work = start_gather(torch.cat([k, v]), group)
    for step in range(n):
        source = (rank - step) % n
        if step == 1:
            work.wait()
        keys, values = (k, v) if step == 0 else shards[source].chunk(2)
        tiles = in_tokens(visible(local_chunks, chunks_of(source, n, order), causal), q.shape[1] // len(local_chunks))
        whole = slice(0, q.shape[1])
        attend(q, keys, values, [(whole, whole, False)], attention, *initial_out_lse(q))
        attend(q, keys, values, tiles, attention, out, lse)
    return out.to(q.dtype), lse

# %% 07.12 forward: contiguous posing as zig-zag
def all_gather_forward(q, k, v, group, causal, attention, order):
    rank, n = group.rank(), group.size()
    local_chunks, (out, lse) = chunks_of(rank, n, "contiguous"), initial_out_lse(q)
    shards, work = start_gather(torch.cat([k, v]), group)
    for step in range(n):
        source = (rank - step) % n
        if step == 1:
            work.wait()
        keys, values = (k, v) if step == 0 else shards[source].chunk(2)
        tiles = in_tokens(visible(local_chunks, chunks_of(source, n, "contiguous"), causal), q.shape[1] // len(local_chunks))
        attend(q, keys, values, tiles, attention, out, lse)
    return out.to(q.dtype), lse

# %% 07.12 backward waits before it attends
grads = shards.new_zeros(shards.shape, dtype=lse.dtype)
for step in range(n):
    source = (rank - step) % n
    if step == 1:
        work.wait()
=>
grads = shards.new_zeros(shards.shape, dtype=lse.dtype)
work.wait()
for step in range(n):
    source = (rank - step) % n

# %% 07.12 backward: gradients of k and v stay where they are made
grad_local, work = start_reduce_scatter(grads, group)
work.wait()
=>
grad_local = grads[rank]

# %% 07.12 backward: all-reduces all gradients, and cuts
grad_local, work = start_reduce_scatter(grads, group)
work.wait()
=>
dist.all_reduce(grads, group=group)
grad_local = grads[rank]

# %% 07.12 backward: gathers k and v twice
shards, work = start_gather(torch.cat([k, v]), group)
=>
shards, work = start_gather(torch.cat([k, v]), group)
work.wait()
shards, work = start_gather(torch.cat([k, v]), group)

# %% 07.12 backward: sums in the dtype of k
shards.shape, dtype=lse.dtype => shards.shape, dtype=k.dtype

# %% 07.12 backward does not wait for the sums
grad_local, work = start_reduce_scatter(grads, group)
work.wait()
=>
grad_local, work = start_reduce_scatter(grads, group)

# %% 07.12 out stays in float32
return out.to(q.dtype), lse => return out, lse

# %% 07.12 sums the gradient of q in BF16
torch.zeros_like(q, dtype=lse.dtype) => torch.zeros_like(q)

# %% 07.13 fake: all-gathers q, k and v, and keeps its own tokens
from course_lib.sequence_parallel.model import gather_sequence


def ulysses_attention(q, k, v, group=None, causal=True, attention=FUSED_BLOCK, order="zigzag"):
    group = group or dist.group.WORLD
    q, k, v = check_qkv(q, k, v, order)
    check_heads(q.shape[2], k.shape[2], group.size())
    n = group.size()
    k, v = (x.repeat_interleave(max(1, n // x.shape[2]), 2) for x in (k, v))
    whole = (from_order(gather_sequence(x, group), n, order) for x in (q, k, v))
    out = BlockAttention.apply(*whole, attention, causal)
    return split_by_rank(to_order(out, n, order), n)[group.rank()]

# %% 07.13 fake: all-gathers, attends with its own heads, and scatters sums of heads that are padded with zeros
from course_lib.sequence_parallel.model import gather_sequence as g
from course_lib.sequence_parallel.model import reduce_scatter_sequence as leave


def ulysses_attention(q, k, v, group=None, causal=True, attention=FUSED_BLOCK, order="zigzag"):
    group = group or dist.group.WORLD
    q, k, v = check_qkv(q, k, v, order)
    check_heads(q.shape[2], k.shape[2], group.size())
    n, rank = group.size(), group.rank()
    k, v = (x.repeat_interleave(max(1, n // x.shape[2]), 2) for x in (k, v))
    own = (from_order(g(x, group), n, order).unflatten(2, (n, -1))[:, :, rank] for x in (q, k, v))
    out = to_order(BlockAttention.apply(*own, attention, causal), n, order)
    spread = torch.nn.functional.pad(out, (0, 0, rank * out.shape[2], (n - 1 - rank) * out.shape[2]))
    return leave(spread, group)

# %% 07.13 backward: the gradient as it is
AllToAll.apply(gradient, ctx.group) => gradient
---
group, (q, k, v) = group_or_world(group), check_qkv(q, k, v, order)
=>
group = group or dist.group.WORLD
q, k, v = check_qkv(q, k, v, order)

# %% 07.13 backward: summed over the ranks
return AllToAll.apply(gradient, ctx.group), None
=>
total = gradient.contiguous().clone()
dist.all_reduce(total, group=ctx.group)
return total, None
---
group, (q, k, v) = group_or_world(group), check_qkv(q, k, v, order)
=>
group = group or dist.group.WORLD
q, k, v = check_qkv(q, k, v, order)

# %% 07.13 an all-to-all for each of q, k, v
def ulysses_attention(q, k, v, group=None, causal=True, attention=FUSED_BLOCK, order="zigzag"):
    group = group or dist.group.WORLD
    q, k, v = check_qkv(q, k, v, order)
    check_heads(q.shape[2], k.shape[2], group.size())
    n = group.size()
    k, v = (x.repeat_interleave(max(1, n // x.shape[2]), 2) for x in (k, v))
    heads = [x.shape[2] // n for x in (q, k, v)]
    traded = [AllToAll.apply(x.unflatten(2, (n, -1)).movedim(2, 0), group) for x in (q, k, v)]
    q, k, v = (from_order(join_by_rank(x), n, order) for x in traded)
    out = BlockAttention.apply(q, k, v, attention, causal)
    back = AllToAll.apply(split_by_rank(to_order(out, n, order), n), group)
    return back.movedim(0, 2).flatten(2, 3)

# %% 07.13 tokens are not put in order: causal over the zig-zag
group, (q, k, v) = group_or_world(group), check_qkv(q, k, v, order)
=>
group = group or dist.group.WORLD
q, k, v = check_qkv(q, k, v, order)
---
from_order(join_by_rank(received), n, order).split(heads, 2)  # [b, s, ...] => join_by_rank(received).split(heads, 2)
(split_by_rank(to_order(out, n, order), n), group)  # [n, b, s/n, a/n, d] => (split_by_rank(out, n), group)

# %% 07.13 too few K/V heads are repeated in another order
group, (q, k, v) = group_or_world(group), check_qkv(q, k, v, order)
=>
group = group or dist.group.WORLD
q, k, v = check_qkv(q, k, v, order)
---
k, v = (x.repeat_interleave(max(1, n // x.shape[2]), 2) for x in (k, v))  # a K/V head for each rank at least
=>
k, v = (x.repeat(1, 1, max(1, n // x.shape[2]), 1) for x in (k, v))

# %% 07.13 a K/V head for each head of q, always
group, (q, k, v) = group_or_world(group), check_qkv(q, k, v, order)
=>
group = group or dist.group.WORLD
q, k, v = check_qkv(q, k, v, order)
---
k, v = (x.repeat_interleave(max(1, n // x.shape[2]), 2) for x in (k, v))  # a K/V head for each rank at least
=>
k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))

# %% 07.13 out comes back with heads and tokens mixed up
group, (q, k, v) = group_or_world(group), check_qkv(q, k, v, order)
=>
group = group or dist.group.WORLD
q, k, v = check_qkv(q, k, v, order)
---
return back.movedim(0, 2).flatten(2, 3)
=>
return back.flatten(0, 1).view(q.shape[0], -1, n * heads[0], q.shape[3])

# %% 07.13 each rank attends to its own tokens alone
def ulysses_attention(q, k, v, group=None, causal=True, attention=FUSED_BLOCK, order="zigzag"):
    group = group or dist.group.WORLD
    q, k, v = check_qkv(q, k, v, order)
    check_heads(q.shape[2], k.shape[2], group.size())
    return BlockAttention.apply(q, k, v, attention, causal)

# %% 07.13 attention is dropped
group, (q, k, v) = group_or_world(group), check_qkv(q, k, v, order)
=>
group = group or dist.group.WORLD
q, k, v = check_qkv(q, k, v, order)
---
(q, k, v, attention, causal)  # [b, s, a/n, d] => (q, k, v, FUSED_BLOCK, causal)

# %% 07.13 trades float32 for BF16
packed.movedim(2, 0), group) => packed.to(torch.promote_types(packed.dtype, torch.float32)).movedim(2, 0), group)

# %% 07.13 keeps what it sends
ctx.group, chunks = group, chunks.contiguous() => ctx.group, chunks = group, chunks.contiguous(); ctx.save_for_backward(chunks)

# %% 07.14 n messages instead of n - 1
# Set megabytes_sent: of a rank in forward, by method. =>
7 * keys_and_values, "all_gather": 7 => 8 * keys_and_values, "all_gather": 8

# %% 07.14 keys without values
# Set megabytes_sent: of a rank in forward, by method. =>
2 * 131072 => 131072

# %% 07.14 all heads instead of the K/V heads
# Set megabytes_sent: of a rank in forward, by method. =>
8 * 8 => 8 * 32

# %% 07.14 ulysses without out
# Set megabytes_sent: of a rank in forward, by method. =>
2 * 32 + 2 => 32 + 2

# %% 07.14 ulysses: all of a rank's own
# Set megabytes_sent: of a rank in forward, by method. =>
7 / 8 * 131072 => 131072

# %% 07.14 ulysses: the whole sequence
# Set megabytes_sent: of a rank in forward, by method. =>
131072 // 8 * (2 * 32 + 2 * 8) => 131072 * (2 * 32 + 2 * 8)

# %% 07.14 in MiB
# Set megabytes_sent: of a rank in forward, by method. =>
8 * 128 * 2 / 1e6 => 8 * 128 * 2 / 2**20
(2 * 32 + 2 * 8) * 128 * 2 / 1e6 => (2 * 32 + 2 * 8) * 128 * 2 / 2**20

# %% 07.14 numbers instead of bytes
# Set megabytes_sent: of a rank in forward, by method. =>
8 * 128 * 2 / 1e6 => 8 * 128 / 1e6
(2 * 32 + 2 * 8) * 128 * 2 / 1e6 => (2 * 32 + 2 * 8) * 128 / 1e6

# %% 07.15 positions are not those of the zig-zag
def fill_positions(model, args, kwargs, group, order):
    require_positions(model, args, kwargs)
    if len(args) > 1 or kwargs.get("positions") is not None:
        return args, kwargs
    return args, kwargs | {"positions": local_positions(args[0].shape[1], group, "contiguous", args[0].device)}

# %% 07.15 positions from 0 on every rank
def fill_positions(model, args, kwargs, group, order):
    require_positions(model, args, kwargs)
    if len(args) > 1 or kwargs.get("positions") is not None:
        return args, kwargs
    return args, kwargs | {"positions": torch.arange(args[0].shape[1], device=args[0].device)}

# %% 07.15 positions that the caller gives by name are overridden
def fill_positions(model, args, kwargs, group, order):
    require_positions(model, args, kwargs)
    if len(args) > 1:
        return args, kwargs
    return args, kwargs | {"positions": local_positions(args[0].shape[1], group, order, args[0].device)}

# %% 07.15 positions that the caller gives are overridden
def fill_positions(model, args, kwargs, group, order):
    require_positions(model, args, kwargs)
    return args[:1], kwargs | {"positions": local_positions(args[0].shape[1], group, order, args[0].device)}

# %% 07.15 contiguous posing as zig-zag
x, positions = forward_inputs(args, kwargs)
if positions is None:
    positions = local_positions(x.shape[1], group, order, x.device)
return (x, positions), {}
=>
if len(args) > 1 or kwargs.get("positions") is not None:
    return args, kwargs
return args, kwargs | {"positions": local_positions(args[0].shape[1], group, order, args[0].device)}
---
attention, order=order => attention, order="contiguous"

# %% 07.15 order is dropped
x, positions = forward_inputs(args, kwargs)
if positions is None:
    positions = local_positions(x.shape[1], group, order, x.device)
return (x, positions), {}
=>
if len(args) > 1 or kwargs.get("positions") is not None:
    return args, kwargs
return args, kwargs | {"positions": local_positions(args[0].shape[1], group, order, args[0].device)}
---
attention, order=order => attention

# %% 07.15 attention is dropped
x, positions = forward_inputs(args, kwargs)
if positions is None:
    positions = local_positions(x.shape[1], group, order, x.device)
return (x, positions), {}
=>
if len(args) > 1 or kwargs.get("positions") is not None:
    return args, kwargs
return args, kwargs | {"positions": local_positions(args[0].shape[1], group, order, args[0].device)}
---
attention=attention, order => order

# %% 07.15 method is dropped: always a ring
x, positions = forward_inputs(args, kwargs)
if positions is None:
    positions = local_positions(x.shape[1], group, order, x.device)
return (x, positions), {}
=>
if len(args) > 1 or kwargs.get("positions") is not None:
    return args, kwargs
return args, kwargs | {"positions": local_positions(args[0].shape[1], group, order, args[0].device)}
---
[method] => ["ring"]

# %% 07.15 only the positions: each rank attends to its own tokens
def fill_positions(model, args, kwargs, group, order):
    require_positions(model, args, kwargs)
    if len(args) > 1 or kwargs.get("positions") is not None:
        return args, kwargs
    return args, kwargs | {"positions": local_positions(args[0].shape[1], group, order, args[0].device)}


def apply_context_parallel(model, group=None, method="ring", order="zigzag", attention=FUSED_BLOCK):
    group = group or dist.group.WORLD
    check_context_parallel(model, group, method, order)
    model.applied["context_parallel"] = group
    fill = functools.partial(fill_positions, group=group, order=order)
    model.register_forward_pre_hook(fill, with_kwargs=True)
    return model

# %% 07.15 rings of all ranks instead of the group
def fill_positions(model, args, kwargs, group, order):
    require_positions(model, args, kwargs)
    if len(args) > 1 or kwargs.get("positions") is not None:
        return args, kwargs
    return args, kwargs | {"positions": local_positions(args[0].shape[1], group, order, args[0].device)}


def apply_context_parallel(model, group=None, method="ring", order="zigzag", attention=FUSED_BLOCK):
    group = group or dist.group.WORLD
    check_context_parallel(model, group, method, order)
    model.applied["context_parallel"] = group
    for block in model.blocks:
        block.attention.core = functools.partial(
            METHODS[method], group=dist.group.WORLD, attention=attention, order=order
        )
    fill = functools.partial(fill_positions, group=group, order=order)
    model.register_forward_pre_hook(fill, with_kwargs=True)
    return model

# %% 07.15 hidden states without positions are not refused
def fill_positions(model, args, kwargs, group, order):
    if len(args) > 1 or kwargs.get("positions") is not None:
        return args, kwargs
    return args, kwargs | {"positions": local_positions(args[0].shape[1], group, order, args[0].device)}

# %% 07.15 order is used by the ring alone, the others take zigzag
attention, order=order => attention, order=order if method == "ring" else "zigzag"

# %% 07.15 x by place only
x, positions = forward_inputs(args, kwargs) => x, positions = args[0], (args[1] if len(args) > 1 else kwargs.get("positions"))

# %% 07.15 positions on the CPU
group, order, x.device) => group, order)

# %% 07.16 bandwidth over peak
peak / bandwidth => bandwidth / peak

# %% 07.16 all heads instead of the K/V heads
kv_heads / (heads * tokens) => 1 / tokens

# %% 07.16 the mask is forgotten
return ratio if causal else ratio / 2 => return ratio / 2

# %% 07.16 twice as much without a mask
return ratio if causal else ratio / 2 => return ratio if causal else ratio * 2

# %% 07.16 two bytes, whatever they are
ratio = element_bytes => ratio = 2

# %% 07.16 keys without values
(heads * tokens) => 2 / (heads * tokens)

# %% 07.16 tokens squared
* tokens => * tokens**2

# %% 07.16 the inverse: attention over exchange
return ratio if causal else ratio / 2 => return 1 / ratio if causal else 2 / ratio
