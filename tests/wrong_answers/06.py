"""Wrong answers that the checks of notebook 06 must catch. None of them hangs."""

# %% 06.1 fake: the whole product on every rank, then cut and gathered
F.linear(x, cut(weight, group, 0))  # [n, out/N] => cut(F.linear(x, weight), group, -1).contiguous()

# %% 06.1 fake: the whole product on every rank, and an all-reduce of an N-th of it
local = F.linear(cut(x, group, -1), cut(weight, group, 1))  # [n, out], a summand
=>
local = F.linear(x, weight) / group.size()

# %% 06.1 columns put together by an all-reduce of parts that are padded with zeros
def split_matmul(x, weight, how, group):
    if how == "columns":
        size = len(weight) // group.size()
        whole = x.new_zeros(len(x), len(weight))
        whole[:, group.rank() * size : (group.rank() + 1) * size] = F.linear(x, cut(weight, group, 0))
        dist.all_reduce(whole, group=group)
        return whole
    local = F.linear(cut(x, group, -1), cut(weight, group, 1))
    dist.all_reduce(local, group=group)
    return local

# %% 06.1 rows summed from gathered summands
dist.all_reduce(local, group=group)
return local
=>
shards = [torch.empty_like(local) for _ in range(group.size())]
dist.all_gather(shards, local, group=group)
return sum(shards)

# %% 06.1 rows: a summand
local = F.linear(cut(x, group, -1), cut(weight, group, 1))  # [n, out], a summand
dist.all_reduce(local, group=group)
return local
=>
return F.linear(cut(x, group, -1), cut(weight, group, 1))

# %% 06.1 rows: a mean instead of the sum
return local => return local / group.size()

# %% 06.1 rows: the sum over all ranks instead of the group
dist.all_reduce(local, group=group) => dist.all_reduce(local)

# %% 06.1 rows: a reduce-scatter, and only the own part of the sum
def split_matmul(x, weight, how, group):
    if how == "columns":
        local = F.linear(x, cut(weight, group, 0))
        shards = [torch.empty_like(local) for _ in range(group.size())]
        dist.all_gather(shards, local, group=group)
        return torch.cat(shards, dim=-1)
    from course_lib.collectives.into_tensor import reduce_scatter_tensor

    local = F.linear(cut(x, group, -1), cut(weight, group, 1))
    own = local.new_empty(local.numel() // group.size())
    reduce_scatter_tensor(own, local.flatten(), group=group)
    return own

# %% 06.1 columns put on top of one another
return torch.cat(shards, dim=-1) => return torch.cat(shards, dim=0).view(len(x), -1)

# %% 06.2 f sums in forward too
return x.view_as(x)
=>
total = x.clone()
dist.all_reduce(total, group=group)
return total

# %% 06.2 f: nothing in backward
class CopyToGroup(OnceDifferentiable):
    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        return gradient, None

# %% 06.2 f reduces the gradient that it is given, in place
total = gradient.clone(memory_format=torch.contiguous_format)  # others may hold the same gradient
=>
total = gradient.contiguous()

# %% 06.2 f: a mean instead of the sum
return total, None => return total / ctx.group.size(), None

# %% 06.2 f sums over all ranks instead of the group
dist.all_reduce(total, group=ctx.group) => dist.all_reduce(total)

# %% 06.2 f* sums in backward too, as the gradient of a sum would in one process
class SumOverGroup(OnceDifferentiable):
    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None

# %% 06.2 f* sums in place what it is given
total = x.clone(memory_format=torch.contiguous_format)
dist.all_reduce(total, group=group)
return total
=>
ctx.group = group
dist.all_reduce(x, group=group)
return x.view_as(x)

# %% 06.2 f*: each rank's x gets an N-th of the gradient
class SumOverGroup(OnceDifferentiable):
    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        return gradient / ctx.group.size(), None

# %% 06.2 f returns no None for the group
return total, None => return total

# %% 06.3 no all-reduce: its own summand of dX
def mlp_backward(x, a, b, grad_y, group):
    u = F.linear(x, a)
    grad_u = (grad_y @ b) * silu_gradient(u)
    return grad_u @ a, grad_u.t() @ x, grad_y.t() @ F.silu(u)

# %% 06.3 all three gradients are summed
def mlp_backward(x, a, b, grad_y, group):
    u = F.linear(x, a)
    grad_u = (grad_y @ b) * silu_gradient(u)
    gradients = grad_u @ a, grad_u.t() @ x, grad_y.t() @ F.silu(u)
    for gradient in gradients:
        dist.all_reduce(gradient, group=group)
    return gradients

# %% 06.3 an all-reduce too many, of dY
def mlp_backward(x, a, b, grad_y, group):
    grad_y = grad_y / group.size()
    dist.all_reduce(grad_y, group=group)
    u = F.linear(x, a)
    grad_u = (grad_y @ b) * silu_gradient(u)
    grad_x = grad_u @ a
    dist.all_reduce(grad_x, group=group)
    return grad_x, grad_u.t() @ x, grad_y.t() @ F.silu(u)

# %% 06.3 a mean instead of the sum
def mlp_backward(x, a, b, grad_y, group):
    u = F.linear(x, a)
    grad_u = (grad_y @ b) * silu_gradient(u)
    grad_x = grad_u @ a
    dist.all_reduce(grad_x, group=group)
    return grad_x / group.size(), grad_u.t() @ x, grad_y.t() @ F.silu(u)

# %% 06.3 the sum over all ranks instead of the group
def mlp_backward(x, a, b, grad_y, group):
    u = F.linear(x, a)
    grad_u = (grad_y @ b) * silu_gradient(u)
    grad_x = grad_u @ a
    dist.all_reduce(grad_x)
    return grad_x, grad_u.t() @ x, grad_y.t() @ F.silu(u)

# %% 06.3 U in place of silu(U) in dB
def mlp_backward(x, a, b, grad_y, group):
    u = F.linear(x, a)
    grad_u = (grad_y @ b) * silu_gradient(u)
    grad_x = grad_u @ a
    dist.all_reduce(grad_x, group=group)
    return grad_x, grad_u.t() @ x, grad_y.t() @ u

# %% 06.3 no silu on the way back
def mlp_backward(x, a, b, grad_y, group):
    u = F.linear(x, a)
    grad_u = grad_y @ b
    grad_x = grad_u @ a
    dist.all_reduce(grad_x, group=group)
    return grad_x, grad_u.t() @ x, grad_y.t() @ F.silu(u)

# %% 06.3 fake: gathers the weights and does all of the work on every rank
def mlp_backward(x, a, b, grad_y, group):
    own = torch.cat([a, b.t()], dim=1)
    pieces = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(pieces, own, group=group)
    whole_a, whole_b = (part.clone() for part in torch.cat(pieces).split(a.shape[1], dim=1))
    u = F.linear(x, whole_a)
    grad_u = (grad_y @ whole_b.t()) * silu_gradient(u)
    grad_a, grad_b = grad_u.t() @ x, grad_y.t() @ F.silu(u)
    return grad_u @ whole_a, cut(grad_a, group, 0), cut(grad_b, group, 1)

# %% 06.3 sums in float32
dist.all_reduce(grad_x, group=group)
return grad_x, grad_a, grad_b
=>
total = grad_x.float()
dist.all_reduce(total, group=group)
return total, grad_a, grad_b

# %% 06.3 multiplies twice
grad_b = grad_y.t() @ F.silu(u) => grad_b = grad_y.t() @ F.silu(F.linear(x, a))

# %% 06.3 in float32 throughout
u = F.linear(x, a)  # [n, ffn/N]
=>
x, a, b, grad_y = x.float(), a.float(), b.float(), grad_y.float()
u = F.linear(x, a)  # [n, ffn/N]

# %% 06.4 a synchronous all-reduce, before the weights' products
class ColumnMatmul(OnceDifferentiable):
    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, weight) for weight in weights)

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor) -> tuple:
        x, *weights = ctx.saved_tensors
        rows, needed = [gradient.flatten(0, -2) for gradient in gradients], ctx.needs_input_grad[2:]
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = sum(row @ weight for row, weight in zip(rows, weights, strict=True))
            dist.all_reduce(grad_x, group=ctx.group)
            grad_x = grad_x.view_as(x)
        grad_weights = [row.t() @ x.flatten(0, -2) if need else None for row, need in zip(rows, needed, strict=True)]
        return grad_x, None, *grad_weights

# %% 06.4 waits before the weights' products
class ColumnMatmul(OnceDifferentiable):
    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, weight) for weight in weights)

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor) -> tuple:
        x, *weights = ctx.saved_tensors
        rows, needed = [gradient.flatten(0, -2) for gradient in gradients], ctx.needs_input_grad[2:]
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = sum(row @ weight for row, weight in zip(rows, weights, strict=True))
            work = dist.all_reduce(grad_x, group=ctx.group, async_op=True)
            work.wait()
            grad_x = grad_x.view_as(x)
        grad_weights = [row.t() @ x.flatten(0, -2) if need else None for row, need in zip(rows, needed, strict=True)]
        return grad_x, None, *grad_weights

