"""Wrong answers that the checks of notebook 06 must catch. None of them hangs."""


# %% 06.1 fake: the whole product on every rank, then cut and gathered
def split_product(x, weight, how, group):
    if how == "columns":
        part = cut(F.linear(x, weight), group, -1).contiguous()
        pieces = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(pieces, part, group=group)
        return torch.cat(pieces, dim=-1)
    part = F.linear(cut(x, group, -1), cut(weight, group, 1))
    dist.all_reduce(part, group=group)
    return part


# %% 06.1 fake: the whole product on every rank, and an all-reduce of an N-th of it
def split_product(x, weight, how, group):
    if how == "columns":
        part = F.linear(x, cut(weight, group, 0))
        pieces = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(pieces, part, group=group)
        return torch.cat(pieces, dim=-1)
    part = F.linear(x, weight) / group.size()
    dist.all_reduce(part, group=group)
    return part


# %% 06.1 columns put together by an all-reduce of parts that are padded with zeros
def split_product(x, weight, how, group):
    if how == "columns":
        size = len(weight) // group.size()
        whole = x.new_zeros(len(x), len(weight))
        whole[:, group.rank() * size : (group.rank() + 1) * size] = F.linear(x, cut(weight, group, 0))
        dist.all_reduce(whole, group=group)
        return whole
    part = F.linear(cut(x, group, -1), cut(weight, group, 1))
    dist.all_reduce(part, group=group)
    return part


# %% 06.1 rows summed from gathered summands
def split_product(x, weight, how, group):
    if how == "columns":
        part = F.linear(x, cut(weight, group, 0))
        pieces = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(pieces, part, group=group)
        return torch.cat(pieces, dim=-1)
    part = F.linear(cut(x, group, -1), cut(weight, group, 1))
    pieces = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(pieces, part, group=group)
    return sum(pieces)


# %% 06.1 rows: a summand
def split_product(x, weight, how, group):
    if how == "columns":
        part = F.linear(x, cut(weight, group, 0))
        pieces = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(pieces, part, group=group)
        return torch.cat(pieces, dim=-1)
    return F.linear(cut(x, group, -1), cut(weight, group, 1))


# %% 06.1 rows: a mean instead of the sum
def split_product(x, weight, how, group):
    if how == "columns":
        part = F.linear(x, cut(weight, group, 0))
        pieces = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(pieces, part, group=group)
        return torch.cat(pieces, dim=-1)
    part = F.linear(cut(x, group, -1), cut(weight, group, 1))
    dist.all_reduce(part, group=group)
    return part / group.size()


# %% 06.1 rows: the sum over all ranks instead of the group
def split_product(x, weight, how, group):
    if how == "columns":
        part = F.linear(x, cut(weight, group, 0))
        pieces = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(pieces, part, group=group)
        return torch.cat(pieces, dim=-1)
    part = F.linear(cut(x, group, -1), cut(weight, group, 1))
    dist.all_reduce(part)
    return part


