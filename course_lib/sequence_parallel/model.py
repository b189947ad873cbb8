"""Sequence parallelism: the activations that tensor parallelism replicates on all t ranks, split along the sequence.

                                    forward          backward
    g   gather_sequence             all-gather       reduce-scatter     local tokens enter split work
    g*  reduce_scatter_sequence     reduce-scatter   all-gather         summands leave it

Between g* and g a rank holds [b, s/t, h]: its local tokens, with all of their elements. A GPT layer keeps 34 sbh/t
bytes instead of sbh(10 + 24/t), in 16 bits and without attention scores. It sends what f and f* send, in twice as many
calls, and one more all-gather in each column layer's backward: x is kept sharded and gathered again. A weight that is
replicated but sees only local tokens (the norms) gets a partial gradient on each rank, and these are summed.
(Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", §4.2.2.)
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course_lib.collectives.groups import group_or_world
from course_lib.sequence_parallel.shards import join_by_rank, split_by_rank, start_gather, start_reduce_scatter
from course_lib.single_gpu.model import Transformer, need_transformer
from course_lib.single_gpu.placement import placement_of
from course_lib.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from course_lib.tensor_parallel.model import SplitNorm
from course_lib.tensor_parallel.partitioned_checkpoints import PartitionedCheckpoint
from course_lib.tensor_parallel.regions import OnceDifferentiable, copy_to_group
from course_lib.tensor_parallel.vocabulary import VocabParallelEmbedding


# exercise 07.1
class GatherSequence(OnceDifferentiable):
    """g: gather all ranks' tokens in forward, [b, s/t, h] to [b, s, h]; in backward sum local tokens' gradients."""

    @staticmethod
    def forward(ctx, local: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        shards, work = start_gather(local, group)
        work.wait()
        return join_by_rank(shards)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        local, work = start_reduce_scatter(split_by_rank(gradient, ctx.group.size()), ctx.group)
        work.wait()
        return local, None


# exercise 07.1
class ReduceScatterSequence(torch.autograd.Function):
    """g*: sum local tokens over the group in forward, [b, s, h] to [b, s/t, h]; in backward gather the gradients."""

    @staticmethod
    def forward(ctx, summand: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        local, work = start_reduce_scatter(split_by_rank(summand, group.size()), group)
        work.wait()
        return local

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        return GatherSequence.apply(gradient, ctx.group), None


def gather_sequence(local: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the full [b, s, ...] of the ranks' shards [b, s/t, ...], for use in split work: gradients are summed."""
    return GatherSequence.apply(local, group)


def reduce_scatter_sequence(summand: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the local tokens [b, s/t, ...] of the sum of the ranks' [b, s, ...]. Raises ValueError if t does not
    divide the sequence.
    """
    return ReduceScatterSequence.apply(summand, group)


# exercise 07.2
class GatheredMatmul(OnceDifferentiable):
    """Apply g, and multiply by several weights. It keeps the local shard of x. In backward the second all-gather of x
    overlaps the matmul for x's gradient, whose reduce-scatter overlaps the matmuls for the weights' gradients.
    """

    @staticmethod
    def forward(ctx, local: torch.Tensor, group: dist.ProcessGroup, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return x · weightᵀ [b, s, out] for each weight. local: [b, s/t, in]; weights: [out, in]."""
        ctx.group = group
        ctx.save_for_backward(local, *weights)
        shards, work = start_gather(local, group)
        work.wait()
        x = join_by_rank(shards)
        return tuple(F.linear(x, weight) for weight in weights)

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor) -> tuple:
        local, *weights = ctx.saved_tensors
        needed, rows = ctx.needs_input_grad[2:], [gradient.flatten(0, -2) for gradient in gradients]  # [b*s, out]
        grad_local = None
        grad_weights: list[torch.Tensor | None] = [None] * len(weights)
        if any(needed):
            shards, gathering = start_gather(local, ctx.group)
        if ctx.needs_input_grad[0]:
            grad_x = rows[0] @ weights[0]
            for row, weight in zip(rows[1:], weights[1:], strict=True):
                grad_x.addmm_(row, weight)
            grad_x = split_by_rank(grad_x.unflatten(0, gradients[0].shape[:-1]), ctx.group.size())
            grad_local, scattering = start_reduce_scatter(grad_x, ctx.group)
        if any(needed):
            gathering.wait()
            x = join_by_rank(shards).flatten(0, -2)  # [b*s, in]
            grad_weights = [row.t() @ x if need else None for row, need in zip(rows, needed, strict=True)]
        if ctx.needs_input_grad[0]:
            scattering.wait()
        return grad_local, None, *grad_weights