# %% 06.4 starts the all-reduce after the weights' products
class ColumnMatmul(OnceDifferentiable):
    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, weight) for weight in weights)

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor) -> tuple:
        x, *weights = ctx.saved_tensors
        rows, needed = [gradient.flatten(0, -2) for gradient in gradients], ctx.needs_input_grad[2:]
        grad_weights, grad_x = (
            [row.t() @ x.flatten(0, -2) if need else None for row, need in zip(rows, needed, strict=True)],
            None,
        )
        if ctx.needs_input_grad[0]:
            grad_x = sum(row @ weight for row, weight in zip(rows, weights, strict=True))
            dist.all_reduce(grad_x, group=ctx.group, async_op=True).wait()
            grad_x = grad_x.view_as(x)
        return grad_x, None, *grad_weights

# %% 06.4 an all-reduce for each weight
class ColumnMatmul(OnceDifferentiable):
    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, weight) for weight in weights)

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor) -> tuple:
        x, *weights = ctx.saved_tensors
        rows, needed = [gradient.flatten(0, -2) for gradient in gradients], ctx.needs_input_grad[2:]
        grad_x, works = None, []
        if ctx.needs_input_grad[0]:
            parts = [row @ weight for row, weight in zip(rows, weights, strict=True)]
            works = [dist.all_reduce(part, group=ctx.group, async_op=True) for part in parts]
        grad_weights = [row.t() @ x.flatten(0, -2) if need else None for row, need in zip(rows, needed, strict=True)]
        for work in works:
            work.wait()
        if works:
            grad_x = sum(parts).view_as(x)
        return grad_x, None, *grad_weights

# %% 06.4 makes gradients of weights that nobody needs
class ColumnMatmul(OnceDifferentiable):
    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, weight) for weight in weights)

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor) -> tuple:
        x, *weights = ctx.saved_tensors
        rows, needed = [gradient.flatten(0, -2) for gradient in gradients], ctx.needs_input_grad[2:]
        grad_x, work = None, None
        if ctx.needs_input_grad[0]:
            grad_x = sum(row @ weight for row, weight in zip(rows, weights, strict=True))
            work = dist.all_reduce(grad_x, group=ctx.group, async_op=True)
            grad_x = grad_x.view_as(x)
        grad_weights = [row.t() @ x.flatten(0, -2) for row in rows]
        if work is not None:
            work.wait()
        return grad_x, None, *grad_weights

# %% 06.4 makes and sends the gradient of x though nobody needs it
class ColumnMatmul(OnceDifferentiable):
    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, weight) for weight in weights)

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor) -> tuple:
        x, *weights = ctx.saved_tensors
        rows, needed = [gradient.flatten(0, -2) for gradient in gradients], ctx.needs_input_grad[2:]
        grad_x = sum(row @ weight for row, weight in zip(rows, weights, strict=True))
        work = dist.all_reduce(grad_x, group=ctx.group, async_op=True)
        grad_weights = [row.t() @ x.flatten(0, -2) if need else None for row, need in zip(rows, needed, strict=True)]
        work.wait()
        return grad_x.view_as(x), None, *grad_weights

# %% 06.4 never waits
class ColumnMatmul(OnceDifferentiable):
    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, weight) for weight in weights)

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor) -> tuple:
        x, *weights = ctx.saved_tensors
        rows, needed = [gradient.flatten(0, -2) for gradient in gradients], ctx.needs_input_grad[2:]
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = sum(row @ weight for row, weight in zip(rows, weights, strict=True))
            dist.all_reduce(grad_x, group=ctx.group, async_op=True)
            grad_x = grad_x.view_as(x)
        grad_weights = [row.t() @ x.flatten(0, -2) if need else None for row, need in zip(rows, needed, strict=True)]
        return grad_x, None, *grad_weights

# %% 06.4 fake: what travels beside the weights' products is a zero, and the gradient follows
class ColumnMatmul(OnceDifferentiable):
    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, weight) for weight in weights)

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor) -> tuple:
        x, *weights = ctx.saved_tensors
        rows, needed = [gradient.flatten(0, -2) for gradient in gradients], ctx.needs_input_grad[2:]
        grad_x, work = None, None
        if ctx.needs_input_grad[0]:
            grad_x = sum(row @ weight for row, weight in zip(rows, weights, strict=True))
            work = dist.all_reduce(grad_x.new_zeros(1), group=ctx.group, async_op=True)
        grad_weights = [row.t() @ x.flatten(0, -2) if need else None for row, need in zip(rows, needed, strict=True)]
        if work is not None:
            work.wait()
            dist.all_reduce(grad_x, group=ctx.group)
            grad_x = grad_x.view_as(x)
        return grad_x, None, *grad_weights

# %% 06.4 the gradients of the weights are summed too
class ColumnMatmul(OnceDifferentiable):
    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, weight) for weight in weights)

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor) -> tuple:
        x, *weights = ctx.saved_tensors
        rows, needed = [gradient.flatten(0, -2) for gradient in gradients], ctx.needs_input_grad[2:]
        grad_x, works = None, []
        if ctx.needs_input_grad[0]:
            grad_x = sum(row @ weight for row, weight in zip(rows, weights, strict=True))
            works.append(dist.all_reduce(grad_x, group=ctx.group, async_op=True))
            grad_x = grad_x.view_as(x)
        grad_weights = [row.t() @ x.flatten(0, -2) if need else None for row, need in zip(rows, needed, strict=True)]
        works += [dist.all_reduce(grad, group=ctx.group, async_op=True) for grad in grad_weights if grad is not None]
        for work in works:
            work.wait()
        return grad_x, None, *grad_weights

# %% 06.4 the sum over all ranks instead of the group
rows, grad_x, work = [gradient.flatten(0, -2) for gradient in gradients], None, None  # [b*s, out]
=>
rows, needed = [gradient.flatten(0, -2) for gradient in gradients], ctx.needs_input_grad[2:]
grad_x, work = None, None
---
grad_x = rows[0] @ weights[0]
for row, weight in zip(rows[1:], weights[1:], strict=True):
    grad_x.addmm_(row, weight)
work = dist.all_reduce(grad_x, group=ctx.group, async_op=True)
=>
grad_x = sum(row @ weight for row, weight in zip(rows, weights, strict=True))
work = dist.all_reduce(grad_x, async_op=True)
---
needed = ctx.needs_input_grad[2:] =>

# %% 06.4 no None for the group
return grad_x, None, *grad_weights => return grad_x, *grad_weights

# %% 06.5 every rank adds the bias before the sum
def forward_at_once(self: RowParallelLinear, x):
    return self.output_reduce(F.linear(x, self.weight, self.bias), self.group)

# %% 06.5 the bias is forgotten
def forward_at_once(self: RowParallelLinear, x):
    return self.output_reduce(F.linear(x, self.weight), self.group)

# %% 06.5 under autocast, a bias of float32 makes the output float32
self.bias.to(out.dtype) => self.bias

# %% 06.5 under autocast, the summands are float32
(x, self.weight) => (x, self.weight).float()

# %% 06.5 the bias goes into the sum, an N-th from each rank
def forward_at_once(self: RowParallelLinear, x):
    out = F.linear(x, self.weight)
    if self.bias is not None:
        gradient = (1 - 1 / self.group.size()) * (self.bias - self.bias.detach())  # that of a whole bias
        out = out + self.bias / self.group.size() + gradient
    return self.output_reduce(out, self.group)

# %% 06.5 no sum
def forward_at_once(self: RowParallelLinear, x):
    return F.linear(x, self.weight, self.bias)

# %% 06.5 an all-reduce too many: f, as if x were whole
x, self.weight => copy_to_group(x, self.group), self.weight
self.bias.to(out.dtype) => self.bias

# %% 06.5 an all-reduce too many: what is summed is averaged
def forward_at_once(self: RowParallelLinear, x):
    out = self.output_reduce(F.linear(x, self.weight), self.group)
    mean = out.detach() / self.group.size()
    dist.all_reduce(mean, group=self.group)
    out = out + (mean - out.detach())
    return out if self.bias is None else out + self.bias

# %% 06.5 fake: gathers weights and inputs, and makes the whole product on every rank
def forward_at_once(self: RowParallelLinear, x):
    shard = self.weight.placement.tensor_shard
    own = F.linear(x, self.weight)
    with torch.no_grad():
        whole = F.linear(shard._replace(dim=-1).gather(x), shard.gather(self.weight))
    out = whole + own - own.detach()
    return out if self.bias is None else out + self.bias

# %% 06.5 the sum over all ranks instead of the group
self.group => dist.group.WORLD
self.bias.to(out.dtype) => self.bias

# %% 06.5 calls f* by its name
out = self.output_reduce => out = sum_over_group
self.bias.to(out.dtype) => self.bias

# %% 06.5 copies x
F.linear(x, self.weight) => F.linear(x.clone(), self.weight)

# %% 06.5 keeps x
out = self.output_reduce(F.linear(x, self.weight), self.group)
=>
self.x = x
out = self.output_reduce(F.linear(x, self.weight), self.group)