# %% 06.1 rows: a reduce-scatter, and only the own part of the sum
def split_product(x, weight, how, group):
    if how == "columns":
        part = F.linear(x, cut(weight, group, 0))
        pieces = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(pieces, part, group=group)
        return torch.cat(pieces, dim=-1)
    from course_lib.collectives.into_tensor import reduce_scatter_tensor

    part = F.linear(cut(x, group, -1), cut(weight, group, 1))
    own = part.new_empty(part.numel() // group.size())
    reduce_scatter_tensor(own, part.flatten(), group=group)
    return own



# %% 06.1 columns put on top of one another
def split_product(x, weight, how, group):
    if how == "columns":
        part = F.linear(x, cut(weight, group, 0))
        pieces = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(pieces, part, group=group)
        return torch.cat(pieces, dim=0).view(len(x), -1)
    part = F.linear(cut(x, group, -1), cut(weight, group, 1))
    dist.all_reduce(part, group=group)
    return part


# %% 06.2 f sums in forward too
import torch
import torch.distributed as dist

import course_lib.tensor_parallel.regions


class CopyToGroup(course_lib.tensor_parallel.regions.CopyToGroup):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total


class SumOverGroup(course_lib.tensor_parallel.regions.SumOverGroup):
    pass


# %% 06.2 f: nothing in backward
import torch
import torch.distributed as dist

import course_lib.tensor_parallel.regions


class CopyToGroup(course_lib.tensor_parallel.regions.CopyToGroup):
    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class SumOverGroup(course_lib.tensor_parallel.regions.SumOverGroup):
    pass


# %% 06.2 f reduces the gradient that it is given, in place
import torch
import torch.distributed as dist

import course_lib.tensor_parallel.regions


class CopyToGroup(course_lib.tensor_parallel.regions.CopyToGroup):
    @staticmethod
    def backward(ctx, gradient):
        total = gradient.contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class SumOverGroup(course_lib.tensor_parallel.regions.SumOverGroup):
    pass


# %% 06.2 f: a mean instead of the sum
import torch
import torch.distributed as dist

import course_lib.tensor_parallel.regions


class CopyToGroup(course_lib.tensor_parallel.regions.CopyToGroup):
    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total / ctx.group.size(), None


class SumOverGroup(course_lib.tensor_parallel.regions.SumOverGroup):
    pass


# %% 06.2 f sums over all ranks instead of the group
import torch
import torch.distributed as dist

import course_lib.tensor_parallel.regions


class CopyToGroup(course_lib.tensor_parallel.regions.CopyToGroup):
    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total, None


class SumOverGroup(course_lib.tensor_parallel.regions.SumOverGroup):
    pass


# %% 06.2 f* sums in backward too, as the gradient of a sum would in one process
import torch
import torch.distributed as dist

import course_lib.tensor_parallel.regions


class CopyToGroup(course_lib.tensor_parallel.regions.CopyToGroup):
    pass


class SumOverGroup(course_lib.tensor_parallel.regions.SumOverGroup):
    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total


# %% 06.2 f* sums in place what it is given
import torch
import torch.distributed as dist

import course_lib.tensor_parallel.regions


class CopyToGroup(course_lib.tensor_parallel.regions.CopyToGroup):
    pass


class SumOverGroup(course_lib.tensor_parallel.regions.SumOverGroup):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        dist.all_reduce(x, group=group)
        return x.view_as(x)


# %% 06.2 f*: each rank's x gets an N-th of the gradient
import torch
import torch.distributed as dist

import course_lib.tensor_parallel.regions


class CopyToGroup(course_lib.tensor_parallel.regions.CopyToGroup):
    pass


class SumOverGroup(course_lib.tensor_parallel.regions.SumOverGroup):
    @staticmethod
    def backward(ctx, gradient):
        return gradient / ctx.group.size(), None

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total


# %% 06.3 no all-reduce: its own summand of dX
def silu_gradient(u):
    return u.sigmoid() * (1 + u * (1 - u.sigmoid()))


def mlp_backward(x, a, b, grad_y, group):
    u = F.linear(x, a)
    grad_u = (grad_y @ b) * silu_gradient(u)
    return grad_u @ a, grad_u.t() @ x, grad_y.t() @ F.silu(u)


# %% 06.3 all three gradients are summed
def silu_gradient(u):
    return u.sigmoid() * (1 + u * (1 - u.sigmoid()))


def mlp_backward(x, a, b, grad_y, group):
    u = F.linear(x, a)
    grad_u = (grad_y @ b) * silu_gradient(u)
    gradients = grad_u @ a, grad_u.t() @ x, grad_y.t() @ F.silu(u)
    for gradient in gradients:
        dist.all_reduce(gradient, group=group)
    return gradients


# %% 06.3 an all-reduce too many, of dY
def silu_gradient(u):
    return u.sigmoid() * (1 + u * (1 - u.sigmoid()))


def mlp_backward(x, a, b, grad_y, group):
    grad_y = grad_y / group.size()
    dist.all_reduce(grad_y, group=group)
    u = F.linear(x, a)
    grad_u = (grad_y @ b) * silu_gradient(u)
    grad_x = grad_u @ a
    dist.all_reduce(grad_x, group=group)
    return grad_x, grad_u.t() @ x, grad_y.t() @ F.silu(u)


# %% 06.3 a mean instead of the sum
def silu_gradient(u):
    return u.sigmoid() * (1 + u * (1 - u.sigmoid()))


def mlp_backward(x, a, b, grad_y, group):
    u = F.linear(x, a)
    grad_u = (grad_y @ b) * silu_gradient(u)
    grad_x = grad_u @ a
    dist.all_reduce(grad_x, group=group)
    return grad_x / group.size(), grad_u.t() @ x, grad_y.t() @ F.silu(u)


# %% 06.3 the sum over all ranks instead of the group
def silu_gradient(u):
    return u.sigmoid() * (1 + u * (1 - u.sigmoid()))


def mlp_backward(x, a, b, grad_y, group):
    u = F.linear(x, a)
    grad_u = (grad_y @ b) * silu_gradient(u)
    grad_x = grad_u @ a
    dist.all_reduce(grad_x)
    return grad_x, grad_u.t() @ x, grad_y.t() @ F.silu(u)


# %% 06.3 U in place of silu(U) in dB
def silu_gradient(u):
    return u.sigmoid() * (1 + u * (1 - u.sigmoid()))


def mlp_backward(x, a, b, grad_y, group):
    u = F.linear(x, a)
    grad_u = (grad_y @ b) * silu_gradient(u)
    grad_x = grad_u @ a
    dist.all_reduce(grad_x, group=group)
    return grad_x, grad_u.t() @ x, grad_y.t() @ u


# %% 06.3 no silu on the way back
def silu_gradient(u):
    return u.sigmoid() * (1 + u * (1 - u.sigmoid()))


def mlp_backward(x, a, b, grad_y, group):
    u = F.linear(x, a)
    grad_u = grad_y @ b
    grad_x = grad_u @ a
    dist.all_reduce(grad_x, group=group)
    return grad_x, grad_u.t() @ x, grad_y.t() @ F.silu(u)


# %% 06.3 fake: gathers the weights and does all of the work on every rank
def silu_gradient(u):
    return u.sigmoid() * (1 + u * (1 - u.sigmoid()))


def mlp_backward(x, a, b, grad_y, group):
    own = torch.cat([a, b.t()], dim=1)
    pieces = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(pieces, own, group=group)
    whole_a, whole_b = (part.clone() for part in torch.cat(pieces).split(a.shape[1], dim=1))
    u = F.linear(x, whole_a)
    grad_u = (grad_y @ whole_b.t()) * silu_gradient(u)
    grad_a, grad_b = grad_u.t() @ x, grad_y.t() @ F.silu(u)
    return grad_u @ whole_a, cut(grad_a, group, 0), cut(grad_b, group, 1)


# %% 06.4 a synchronous all-reduce, before the weights' products
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import course_lib.tensor_parallel.linear


class ColumnProducts(course_lib.tensor_parallel.linear.ColumnProducts):
    @staticmethod
    def backward(ctx, *gradients):
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
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import course_lib.tensor_parallel.linear


class ColumnProducts(course_lib.tensor_parallel.linear.ColumnProducts):
    @staticmethod
    def backward(ctx, *gradients):
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
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import course_lib.tensor_parallel.linear


class ColumnProducts(course_lib.tensor_parallel.linear.ColumnProducts):
    @staticmethod
    def backward(ctx, *gradients):
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
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import course_lib.tensor_parallel.linear


class ColumnProducts(course_lib.tensor_parallel.linear.ColumnProducts):
    @staticmethod
    def backward(ctx, *gradients):
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
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import course_lib.tensor_parallel.linear


class ColumnProducts(course_lib.tensor_parallel.linear.ColumnProducts):
    @staticmethod
    def backward(ctx, *gradients):
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
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import course_lib.tensor_parallel.linear


class ColumnProducts(course_lib.tensor_parallel.linear.ColumnProducts):
    @staticmethod
    def backward(ctx, *gradients):
        x, *weights = ctx.saved_tensors
        rows, needed = [gradient.flatten(0, -2) for gradient in gradients], ctx.needs_input_grad[2:]
        grad_x = sum(row @ weight for row, weight in zip(rows, weights, strict=True))
        work = dist.all_reduce(grad_x, group=ctx.group, async_op=True)
        grad_weights = [row.t() @ x.flatten(0, -2) if need else None for row, need in zip(rows, needed, strict=True)]
        work.wait()
        return grad_x.view_as(x), None, *grad_weights


# %% 06.4 never waits
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import course_lib.tensor_parallel.linear


class ColumnProducts(course_lib.tensor_parallel.linear.ColumnProducts):
    @staticmethod
    def backward(ctx, *gradients):
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
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import course_lib.tensor_parallel.linear


class ColumnProducts(course_lib.tensor_parallel.linear.ColumnProducts):
    @staticmethod
    def backward(ctx, *gradients):
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
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import course_lib.tensor_parallel.linear


class ColumnProducts(course_lib.tensor_parallel.linear.ColumnProducts):
    @staticmethod
    def backward(ctx, *gradients):
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
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import course_lib.tensor_parallel.linear


class ColumnProducts(course_lib.tensor_parallel.linear.ColumnProducts):
    @staticmethod
    def backward(ctx, *gradients):
        x, *weights = ctx.saved_tensors
        rows, needed = [gradient.flatten(0, -2) for gradient in gradients], ctx.needs_input_grad[2:]
        grad_x, work = None, None
        if ctx.needs_input_grad[0]:
            grad_x = sum(row @ weight for row, weight in zip(rows, weights, strict=True))
            work = dist.all_reduce(grad_x, async_op=True)
            grad_x = grad_x.view_as(x)
        grad_weights = [row.t() @ x.flatten(0, -2) if need else None for row, need in zip(rows, needed, strict=True)]
        if work is not None:
            work.wait()
        return grad_x, None, *grad_weights


# %% 06.5 every rank adds the bias before the sum
import course_lib.tensor_parallel.linear


class RowParallelLinear(course_lib.tensor_parallel.linear.RowParallelLinear):
    def forward(self, x):
        return self.leave(F.linear(x, self.weight, self.bias), self.group)


# %% 06.5 the bias is forgotten
import course_lib.tensor_parallel.linear


class RowParallelLinear(course_lib.tensor_parallel.linear.RowParallelLinear):
    def forward(self, x):
        return self.leave(F.linear(x, self.weight), self.group)


# %% 06.5 under autocast, a bias of float32 makes the output float32
import course_lib.tensor_parallel.linear


class RowParallelLinear(course_lib.tensor_parallel.linear.RowParallelLinear):
    def forward(self, x):
        out = self.leave(F.linear(x, self.weight), self.group)
        return out if self.bias is None else out + self.bias


# %% 06.5 under autocast, the summands are float32
import course_lib.tensor_parallel.linear


class RowParallelLinear(course_lib.tensor_parallel.linear.RowParallelLinear):
    def forward(self, x):
        out = self.leave(F.linear(x, self.weight).float(), self.group)
        return out if self.bias is None else out + self.bias.to(out.dtype)


# %% 06.5 the bias goes into the sum, an N-th from each rank
import course_lib.tensor_parallel.linear


class RowParallelLinear(course_lib.tensor_parallel.linear.RowParallelLinear):
    def forward(self, x):
        out = F.linear(x, self.weight)
        if self.bias is not None:
            gradient = (1 - 1 / self.group.size()) * (self.bias - self.bias.detach())  # that of a whole bias
            out = out + self.bias / self.group.size() + gradient
        return self.leave(out, self.group)



# %% 06.5 no sum
import course_lib.tensor_parallel.linear


class RowParallelLinear(course_lib.tensor_parallel.linear.RowParallelLinear):
    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


# %% 06.5 an all-reduce too many: f, as if x were whole
import course_lib.tensor_parallel.linear


class RowParallelLinear(course_lib.tensor_parallel.linear.RowParallelLinear):
    def forward(self, x):
        out = self.leave(F.linear(copy_to_group(x, self.group), self.weight), self.group)
        return out if self.bias is None else out + self.bias


# %% 06.5 an all-reduce too many: what is summed is averaged
import course_lib.tensor_parallel.linear


class RowParallelLinear(course_lib.tensor_parallel.linear.RowParallelLinear):
    def forward(self, x):
        out = self.leave(F.linear(x, self.weight), self.group)
        mean = out.detach() / self.group.size()
        dist.all_reduce(mean, group=self.group)
        out = out + (mean - out.detach())
        return out if self.bias is None else out + self.bias


# %% 06.5 fake: gathers weights and inputs, and makes the whole product on every rank
import course_lib.tensor_parallel.linear


class RowParallelLinear(course_lib.tensor_parallel.linear.RowParallelLinear):
    def forward(self, x):
        shard = self.weight.tensor_shard
        own = F.linear(x, self.weight)
        with torch.no_grad():
            whole = F.linear(shard._replace(dim=-1).gather(x), shard.gather(self.weight))
        out = whole + own - own.detach()
        return out if self.bias is None else out + self.bias


# %% 06.5 the sum over all ranks instead of the group
import course_lib.tensor_parallel.linear


class RowParallelLinear(course_lib.tensor_parallel.linear.RowParallelLinear):
    def forward(self, x):
        out = self.leave(F.linear(x, self.weight), dist.group.WORLD)
        return out if self.bias is None else out + self.bias


# %% 06.5 the weight is a view: the whole one stays on each rank
import course_lib.tensor_parallel.linear


class RowParallelLinear(course_lib.tensor_parallel.linear.RowParallelLinear):
    def __init__(self, linear, group=None, chunks=1):
        super().__init__(linear, group, chunks)
        self.weight = nn.Parameter(self.weight.tensor_shard.cut(linear.weight.detach()))

    def forward(self, x):
        out = self.leave(F.linear(x, self.weight), self.group)
        return out if self.bias is None else out + self.bias


# %% 06.5 fake: the whole layer stays on each rank, out of sight
import course_lib.tensor_parallel.linear


class RowParallelLinear(course_lib.tensor_parallel.linear.RowParallelLinear):
    def __init__(self, linear, group=None, chunks=1):
        super().__init__(linear, group, chunks)
        self.whole = [linear]

    def forward(self, x):
        out = self.leave(F.linear(x, self.weight), self.group)
        return out if self.bias is None else out + self.bias


# %% 06.5 calls f* by its name
import course_lib.tensor_parallel.linear


class RowParallelLinear(course_lib.tensor_parallel.linear.RowParallelLinear):
    def forward(self, x):
        out = sum_over_group(F.linear(x, self.weight), self.group)
        return out if self.bias is None else out + self.bias


# %% 06.6 copies are not kept in sync
def project_together(x, layers):
    def shared(layer, parameter):
        return parameter

    x, *weights = as_autocast(x, *(shared(layer, layer.weight) for layer in layers))
    outs = layers[0].products.apply(x, layers[0].group, *weights)
    return tuple(
        out if layer.bias is None else out + shared(layer, layer.bias).to(out.dtype) for layer, out in zip(layers, outs, strict=True)
    )


# %% 06.6 the copies' gradients are summed over the whole group
def project_together(x, layers):
    def shared(layer, parameter):
        return copy_to_group(parameter, layer.group) if layer.replicas else parameter

    x, *weights = as_autocast(x, *(shared(layer, layer.weight) for layer in layers))
    outs = layers[0].products.apply(x, layers[0].group, *weights)
    return tuple(
        out if layer.bias is None else out + shared(layer, layer.bias).to(out.dtype) for layer, out in zip(layers, outs, strict=True)
    )


# %% 06.6 the copies' gradients are summed over the ranks that have the others
def project_together(x, layers):
    def shared(layer, parameter):
        return copy_to_group(parameter, layer.replicas.shards) if layer.replicas else parameter

    x, *weights = as_autocast(x, *(shared(layer, layer.weight) for layer in layers))
    outs = layers[0].products.apply(x, layers[0].group, *weights)
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
    outs = layers[0].products.apply(x, layers[0].group, *weights)
    return tuple(
        out if layer.bias is None else out + shared(layer, layer.bias).to(out.dtype) for layer, out in zip(layers, outs, strict=True)
    )


# %% 06.6 the biases of copies are not kept in sync
def project_together(x, layers):
    weights = [copy_to_group(each.weight, each.replicas.copies) if each.replicas else each.weight for each in layers]
    outs = layers[0].products.apply(x, layers[0].group, *weights)
    return tuple(out if each.bias is None else out + each.bias.to(out.dtype) for each, out in zip(layers, outs, strict=True))


# %% 06.6 the biases are forgotten
def project_together(x, layers):
    def shared(layer, parameter):
        return copy_to_group(parameter, layer.replicas.copies) if layer.replicas else parameter

    x, *weights = as_autocast(x, *(shared(layer, layer.weight) for layer in layers))
    return layers[0].products.apply(x, layers[0].group, *weights)


# %% 06.6 an all-reduce for each layer
def project_together(x, layers):
    def shared(layer, parameter):
        return copy_to_group(parameter, layer.replicas.copies) if layer.replicas else parameter

    x, *weights = as_autocast(x, *(shared(layer, layer.weight) for layer in layers))
    outs = [layers[0].products.apply(x, layers[0].group, weight)[0] for weight in weights]
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
    outs = layers[0].products.apply(x, layers[0].group, *weights)
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
    outs = layers[0].products.apply(x, layers[0].group, *weights)
    return tuple(
        out if layer.bias is None else out + shared(layer, layer.bias).to(out.dtype) for layer, out in zip(layers, outs, strict=True)
    )


# %% 06.6 float32 in autocast
def project_together(x, layers):
    def shared(layer, parameter):
        return copy_to_group(parameter, layer.replicas.copies) if layer.replicas else parameter

    outs = layers[0].products.apply(x, layers[0].group, *(shared(layer, layer.weight) for layer in layers))
    return tuple(
        out if layer.bias is None else out + shared(layer, layer.bias).to(out.dtype) for layer, out in zip(layers, outs, strict=True)
    )


# %% 06.6 calls ColumnProducts by its name
def project_together(x, layers):
    def shared(layer, parameter):
        return copy_to_group(parameter, layer.replicas.copies) if layer.replicas else parameter

    x, *weights = as_autocast(x, *(shared(layer, layer.weight) for layer in layers))
    outs = ColumnProducts.apply(x, layers[0].group, *weights)
    return tuple(
        out if layer.bias is None else out + shared(layer, layer.bias).to(out.dtype) for layer, out in zip(layers, outs, strict=True)
    )


# %% 06.7 rows for tokens of other ranks are not zeroed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import course_lib.tensor_parallel.vocabulary


class VocabParallelEmbedding(course_lib.tensor_parallel.vocabulary.VocabParallelEmbedding):
    def forward(self, tokens):
        rows = tokens - self.shard.start
        elsewhere = (rows < 0) | (rows >= self.shard.size)
        return self.leave(F.embedding(rows.masked_fill(elsewhere, 0), self.weight), self.group)


# %% 06.7 looks up modulo its rows
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import course_lib.tensor_parallel.vocabulary


class VocabParallelEmbedding(course_lib.tensor_parallel.vocabulary.VocabParallelEmbedding):
    def forward(self, tokens):
        return self.leave(F.embedding(tokens % self.shard.size, self.weight), self.group) / self.group.size()


# %% 06.7 tokens beyond its own get its last row
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import course_lib.tensor_parallel.vocabulary


class VocabParallelEmbedding(course_lib.tensor_parallel.vocabulary.VocabParallelEmbedding):
    def forward(self, tokens):
        rows = tokens - self.shard.start
        found = F.embedding(rows.clamp(0, self.shard.size - 1), self.weight)
        return self.leave(found.masked_fill((rows < 0)[..., None], 0.0), self.group)


# %% 06.7 no sum
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import course_lib.tensor_parallel.vocabulary


class VocabParallelEmbedding(course_lib.tensor_parallel.vocabulary.VocabParallelEmbedding):
    def forward(self, tokens):
        rows = tokens - self.shard.start
        elsewhere = (rows < 0) | (rows >= self.shard.size)
        found = F.embedding(rows.masked_fill(elsewhere, 0), self.weight)
        return found.masked_fill(elsewhere[..., None], 0.0)


# %% 06.7 a mean instead of the sum
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import course_lib.tensor_parallel.vocabulary


class VocabParallelEmbedding(course_lib.tensor_parallel.vocabulary.VocabParallelEmbedding):
    def forward(self, tokens):
        rows = tokens - self.shard.start
        elsewhere = (rows < 0) | (rows >= self.shard.size)
        found = F.embedding(rows.masked_fill(elsewhere, 0), self.weight)
        return self.leave(found.masked_fill(elsewhere[..., None], 0.0), self.group) / self.group.size()


# %% 06.7 the sum over all ranks instead of the group
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import course_lib.tensor_parallel.vocabulary


class VocabParallelEmbedding(course_lib.tensor_parallel.vocabulary.VocabParallelEmbedding):
    def forward(self, tokens):
        rows = tokens - self.shard.start
        elsewhere = (rows < 0) | (rows >= self.shard.size)
        found = F.embedding(rows.masked_fill(elsewhere, 0), self.weight)
        return self.leave(found.masked_fill(elsewhere[..., None], 0.0), dist.group.WORLD)


# %% 06.7 an all-reduce too many: a sum in backward as well
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import course_lib.tensor_parallel.vocabulary


class VocabParallelEmbedding(course_lib.tensor_parallel.vocabulary.VocabParallelEmbedding):
    def forward(self, tokens):
        rows = tokens - self.shard.start
        elsewhere = (rows < 0) | (rows >= self.shard.size)
        found = F.embedding(rows.masked_fill(elsewhere, 0), self.weight)
        found = self.leave(found.masked_fill(elsewhere[..., None], 0.0), self.group)
        return copy_to_group(found, self.group)


# %% 06.7 fake: gathers all rows and looks up
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import course_lib.tensor_parallel.vocabulary


class VocabParallelEmbedding(course_lib.tensor_parallel.vocabulary.VocabParallelEmbedding):
    def forward(self, tokens):
        with torch.no_grad():
            whole = self.shard.gather(self.weight)
        rows = tokens - self.shard.start
        elsewhere = (rows < 0) | (rows >= self.shard.size)
        own = F.embedding(rows.masked_fill(elsewhere, 0), self.weight).masked_fill(elsewhere[..., None], 0.0)
        outside = (tokens < 0) | (tokens >= self.shard.whole)
        looked_up = F.embedding(tokens.masked_fill(outside, 0), whole).masked_fill(outside[..., None], 0.0)
        return looked_up + own - own.detach()


# %% 06.7 the rows are a view: the whole table stays on each rank
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import course_lib.tensor_parallel.vocabulary


class VocabParallelEmbedding(course_lib.tensor_parallel.vocabulary.VocabParallelEmbedding):
    def __init__(self, embedding, group=None):
        super().__init__(embedding, group)
        self.weight = nn.Parameter(self.shard.cut(embedding.weight.detach()))

    def forward(self, tokens):
        rows = tokens - self.shard.start
        elsewhere = (rows < 0) | (rows >= self.shard.size)
        found = F.embedding(rows.masked_fill(elsewhere, 0), self.weight)
        return self.leave(found.masked_fill(elsewhere[..., None], 0.0), self.group)


# %% 06.7 fake: the whole table stays on each rank, out of sight, and the all-reduce is for show
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import course_lib.tensor_parallel.vocabulary


class VocabParallelEmbedding(course_lib.tensor_parallel.vocabulary.VocabParallelEmbedding):
    def __init__(self, embedding, group=None):
        super().__init__(embedding, group)
        self.whole = [embedding.weight.detach()]

    def forward(self, tokens):
        rows = tokens - self.shard.start
        elsewhere = (rows < 0) | (rows >= self.shard.size)
        own = F.embedding(rows.masked_fill(elsewhere, 0), self.weight).masked_fill(elsewhere[..., None], 0.0)
        outside = (tokens < 0) | (tokens >= self.shard.whole)
        whole = F.embedding(tokens.masked_fill(outside, 0), self.whole[0]).masked_fill(outside[..., None], 0.0)
        dist.all_reduce(torch.empty_like(whole), group=self.group)
        return whole + own - own.detach()


# %% 06.7 calls f* by its name
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import course_lib.tensor_parallel.vocabulary


class VocabParallelEmbedding(course_lib.tensor_parallel.vocabulary.VocabParallelEmbedding):
    def forward(self, tokens):
        rows = tokens - self.shard.start
        elsewhere = (rows < 0) | (rows >= self.shard.size)
        found = F.embedding(rows.masked_fill(elsewhere, 0), self.weight)
        return sum_over_group(found.masked_fill(elsewhere[..., None], 0.0), self.group)


# %% 06.8 fake: gathered logits
import course_lib.tensor_parallel.vocabulary

local_rows = course_lib.tensor_parallel.vocabulary.local_rows


class VocabParallelCrossEntropy(course_lib.tensor_parallel.vocabulary.VocabParallelCrossEntropy):
    @staticmethod
    def forward(ctx, logits, targets, shard):
        ctx.shard, ctx.dtype = shard, logits.dtype
        whole = shard.gather(logits.float())
        ctx.save_for_backward(whole.softmax(1), targets)
        return F.cross_entropy(whole, targets, reduction="none")

    @staticmethod
    def backward(ctx, gradient):
        softmax, targets = ctx.saved_tensors
        onehot = F.one_hot(targets.clamp(min=0), ctx.shard.whole)
        grad = ctx.shard.cut((softmax - onehot) * gradient[:, None])
        return grad.to(ctx.dtype), None, None


# %% 06.8 fake: gathered logits, of which only the own ones are kept
import course_lib.tensor_parallel.vocabulary

local_rows = course_lib.tensor_parallel.vocabulary.local_rows


class VocabParallelCrossEntropy(course_lib.tensor_parallel.vocabulary.VocabParallelCrossEntropy):
    @staticmethod
    def forward(ctx, logits, targets, shard):
        ctx.shard, ctx.dtype = shard, logits.dtype
        whole = shard.gather(logits.float())
        losses = F.cross_entropy(whole, targets, reduction="none")
        ctx.save_for_backward(shard.cut(whole.softmax(1)).clone(), torch.ones_like(losses), targets)
        return losses

    @staticmethod
    def backward(ctx, gradient):
        exps, total, targets = ctx.saved_tensors
        rows, elsewhere = local_rows(targets, ctx.shard)
        grad = exps.mul_((gradient / total)[:, None])
        grad.scatter_add_(1, rows[:, None], -gradient.masked_fill(elsewhere, 0.0)[:, None])
        return grad.to(ctx.dtype), None, None


# %% 06.8 each rank subtracts its own maximum
import course_lib.tensor_parallel.vocabulary

local_rows = course_lib.tensor_parallel.vocabulary.local_rows


class VocabParallelCrossEntropy(course_lib.tensor_parallel.vocabulary.VocabParallelCrossEntropy):
    @staticmethod
    def forward(ctx, logits, targets, shard):
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
    def backward(ctx, gradient):
        exps, total, targets = ctx.saved_tensors
        rows, elsewhere = local_rows(targets, ctx.shard)
        grad = exps.mul_((gradient / total)[:, None])
        grad.scatter_add_(1, rows[:, None], -gradient.masked_fill(elsewhere, 0.0)[:, None])
        return grad.to(ctx.dtype), None, None


# %% 06.8 no maximum: exp overflows
import course_lib.tensor_parallel.vocabulary

local_rows = course_lib.tensor_parallel.vocabulary.local_rows


class VocabParallelCrossEntropy(course_lib.tensor_parallel.vocabulary.VocabParallelCrossEntropy):
    @staticmethod
    def forward(ctx, logits, targets, shard):
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
    def backward(ctx, gradient):
        exps, total, targets = ctx.saved_tensors
        rows, elsewhere = local_rows(targets, ctx.shard)
        grad = exps.mul_((gradient / total)[:, None])
        grad.scatter_add_(1, rows[:, None], -gradient.masked_fill(elsewhere, 0.0)[:, None])
        return grad.to(ctx.dtype), None, None


# %% 06.8 an all-reduce too many: sum and target's logit apart
import course_lib.tensor_parallel.vocabulary

local_rows = course_lib.tensor_parallel.vocabulary.local_rows


class VocabParallelCrossEntropy(course_lib.tensor_parallel.vocabulary.VocabParallelCrossEntropy):
    @staticmethod
    def forward(ctx, logits, targets, shard):
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
    def backward(ctx, gradient):
        exps, total, targets = ctx.saved_tensors
        rows, elsewhere = local_rows(targets, ctx.shard)
        grad = exps.mul_((gradient / total)[:, None])
        grad.scatter_add_(1, rows[:, None], -gradient.masked_fill(elsewhere, 0.0)[:, None])
        return grad.to(ctx.dtype), None, None


# %% 06.8 an all-reduce too many: the total is summed again in backward
import course_lib.tensor_parallel.vocabulary

local_rows = course_lib.tensor_parallel.vocabulary.local_rows


class VocabParallelCrossEntropy(course_lib.tensor_parallel.vocabulary.VocabParallelCrossEntropy):
    @staticmethod
    def forward(ctx, logits, targets, shard):
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
    def backward(ctx, gradient):
        exps, total, targets = ctx.saved_tensors
        total = exps.sum(1)
        dist.all_reduce(total, group=ctx.shard.group)
        rows, elsewhere = local_rows(targets, ctx.shard)
        grad = exps.mul_((gradient / total)[:, None])
        grad.scatter_add_(1, rows[:, None], -gradient.masked_fill(elsewhere, 0.0)[:, None])
        return grad.to(ctx.dtype), None, None


# %% 06.8 the target's logit of every rank counts: those elsewhere are not zeroed
import course_lib.tensor_parallel.vocabulary

local_rows = course_lib.tensor_parallel.vocabulary.local_rows


class VocabParallelCrossEntropy(course_lib.tensor_parallel.vocabulary.VocabParallelCrossEntropy):
    @staticmethod
    def forward(ctx, logits, targets, shard):
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
    def backward(ctx, gradient):
        exps, total, targets = ctx.saved_tensors
        rows, elsewhere = local_rows(targets, ctx.shard)
        grad = exps.mul_((gradient / total)[:, None])
        grad.scatter_add_(1, rows[:, None], -gradient.masked_fill(elsewhere, 0.0)[:, None])
        return grad.to(ctx.dtype), None, None


# %% 06.8 the logits are changed in place
import course_lib.tensor_parallel.vocabulary

local_rows = course_lib.tensor_parallel.vocabulary.local_rows


class VocabParallelCrossEntropy(course_lib.tensor_parallel.vocabulary.VocabParallelCrossEntropy):
    @staticmethod
    def forward(ctx, logits, targets, shard):
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
    def backward(ctx, gradient):
        exps, total, targets = ctx.saved_tensors
        rows, elsewhere = local_rows(targets, ctx.shard)
        grad = exps.mul_((gradient / total)[:, None])
        grad.scatter_add_(1, rows[:, None], -gradient.masked_fill(elsewhere, 0.0)[:, None])
        return grad.to(ctx.dtype), None, None


# %% 06.8 keeps two: exp(z - m) and the mask of the targets in float32
import course_lib.tensor_parallel.vocabulary

local_rows = course_lib.tensor_parallel.vocabulary.local_rows


class VocabParallelCrossEntropy(course_lib.tensor_parallel.vocabulary.VocabParallelCrossEntropy):
    @staticmethod
    def forward(ctx, logits, targets, shard):
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
    def backward(ctx, gradient):
        exps, total, onehot = ctx.saved_tensors
        return ((exps / total[:, None] - onehot) * gradient[:, None]).to(ctx.dtype), None, None


# %% 06.8 makes a second float32 tensor of the logits' size on the way
import course_lib.tensor_parallel.vocabulary

local_rows = course_lib.tensor_parallel.vocabulary.local_rows


class VocabParallelCrossEntropy(course_lib.tensor_parallel.vocabulary.VocabParallelCrossEntropy):
    @staticmethod
    def forward(ctx, logits, targets, shard):
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
    def backward(ctx, gradient):
        exps, total, targets = ctx.saved_tensors
        rows, elsewhere = local_rows(targets, ctx.shard)
        grad = exps.mul_((gradient / total)[:, None])
        grad.scatter_add_(1, rows[:, None], -gradient.masked_fill(elsewhere, 0.0)[:, None])
        return grad.to(ctx.dtype), None, None


# %% 06.8 backward makes a second float32 tensor
import course_lib.tensor_parallel.vocabulary

local_rows = course_lib.tensor_parallel.vocabulary.local_rows


class VocabParallelCrossEntropy(course_lib.tensor_parallel.vocabulary.VocabParallelCrossEntropy):
    @staticmethod
    def forward(ctx, logits, targets, shard):
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
    def backward(ctx, gradient):
        exps, total, targets = ctx.saved_tensors
        rows, elsewhere = local_rows(targets, ctx.shard)
        grad = exps * (gradient / total)[:, None]
        grad.scatter_add_(1, rows[:, None], -gradient.masked_fill(elsewhere, 0.0)[:, None])
        return grad.to(ctx.dtype), None, None


# %% 06.8 backward takes 1 off, not the gradient
import course_lib.tensor_parallel.vocabulary

local_rows = course_lib.tensor_parallel.vocabulary.local_rows


class VocabParallelCrossEntropy(course_lib.tensor_parallel.vocabulary.VocabParallelCrossEntropy):
    @staticmethod
    def forward(ctx, logits, targets, shard):
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
    def backward(ctx, gradient):
        exps, total, targets = ctx.saved_tensors
        rows, elsewhere = local_rows(targets, ctx.shard)
        grad = exps.mul_((gradient / total)[:, None])
        grad.scatter_add_(1, rows[:, None], -torch.ones_like(gradient).masked_fill(elsewhere, 0.0)[:, None])
        return grad.to(ctx.dtype), None, None


# %% 06.8 ignored targets give a gradient that is no number
import course_lib.tensor_parallel.vocabulary

local_rows = course_lib.tensor_parallel.vocabulary.local_rows


class VocabParallelCrossEntropy(course_lib.tensor_parallel.vocabulary.VocabParallelCrossEntropy):
    @staticmethod
    def forward(ctx, logits, targets, shard):
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
    def backward(ctx, gradient):
        exps, total, targets = ctx.saved_tensors
        rows, elsewhere = local_rows(targets, ctx.shard)
        grad = exps.mul_((gradient / total)[:, None])
        grad.scatter_add_(1, rows[:, None], -gradient.masked_fill(elsewhere, 0.0)[:, None])
        return grad.to(ctx.dtype), None, None


# %% 06.9 gathered logits: the head gathers its output
import course_lib.tensor_parallel.model


def apply_tensor_parallel(model, group=None, chunks=1, gather_logits=False):
    course_lib.tensor_parallel.model.apply_tensor_parallel(model, group, chunks, True)
    return model


# %% 06.9 fake: gathered logits, and then each rank cuts its own out of them
import course_lib.tensor_parallel.model


def apply_tensor_parallel(model, group=None, chunks=1, gather_logits=False):
    course_lib.tensor_parallel.model.apply_tensor_parallel(model, group, chunks, True)
    if not gather_logits:
        model.head.register_forward_hook(lambda layer, _, out: layer.shard._replace(dim=-1).cut(out))
    return model


# %% 06.9 fake: the MLPs stay whole on each rank
import course_lib.tensor_parallel.model


def apply_tensor_parallel(model, group=None, chunks=1, gather_logits=False):
    mlps = [copy.deepcopy(block.mlp) for block in model.blocks]
    course_lib.tensor_parallel.model.apply_tensor_parallel(model, group, chunks, gather_logits)
    for block, mlp in zip(model.blocks, mlps, strict=True):
        block.mlp = mlp
    return model


# %% 06.9 fake: a full copy of the weights stays on each rank, out of sight
import course_lib.tensor_parallel.model


def apply_tensor_parallel(model, group=None, chunks=1, gather_logits=False):
    model.whole = [copy.deepcopy(model)]
    course_lib.tensor_parallel.model.apply_tensor_parallel(model, group, chunks, gather_logits)
    return model


# %% 06.9 q, k and v, gate and up are projected one by one
import course_lib.tensor_parallel.model


def apply_tensor_parallel(model, group=None, chunks=1, gather_logits=False):
    course_lib.tensor_parallel.model.apply_tensor_parallel(model, group, chunks, gather_logits)
    for block in model.blocks:
        del block.attention.project, block.mlp.project
    return model


# %% 06.9 gate and up mixed up
import course_lib.tensor_parallel.model


def apply_tensor_parallel(model, group=None, chunks=1, gather_logits=False):
    course_lib.tensor_parallel.model.apply_tensor_parallel(model, group, chunks, gather_logits)
    for block in model.blocks:
        layers = [block.mlp.up_proj, block.mlp.gate_proj]
        block.mlp.project = functools.partial(project_together, layers=layers)
    return model


# %% 06.9 tied head and embedding come apart
import course_lib.tensor_parallel.model


def apply_tensor_parallel(model, group=None, chunks=1, gather_logits=False):
    course_lib.tensor_parallel.model.apply_tensor_parallel(model, group, chunks, gather_logits)
    if model.head is not None:
        weight = model.head.weight
        model.head.weight = nn.Parameter(weight.detach().clone())
        model.head.weight.__dict__.update(weight.__dict__)
    return model


# %% 06.9 copies of K/V heads are not kept in sync
import course_lib.tensor_parallel.model


def apply_tensor_parallel(model, group=None, chunks=1, gather_logits=False):
    course_lib.tensor_parallel.model.apply_tensor_parallel(model, group, chunks, gather_logits)
    for block in model.blocks:
        block.attention.k_proj.replicas = block.attention.v_proj.replicas = None
    return model


# %% 06.9 an all-reduce too many: what is whole is averaged
import course_lib.tensor_parallel.model


def apply_tensor_parallel(model, group=None, chunks=1, gather_logits=False):
    course_lib.tensor_parallel.model.apply_tensor_parallel(model, group, chunks, gather_logits)

    def average(layer, _, out):
        mean = sum_over_group(out.detach() / layer.group.size(), layer.group)
        return out + (mean - out.detach())

    for block in model.blocks:
        block.mlp.down_proj.register_forward_hook(average)
    return model


# %% 06.9 chunks are not passed on
import course_lib.tensor_parallel.model


def apply_tensor_parallel(model, group=None, chunks=1, gather_logits=False):
    course_lib.tensor_parallel.model.apply_tensor_parallel(model, group, 1, gather_logits)
    return model


# %% 06.9 gather_logits is not passed on
import course_lib.tensor_parallel.model


def apply_tensor_parallel(model, group=None, chunks=1, gather_logits=False):
    course_lib.tensor_parallel.model.apply_tensor_parallel(model, group, chunks)
    return model


# %% 06.9 a stage without a head is not foreseen
import course_lib.tensor_parallel.model


def apply_tensor_parallel(model, group=None, chunks=1, gather_logits=False):
    course_lib.tensor_parallel.model.apply_tensor_parallel(model, group, chunks, gather_logits)
    model.head.gather_output = gather_logits
    return model


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
def diagnose(first_loss, expected, differing):
    if first_loss != expected:
        return "row layer"
    if any("norm" in name for name in differing):
        return "f"
    return "copies" if differing else "right"


# %% 06.11 f and copies mixed up
def diagnose(first_loss, expected, differing):
    if abs(first_loss / expected - 1) > 1e-4:
        return "row layer"
    if any("norm" in name for name in differing):
        return "copies"
    return "f" if differing else "right"


# %% 06.11 fake: knows the block of the lab
def diagnose(first_loss, expected, differing):
    if abs(first_loss / expected - 1) > 1e-4:
        return "row layer"
    if any(name.startswith("blocks.1.") and "norm" in name for name in differing):
        return "f"
    return "copies" if differing else "right"


# %% 06.11 fake: counts the names
def diagnose(first_loss, expected, differing):
    if abs(first_loss / expected - 1) > 1e-4:
        return "row layer"
    return ("right", "f")[len(differing)] if len(differing) < 2 else "copies"



# %% 06.11 a loss that is too large only
def diagnose(first_loss, expected, differing):
    if first_loss > expected * 1.05:
        return "row layer"
    if any("norm" in name for name in differing):
        return "f"
    return "copies" if differing else "right"


# %% 06.12 fake: all products first, then all sums
import course_lib.tensor_parallel.linear


class RowProduct(course_lib.tensor_parallel.linear.RowProduct):
    @staticmethod
    def forward(ctx, x, group, weight, chunks):
        ctx.save_for_backward(x, weight)
        rows, works = x.flatten(0, -2), []
        out = rows.new_empty(len(rows), len(weight))
        for part, own in zip(rows.chunk(chunks), out.chunk(chunks), strict=True):
            torch.mm(part, weight.t(), out=own)
        works = [dist.all_reduce(own, group=group, async_op=True) for own in out.chunk(chunks)]
        for work in works:
            work.wait()
        return out.view(*x.shape[:-1], -1)


# %% 06.12 waits for each sum at once
import course_lib.tensor_parallel.linear


class RowProduct(course_lib.tensor_parallel.linear.RowProduct):
    @staticmethod
    def forward(ctx, x, group, weight, chunks):
        ctx.save_for_backward(x, weight)
        rows, works = x.flatten(0, -2), []
        out = rows.new_empty(len(rows), len(weight))
        for part, own in zip(rows.chunk(chunks), out.chunk(chunks), strict=True):
            torch.mm(part, weight.t(), out=own)
            dist.all_reduce(own, group=group)
        return out.view(*x.shape[:-1], -1)


# %% 06.12 waits for the sum before, once the next is multiplied
import course_lib.tensor_parallel.linear


class RowProduct(course_lib.tensor_parallel.linear.RowProduct):
    @staticmethod
    def forward(ctx, x, group, weight, chunks):
        ctx.save_for_backward(x, weight)
        rows, works = x.flatten(0, -2), []
        out = rows.new_empty(len(rows), len(weight))
        for part, own in zip(rows.chunk(chunks), out.chunk(chunks), strict=True):
            torch.mm(part, weight.t(), out=own)
            if works:
                works.pop().wait()
            works.append(dist.all_reduce(own, group=group, async_op=True))
        works.pop().wait()
        return out.view(*x.shape[:-1], -1)


# %% 06.12 waits for the last sum only
import course_lib.tensor_parallel.linear


class RowProduct(course_lib.tensor_parallel.linear.RowProduct):
    @staticmethod
    def forward(ctx, x, group, weight, chunks):
        ctx.save_for_backward(x, weight)
        rows, works = x.flatten(0, -2), []
        out = rows.new_empty(len(rows), len(weight))
        for part, own in zip(rows.chunk(chunks), out.chunk(chunks), strict=True):
            torch.mm(part, weight.t(), out=own)
            works.append(dist.all_reduce(own, group=group, async_op=True))
        works[-1].wait()
        return out.view(*x.shape[:-1], -1)


# %% 06.12 fake: one product, one sum
import course_lib.tensor_parallel.linear


class RowProduct(course_lib.tensor_parallel.linear.RowProduct):
    @staticmethod
    def forward(ctx, x, group, weight, chunks):
        ctx.save_for_backward(x, weight)
        rows, works = x.flatten(0, -2), []
        out = rows.new_empty(len(rows), len(weight))
        torch.mm(rows, weight.t(), out=out)
        dist.all_reduce(out, group=group)
        return out.view(*x.shape[:-1], -1)


# %% 06.12 a cat of chunks: a second output
import course_lib.tensor_parallel.linear


class RowProduct(course_lib.tensor_parallel.linear.RowProduct):
    @staticmethod
    def forward(ctx, x, group, weight, chunks):
        ctx.save_for_backward(x, weight)
        rows, works = x.flatten(0, -2), []
        parts = []
        for part in rows.chunk(chunks):
            parts.append(part @ weight.t())
            works.append(dist.all_reduce(parts[-1], group=group, async_op=True))
        for work in works:
            work.wait()
        out = torch.cat(parts)
        return out.view(*x.shape[:-1], -1)


# %% 06.12 sums all of the output for each chunk
import course_lib.tensor_parallel.linear


class RowProduct(course_lib.tensor_parallel.linear.RowProduct):
    @staticmethod
    def forward(ctx, x, group, weight, chunks):
        ctx.save_for_backward(x, weight)
        rows, works = x.flatten(0, -2), []
        out = rows.new_empty(len(rows), len(weight))
        out.zero_()
        for part, own in zip(rows.chunk(chunks), out.chunk(chunks), strict=True):
            torch.mm(part, weight.t(), out=own)
            whole = torch.zeros_like(out)
            whole[own.storage_offset() // len(weight) :][: len(own)] = own
            works.append(dist.all_reduce(whole, group=group, async_op=True))
            works[-1].wait()
            own.copy_(whole[own.storage_offset() // len(weight) :][: len(own)])
        return out.view(*x.shape[:-1], -1)


# %% 06.12 the whole product for each chunk, then a cut
import course_lib.tensor_parallel.linear


class RowProduct(course_lib.tensor_parallel.linear.RowProduct):
    @staticmethod
    def forward(ctx, x, group, weight, chunks):
        ctx.save_for_backward(x, weight)
        rows, works = x.flatten(0, -2), []
        out = rows.new_empty(len(rows), len(weight))
        for number, own in enumerate(out.chunk(chunks)):
            own.copy_((rows @ weight.t()).chunk(chunks)[number])
            works.append(dist.all_reduce(own, group=group, async_op=True))
        for work in works:
            work.wait()
        return out.view(*x.shape[:-1], -1)


# %% 06.12 the sums over all ranks instead of the group
import course_lib.tensor_parallel.linear


class RowProduct(course_lib.tensor_parallel.linear.RowProduct):
    @staticmethod
    def forward(ctx, x, group, weight, chunks):
        ctx.save_for_backward(x, weight)
        rows, works = x.flatten(0, -2), []
        out = rows.new_empty(len(rows), len(weight))
        for part, own in zip(rows.chunk(chunks), out.chunk(chunks), strict=True):
            torch.mm(part, weight.t(), out=own)
            works.append(dist.all_reduce(own, async_op=True))
        for work in works:
            work.wait()
        return out.view(*x.shape[:-1], -1)


# %% 06.13 a seed made of the rank only: the same numbers in each region
import contextlib
import zlib

from course_lib.tensor_parallel.regions import generators


@contextlib.contextmanager
def own_randomness(group=None):
    group = group or dist.group.WORLD
    states = []
    for generator in generators():
        torch.empty((), device=generator.device).uniform_(generator=generator)
        states.append((generator, generator.get_state()))
        generator.manual_seed(1234 + group.rank())
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


# %% 06.13 a seed made of the first seed and the rank: the same numbers in each region
import contextlib
import zlib

from course_lib.tensor_parallel.regions import generators


@contextlib.contextmanager
def own_randomness(group=None):
    group = group or dist.group.WORLD
    states = []
    for generator in generators():
        seed = generator.initial_seed() + group.rank()
        torch.empty((), device=generator.device).uniform_(generator=generator)
        states.append((generator, generator.get_state()))
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


# %% 06.13 takes no number: a region at once after another draws the same numbers
import contextlib
import zlib

from course_lib.tensor_parallel.regions import generators


@contextlib.contextmanager
def own_randomness(group=None):
    group = group or dist.group.WORLD
    states = []
    for generator in generators():
        seed = zlib.crc32(generator.get_state().numpy().tobytes(), group.rank())
        states.append((generator, generator.get_state()))
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


# %% 06.13 the same seed on all ranks
import contextlib
import zlib

from course_lib.tensor_parallel.regions import generators


@contextlib.contextmanager
def own_randomness(group=None):
    group = group or dist.group.WORLD
    states = []
    for generator in generators():
        seed = zlib.crc32(generator.get_state().numpy().tobytes())
        torch.empty((), device=generator.device).uniform_(generator=generator)
        states.append((generator, generator.get_state()))
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


# %% 06.13 does not come back
import contextlib
import zlib

from course_lib.tensor_parallel.regions import generators


@contextlib.contextmanager
def own_randomness(group=None):
    group = group or dist.group.WORLD
    for generator in generators():
        generator.manual_seed(zlib.crc32(generator.get_state().numpy().tobytes(), group.rank()))
    yield


# %% 06.13 does not come back after an error
import contextlib
import zlib

from course_lib.tensor_parallel.regions import generators


@contextlib.contextmanager
def own_randomness(group=None):
    group = group or dist.group.WORLD
    states = []
    for generator in generators():
        seed = zlib.crc32(generator.get_state().numpy().tobytes(), group.rank())
        torch.empty((), device=generator.device).uniform_(generator=generator)
        states.append((generator, generator.get_state()))
        generator.manual_seed(seed)
    yield
    for generator, state in states:
        generator.set_state(state)


# %% 06.13 takes as many numbers as its rank, so that the ranks come back to different places
import contextlib
import zlib

from course_lib.tensor_parallel.regions import generators


@contextlib.contextmanager
def own_randomness(group=None):
    group = group or dist.group.WORLD
    states = []
    for generator in generators():
        seed = zlib.crc32(generator.get_state().numpy().tobytes(), group.rank())
        torch.empty(1 + group.rank(), device=generator.device).uniform_(generator=generator)
        states.append((generator, generator.get_state()))
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


# %% 06.13 draws its seed from the system
import contextlib
import zlib

from course_lib.tensor_parallel.regions import generators


@contextlib.contextmanager
def own_randomness(group=None):
    group = group or dist.group.WORLD
    states = []
    for generator in generators():
        torch.empty((), device=generator.device).uniform_(generator=generator)
        states.append((generator, generator.get_state()))
        generator.seed()
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


# %% 06.13 counts regions in the process: a checkpoint that runs one again draws other numbers
import contextlib
import zlib

from course_lib.tensor_parallel.regions import generators

regions_so_far = 0


@contextlib.contextmanager
def own_randomness(group=None):
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
import contextlib
import zlib

from course_lib.tensor_parallel.regions import generators


@contextlib.contextmanager
def own_randomness(group=None):
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


# %% 06.14 parts are views, which keep the whole alive
import torch
import torch.distributed as dist

import course_lib.tensor_parallel.partitioned_checkpoints
from course_lib.recompute.modes import Recomputed
from course_lib.tensor_parallel.shards import TensorShard


class PartitionedCheckpoint(course_lib.tensor_parallel.partitioned_checkpoints.PartitionedCheckpoint):
    def pack(self, tensor):
        if not tensor.requires_grad:
            return tensor
        shard = TensorShard.of(tensor.numel(), self.group)
        return shard, shard.cut(tensor.detach().flatten()), tensor.shape


# %% 06.14 gathers when it packs
import torch
import torch.distributed as dist

import course_lib.tensor_parallel.partitioned_checkpoints
from course_lib.recompute.modes import Recomputed
from course_lib.tensor_parallel.shards import TensorShard


class PartitionedCheckpoint(course_lib.tensor_parallel.partitioned_checkpoints.PartitionedCheckpoint):
    def pack(self, tensor):
        if not tensor.requires_grad:
            return tensor
        shard = TensorShard.of(tensor.numel(), self.group)
        return shard.gather(shard.cut(tensor.detach().flatten()).clone()).view(tensor.shape)


# %% 06.14 fake: keeps the whole, and gathers for show
import torch
import torch.distributed as dist

import course_lib.tensor_parallel.partitioned_checkpoints
from course_lib.recompute.modes import Recomputed
from course_lib.tensor_parallel.shards import TensorShard


class PartitionedCheckpoint(course_lib.tensor_parallel.partitioned_checkpoints.PartitionedCheckpoint):
    def pack(self, tensor):
        if not tensor.requires_grad:
            return tensor
        shard = TensorShard.of(tensor.numel(), self.group)
        self.whole = tensor.detach().clone()
        return shard, shard.cut(tensor.detach().flatten()).clone(), tensor.shape

    def unpack(self, kept):
        if torch.is_tensor(kept):
            return kept
        shard, part, shape = kept
        shard.gather(part)
        return self.whole


# %% 06.14 unpacks by an all-reduce of parts that are padded with zeros
import torch
import torch.distributed as dist

import course_lib.tensor_parallel.partitioned_checkpoints
from course_lib.recompute.modes import Recomputed
from course_lib.tensor_parallel.shards import TensorShard


class PartitionedCheckpoint(course_lib.tensor_parallel.partitioned_checkpoints.PartitionedCheckpoint):
    def unpack(self, kept):
        if torch.is_tensor(kept):
            return kept
        shard, part, shape = kept
        whole = part.new_zeros(shard.whole)
        whole[shard.start : shard.start + shard.size] = part
        dist.all_reduce(whole, group=self.group)
        return whole.view(shape)


# %% 06.14 what all layers share is cut up too
import torch
import torch.distributed as dist

import course_lib.tensor_parallel.partitioned_checkpoints
from course_lib.recompute.modes import Recomputed
from course_lib.tensor_parallel.shards import TensorShard


class PartitionedCheckpoint(course_lib.tensor_parallel.partitioned_checkpoints.PartitionedCheckpoint):
    def pack(self, tensor):
        shard = TensorShard.of(tensor.numel(), self.group)
        return shard, shard.cut(tensor.detach().flatten()).clone(), tensor.shape


# %% 06.14 fake: keeps all of it in 16 bits
import torch
import torch.distributed as dist

import course_lib.tensor_parallel.partitioned_checkpoints
from course_lib.recompute.modes import Recomputed
from course_lib.tensor_parallel.shards import TensorShard


class PartitionedCheckpoint(course_lib.tensor_parallel.partitioned_checkpoints.PartitionedCheckpoint):
    def pack(self, tensor):
        if not tensor.requires_grad:
            return tensor
        return tensor.detach().bfloat16(), tensor.shape

    def unpack(self, kept):
        if torch.is_tensor(kept):
            return kept
        return kept[0].float()


# %% 06.14 parts over all ranks instead of the group
import torch
import torch.distributed as dist

import course_lib.tensor_parallel.partitioned_checkpoints
from course_lib.recompute.modes import Recomputed
from course_lib.tensor_parallel.shards import TensorShard


class PartitionedCheckpoint(course_lib.tensor_parallel.partitioned_checkpoints.PartitionedCheckpoint):
    def pack(self, tensor):
        if not tensor.requires_grad:
            return tensor
        shard = TensorShard.of(tensor.numel(), dist.group.WORLD)
        return shard, shard.cut(tensor.detach().flatten()).clone(), tensor.shape


# %% 06.14 sizes must divide
import torch
import torch.distributed as dist

import course_lib.tensor_parallel.partitioned_checkpoints
from course_lib.recompute.modes import Recomputed
from course_lib.tensor_parallel.shards import TensorShard


class PartitionedCheckpoint(course_lib.tensor_parallel.partitioned_checkpoints.PartitionedCheckpoint):
    def pack(self, tensor):
        if not tensor.requires_grad:
            return tensor
        part = tensor.detach().flatten().view(self.group.size(), -1)[self.group.rank()].clone()
        return part, tensor.shape

    def unpack(self, kept):
        if torch.is_tensor(kept):
            return kept
        part, shape = kept
        pieces = [torch.empty_like(part) for _ in range(self.group.size())]
        dist.all_gather(pieces, part, group=self.group)
        return torch.cat(pieces).view(shape)


# %% 06.15 t in the wrong place: (t-1)/t
def all_reduce_ratio(hidden, tp, bandwidth, peak, layer_params=None, element_bytes=2):
    weights = 12 * hidden**2 if layer_params is None else layer_params
    return 2 * element_bytes * hidden * (tp - 1) / tp / weights * peak / bandwidth


# %% 06.15 t in the wrong place: t(t-1)
def all_reduce_ratio(hidden, tp, bandwidth, peak, layer_params=None, element_bytes=2):
    weights = 12 * hidden**2 if layer_params is None else layer_params
    return 2 * element_bytes * hidden * (tp - 1) * tp / weights * peak / bandwidth


# %% 06.15 one all-reduce
def all_reduce_ratio(hidden, tp, bandwidth, peak, layer_params=None, element_bytes=2):
    weights = 12 * hidden**2 if layer_params is None else layer_params
    return element_bytes * hidden * (tp - 1) / weights * peak / bandwidth


# %% 06.15 elements instead of bytes
def all_reduce_ratio(hidden, tp, bandwidth, peak, layer_params=None, element_bytes=2):
    weights = 12 * hidden**2 if layer_params is None else layer_params
    return 2 * hidden * (tp - 1) / weights * peak / bandwidth


# %% 06.15 two bytes, whatever they are
def all_reduce_ratio(hidden, tp, bandwidth, peak, layer_params=None, element_bytes=2):
    weights = 12 * hidden**2 if layer_params is None else layer_params
    return 4 * hidden * (tp - 1) / weights * peak / bandwidth


# %% 06.15 one operation a weight and token
def all_reduce_ratio(hidden, tp, bandwidth, peak, layer_params=None, element_bytes=2):
    weights = 12 * hidden**2 if layer_params is None else layer_params
    return 4 * element_bytes * hidden * (tp - 1) / weights * peak / bandwidth


# %% 06.15 bandwidth over peak
def all_reduce_ratio(hidden, tp, bandwidth, peak, layer_params=None, element_bytes=2):
    weights = 12 * hidden**2 if layer_params is None else layer_params
    return 2 * element_bytes * hidden * (tp - 1) / weights * bandwidth / peak


# %% 06.15 12 h² weights, whatever the layer has
def all_reduce_ratio(hidden, tp, bandwidth, peak, layer_params=None, element_bytes=2):
    weights = 12 * hidden**2
    return 2 * element_bytes * hidden * (tp - 1) / weights * peak / bandwidth


# %% 06.15 as in the playbook's appendix
def all_reduce_ratio(hidden, tp, bandwidth, peak, layer_params=None, element_bytes=2):
    return (tp - 1) / (2 * hidden) * peak / bandwidth


# %% 06.1 float32, whatever it is given
def split_product(x, weight, how, group):
    if how == "columns":
        part = F.linear(x, cut(weight, group, 0))
        pieces = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(pieces, part, group=group)
        whole = torch.empty(len(x), len(weight))
        for piece, own in zip(pieces, whole.chunk(group.size(), -1), strict=True):
            own.copy_(piece)
        return whole
    part = F.linear(cut(x, group, -1), cut(weight, group, 1))
    dist.all_reduce(part, group=group)
    return part


# %% 06.1 BF16 is summed in float32
def split_product(x, weight, how, group):
    if how == "columns":
        part = F.linear(x, cut(weight, group, 0))
        pieces = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(pieces, part, group=group)
        return torch.cat(pieces, dim=-1)
    part = F.linear(cut(x, group, -1), cut(weight, group, 1)).float()
    dist.all_reduce(part, group=group)
    return part.to(x.dtype)


# %% 06.2 f* sums a copy with the strides of x
import torch
import torch.distributed as dist

import course_lib.tensor_parallel.regions


class CopyToGroup(course_lib.tensor_parallel.regions.CopyToGroup):
    pass


class SumOverGroup(course_lib.tensor_parallel.regions.SumOverGroup):
    @staticmethod
    def forward(ctx, x, group):
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total


# %% 06.2 f* returns float32
import torch
import torch.distributed as dist

import course_lib.tensor_parallel.regions


class CopyToGroup(course_lib.tensor_parallel.regions.CopyToGroup):
    pass


class SumOverGroup(course_lib.tensor_parallel.regions.SumOverGroup):
    @staticmethod
    def forward(ctx, x, group):
        total = torch.zeros(x.shape)
        total += x
        dist.all_reduce(total, group=group)
        return total


# %% 06.2 f sums gradients of BF16 in float32
import torch
import torch.distributed as dist

import course_lib.tensor_parallel.regions


class CopyToGroup(course_lib.tensor_parallel.regions.CopyToGroup):
    @staticmethod
    def backward(ctx, gradient):
        total = gradient.double().float().contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class SumOverGroup(course_lib.tensor_parallel.regions.SumOverGroup):
    pass


# %% 06.4 the gradient of x is summed in float32
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import course_lib.tensor_parallel.linear


class ColumnProducts(course_lib.tensor_parallel.linear.ColumnProducts):
    @staticmethod
    def backward(ctx, *gradients):
        x, *weights = ctx.saved_tensors
        rows, needed = [gradient.flatten(0, -2) for gradient in gradients], ctx.needs_input_grad[2:]
        grad_x, work = None, None
        if ctx.needs_input_grad[0]:
            grad_x = torch.zeros(len(rows[0]), x.shape[-1])
            for row, weight in zip(rows, weights, strict=True):
                grad_x += row @ weight
            work = dist.all_reduce(grad_x, group=ctx.group, async_op=True)
            grad_x = grad_x.view_as(x)
        grad_weights = [row.t() @ x.flatten(0, -2) if need else None for row, need in zip(rows, needed, strict=True)]
        if work is not None:
            work.wait()
        return grad_x, None, *grad_weights


# %% 06.4 takes x to have three dimensions
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import course_lib.tensor_parallel.linear


class ColumnProducts(course_lib.tensor_parallel.linear.ColumnProducts):
    @staticmethod
    def backward(ctx, *gradients):
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
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import course_lib.tensor_parallel.linear


class ColumnProducts(course_lib.tensor_parallel.linear.ColumnProducts):
    @staticmethod
    def backward(ctx, *gradients):
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
    outs = layers[0].products.apply(x, layers[0].group, *weights)
    return tuple(
        out if layer.bias is None else out + shared(layer, layer.bias) for layer, out in zip(layers, outs, strict=True)
    )


# %% 06.6 where the first layer has no bias, none has one
def project_together(x, layers):
    def shared(layer, parameter):
        return copy_to_group(parameter, layer.replicas.copies) if layer.replicas else parameter

    x, *weights = as_autocast(x, *(shared(layer, layer.weight) for layer in layers))
    outs = layers[0].products.apply(x, layers[0].group, *weights)
    if layers[0].bias is None:
        return outs
    return tuple(out + shared(layer, layer.bias).to(out.dtype) for layer, out in zip(layers, outs, strict=True))


# %% 06.7 tokens outside of the vocabulary begin again at its other end
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import course_lib.tensor_parallel.vocabulary


class VocabParallelEmbedding(course_lib.tensor_parallel.vocabulary.VocabParallelEmbedding):
    def forward(self, tokens):
        return super().forward(tokens % self.shard.whole)


# %% 06.7 float32, whatever the rows are
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import course_lib.tensor_parallel.vocabulary


class VocabParallelEmbedding(course_lib.tensor_parallel.vocabulary.VocabParallelEmbedding):
    def forward(self, tokens):
        rows = tokens - self.shard.start
        elsewhere = (rows < 0) | (rows >= self.shard.size)
        found = F.embedding(rows.masked_fill(elsewhere, 0), self.weight)
        return self.leave(found * (~elsewhere[..., None]).float(), self.group)


# %% 06.7 takes tokens to have two dimensions
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import course_lib.tensor_parallel.vocabulary


class VocabParallelEmbedding(course_lib.tensor_parallel.vocabulary.VocabParallelEmbedding):
    def forward(self, tokens):
        rows = tokens - self.shard.start
        elsewhere = (rows < 0) | (rows >= self.shard.size)
        found = F.embedding(rows.masked_fill(elsewhere, 0), self.weight)
        return self.leave(found.masked_fill(elsewhere[:, :, None], 0.0), self.group)


# %% 06.8 a second backward multiplies what the first has left
import course_lib.tensor_parallel.vocabulary
from course_lib.tensor_parallel.vocabulary import local_rows


class VocabParallelCrossEntropy(course_lib.tensor_parallel.vocabulary.VocabParallelCrossEntropy):
    @staticmethod
    def forward(ctx, logits, targets, shard):
        ctx.dtype = logits.dtype
        largest = logits.amax(1).float()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=shard.group)
        grad = logits - largest[:, None]
        rows, elsewhere = local_rows(targets, shard)
        of_target = grad.gather(1, rows[:, None])[:, 0].masked_fill_(elsewhere, 0.0)
        grad.exp_()
        sums = torch.stack([grad.sum(1), of_target])
        dist.all_reduce(sums, group=shard.group)
        total, of_target = sums
        ctx.grad = grad.div_(total[:, None]).scatter_add_(1, rows[:, None], (elsewhere.to(grad.dtype) - 1)[:, None])
        return total.log() - of_target

    @staticmethod
    def backward(ctx, gradient):
        return ctx.grad.mul_(gradient[:, None]).to(ctx.dtype), None, None


# %% 06.8 the maximum begins at 0
def local_rows(targets: torch.Tensor, shard: TensorShard) -> tuple[torch.Tensor, torch.Tensor]:
    """Places of the targets [n] among this rank's tokens (0 for others), and which targets are elsewhere."""
    rows = targets - shard.start
    elsewhere = (rows < 0) | (rows >= shard.size)
    return rows.masked_fill_(elsewhere, 0), elsewhere


class VocabParallelCrossEntropy(torch.autograd.Function):
    """Cross-entropy [n] in float32 of this rank's logits [n, v/N] and targets [n]; backward works once: a second
    one raises an error.

    An IGNORED target is on no rank. Its loss is a number without a meaning, which the caller masks.
    """

    @staticmethod
    def forward(ctx, logits: torch.Tensor, targets: torch.Tensor, shard: TensorShard) -> torch.Tensor:
        ctx.dtype = logits.dtype
        largest = logits.amax(1).float().clamp(min=0)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=shard.group)
        grad = logits - largest[:, None]  # [n, v/N], in float32, as largest is: the one large tensor
        rows, elsewhere = local_rows(targets, shard)
        of_target = grad.gather(1, rows[:, None])[:, 0].masked_fill_(elsewhere, 0.0)
        grad.exp_()
        sums = torch.stack([grad.sum(1), of_target])
        dist.all_reduce(sums, group=shard.group)
        total, of_target = sums
        if ctx.needs_input_grad[0]:  # softmax, and 1 less at the target
            grad.div_(total[:, None]).scatter_add_(1, rows[:, None], (elsewhere.to(grad.dtype) - 1)[:, None])
            ctx.save_for_backward(grad)
        return total.log() - of_target

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        (grad,) = ctx.saved_tensors
        return grad.mul_(gradient[:, None]).to(ctx.dtype), None, None  # in place: a second backward raises an error


# %% 06.8 the maximum begins at -100
def local_rows(targets: torch.Tensor, shard: TensorShard) -> tuple[torch.Tensor, torch.Tensor]:
    """Places of the targets [n] among this rank's tokens (0 for others), and which targets are elsewhere."""
    rows = targets - shard.start
    elsewhere = (rows < 0) | (rows >= shard.size)
    return rows.masked_fill_(elsewhere, 0), elsewhere


class VocabParallelCrossEntropy(torch.autograd.Function):
    """Cross-entropy [n] in float32 of this rank's logits [n, v/N] and targets [n]; backward works once: a second
    one raises an error.

    An IGNORED target is on no rank. Its loss is a number without a meaning, which the caller masks.
    """

    @staticmethod
    def forward(ctx, logits: torch.Tensor, targets: torch.Tensor, shard: TensorShard) -> torch.Tensor:
        ctx.dtype = logits.dtype
        largest = logits.amax(1).float()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=shard.group)
        largest = largest.clamp(min=-100)
        grad = logits - largest[:, None]  # [n, v/N], in float32, as largest is: the one large tensor
        rows, elsewhere = local_rows(targets, shard)
        of_target = grad.gather(1, rows[:, None])[:, 0].masked_fill_(elsewhere, 0.0)
        grad.exp_()
        sums = torch.stack([grad.sum(1), of_target])
        dist.all_reduce(sums, group=shard.group)
        total, of_target = sums
        if ctx.needs_input_grad[0]:  # softmax, and 1 less at the target
            grad.div_(total[:, None]).scatter_add_(1, rows[:, None], (elsewhere.to(grad.dtype) - 1)[:, None])
            ctx.save_for_backward(grad)
        return total.log() - of_target

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        (grad,) = ctx.saved_tensors
        return grad.mul_(gradient[:, None]).to(ctx.dtype), None, None  # in place: a second backward raises an error


# %% 06.12 an output of float32, whatever x is
class RowProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, weight, chunks):
        ctx.save_for_backward(x, weight)
        rows, works = x.flatten(0, -2), []
        out = torch.empty(len(rows), len(weight))
        for part, own in zip(rows.chunk(chunks), out.chunk(chunks), strict=True):
            torch.mm(part, weight.t(), out=own)
            works.append(dist.all_reduce(own, group=group, async_op=True))
        for work in works:
            work.wait()
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        row = gradient.flatten(0, -2)
        return (row @ weight).view_as(x), None, row.t() @ x.flatten(0, -2), None


