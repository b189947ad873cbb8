"""Linear layers of which each rank of a group has a part: by columns (the output is split) or by rows (the input is).

    Y = X [W1 W2]  = [X W1  X W2]        ColumnParallelLinear   f,  then the product
    Y = [X1 X2] W  = X1 W1 + X2 W2       RowParallelLinear      the product, then f*

In backward the gradient of X is a sum over the ranks (f), those of the weights are each rank's own. Both of a column
layer's products need the gradient of Y alone, so the sum of the first travels while the second is made. (Shoeybi et
al. 2019, Megatron-LM, §3; its LinearWithGradAccumulationAndAsyncCommunication.)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course_lib.tensor_parallel.regions import OnceDifferentiable, copy_to_group, gather_from_group, sum_over_group
from course_lib.tensor_parallel.shards import TensorShard, shard_parameter


# exercise 06.4
class ColumnMatmul(OnceDifferentiable):
    """Multiply x by several weights; in backward the all-reduce of x's gradient overlaps the products that make the
    gradients of the weights.
    """

    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return x · weightᵀ [..., out/N] for each weight. Sends nothing.

        x: [..., in], of two dimensions or more, the same on all ranks; weights: [out/N, in], this rank's.
        """
        ctx.group = group
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, weight) for weight in weights)

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor) -> tuple:
        """Return the gradients of x (summed over the weights and over the group, in x's dtype), of the group (None),
        and of each weight; None where ctx.needs_input_grad says that one is not needed.

        gradients: of each output; they need not be contiguous, and stay as they are.
        """
        x, *weights = ctx.saved_tensors
        rows, grad_x, work = [gradient.flatten(0, -2) for gradient in gradients], None, None  # [b*s, out]
        if ctx.needs_input_grad[0]:
            grad_x = rows[0] @ weights[0]
            for row, weight in zip(rows[1:], weights[1:], strict=True):
                grad_x.addmm_(row, weight)
            work = dist.all_reduce(grad_x, group=ctx.group, async_op=True)
            grad_x = grad_x.view_as(x)
        needed = ctx.needs_input_grad[2:]
        grad_weights = [row.t() @ x.flatten(0, -2) if need else None for row, need in zip(rows, needed, strict=True)]
        if work is not None:
            work.wait()
        return grad_x, None, *grad_weights


# exercise 06.12
class RowMatmul(OnceDifferentiable):
    """Multiply x in chunks of its rows and sum over the group: the sum of one chunk travels while the next is
    multiplied.
    """

    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup, weight: torch.Tensor, chunks: int) -> torch.Tensor:
        """Return the sum over the ranks of x · weightᵀ, [..., out], in x's dtype: one tensor, in whose rows each chunk
        is multiplied and summed.

        x: [..., in/N], of two dimensions or more; it need not be contiguous. weight: [out, in/N].
        """
        ctx.save_for_backward(x, weight)
        rows, works = x.flatten(0, -2), []  # [b*s, in/N]
        out = rows.new_empty(len(rows), len(weight))
        for part, own in zip(rows.chunk(chunks), out.chunk(chunks), strict=True):
            torch.mm(part, weight.t(), out=own)
            works.append(dist.all_reduce(own, group=group, async_op=True))
        for work in works:
            work.wait()
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        """Return a gradient for each argument of forward; None where ctx.needs_input_grad says that it is not needed.
        Sends nothing.
        """
        x, weight = ctx.saved_tensors
        row = gradient.flatten(0, -2)
        grad_x = (row @ weight).view_as(x) if ctx.needs_input_grad[0] else None
        grad_weight = row.t() @ x.flatten(0, -2) if ctx.needs_input_grad[2] else None
        return grad_x, None, grad_weight, None


def as_autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors in autocast's dtype, where it is on: what PyTorch's own matrix products would take."""
    kind = tensors[0].device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in tensors)


class RowParallelLinear(nn.Module):
    """`linear` with its weight split over `group` along the input: this rank's input [..., in/N] to all of the output
    [..., out], under autocast in its dtype.

    chunks: into how many parts the rows of x are cut, each summed over the group while the next is multiplied.
    """

    def __init__(self, linear: nn.Linear, group: dist.ProcessGroup | None = None, chunks: int = 1):
        super().__init__()
        self.group, self.chunks = group or dist.group.WORLD, chunks
        self.output_reduce = sum_over_group  # f*; notebook 07 puts another one in its place
        self.weight = shard_parameter(linear.weight, TensorShard.of(linear.in_features, self.group, dim=1))
        self.bias = linear.bias  # whole: all ranks add the same one

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward_in_chunks(x) if self.chunks > 1 else self.forward_at_once(x)

    # exercise 06.5
    def forward_at_once(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply this rank's x: [..., in/N], sum over the ranks by `self.output_reduce`, and add the bias; return [..., out].

        Under autocast the summand and the output have its dtype, with a bias and without.
        """
        out = self.output_reduce(F.linear(x, self.weight), self.group)
        return out if self.bias is None else out + self.bias.to(out.dtype)

    def forward_in_chunks(self, x: torch.Tensor) -> torch.Tensor:
        """As forward_at_once, in chunks of x's rows."""
        x, weight = as_autocast(x, self.weight)
        out = RowMatmul.apply(x, self.group, weight, self.chunks)
        return out if self.bias is None else out + self.bias.to(out.dtype)