# %% 06.6 copies are not kept in sync
def project_together(x, layers):
    def shared(layer, parameter):
        return parameter

    x, *weights = as_autocast(x, *(shared(layer, layer.weight) for layer in layers))
    outs = layers[0].matmul.apply(x, layers[0].group, *weights)
    return tuple(
        out if layer.bias is None else out + shared(layer, layer.bias).to(out.dtype) for layer, out in zip(layers, outs, strict=True)
    )

# %% 06.6 the copies' gradients are summed over the whole group
def project_together(x, layers):
    def shared(layer, parameter):
        return copy_to_group(parameter, layer.group) if layer.replicas else parameter

    x, *weights = as_autocast(x, *(shared(layer, layer.weight) for layer in layers))
    outs = layers[0].matmul.apply(x, layers[0].group, *weights)
    return tuple(
        out if layer.bias is None else out + shared(layer, layer.bias).to(out.dtype) for layer, out in zip(layers, outs, strict=True)
    )

# %% 06.6 the copies' gradients are summed over the ranks that have the others
def project_together(x, layers):
    def shared(layer, parameter):
        return copy_to_group(parameter, layer.replicas.shards) if layer.replicas else parameter

    x, *weights = as_autocast(x, *(shared(layer, layer.weight) for layer in layers))
    outs = layers[0].matmul.apply(x, layers[0].group, *weights)
    return tuple(
        out if layer.bias is None else out + shared(layer, layer.bias).to(out.dtype) for layer, out in zip(layers, outs, strict=True)
    )

# %% 06.6 the copies' gradients are averaged
def project_together(x, layers):
    def shared(layer, parameter):
        return (
            parameter
            if not layer.replicas
            else (copy_to_group(parameter / layer.replicas.copies.size(), layer.replicas.copies) * 1.0)
            + (parameter - parameter / layer.replicas.copies.size()).detach()
        )

    x, *weights = as_autocast(x, *(shared(layer, layer.weight) for layer in layers))
    outs = layers[0].matmul.apply(x, layers[0].group, *weights)
    return tuple(
        out if layer.bias is None else out + shared(layer, layer.bias).to(out.dtype) for layer, out in zip(layers, outs, strict=True)
    )

# %% 06.6 the biases of copies are not kept in sync
def project_together(x, layers):
    weights = [copy_to_group(each.weight, each.replicas.copies) if each.replicas else each.weight for each in layers]
    outs = layers[0].matmul.apply(x, layers[0].group, *weights)
    return tuple(out if each.bias is None else out + each.bias.to(out.dtype) for each, out in zip(layers, outs, strict=True))

# %% 06.6 the biases are forgotten
def project_together(x, layers):
    def shared(layer, parameter):
        return copy_to_group(parameter, layer.replicas.copies) if layer.replicas else parameter

    x, *weights = as_autocast(x, *(shared(layer, layer.weight) for layer in layers))
    return layers[0].matmul.apply(x, layers[0].group, *weights)

# %% 06.6 an all-reduce for each layer
def project_together(x, layers):
    def shared(layer, parameter):
        return copy_to_group(parameter, layer.replicas.copies) if layer.replicas else parameter

    x, *weights = as_autocast(x, *(shared(layer, layer.weight) for layer in layers))
    outs = [layers[0].matmul.apply(x, layers[0].group, weight)[0] for weight in weights]
    return tuple(
        out if layer.bias is None else out + shared(layer, layer.bias).to(out.dtype) for layer, out in zip(layers, outs, strict=True)
    )

# %% 06.6 an all-reduce too many: f in front of the products, which sum already
def project_together(x, layers):
    def shared(layer, parameter):
        return copy_to_group(parameter, layer.replicas.copies) if layer.replicas else parameter

    x = copy_to_group(x / layers[0].group.size(), layers[0].group) * layers[0].group.size()
    x = x / layers[0].group.size() + (x - x / layers[0].group.size()).detach()
    x, *weights = as_autocast(x, *(shared(layer, layer.weight) for layer in layers))
    outs = layers[0].matmul.apply(x, layers[0].group, *weights)
    return tuple(
        out if layer.bias is None else out + shared(layer, layer.bias).to(out.dtype) for layer, out in zip(layers, outs, strict=True)
    )

# %% 06.6 fake: f and linear layers, so that nothing runs beside the all-reduce
def project_together(x, layers):
    def shared(layer, parameter):
        return copy_to_group(parameter, layer.replicas.copies) if layer.replicas else parameter

    x, *weights = as_autocast(x, *(shared(layer, layer.weight) for layer in layers))
    x = copy_to_group(x, layers[0].group)
    outs = [F.linear(x, weight) for weight in weights]
    return tuple(
        out if layer.bias is None else out + shared(layer, layer.bias).to(out.dtype) for layer, out in zip(layers, outs, strict=True)
    )

# %% 06.6 every weight goes through f, those without copies over the whole group
def project_together(x, layers):
    def shared(layer, parameter):
        return copy_to_group(parameter, layer.replicas.copies if layer.replicas else layer.group)

    x, *weights = as_autocast(x, *(shared(layer, layer.weight) for layer in layers))
    outs = layers[0].matmul.apply(x, layers[0].group, *weights)
    return tuple(
        out if layer.bias is None else out + shared(layer, layer.bias).to(out.dtype) for layer, out in zip(layers, outs, strict=True)
    )

# %% 06.6 float32 in autocast
def project_together(x, layers):
    def shared(layer, parameter):
        return copy_to_group(parameter, layer.replicas.copies) if layer.replicas else parameter

    outs = layers[0].matmul.apply(x, layers[0].group, *(shared(layer, layer.weight) for layer in layers))
    return tuple(
        out if layer.bias is None else out + shared(layer, layer.bias).to(out.dtype) for layer, out in zip(layers, outs, strict=True)
    )

# %% 06.6 calls ColumnMatmul by its name
def project_together(x, layers):
    def shared(layer, parameter):
        return copy_to_group(parameter, layer.replicas.copies) if layer.replicas else parameter

    x, *weights = as_autocast(x, *(shared(layer, layer.weight) for layer in layers))
    outs = ColumnMatmul.apply(x, layers[0].group, *weights)
    return tuple(
        out if layer.bias is None else out + shared(layer, layer.bias).to(out.dtype) for layer, out in zip(layers, outs, strict=True)
    )

# %% 06.6 returns a list
return tuple(out if bias is None else out + bias.to(out.dtype) for out, bias in zip(outs, biases, strict=True))
=>
return [out if bias is None else out + bias.to(out.dtype) for out, bias in zip(outs, biases, strict=True)]

# %% 06.7 rows for tokens of other ranks are not zeroed
def forward(self: VocabParallelEmbedding, tokens):
    rows = tokens - self.shard.start
    elsewhere = (rows < 0) | (rows >= self.shard.size)
    return self.output_reduce(F.embedding(rows.masked_fill(elsewhere, 0), self.weight), self.group)

# %% 06.7 looks up modulo its rows
def forward(self: VocabParallelEmbedding, tokens):
    return self.output_reduce(F.embedding(tokens % self.shard.size, self.weight), self.group) / self.group.size()

# %% 06.7 tokens beyond its own get its last row
def forward(self: VocabParallelEmbedding, tokens):
    rows = tokens - self.shard.start
    hidden = F.embedding(rows.clamp(0, self.shard.size - 1), self.weight)
    return self.output_reduce(hidden.masked_fill((rows < 0)[..., None], 0.0), self.group)

# %% 06.7 no sum
self.output_reduce(hidden.masked_fill(elsewhere[..., None], 0.0), self.group) => hidden.masked_fill(elsewhere[..., None], 0.0)

# %% 06.7 a mean instead of the sum
return self.output_reduce(hidden.masked_fill(elsewhere[..., None], 0.0), self.group)
=>
return self.output_reduce(hidden.masked_fill(elsewhere[..., None], 0.0), self.group) / self.group.size()

# %% 06.7 the sum over all ranks instead of the group
self.group => dist.group.WORLD

# %% 06.7 an all-reduce too many: a sum in backward as well
from course_lib.tensor_parallel.regions import copy_to_group


def forward(self: VocabParallelEmbedding, tokens):
    rows = tokens - self.shard.start
    elsewhere = (rows < 0) | (rows >= self.shard.size)
    hidden = F.embedding(rows.masked_fill(elsewhere, 0), self.weight)
    hidden = self.output_reduce(hidden.masked_fill(elsewhere[..., None], 0.0), self.group)
    return copy_to_group(hidden, self.group)

# %% 06.7 fake: gathers all rows and looks up
def forward(self: VocabParallelEmbedding, tokens):
    with torch.no_grad():
        whole = self.shard.gather(self.weight)
    rows = tokens - self.shard.start
    elsewhere = (rows < 0) | (rows >= self.shard.size)
    own = F.embedding(rows.masked_fill(elsewhere, 0), self.weight).masked_fill(elsewhere[..., None], 0.0)
    outside = (tokens < 0) | (tokens >= self.shard.full_size)
    looked_up = F.embedding(tokens.masked_fill(outside, 0), whole).masked_fill(outside[..., None], 0.0)
    return looked_up + own - own.detach()