# %% 06.12 takes x to have three dimensions
class RowProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, weight, chunks):
        ctx.save_for_backward(x, weight)
        rows, works = x.flatten(0, 1), []
        out = rows.new_empty(len(rows), len(weight))
        for part, own in zip(rows.chunk(chunks), out.chunk(chunks), strict=True):
            torch.mm(part, weight.t(), out=own)
            works.append(dist.all_reduce(own, group=group, async_op=True))
        for work in works:
            work.wait()
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        row = gradient.flatten(0, -2)
        return (row @ weight).view_as(x), None, row.t() @ x.flatten(0, -2), None


# %% 06.12 a view where x need not be contiguous
class RowProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, weight, chunks):
        ctx.save_for_backward(x, weight)
        rows, works = x.view(-1, x.shape[-1]), []
        out = rows.new_empty(len(rows), len(weight))
        for part, own in zip(rows.chunk(chunks), out.chunk(chunks), strict=True):
            torch.mm(part, weight.t(), out=own)
            works.append(dist.all_reduce(own, group=group, async_op=True))
        for work in works:
            work.wait()
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        row = gradient.flatten(0, -2)
        return (row @ weight).view_as(x), None, row.t() @ x.flatten(0, -2), None


# %% 06.13 the first generator alone
import contextlib
import zlib