class Replicas(NamedTuple):
    """Groups of a rank where parts are too few for all: c neighbours have the same one."""

    copies: dist.ProcessGroup  # the ranks that have the same part
    shards: dist.ProcessGroup  # ranks that have one copy of each part, in order


def new_disjoint_subgroups(lists: list[tuple[int, ...]]) -> dist.ProcessGroup | None:
    """This rank's group of `lists`, which do not overlap; None where it is in none. Collective over the default group.

    Where that group knows its device (device_id), its communicator is split once, into all of them; else PyTorch
    makes one after the other. (So does a DeviceMesh, but its groups are all of one size, and dry runs on fake tensors
    can't make one.)
    """
    if dist.group.WORLD.bound_device_id is None:
        return dist.new_subgroups_by_enumeration(lists)[0]
    return dist.split_group(split_ranks=lists)


def replicas_of(group: dist.ProcessGroup, copies: int) -> Replicas:
    """The groups in which `copies` neighbours of `group` have the same part.

    Collective over the default group: all its ranks call it, with groups of theirs. Raises ValueError, on all of them,
    where copies are less than 1 or do not divide a group, and where the ranks of a group do not come with the same.
    """
    of_all = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, (dist.get_process_group_ranks(group), copies))
    groups = sorted({(tuple(members), count) for members, count in of_all})
    for members, count in groups:
        if count < 1:
            raise ValueError(f"{count} copies: it must be 1 or more")
        if len(members) % count:
            raise ValueError(f"{count} copies do not divide {len(members)} ranks")
    if sum(len(members) for members, _ in groups) != len(of_all):
        raise ValueError("the ranks of a group passed different groups or different numbers of copies")
    same = [members[i : i + count] for members, count in groups for i in range(0, len(members), count)]
    shards = [members[i::count] for members, count in groups for i in range(count)]
    return Replicas(new_disjoint_subgroups(same), new_disjoint_subgroups(shards))


class ColumnParallelLinear(nn.Module):
    """`linear` with its weight split over `group` along the output: all of x [..., in] to this rank's output
    [..., out/N].

    replicas: parts are fewer than ranks, and these are the groups that share them. gather_output: return all of the
    output on every rank. Raises ValueError for both at once.
    """

    def __init__(
        self,
        linear: nn.Linear,
        group: dist.ProcessGroup | None = None,
        replicas: Replicas | None = None,
        gather_output: bool = False,
    ):
        if replicas and gather_output:
            raise ValueError("gather_output with replicas: each copy would add the whole gradient once more")
        super().__init__()
        self.group, self.replicas, self.gather_output = group or dist.group.WORLD, replicas, gather_output
        self.matmul = ColumnMatmul  # how it multiplies; notebook 07 puts another way in its place
        self.shard = TensorShard.of(linear.out_features, replicas.shards if replicas else self.group)
        self.weight = shard_parameter(linear.weight, self.shard)
        self.bias = None if linear.bias is None else shard_parameter(linear.bias, self.shard)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (out,) = project_together(x, [self])
        return gather_from_group(out, self.shard._replace(dim=-1)) if self.gather_output else out


# exercise 06.6
def project_together(x: torch.Tensor, layers: list[ColumnParallelLinear]) -> tuple[torch.Tensor, ...]:
    """Return what each of the layers, all over one group, makes of x [..., in]: [..., out/N] each.

    For all of them together there is one all-reduce of x's gradient in backward. Weights and biases of which ranks have
    copies get the sum of the copies' gradients. Under autocast all outputs have its dtype.
    """

    def shared(layer: ColumnParallelLinear, parameter: nn.Parameter) -> torch.Tensor:
        return copy_to_group(parameter, layer.replicas.copies) if layer.replicas else parameter

    x, *weights = as_autocast(x, *(shared(layer, layer.weight) for layer in layers))
    outs = layers[0].matmul.apply(x, layers[0].group, *weights)
    biases = [None if layer.bias is None else shared(layer, layer.bias) for layer in layers]
    return tuple(out if bias is None else out + bias.to(out.dtype) for out, bias in zip(outs, biases, strict=True))
