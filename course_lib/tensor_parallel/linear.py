"""Linear layers sharded over a group: by columns (the output is split) or by rows (the input is split).

    Y = X [W1 W2]  = [X W1  X W2]        ColumnParallelLinear   f,  then the matmul
    Y = [X1 X2] W  = X1 W1 + X2 W2       RowParallelLinear      the matmul, then f*

In backward the gradient of X is a sum over the ranks (f); the gradient of a weight shard is local. Both backward
matmuls of a column layer need only the gradient of Y, so the all-reduce of X's gradient overlaps the matmul for the
weight. (Shoeybi et al. 2019, Megatron-LM, §3; its LinearWithGradAccumulationAndAsyncCommunication.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course_lib.collectives.groups import group_or_world
from course_lib.collectives.simulation import all_gather_object
from course_lib.single_gpu.model import LinearLayer
from course_lib.tensor_parallel.regions import OnceDifferentiable, copy_to_group, gather_from_group, sum_over_group
from course_lib.tensor_parallel.shards import TensorShard, shard_parameter

OutputReduce = Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor]


class SharedInputMatmul(Protocol):
    """Multiplies one input by the weights of several layers: an autograd Function, or an object with its `apply`."""

    def apply(self, x: torch.Tensor, group: dist.ProcessGroup, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return x · weightᵀ [..., out] for each weight."""


# exercise 06.4
class ColumnMatmul(OnceDifferentiable):
    """Multiply x by several weights; in backward the all-reduce of x's gradient overlaps the matmuls for the weights'
    gradients.
    """

    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return x · weightᵀ [..., out/N] for each weight, in x's dtype. Sends nothing; keeps x and the weights for
        backward, no copies and nothing else.

        x: [..., in], of two dimensions or more, the same on all ranks; weights: [out/N, in], local shards.
        """
        ctx.group = group
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, weight) for weight in weights)

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor) -> tuple:
        """Return the gradients of x (summed over the weights and over the group, in x's dtype), of the group (None),
        and of each weight; None for a gradient that ctx.needs_input_grad does not ask for.

        gradients: one per output; they need not be contiguous, and are not changed.
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
    """Multiply x in chunks of rows and sum over the group; the all-reduce of a chunk overlaps the next matmul."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup, weight: torch.Tensor, chunks: int) -> torch.Tensor:
        """Return the sum over the ranks of x · weightᵀ, [..., out], in x's dtype: one tensor; each chunk is multiplied
        and summed in its own rows.

        x: [..., in/N], of two dimensions or more; it need not be contiguous. weight: [out, in/N].
        """
        ctx.save_for_backward(x, weight)
        rows, works = x.flatten(0, -2), []  # [b*s, in/N]
        out = rows.new_empty(len(rows), len(weight))
        for x_chunk, out_chunk in zip(rows.chunk(chunks), out.chunk(chunks), strict=True):
            torch.mm(x_chunk, weight.t(), out=out_chunk)
            works.append(dist.all_reduce(out_chunk, group=group, async_op=True))
        for work in works:
            work.wait()
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        """Return a gradient for each argument of forward, None for one that ctx.needs_input_grad does not ask for.
        Sends nothing.
        """
        x, weight = ctx.saved_tensors
        row = gradient.flatten(0, -2)
        grad_x = (row @ weight).view_as(x) if ctx.needs_input_grad[0] else None
        grad_weight = row.t() @ x.flatten(0, -2) if ctx.needs_input_grad[2] else None
        return grad_x, None, grad_weight, None


def as_autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors in autocast's dtype if it is enabled, as PyTorch's own matmuls would cast them."""
    kind = tensors[0].device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in tensors)