# %% 06.7 calls f* by its name
return self.output_reduce => return sum_over_group

# %% 06.8 fake: gathered logits
class VocabParallelCrossEntropy(OnceDifferentiable):
    @staticmethod
    def forward(ctx, logits: torch.Tensor, targets: torch.Tensor, shard: TensorShard) -> torch.Tensor:
        ctx.shard, ctx.dtype = shard, logits.dtype
        whole = shard.gather(logits.float())
        ctx.save_for_backward(whole.softmax(1), targets)
        return F.cross_entropy(whole, targets, reduction="none")

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        softmax, targets = ctx.saved_tensors
        onehot = F.one_hot(targets.clamp(min=0), ctx.shard.full_size)
        grad = ctx.shard.cut((softmax - onehot) * gradient[:, None])
        return grad.to(ctx.dtype), None, None

# %% 06.8 fake: gathered logits, of which only the own ones are kept
class VocabParallelCrossEntropy(OnceDifferentiable):
    @staticmethod
    def forward(ctx, logits: torch.Tensor, targets: torch.Tensor, shard: TensorShard) -> torch.Tensor:
        ctx.shard, ctx.dtype = shard, logits.dtype
        whole = shard.gather(logits.float())
        losses = F.cross_entropy(whole, targets, reduction="none")
        ctx.save_for_backward(shard.cut(whole.softmax(1)).clone(), torch.ones_like(losses), targets)
        return losses

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        exps, total, targets = ctx.saved_tensors
        rows, elsewhere = local_rows(targets, ctx.shard)
        grad = exps.mul_((gradient / total)[:, None])
        grad.scatter_add_(1, rows[:, None], -gradient.masked_fill(elsewhere, 0.0)[:, None])
        return grad.to(ctx.dtype), None, None

# %% 06.8 each rank subtracts its own maximum
class VocabParallelCrossEntropy(OnceDifferentiable):
    @staticmethod
    def forward(ctx, logits: torch.Tensor, targets: torch.Tensor, shard: TensorShard) -> torch.Tensor:
        ctx.shard, ctx.dtype = shard, logits.dtype
        exps = logits - logits.amax(1).float()[:, None]
        rows, elsewhere = local_rows(targets, shard)
        of_target = exps.gather(1, rows[:, None])[:, 0].masked_fill_(elsewhere, 0.0)
        exps.exp_()
        sums = torch.stack([exps.sum(1), of_target])
        dist.all_reduce(sums, group=shard.group)
        ctx.save_for_backward(exps, sums[0], targets)
        return sums[0].log() - sums[1]

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        exps, total, targets = ctx.saved_tensors
        rows, elsewhere = local_rows(targets, ctx.shard)
        grad = exps.mul_((gradient / total)[:, None])
        grad.scatter_add_(1, rows[:, None], -gradient.masked_fill(elsewhere, 0.0)[:, None])
        return grad.to(ctx.dtype), None, None

# %% 06.8 no maximum: exp overflows
class VocabParallelCrossEntropy(OnceDifferentiable):
    @staticmethod
    def forward(ctx, logits: torch.Tensor, targets: torch.Tensor, shard: TensorShard) -> torch.Tensor:
        ctx.shard, ctx.dtype = shard, logits.dtype
        exps = logits.to(torch.float32, copy=True)
        rows, elsewhere = local_rows(targets, shard)
        of_target = exps.gather(1, rows[:, None])[:, 0].masked_fill_(elsewhere, 0.0)
        exps.exp_()
        sums = torch.stack([exps.sum(1), of_target])
        dist.all_reduce(sums, group=shard.group)
        ctx.save_for_backward(exps, sums[0], targets)
        return sums[0].log() - sums[1]

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        exps, total, targets = ctx.saved_tensors
        rows, elsewhere = local_rows(targets, ctx.shard)
        grad = exps.mul_((gradient / total)[:, None])
        grad.scatter_add_(1, rows[:, None], -gradient.masked_fill(elsewhere, 0.0)[:, None])
        return grad.to(ctx.dtype), None, None

# %% 06.8 an all-reduce too many: sum and target's logit apart
class VocabParallelCrossEntropy(OnceDifferentiable):
    @staticmethod
    def forward(ctx, logits: torch.Tensor, targets: torch.Tensor, shard: TensorShard) -> torch.Tensor:
        ctx.shard, ctx.dtype = shard, logits.dtype
        largest = logits.amax(1).float()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=shard.group)
        exps = logits - largest[:, None]
        rows, elsewhere = local_rows(targets, shard)
        of_target = exps.gather(1, rows[:, None])[:, 0].masked_fill_(elsewhere, 0.0)
        total = exps.exp_().sum(1)
        dist.all_reduce(total, group=shard.group)
        dist.all_reduce(of_target, group=shard.group)
        ctx.save_for_backward(exps, total, targets)
        return total.log() - of_target

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        exps, total, targets = ctx.saved_tensors
        rows, elsewhere = local_rows(targets, ctx.shard)
        grad = exps.mul_((gradient / total)[:, None])
        grad.scatter_add_(1, rows[:, None], -gradient.masked_fill(elsewhere, 0.0)[:, None])
        return grad.to(ctx.dtype), None, None

# %% 06.8 an all-reduce too many: the total is summed again in backward
class VocabParallelCrossEntropy(OnceDifferentiable):
    @staticmethod
    def forward(ctx, logits: torch.Tensor, targets: torch.Tensor, shard: TensorShard) -> torch.Tensor:
        ctx.shard, ctx.dtype = shard, logits.dtype
        largest = logits.amax(1).float()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=shard.group)
        exps = logits - largest[:, None]
        rows, elsewhere = local_rows(targets, shard)
        of_target = exps.gather(1, rows[:, None])[:, 0].masked_fill_(elsewhere, 0.0)
        exps.exp_()
        sums = torch.stack([exps.sum(1), of_target])
        dist.all_reduce(sums, group=shard.group)
        ctx.save_for_backward(exps, sums[0], targets)
        return sums[0].log() - sums[1]

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        exps, total, targets = ctx.saved_tensors
        total = exps.sum(1)
        dist.all_reduce(total, group=ctx.shard.group)
        rows, elsewhere = local_rows(targets, ctx.shard)
        grad = exps.mul_((gradient / total)[:, None])
        grad.scatter_add_(1, rows[:, None], -gradient.masked_fill(elsewhere, 0.0)[:, None])
        return grad.to(ctx.dtype), None, None

# %% 06.8 the target's logit of every rank counts: those elsewhere are not zeroed
class VocabParallelCrossEntropy(OnceDifferentiable):
    @staticmethod
    def forward(ctx, logits: torch.Tensor, targets: torch.Tensor, shard: TensorShard) -> torch.Tensor:
        ctx.shard, ctx.dtype = shard, logits.dtype
        largest = logits.amax(1).float()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=shard.group)
        exps = logits - largest[:, None]
        rows, elsewhere = local_rows(targets, shard)
        of_target = exps.gather(1, rows[:, None])[:, 0]
        exps.exp_()
        sums = torch.stack([exps.sum(1), of_target])
        dist.all_reduce(sums, group=shard.group)
        ctx.save_for_backward(exps, sums[0], targets)
        return sums[0].log() - sums[1]

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        exps, total, targets = ctx.saved_tensors
        rows, elsewhere = local_rows(targets, ctx.shard)
        grad = exps.mul_((gradient / total)[:, None])
        grad.scatter_add_(1, rows[:, None], -gradient.masked_fill(elsewhere, 0.0)[:, None])
        return grad.to(ctx.dtype), None, None

# %% 06.8 the logits are changed in place
class VocabParallelCrossEntropy(OnceDifferentiable):
    @staticmethod
    def forward(ctx, logits: torch.Tensor, targets: torch.Tensor, shard: TensorShard) -> torch.Tensor:
        ctx.shard, ctx.dtype = shard, logits.dtype
        largest = logits.amax(1).float()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=shard.group)
        exps = logits.data.sub_(largest[:, None])
        rows, elsewhere = local_rows(targets, shard)
        of_target = exps.gather(1, rows[:, None])[:, 0].masked_fill_(elsewhere, 0.0)
        exps.exp_()
        sums = torch.stack([exps.float().sum(1), of_target.float()])
        dist.all_reduce(sums, group=shard.group)
        ctx.save_for_backward(exps.float(), sums[0], targets)
        return sums[0].log() - sums[1]

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        exps, total, targets = ctx.saved_tensors
        rows, elsewhere = local_rows(targets, ctx.shard)
        grad = exps.mul_((gradient / total)[:, None])
        grad.scatter_add_(1, rows[:, None], -gradient.masked_fill(elsewhere, 0.0)[:, None])
        return grad.to(ctx.dtype), None, None