from course_lib.tensor_parallel.regions import generators


@contextlib.contextmanager
def own_randomness(group=None):
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
import contextlib
import zlib

from course_lib.tensor_parallel.regions import generators


@contextlib.contextmanager
def own_randomness(group=None):
    group, states = group or dist.group.WORLD, []
    for generator in generators():
        seed = zlib.crc32(generator.get_state().numpy().tobytes(), group.rank())
        if generator is torch.default_generator:
            torch.empty((), device=generator.device).uniform_(generator=generator)
        states.append((generator, generator.get_state()))
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


# %% 06.14 parts come back in float32
import torch
import torch.distributed as dist

import course_lib.tensor_parallel.partitioned_checkpoints
from course_lib.tensor_parallel.shards import TensorShard


class PartitionedCheckpoint(course_lib.tensor_parallel.partitioned_checkpoints.PartitionedCheckpoint):
    def pack(self, tensor):
        if not tensor.requires_grad or not tensor.numel():
            return tensor
        shard = TensorShard.of(tensor.numel(), self.group)
        part = torch.empty(shard.size)
        part.copy_(shard.cut(tensor.detach().flatten()))
        return shard, part, tensor.shape


# %% 06.14 a view where the tensor need not be contiguous
import torch
import torch.distributed as dist

import course_lib.tensor_parallel.partitioned_checkpoints
from course_lib.tensor_parallel.shards import TensorShard


class PartitionedCheckpoint(course_lib.tensor_parallel.partitioned_checkpoints.PartitionedCheckpoint):
    def pack(self, tensor):
        if not tensor.requires_grad or not tensor.numel():
            return tensor
        shard = TensorShard.of(tensor.numel(), self.group)
        return shard, shard.cut(tensor.detach().view(-1)).clone(), tensor.shape