def forward_inputs(args: tuple, kwargs: dict) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the arguments x and positions (None if absent) of a call of `Transformer`."""
    return tuple([*args, *(kwargs[name] for name in ("x", "positions") if name in kwargs), None][:2])


def require_positions(model: nn.Module, args: tuple, kwargs: dict) -> None:
    """Raise ValueError if a `Transformer` is called with hidden states but without positions: a forward pre-hook.

    Hidden states of a shard of the sequence do not tell which tokens they belong to.
    """
    x, positions = forward_inputs(args, kwargs)
    if x.is_floating_point() and positions is None:
        raise ValueError("hidden states without positions: pass the positions of all tokens of the sequence")


def check_sequence_parallel(model: Transformer, group: dist.ProcessGroup) -> None:
    """Raise ValueError for a model that is not split over the group, whose row layers work in chunks or have biases,
    that has partitioned checkpoints, or that is sequence parallel already.
    """
    pair = "gather_sequence(local, group) and reduce_scatter_sequence(summand, group)"
    need_transformer(model, "apply_sequence_parallel", f"{pair} work on any [b, s, ...]")
    rows = [module for module in model.modules() if isinstance(module, RowParallelLinear)]
    if not rows or model.applied.get("tensor_parallel") != group:
        raise ValueError("the model is not split over this group: call apply_tensor_parallel first")
    if rows[0].chunks > 1:
        raise ValueError("row layers in chunks sum over the group: split the model with chunks=1")
    if "sequence_parallel" in model.applied:
        raise ValueError("the model is sequence parallel already")
    if any(row.bias is not None for row in rows):
        raise ValueError("a row layer has a bias, whose gradient would lack the tokens of the other ranks")
    if any(isinstance(block.forward, PartitionedCheckpoint) for block in model.blocks):
        raise ValueError("partitioned checkpoints need equal hidden states on all ranks: use mode full, afterward")


# exercise 07.4
class SequenceParallelNorm(SplitNorm):
    """`norm`, an nn.RMSNorm, applied to local tokens; its weight's gradient is summed over the group."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, copy_to_group(self.weight, self.group), self.eps)


# exercise 07.4
def apply_sequence_parallel(
    model: Transformer, group: dist.ProcessGroup | None = None, reduce_group: dist.ProcessGroup | None = None
) -> Transformer:
    """Split the activations between a `Transformer`'s sharded layers along the sequence, in place; return the model.

    The model has been split over `group` by apply_tensor_parallel. All ranks still pass it the same tokens [b, s], and
    get the logits of all of them. The norms' gradients are summed over the group in backward; with `reduce_group`, all
    ranks that hold these norms, DataParallel or ZeRO sum them over it instead. With dropout, the ranks must have
    different random states. Raises ValueError, and changes nothing, if `check_sequence_parallel` refuses the model;
    raises it in forward if the ranks do not divide the sequence.
    """
    group = group_or_world(group)
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
                setattr(parent, name, SequenceParallelNorm(norm, group))
            else:
                placement_of(norm.weight).reduce_group = reduce_group
    model.register_forward_pre_hook(require_positions, with_kwargs=True)
    return model