# %% 06.8 keeps two: exp(z - m) and the mask of the targets in float32
class VocabParallelCrossEntropy(OnceDifferentiable):
    @staticmethod
    def forward(ctx, logits: torch.Tensor, targets: torch.Tensor, shard: TensorShard) -> torch.Tensor:
        ctx.shard, ctx.dtype = shard, logits.dtype
        largest = logits.amax(1).float()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=shard.group)
        exps = logits - largest[:, None]
        rows, elsewhere = local_rows(targets, shard)
        onehot = F.one_hot(rows, shard.size).float().masked_fill_(elsewhere[:, None], 0.0)
        sums = torch.stack([exps.exp().sum(1), (exps * onehot).sum(1)])
        dist.all_reduce(sums, group=shard.group)
        ctx.save_for_backward(exps.exp_(), sums[0], onehot)
        return sums[0].log() - sums[1]

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        exps, total, onehot = ctx.saved_tensors
        return ((exps / total[:, None] - onehot) * gradient[:, None]).to(ctx.dtype), None, None

# %% 06.8 makes a second float32 tensor of the logits' size on the way
class VocabParallelCrossEntropy(OnceDifferentiable):
    @staticmethod
    def forward(ctx, logits: torch.Tensor, targets: torch.Tensor, shard: TensorShard) -> torch.Tensor:
        ctx.shard, ctx.dtype = shard, logits.dtype
        largest = logits.amax(1).float()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=shard.group)
        shifted = logits - largest[:, None]
        exps = shifted.exp()
        rows, elsewhere = local_rows(targets, shard)
        of_target = shifted.gather(1, rows[:, None])[:, 0].masked_fill_(elsewhere, 0.0)
        sums = torch.stack([exps.sum(1), of_target])
        dist.all_reduce(sums, group=shard.group)
        ctx.save_for_backward(exps, sums[0], targets)
        return sums[0].log() - sums[1]

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        exps, total, targets = ctx.saved_tensors
        rows, elsewhere = local_rows(targets, ctx.shard)
        grad = exps.mul_((gradient / total)[:, None])
        grad.scatter_add_(1, rows[:, None], -gradient.masked_fill(elsewhere, 0.0)[:, None])
        return grad.to(ctx.dtype), None, None

# %% 06.8 backward makes a second float32 tensor
class VocabParallelCrossEntropy(OnceDifferentiable):
    @staticmethod
    def forward(ctx, logits: torch.Tensor, targets: torch.Tensor, shard: TensorShard) -> torch.Tensor:
        ctx.shard, ctx.dtype = shard, logits.dtype
        largest = logits.amax(1).float()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=shard.group)
        exps = logits - largest[:, None]
        rows, elsewhere = local_rows(targets, shard)
        of_target = exps.gather(1, rows[:, None])[:, 0].masked_fill_(elsewhere, 0.0)
        exps.exp_()
        sums = torch.stack([exps.sum(1), of_target])
        dist.all_reduce(sums, group=shard.group)
        ctx.save_for_backward(exps, sums[0], targets)
        return sums[0].log() - sums[1]

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        exps, total, targets = ctx.saved_tensors
        rows, elsewhere = local_rows(targets, ctx.shard)
        grad = exps * (gradient / total)[:, None]
        grad.scatter_add_(1, rows[:, None], -gradient.masked_fill(elsewhere, 0.0)[:, None])
        return grad.to(ctx.dtype), None, None

# %% 06.8 backward takes 1 off, not the gradient
class VocabParallelCrossEntropy(OnceDifferentiable):
    @staticmethod
    def forward(ctx, logits: torch.Tensor, targets: torch.Tensor, shard: TensorShard) -> torch.Tensor:
        ctx.shard, ctx.dtype = shard, logits.dtype
        largest = logits.amax(1).float()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=shard.group)
        exps = logits - largest[:, None]
        rows, elsewhere = local_rows(targets, shard)
        of_target = exps.gather(1, rows[:, None])[:, 0].masked_fill_(elsewhere, 0.0)
        exps.exp_()
        sums = torch.stack([exps.sum(1), of_target])
        dist.all_reduce(sums, group=shard.group)
        ctx.save_for_backward(exps, sums[0], targets)
        return sums[0].log() - sums[1]

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        exps, total, targets = ctx.saved_tensors
        rows, elsewhere = local_rows(targets, ctx.shard)
        grad = exps.mul_((gradient / total)[:, None])
        grad.scatter_add_(1, rows[:, None], -torch.ones_like(gradient).masked_fill(elsewhere, 0.0)[:, None])
        return grad.to(ctx.dtype), None, None

# %% 06.8 ignored targets give a gradient that is no number
class VocabParallelCrossEntropy(OnceDifferentiable):
    @staticmethod
    def forward(ctx, logits: torch.Tensor, targets: torch.Tensor, shard: TensorShard) -> torch.Tensor:
        ctx.shard, ctx.dtype = shard, logits.dtype
        largest = logits.amax(1).float()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=shard.group)
        exps = logits - largest[:, None]
        rows, elsewhere = local_rows(targets, shard)
        of_target = exps.gather(1, rows[:, None])[:, 0].masked_fill_(elsewhere, 0.0)
        exps.exp_()
        sums = torch.stack([exps.sum(1), of_target])
        dist.all_reduce(sums, group=shard.group)
        ctx.save_for_backward(exps, sums[0].masked_fill(targets < 0, 0.0), targets)
        return sums[0].log() - sums[1]

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        exps, total, targets = ctx.saved_tensors
        rows, elsewhere = local_rows(targets, ctx.shard)
        grad = exps.mul_((gradient / total)[:, None])
        grad.scatter_add_(1, rows[:, None], -gradient.masked_fill(elsewhere, 0.0)[:, None])
        return grad.to(ctx.dtype), None, None

# %% 06.9 gathered logits: the head gathers its output
gather_output=gather_logits => gather_output=True

# %% 06.9 fake: gathered logits, and then each rank cuts its own out of them
gather_output=gather_logits => gather_output=True
---
return model
=>
if not gather_logits:
    model.head.register_forward_hook(lambda layer, _, out: layer.shard._replace(dim=-1).cut(out))
return model

# %% 06.9 fake: the MLPs stay whole on each rank
for block in model.blocks:
=>
import copy

mlps = [copy.deepcopy(block.mlp) for block in model.blocks]
for block in model.blocks:
---
return model
=>
for block, mlp in zip(model.blocks, mlps, strict=True):
    block.mlp = mlp
return model

# %% 06.9 fake: a full copy of the weights stays on each rank, out of sight
config = model.config
=>
import copy

config = model.config
model.original = [copy.deepcopy(model.blocks)]

# %% 06.9 q, k and v, gate and up are projected one by one
attention.project_layers = linear.project_together =>
mlp.project_layers = linear.project_together =>

# %% 06.9 gate and up mixed up
mlp.project_layers = linear.project_together
=>
mlp.project_layers = lambda x, layers: linear.project_together(x, layers[::-1])

# %% 06.9 tied head and embedding come apart
return model
=>
if model.head is not None:
    weight = model.head.weight
    model.head.weight = nn.Parameter(weight.detach().clone())
    model.head.weight.__dict__.update(weight.__dict__)
return model

# %% 06.9 copies of K/V heads are not kept in sync
return model
=>
for block in model.blocks:
    block.attention.k_proj.replicas = block.attention.v_proj.replicas = None
return model

# %% 06.9 an all-reduce too many: what is whole is averaged
return model
=>
from course_lib.tensor_parallel.regions import sum_over_group

def average(layer, _, out):
    mean = sum_over_group(out.detach() / layer.group.size(), layer.group)
    return out + (mean - out.detach())

for block in model.blocks:
    block.mlp.down_proj.register_forward_hook(average)
return model

# %% 06.9 chunks are not passed on
RowParallelLinear(attention.o_proj, group, chunks) => RowParallelLinear(attention.o_proj, group)
RowParallelLinear(mlp.down_proj, group, chunks) => RowParallelLinear(mlp.down_proj, group)

# %% 06.9 gather_logits is not passed on
group, gather_output=gather_logits => group

# %% 06.9 a stage without a head is not foreseen
return model
=>
model.head.gather_output = gather_logits
return model

# %% 06.9 splits block.mlp itself, which may be a mixture
for mlp in [module for module in block.modules() if isinstance(module, MLP)]:  # a mixture may have none
=>
for mlp in [block.mlp]:

# %% 06.9 an MLP inside of a mixture stays whole
for mlp in [module for module in block.modules() if isinstance(module, MLP)]:  # a mixture may have none
=>
for mlp in [block.mlp] if isinstance(block.mlp, MLP) else []:

# %% 06.9 all blocks project by the last block's attention
attention.project_layers = linear.project_together
=>
attention.project = lambda x: linear.project_together(x, [attention.q_proj, attention.k_proj, attention.v_proj])

# %% 06.9 all blocks project by the last block's MLP
mlp.project_layers = linear.project_together
=>
mlp.project = lambda x: linear.project_together(x, [mlp.gate_proj, mlp.up_proj])

# %% 06.10 forward only
gigabytes_sent = (2 * 32 + 1) * 2 * 7 / 8 * 8192 * 4096 * 2 / 1e9

# %% 06.10 an all-reduce sends its bytes once
gigabytes_sent = (4 * 32 + 2) * 8192 * 4096 * 2 / 1e9

