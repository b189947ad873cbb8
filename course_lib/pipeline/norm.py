"""The norm of all gradients of a model in stages, of which ranks have parts, pieces and copies; clipping by it."""

from __future__ import annotations

import functools
import math

import torch
import torch.distributed as dist

from course_lib.single_gpu.placement import placement_of


def gradients_of(runner, zero=None) -> list[tuple[torch.Tensor, float]]:
    """This rank's gradients, whole or in pieces, each with the number of ranks of the default group that have the same.

    runner: a PipelineRunner. zero: the ZeroOptimizer that has them, if one has. Pieces of fully_shard are in `.grad`.
    """
    pipeline = dist.get_process_group_ranks(runner.group)
    members_of = functools.cache(lambda group: set(dist.get_process_group_ranks(group)))  # each group once a step

    def copies(outer: tuple, owner_ranks: int, pieces: int = 1) -> float:
        """outer: the groups that split the tensor; owner_ranks: ranks of a pipeline that have it, or pieces of it."""
        return dist.get_world_size() * owner_ranks / (len(pipeline) * math.prod(each.size() for each in outer) * pieces)

    def of_piece(outer: tuple, group) -> float:
        members = members_of(group)
        return copies(outer, sum(rank in members for rank in pipeline), len(members))

    if zero is not None:
        return [
            (each.gradient, of_piece(placement_of(each.parameters[0]).norm_groups, each.group))
            for each in zero.gradients
        ]
    found = []
    for weight, owner_ranks in runner.tied_weights.owner_ranks.items():
        if weight.grad is not None and placement_of(weight).flat_shard:
            found.append(
                (weight.grad, of_piece(placement_of(weight).norm_groups[1:], placement_of(weight).flat_shard.group))
            )
        elif weight.grad is not None:
            found.append((weight.grad, copies(placement_of(weight).norm_groups, len(owner_ranks))))
    return found


@torch.no_grad()
def clip_grad_norm_(runner, max_norm: float, zero=None) -> torch.Tensor:
    """As torch.nn.utils.clip_grad_norm_, of all stages together, whoever holds which part. Returns the norm.

    Every rank adds up its squares, each divided by the number of ranks that have the same: one all-reduce over the
    default group, whose ranks train one model. zero: the ZeroOptimizer that has the gradients, if one has.
    """
    if zero is not None:
        zero.finish()
    found = gradients_of(runner, zero)
    gradients = [gradient for gradient, _ in found]
    square = torch.zeros((), device=next(runner.stages.parameters()).device)
    if found:
        squares = torch._foreach_pow(torch._foreach_norm(gradients, dtype=torch.float32), 2)  # few launches for all
        torch._foreach_div_(squares, [copies for _, copies in found])
        square += torch.stack(squares).sum()
    dist.all_reduce(square)
    norm = square.sqrt()
    if found:
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm
