"""Sequence parallelism: what tensor parallelism keeps whole on all t ranks is split over them along the sequence.

                                    forward          backward
    g   gather_sequence             all-gather       reduce-scatter     own tokens enter split work
    g*  reduce_scatter_sequence     reduce-scatter   all-gather         summands leave it

Between g* and g a rank has [b, s/t, h]: its own tokens, and all of their numbers. A GPT layer keeps 34 sbh/t bytes
instead of sbh(10 + 24/t), in 16 bits and without scores of attention. It sends what f and f* send, in twice as many
calls, and one all-gather more in each column layer's backward: x is kept in parts and gathered once more. What is whole
on all ranks but sees each rank's own tokens only (the norms' weights) gets a part of its gradient on each: these are
summed. (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", §4.2.2.)
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course_lib.sequence_parallel.shards import join_by_rank, split_by_rank, start_gather, start_reduce_scatter
from course_lib.single_gpu.model import need_transformer
from course_lib.single_gpu.placement import placement_of
from course_lib.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from course_lib.tensor_parallel.model import SplitNorm
from course_lib.tensor_parallel.partitioned_checkpoints import PartitionedCheckpoint
from course_lib.tensor_parallel.regions import OnceDifferentiable, copy_to_group
from course_lib.tensor_parallel.vocabulary import VocabParallelEmbedding


# exercise 07.1
class GatherSequence(OnceDifferentiable):
    """g: all ranks' tokens in forward, [b, s/t, h] to [b, s, h]; in backward the sum of the own ones' gradients."""

    @staticmethod
    def forward(ctx, part: torch.Tensor, group) -> torch.Tensor:
        ctx.group = group
        pieces, work = start_gather(part, group)
        work.wait()
        return join_by_rank(pieces)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        own, work = start_reduce_scatter(split_by_rank(gradient, ctx.group.size()), ctx.group)
        work.wait()
        return own, None


# exercise 07.1
class ReduceScatterSequence(torch.autograd.Function):
    """g*: the sum over the group of the own tokens in forward, [b, s, h] to [b, s/t, h]; in backward all gradients."""

    @staticmethod
    def forward(ctx, summand: torch.Tensor, group) -> torch.Tensor:
        ctx.group = group
        own, work = start_reduce_scatter(split_by_rank(summand, group.size()), group)
        work.wait()
        return own

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        return GatherSequence.apply(gradient, ctx.group), None


def gather_sequence(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[b, s, ...] of the ranks' parts [b, s/t, ...], on its way into split work: gradients are summed."""
    return GatherSequence.apply(part, group)


def reduce_scatter_sequence(summand: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's tokens [b, s/t, ...] of the sum of the ranks' [b, s, ...]. Raises ValueError where t does not divide
    the sequence.
    """
    return ReduceScatterSequence.apply(summand, group)


# exercise 07.2
class GatheredMatmul(OnceDifferentiable):
    """g, and x · weightᵀ for each weight. Keeps this rank's part of x; in backward x is gathered once more beside the
    product that makes its gradient, and the sum of that travels beside the products for the weights.
    """

    @staticmethod
    def forward(ctx, part: torch.Tensor, group, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """part: [b, s/t, in]; weights: [out, in]; returns one [b, s, out] for each weight."""
        ctx.group = group
        ctx.save_for_backward(part, *weights)
        pieces, work = start_gather(part, group)
        work.wait()
        x = join_by_rank(pieces)
        return tuple(F.linear(x, weight) for weight in weights)

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor) -> tuple:
        part, *weights = ctx.saved_tensors
        needed, rows = ctx.needs_input_grad[2:], [gradient.flatten(0, -2) for gradient in gradients]  # [b*s, out]
        own, grad_weights = None, [None] * len(weights)
        if any(needed):
            pieces, gathering = start_gather(part, ctx.group)
        if ctx.needs_input_grad[0]:
            grad_x = rows[0] @ weights[0]
            for row, weight in zip(rows[1:], weights[1:], strict=True):
                grad_x.addmm_(row, weight)
            grad_x = split_by_rank(grad_x.unflatten(0, gradients[0].shape[:-1]), ctx.group.size())
            own, scattering = start_reduce_scatter(grad_x, ctx.group)
        if any(needed):
            gathering.wait()
            x = join_by_rank(pieces).flatten(0, -2)  # [b*s, in]
            grad_weights = [row.t() @ x if need else None for row, need in zip(rows, needed, strict=True)]
        if ctx.needs_input_grad[0]:
            scattering.wait()
        return own, None, *grad_weights


def given(args: tuple, kwargs: dict) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x and positions of a call of `Transformer`."""
    return tuple([*args, *(kwargs[name] for name in ("x", "positions") if name in kwargs), None][:2])


def require_positions(model: nn.Module, args: tuple, kwargs: dict) -> None:
    """A forward pre-hook: hidden states of a part of the sequence do not tell which tokens they are.

    Raises ValueError where a `Transformer` is given hidden states and no positions.
    """
    x, positions = given(args, kwargs)
    if x.is_floating_point() and positions is None:
        raise ValueError("hidden states without positions: pass the positions of all tokens of the sequence")


def check_sequence_parallel(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Raise ValueError for a model that is not split over the group, whose row layers work in chunks or have biases,
    that has partitioned checkpoints, or is sequence parallel already.
    """
    pair = "gather_sequence(part, group) and reduce_scatter_sequence(summand, group)"
    need_transformer(model, "apply_sequence_parallel", f"{pair} work on any [b, s, ...]")
    rows = [module for module in model.modules() if isinstance(module, RowParallelLinear)]
    if not rows or rows[0].group != group:
        raise ValueError("the model is not split over this group: apply_tensor_parallel comes first")
    if rows[0].chunks > 1:
        raise ValueError("row layers in chunks sum over the group: split the model with chunks=1")
    if rows[0].output_reduce is reduce_scatter_sequence:
        raise ValueError("the model is sequence parallel already")
    if any(row.bias is not None for row in rows):
        raise ValueError("a row layer has a bias, whose gradient would lack the tokens of the other ranks")
    if any(isinstance(block.forward, PartitionedCheckpoint) for block in model.blocks):
        raise ValueError("partitioned checkpoints need equal hidden states on all ranks: use mode full, afterwards")


# exercise 07.4
class SequenceParallelNorm(SplitNorm):
    """`norm`, an nn.RMSNorm, of this rank's tokens: its weight's gradient is the sum over the group."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, copy_to_group(self.weight, self.group), self.eps)


# exercise 07.4
def apply_sequence_parallel(
    model: nn.Module, group: dist.ProcessGroup | None = None, reduce_group: dist.ProcessGroup | None = None
) -> nn.Module:
    """Split along the sequence what lies between the split layers of a `Transformer`, in place; returns the model.

    The model has been split over `group` by apply_tensor_parallel. Still all ranks give it the same tokens [b, s], and
    get the logits of all of them. The norms' gradients are summed over the group in backward; where `reduce_group` is
    given, DataParallel or ZeRO sum them over it instead: all ranks that hold these norms. With dropout, each rank comes
    with random numbers of its own. Raises ValueError, and changes nothing, where `check_sequence_parallel` refuses the
    model; and in forward where the ranks do not divide the sequence.
    """
    group = group or dist.group.WORLD
    check_sequence_parallel(model, group)
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
                setattr(parent, name, SequenceParallelNorm(norm, group))
            else:
                placement_of(norm.weight).reduce_group = reduce_group
    model.register_forward_pre_hook(require_positions, with_kwargs=True)
    return model