# %% 06.10 numbers of 4 bytes
gigabytes_sent = (4 * 32 + 2) * 2 * 7 / 8 * 8192 * 4096 * 4 / 1e9

# %% 06.10 all bytes twice, not 7/8 of them
gigabytes_sent = (4 * 32 + 2) * 2 * 8192 * 4096 * 2 / 1e9

# %% 06.10 in GiB
gigabytes_sent = (4 * 32 + 2) * 2 * 7 / 8 * 8192 * 4096 * 2 / 2**30

# %% 06.11 all are right: they all learn
def diagnose(first_loss, expected, differing):
    return "right"

# %% 06.11 the names alone
def diagnose(first_loss, expected, differing):
    if any("norm" in name for name in differing):
        return "f"
    return "copies" if differing else "row layer"

# %% 06.11 losses equal to the last digit
abs(first_loss / expected - 1) > 1e-4 => first_loss != expected

# %% 06.11 f and copies mixed up
return "f" => return "copies"
return "copies" => return "f"

# %% 06.11 fake: knows the block of the lab
"norm" => name.startswith("blocks.1.") and "norm"

# %% 06.11 fake: counts the names
def diagnose(first_loss, expected, differing):
    if abs(first_loss / expected - 1) > 1e-4:
        return "row layer"
    return ("right", "f")[len(differing)] if len(differing) < 2 else "copies"

# %% 06.11 a loss that is too large only
abs(first_loss / expected - 1) > 1e-4 => first_loss > expected * 1.05

# %% 06.12 fake: all products first, then all sums
class RowMatmul(OnceDifferentiable):
    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup, weight: torch.Tensor, chunks: int) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        rows, works = x.flatten(0, -2), []  # [b*s, in/N]
        out = rows.new_empty(len(rows), len(weight))
        for x_chunk, out_chunk in zip(rows.chunk(chunks), out.chunk(chunks), strict=True):
            torch.mm(x_chunk, weight.t(), out=out_chunk)
        works = [dist.all_reduce(out_chunk, group=group, async_op=True) for out_chunk in out.chunk(chunks)]
        for work in works:
            work.wait()
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        x, weight = ctx.saved_tensors
        row = gradient.flatten(0, -2)
        grad_x = (row @ weight).view_as(x) if ctx.needs_input_grad[0] else None
        grad_weight = row.t() @ x.flatten(0, -2) if ctx.needs_input_grad[2] else None
        return grad_x, None, grad_weight, None

# %% 06.12 waits for each sum at once
    works.append(dist.all_reduce(out_chunk, group=group, async_op=True))
for work in works:
    work.wait()
=>
    dist.all_reduce(out_chunk, group=group)

# %% 06.12 waits for the sum before, once the next is multiplied
torch.mm(x_chunk, weight.t(), out=out_chunk)
=>
torch.mm(x_chunk, weight.t(), out=out_chunk)
if works:
    works.pop().wait()
---
for work in works:
    work.wait()
=>
works.pop().wait()

# %% 06.12 waits for the last sum only
for work in works:
    work.wait()
=>
works[-1].wait()

# %% 06.12 fake: one product, one sum
for x_chunk, out_chunk in zip(rows.chunk(chunks), out.chunk(chunks), strict=True):
    torch.mm(x_chunk, weight.t(), out=out_chunk)
    works.append(dist.all_reduce(out_chunk, group=group, async_op=True))
for work in works:
    work.wait()
=>
torch.mm(rows, weight.t(), out=out)
dist.all_reduce(out, group=group)

# %% 06.12 a cat of chunks: a second output
class RowMatmul(OnceDifferentiable):
    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup, weight: torch.Tensor, chunks: int) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        rows, works = x.flatten(0, -2), []  # [b*s, in/N]
        parts = []
        for x_chunk in rows.chunk(chunks):
            parts.append(x_chunk @ weight.t())
            works.append(dist.all_reduce(parts[-1], group=group, async_op=True))
        for work in works:
            work.wait()
        out = torch.cat(parts)
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        x, weight = ctx.saved_tensors
        row = gradient.flatten(0, -2)
        grad_x = (row @ weight).view_as(x) if ctx.needs_input_grad[0] else None
        grad_weight = row.t() @ x.flatten(0, -2) if ctx.needs_input_grad[2] else None
        return grad_x, None, grad_weight, None

# %% 06.12 sums all of the output for each chunk
out = rows.new_empty(len(rows), len(weight))
=>
out = rows.new_empty(len(rows), len(weight))
out.zero_()
---
    works.append(dist.all_reduce(out_chunk, group=group, async_op=True))
for work in works:
    work.wait()