class RowParallelLinear(nn.Module):
    """`linear` with its weight split over `group` along the input: local x [..., in/N] to full output [..., out], under
    autocast in its dtype.

    chunks: number of chunks of x's rows; each is summed over the group while the next is multiplied. output_reduce(out,
    group) sums the outputs over the ranks: f*, which apply_sequence_parallel (notebook 07) replaces by g*.
    """

    def __init__(self, linear: LinearLayer, group: dist.ProcessGroup | None = None, chunks: int = 1):
        super().__init__()
        self.group, self.chunks = group_or_world(group), chunks
        self.output_reduce: OutputReduce = sum_over_group
        shard = TensorShard.of(linear.weight.shape[1], self.group, dim=1)
        self.weight: torch.Tensor = shard_parameter(linear.weight, shard)
        self.bias = linear.bias  # full: all ranks add the same bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward_in_chunks(x) if self.chunks > 1 else self.forward_at_once(x)

    # exercise 06.5
    def forward_at_once(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply local x [..., in/N], sum over the ranks by `self.output_reduce`, add the bias; return [..., out].

        Under autocast the summand and the output have its dtype, with a bias and without.
        """
        out = self.output_reduce(F.linear(x, self.weight), self.group)
        return out if self.bias is None else out + self.bias.to(out.dtype)

    def forward_in_chunks(self, x: torch.Tensor) -> torch.Tensor:
        """Return what forward_at_once returns, computed in chunks of x's rows."""
        x, weight = as_autocast(x, self.weight)
        out = RowMatmul.apply(x, self.group, weight, self.chunks)
        return out if self.bias is None else out + self.bias.to(out.dtype)


class Replicas(NamedTuple):
    """The groups of a rank if there are fewer shards than ranks: c neighboring ranks hold the same shard."""

    copies: dist.ProcessGroup  # the ranks that hold the same shard
    shards: dist.ProcessGroup  # ranks that hold one copy of each shard, in order


def new_disjoint_subgroups(lists: list[tuple[int, ...]]) -> dist.ProcessGroup | None:
    """Return this rank's group of `lists` of ranks, which do not overlap; None if it is in none. Collective over the
    default group.

    If the default group was created with a device_id, its communicator is split once, into all of them; otherwise
    PyTorch creates them one by one. (A DeviceMesh does the same, but its groups all have one size, and dry runs on fake
    tensors cannot create one.)
    """
    if cast("dist.ProcessGroup", dist.group.WORLD).bound_device_id is None:
        return dist.new_subgroups_by_enumeration(lists)[0]
    return dist.split_group(split_ranks=lists)


def replicas_of(group: dist.ProcessGroup, copies: int) -> Replicas:
    """Return the groups in which `copies` neighboring ranks of `group` hold the same shard.

    Collective over the default group: every rank calls it, with its group. Raises ValueError, on all ranks, if copies
    is below 1 or does not divide the size of a group, or if the ranks of a group passed different arguments.
    """
    gathered: list[Any] = [None] * dist.get_world_size()
    all_gather_object(gathered, (dist.get_process_group_ranks(group), copies))
    groups = sorted({(tuple(members), count) for members, count in gathered})
    for members, count in groups:
        if count < 1:
            raise ValueError(f"{count} copies: it must be 1 or more")
        if len(members) % count:
            raise ValueError(f"{count} copies do not divide {len(members)} ranks")
    if sum(len(members) for members, _ in groups) != len(gathered):
        raise ValueError("the ranks of a group passed different groups or different numbers of copies")
    same = [members[i : i + count] for members, count in groups for i in range(0, len(members), count)]
    shards = [members[i::count] for members, count in groups for i in range(count)]
    return Replicas(*(cast(dist.ProcessGroup, new_disjoint_subgroups(lists)) for lists in (same, shards)))


class ColumnParallelLinear(nn.Module):
    """`linear` with its weight split over `group` along the output: full x [..., in] to local outputs [..., out/N].

    replicas: the groups that share the shards, if there are fewer shards than ranks. gather_output: return the full
    output on every rank. matmul: the autograd Function that multiplies, which apply_sequence_parallel and apply_fp8
    replace. Raises ValueError for replicas together with gather_output.
    """

    def __init__(
        self,
        linear: LinearLayer,
        group: dist.ProcessGroup | None = None,
        replicas: Replicas | None = None,
        gather_output: bool = False,
    ):
        if replicas and gather_output:
            raise ValueError("gather_output with replicas: each copy would add the whole gradient once more")
        super().__init__()
        self.group, self.replicas, self.gather_output = group_or_world(group), replicas, gather_output
        self.matmul: SharedInputMatmul = ColumnMatmul
        self.shard = TensorShard.of(linear.weight.shape[0], replicas.shards if replicas else self.group)
        self.weight: torch.Tensor = shard_parameter(linear.weight, self.shard)
        self.bias = None if linear.bias is None else shard_parameter(linear.bias, self.shard)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (out,) = project_together(x, [self])
        return gather_from_group(out, self.shard._replace(dim=-1)) if self.gather_output else out


# exercise 06.6
def project_together(x: torch.Tensor, layers: list[ColumnParallelLinear]) -> tuple[torch.Tensor, ...]:
    """Return the output [..., out/N] of each layer for one input x [..., in]; the layers have one group.

    Backward all-reduces x's gradient once for all of them. Weights and biases that are replicated get the sum of their
    copies' gradients. Under autocast all outputs have its dtype.
    """

    def shared(layer: ColumnParallelLinear, parameter: torch.Tensor) -> torch.Tensor:
        return copy_to_group(parameter, layer.replicas.copies) if layer.replicas else parameter

    x, *weights = as_autocast(x, *(shared(layer, layer.weight) for layer in layers))
    outs = layers[0].matmul.apply(x, layers[0].group, *weights)
    biases = [None if layer.bias is None else shared(layer, layer.bias) for layer in layers]
    return tuple(out if bias is None else out + bias.to(out.dtype) for out, bias in zip(outs, biases, strict=True))