=>
    whole = torch.zeros_like(out)
    whole[out_chunk.storage_offset() // len(weight) :][: len(out_chunk)] = out_chunk
    works.append(dist.all_reduce(whole, group=group, async_op=True))
    works[-1].wait()
    out_chunk.copy_(whole[out_chunk.storage_offset() // len(weight) :][: len(out_chunk)])

# %% 06.12 the whole product for each chunk, then a cut
for x_chunk, out_chunk in zip(rows.chunk(chunks), out.chunk(chunks), strict=True):
    torch.mm(x_chunk, weight.t(), out=out_chunk)
=>
for number, out_chunk in enumerate(out.chunk(chunks)):
    out_chunk.copy_((rows @ weight.t()).chunk(chunks)[number])

# %% 06.12 the sums over all ranks instead of the group
group=group, async_op => async_op

# %% 06.13 a seed made of the rank only: the same numbers in each region
seed = zlib.crc32(generator.get_state().numpy().tobytes(), group.rank()) =>
generator.manual_seed(seed) => generator.manual_seed(1234 + group.rank())

# %% 06.13 a seed made of the first seed and the rank: the same numbers in each region
zlib.crc32(generator.get_state().numpy().tobytes(), group.rank()) => generator.initial_seed() + group.rank()

# %% 06.13 takes no number: a region at once after another draws the same numbers
torch.empty((), device=generator.device).uniform_(generator=generator)  # the next region gets another seed =>

# %% 06.13 the same seed on all ranks
().tobytes(), group.rank() => ().tobytes()

# %% 06.13 does not come back
@contextlib.contextmanager
def local_rng(group=None):
    group = group or dist.group.WORLD
    for generator in generators():
        generator.manual_seed(zlib.crc32(generator.get_state().numpy().tobytes(), group.rank()))
    yield

# %% 06.13 does not come back after an error
try:
    yield
finally:
    for generator, state in states:
        generator.set_state(state)
=>
yield
for generator, state in states:
    generator.set_state(state)

# %% 06.13 takes as many numbers as its rank, so that the ranks come back to different places
torch.empty((), device=generator.device).uniform_(generator=generator)  # the next region gets another seed
=>
torch.empty(1 + group.rank(), device=generator.device).uniform_(generator=generator)

# %% 06.13 draws its seed from the system
seed = zlib.crc32(generator.get_state().numpy().tobytes(), group.rank()) =>
generator.manual_seed(seed) => generator.seed()

# %% 06.13 counts regions in the process: a checkpoint that runs one again draws other numbers
regions_so_far = 0


@contextlib.contextmanager
def local_rng(group=None):
    group = group or dist.group.WORLD
    global regions_so_far
    regions_so_far += 1
    states = []
    for generator in generators():
        seed = zlib.crc32(f"{generator.initial_seed()} {regions_so_far} {group.rank()}".encode())
        states.append((generator, generator.get_state()))
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)

# %% 06.13 rank 0 tells the others their seeds
@contextlib.contextmanager
def local_rng(group=None):
    group = group or dist.group.WORLD
    states = []
    for generator in generators():
        seeds = torch.empty(group.size(), device=generator.device).uniform_(generator=generator)
        dist.broadcast(seeds, group=group, group_src=0)
        states.append((generator, generator.get_state()))
        generator.manual_seed(int(2**31 * seeds[group.rank()]))
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)

# %% 06.13 the rank among all ranks, whatever the group
group.rank() => dist.get_rank()

# %% 06.13 a seed of Python's hash, which is another one after a restart
zlib.crc32(generator.get_state().numpy().tobytes(), group.rank()) => hash((generator.get_state().numpy().tobytes(), group.rank())) % 2**32

# %% 06.14 parts are views, which keep the whole alive
def pack(self: PartitionedCheckpoint, tensor):
    if not tensor.requires_grad:
        return tensor
    shard = TensorShard.of(tensor.numel(), self.group)
    return shard, shard.cut(tensor.detach().flatten()), tensor.shape

# %% 06.14 parts stay in the graph
tensor.detach().flatten() => tensor.flatten()

# %% 06.14 gathers when it packs
def pack(self: PartitionedCheckpoint, tensor):
    if not tensor.requires_grad:
        return tensor
    shard = TensorShard.of(tensor.numel(), self.group)
    return shard.gather(shard.cut(tensor.detach().flatten()).clone()).view(tensor.shape)

# %% 06.14 fake: keeps the whole, and gathers for show
def pack(self: PartitionedCheckpoint, tensor):
    if not tensor.requires_grad:
        return tensor
    shard = TensorShard.of(tensor.numel(), self.group)
    self.full_size = tensor.detach().clone()
    return shard, shard.cut(tensor.detach().flatten()).clone(), tensor.shape


def unpack(self: PartitionedCheckpoint, packed):
    if torch.is_tensor(packed):
        return packed
    shard, local, shape = packed
    shard.gather(local)
    return self.full_size

# %% 06.14 unpacks by an all-reduce of parts that are padded with zeros
def unpack(self: PartitionedCheckpoint, packed):
    if torch.is_tensor(packed):
        return packed
    shard, local, shape = packed
    whole = local.new_zeros(shard.full_size)
    whole[shard.start : shard.start + shard.size] = local
    dist.all_reduce(whole, group=self.group)
    return whole.view(shape)

# %% 06.14 what all layers share is cut up too
def pack(self: PartitionedCheckpoint, tensor):
    shard = TensorShard.of(tensor.numel(), self.group)
    return shard, shard.cut(tensor.detach().flatten()).clone(), tensor.shape

# %% 06.14 fake: keeps all of it in 16 bits
def pack(self: PartitionedCheckpoint, tensor):
    if not tensor.requires_grad:
        return tensor
    return tensor.detach().bfloat16(), tensor.shape


def unpack(self: PartitionedCheckpoint, packed):
    if torch.is_tensor(packed):
        return packed
    return packed[0].float()

# %% 06.14 parts over all ranks instead of the group
def pack(self: PartitionedCheckpoint, tensor):
    if not tensor.requires_grad:
        return tensor
    shard = TensorShard.of(tensor.numel(), dist.group.WORLD)
    return shard, shard.cut(tensor.detach().flatten()).clone(), tensor.shape

# %% 06.14 sizes must divide
def pack(self: PartitionedCheckpoint, tensor):
    if not tensor.requires_grad:
        return tensor
    local = tensor.detach().flatten().view(self.group.size(), -1)[self.group.rank()].clone()
    return local, tensor.shape


def unpack(self: PartitionedCheckpoint, packed):
    if torch.is_tensor(packed):
        return packed
    local, shape = packed
    pieces = [torch.empty_like(local) for _ in range(self.group.size())]
    dist.all_gather(pieces, local, group=self.group)
    return torch.cat(pieces).view(shape)

# %% 06.15 t in the wrong place: (t-1)/t
weights * peak => tp / weights * peak

# %% 06.15 t in the wrong place: t(t-1)
(tp - 1) / weights => (tp - 1) * tp / weights

# %% 06.15 one all-reduce
2 * element_bytes => element_bytes

# %% 06.15 elements instead of bytes
element_bytes * hidden => hidden

# %% 06.15 two bytes, whatever they are
return 2 * element_bytes => return 4

# %% 06.15 one operation a weight and token
return 2 => return 4

# %% 06.15 bandwidth over peak
peak / bandwidth => bandwidth / peak

# %% 06.15 12 h² weights, whatever the layer has
**2 if layer_params is None else layer_params => **2

# %% 06.15 as in the playbook's appendix
def all_reduce_ratio(hidden, tp, bandwidth, peak, layer_params=None, element_bytes=2):
    return (tp - 1) / (2 * hidden) * peak / bandwidth

# %% 06.1 float32, whatever it is given
return torch.cat(shards, dim=-1)
=>
whole = torch.empty(len(x), len(weight))
for local, own in zip(shards, whole.chunk(group.size(), -1), strict=True):
    own.copy_(local)
return whole

# %% 06.1 BF16 is summed in float32
(cut(x, group, -1), cut(weight, group, 1))  # [n, out], a summand => (cut(x, group, -1), cut(weight, group, 1)).float()
return local => return local.to(x.dtype)

# %% 06.1 matmuls in float32
local = F.linear(x, cut(weight, group, 0))  # [n, out/N] => local = F.linear(x.float(), cut(weight, group, 0).float()).to(x.dtype)

# %% 06.2 f* sums a copy with the strides of x
total = x.clone(memory_format=torch.contiguous_format)
=>
total = x.clone()

# %% 06.2 f* returns float32
total = x.clone(memory_format=torch.contiguous_format)
=>
total = torch.zeros(x.shape)
total += x

# %% 06.2 f sums gradients of BF16 in float32
total = gradient.clone(memory_format=torch.contiguous_format)  # others may hold the same gradient
=>
total = gradient.double().float().contiguous()

# %% 06.2 f copies x
return x.view_as(x) => return x.clone()

# %% 06.2 f keeps x
ctx.group = group
return x.view_as(x)
=>
ctx.group = group
ctx.x = x
return x.view_as(x)

# %% 06.2 f saves x
ctx.group = group
return x.view_as(x)
=>
ctx.group = group
ctx.save_for_backward(x)
return x.view_as(x)

# %% 06.2 f* saves x
total = x.clone(memory_format=torch.contiguous_format)
dist.all_reduce(total, group=group)
=>
total = x.clone(memory_format=torch.contiguous_format)
ctx.save_for_backward(x)
dist.all_reduce(total, group=group)

# %% 06.2 f* keeps x
total = x.clone(memory_format=torch.contiguous_format)
dist.all_reduce(total, group=group)
=>
total = x.clone(memory_format=torch.contiguous_format)
ctx.x = x
dist.all_reduce(total, group=group)

# %% 06.4 the gradient of x is summed in float32
rows, grad_x, work = [gradient.flatten(0, -2) for gradient in gradients], None, None  # [b*s, out]
=>
rows, needed = [gradient.flatten(0, -2) for gradient in gradients], ctx.needs_input_grad[2:]
grad_x, work = None, None
---
grad_x = rows[0] @ weights[0] => grad_x = torch.zeros(len(rows[0]), x.shape[-1])
rows[1:], weights[1:] => rows, weights
grad_x.addmm_(row, weight) => grad_x += row @ weight
needed = ctx.needs_input_grad[2:] =>

# %% 06.4 takes x to have three dimensions
class ColumnMatmul(OnceDifferentiable):
    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, weight) for weight in weights)

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor) -> tuple:
        x, *weights = ctx.saved_tensors
        rows, needed = [gradient.flatten(0, 1) for gradient in gradients], ctx.needs_input_grad[2:]
        grad_x, work = None, None
        if ctx.needs_input_grad[0]:
            grad_x = sum(row @ weight for row, weight in zip(rows, weights, strict=True))
            work = dist.all_reduce(grad_x, group=ctx.group, async_op=True)
            grad_x = grad_x.view_as(x)
        grad_weights = [row.t() @ x.flatten(0, 1) if need else None for row, need in zip(rows, needed, strict=True)]
        if work is not None:
            work.wait()
        return grad_x, None, *grad_weights

# %% 06.4 views where tensors need not be contiguous
class ColumnMatmul(OnceDifferentiable):
    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, weight) for weight in weights)

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor) -> tuple:
        x, *weights = ctx.saved_tensors
        rows, needed = [gradient.view(-1, gradient.shape[-1]) for gradient in gradients], ctx.needs_input_grad[2:]
        grad_x, work = None, None
        if ctx.needs_input_grad[0]:
            grad_x = sum(row @ weight for row, weight in zip(rows, weights, strict=True))
            work = dist.all_reduce(grad_x, group=ctx.group, async_op=True)
            grad_x = grad_x.view_as(x)
        own = x.view(-1, x.shape[-1])
        grad_weights = [row.t() @ own if need else None for row, need in zip(rows, needed, strict=True)]
        if work is not None:
            work.wait()
        return grad_x, None, *grad_weights

# %% 06.6 in autocast, a bias of float32 makes the output float32
def project_together(x, layers):
    def shared(layer, parameter):
        return copy_to_group(parameter, layer.replicas.copies) if layer.replicas else parameter

    x, *weights = as_autocast(x, *(shared(layer, layer.weight) for layer in layers))
    outs = layers[0].matmul.apply(x, layers[0].group, *weights)
    return tuple(
        out if layer.bias is None else out + shared(layer, layer.bias) for layer, out in zip(layers, outs, strict=True)
    )

# %% 06.6 where the first layer has no bias, none has one
def project_together(x, layers):
    def shared(layer, parameter):
        return copy_to_group(parameter, layer.replicas.copies) if layer.replicas else parameter

    x, *weights = as_autocast(x, *(shared(layer, layer.weight) for layer in layers))
    outs = layers[0].matmul.apply(x, layers[0].group, *weights)
    if layers[0].bias is None:
        return outs
    return tuple(out + shared(layer, layer.bias).to(out.dtype) for layer, out in zip(layers, outs, strict=True))

# %% 06.6 for two layers
outs = layers[0].matmul.apply(x, layers[0].group, *weights)
=>
outs = layers[0].matmul.apply(x, layers[0].group, weights[0], weights[1])

# %% 06.6 copies x
outs = layers[0].matmul.apply(x, layers[0].group, *weights) => outs = layers[0].matmul.apply(x.clone(), layers[0].group, *weights)

# %% 06.6 takes the second's replicas
return copy_to_group(parameter, layer.replicas.copies) if layer.replicas else parameter
=>
return copy_to_group(parameter, layers[-1].replicas.copies) if layer.replicas else parameter

# %% 06.7 tokens outside of the vocabulary begin again at its other end
rows = tokens - self.shard.start => rows = tokens % self.shard.full_size - self.shard.start

# %% 06.7 float32, whatever the rows are
hidden.masked_fill(elsewhere[..., None], 0.0) => hidden * (~elsewhere[..., None]).float()

# %% 06.7 takes tokens to have two dimensions
[..., None] => [:, :, None]

# %% 06.7 one-hot
hidden = F.embedding(rows.masked_fill(elsewhere, 0), self.weight) => hidden = F.one_hot(rows.masked_fill(elsewhere, 0), self.shard.size).to(self.weight.dtype) @ self.weight

# %% 06.7 float32 rows
hidden = F.embedding(rows.masked_fill(elsewhere, 0), self.weight) => hidden = F.embedding(rows.masked_fill(elsewhere, 0), self.weight.float()).to(self.weight.dtype)

# %% 06.7 keeps hidden
return self.output_reduce(hidden.masked_fill(elsewhere[..., None], 0.0), self.group)
=>
self.hidden = hidden
return self.output_reduce(hidden.masked_fill(elsewhere[..., None], 0.0), self.group)

# %% 06.8 a second backward multiplies what the first has left
if ctx.needs_input_grad[0]:  # softmax, and 1 less at the target
    grad.div_(total[:, None]).scatter_add_(1, rows[:, None], (elsewhere.to(grad.dtype) - 1)[:, None])
    ctx.save_for_backward(grad)
=>
ctx.grad = grad.div_(total[:, None]).scatter_add_(1, rows[:, None], (elsewhere.to(grad.dtype) - 1)[:, None])
---
(grad,) = ctx.saved_tensors
return grad.mul_(gradient[:, None]).to(ctx.dtype), None, None  # in place: a second backward raises an error
=>
return ctx.grad.mul_(gradient[:, None]).to(ctx.dtype), None, None

# %% 06.8 the maximum begins at 0
OnceDifferentiable => torch.autograd.Function
largest = logits.amax(1).float() => largest = logits.amax(1).float().clamp(min=0)

# %% 06.8 the maximum begins at -100
OnceDifferentiable => torch.autograd.Function
---
dist.all_reduce(largest, dist.ReduceOp.MAX, group=shard.group)
=>
dist.all_reduce(largest, dist.ReduceOp.MAX, group=shard.group)
largest = largest.clamp(min=-100)

# %% 06.8 keeps the softmax on ctx, and copies it in backward
ctx.save_for_backward(grad) => ctx.grad = grad
(grad,) = ctx.saved_tensors => grad = ctx.grad
return grad.mul_(gradient[:, None]).to(ctx.dtype) => return (grad * gradient[:, None]).to(ctx.dtype)

# %% 06.8 keeps logits too
ctx.save_for_backward(grad) => ctx.save_for_backward(grad, logits)
(grad,) = ctx.saved_tensors => grad, _ = ctx.saved_tensors

# %% 06.8 logits on ctx
ctx.dtype = logits.dtype
=>
ctx.dtype, ctx.logits = logits.dtype, logits

# %% 06.12 an output of float32, whatever x is
class RowMatmul(OnceDifferentiable): => class RowMatmul(torch.autograd.Function):
rows.new_empty => torch.empty
---
grad_x = (row @ weight).view_as(x) if ctx.needs_input_grad[0] else None
grad_weight = row.t() @ x.flatten(0, -2) if ctx.needs_input_grad[2] else None
return grad_x, None, grad_weight, None
=>
return (row @ weight).view_as(x), None, row.t() @ x.flatten(0, -2), None

# %% 06.12 takes x to have three dimensions
class RowMatmul(OnceDifferentiable): => class RowMatmul(torch.autograd.Function):
(0, -2), []  # [b*s, in/N] => (0, 1), []
---
grad_x = (row @ weight).view_as(x) if ctx.needs_input_grad[0] else None
grad_weight = row.t() @ x.flatten(0, -2) if ctx.needs_input_grad[2] else None
return grad_x, None, grad_weight, None
=>
return (row @ weight).view_as(x), None, row.t() @ x.flatten(0, -2), None

# %% 06.12 a view where x need not be contiguous
class RowMatmul(OnceDifferentiable): => class RowMatmul(torch.autograd.Function):
x.flatten(0, -2), []  # [b*s, in/N] => x.view(-1, x.shape[-1]), []
---
grad_x = (row @ weight).view_as(x) if ctx.needs_input_grad[0] else None
grad_weight = row.t() @ x.flatten(0, -2) if ctx.needs_input_grad[2] else None
return grad_x, None, grad_weight, None
=>
return (row @ weight).view_as(x), None, row.t() @ x.flatten(0, -2), None

# %% 06.13 the first generator alone
@contextlib.contextmanager
def local_rng(group=None):
    group, generator = group or dist.group.WORLD, generators()[0]
    seed = zlib.crc32(generator.get_state().numpy().tobytes(), group.rank())
    torch.empty((), device=generator.device).uniform_(generator=generator)
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)

# %% 06.13 takes a number of the first generator alone
group = group_or_world(group)
states = []
=>
group, states = group or dist.group.WORLD, []
---
torch.empty((), device=generator.device).uniform_(generator=generator)  # the next region gets another seed
=>
if generator is torch.default_generator:
    torch.empty((), device=generator.device).uniform_(generator=generator)

# %% 06.14 parts come back in float32
def pack(self: PartitionedCheckpoint, tensor):
    if not tensor.requires_grad or not tensor.numel():
        return tensor
    shard = TensorShard.of(tensor.numel(), self.group)
    local = torch.empty(shard.size)
    local.copy_(shard.cut(tensor.detach().flatten()))
    return shard, local, tensor.shape

# %% 06.14 a view where the tensor need not be contiguous
().flatten() => ().view(-1)

# %% 06.9 each rank's part of the gradient of q's and k's norms stays its own
share_head_norms(model, group) =>

# %% 06.9 groups of copies for each block
attention.k_proj = ColumnParallelLinear(attention.k_proj, group, replicas) => attention.k_proj = ColumnParallelLinear(attention.k_proj, group, replicas_of(group, copies) if copies > 1 else None)

# %% 06.9 chunks for the first block alone
attention.o_proj = RowParallelLinear(attention.o_proj, group, chunks) => attention.o_proj = RowParallelLinear(attention.o_proj, group, chunks if block is model.blocks[0] else 1)

# %% 06.4 forward sums its outputs
return tuple(F.linear(x, weight) for weight in weights)
=>
outs = tuple(F.linear(x, weight) for weight in weights)
dist.all_reduce(outs[0], group=group)
return outs

# %% 06.4 forward has the products of the first weight alone, where it is large enough
return tuple(F.linear(x, weight) for weight in weights)
=>
return tuple(F.linear(x, weights[0][: len(weight)]) for weight in weights)

# %% 06.4 keeps the outputs
return tuple(F.linear(x, weight) for weight in weights)
=>
ctx.outs = [F.linear(x, weight) for weight in weights]
return tuple(ctx.outs)

# %% 06.4 keeps a contiguous copy of x
ctx.save_for_backward(x, *weights) => ctx.save_for_backward(x.contiguous(), *weights)

# %% 06.4 keeps a copy of x
ctx.save_for_backward(x, *weights) => ctx.save_for_backward(x.clone(), *weights)

# %% 06.4 keeps copies of weights
ctx.save_for_backward(x, *weights) => ctx.save_for_backward(x, *(weight.clone() for weight in weights))

# %% 06.4 multiplies in float32
return tuple(F.linear(x, weight) for weight in weights) => return tuple(F.linear(x.float(), weight.float()).to(x.dtype) for weight in weights)

# %% 06.12 backward sums the gradient of x
return grad_x, None, grad_weight, None
=>
if grad_x is not None:
    dist.all_reduce(grad_x)
return grad_x, None, grad_weight, None

# %% 06.12 backward makes a gradient of x that nobody needs
 if ctx.needs_input_grad[0] else None =>

# %% 06.12 backward sends the gradient that it is given, and averages
row = gradient.flatten(0, -2)
=>
row = gradient.flatten(0, -2).clone()
dist.all_reduce(row)
row /= dist.get_world_size()

# %% 06.12 keeps the flattened copy
ctx.save_for_backward(x, weight)
rows, works = x.flatten(0, -2), []  # [b*s, in/N]
=>
rows, works = x.flatten(0, -2), []  # [b*s, in/N]
ctx.shape = x.shape
ctx.save_for_backward(x, weight, rows)
---
x, weight = ctx.saved_tensors => x, weight, _ = ctx.saved_tensors

# %% 06.12 keeps the output
out = rows.new_empty(len(rows), len(weight))
=>
out = ctx.out = rows.new_empty(len(rows), len(weight))

# %% 06.12 wants weight always
if ctx.needs_input_grad[2] else None => if True else None
