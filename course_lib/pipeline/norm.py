"""The norm of all gradients of a model in stages, of which ranks hold shards and replicas; clipping by it."""

from __future__ import annotations

import functools
import math

import torch
import torch.distributed as dist

from course_lib.data_parallel.gradient_owner import GradientOwner, module_gradients
from course_lib.single_gpu.clipping import clip_factor


def gradients_of(runner, sharding: GradientOwner | None = None) -> list[tuple[torch.Tensor, float]]:
    """Return this rank's gradients, each with the number of ranks of the default group that have the same.

    runner: a PipelineRunner. sharding: the owner of its gradients; None: they are in `.grad`.
    """
    pipeline = dist.get_process_group_ranks(runner.group)
    members_of = functools.cache(lambda group: set(dist.get_process_group_ranks(group)))  # each group once a step

    def copies(outer: tuple, owner_ranks: int, shards: int = 1) -> float:
        """outer: the groups that split the tensor; owner_ranks: ranks of a pipeline that have it, or shards of it."""
        return dist.get_world_size() * owner_ranks / (len(pipeline) * math.prod(each.size() for each in outer) * shards)

    def of_shard(outer: tuple, group) -> float:
        members = members_of(group)
        return copies(outer, sum(rank in members for rank in pipeline), len(members))

    def count(weight: torch.nn.Parameter, group: dist.ProcessGroup | None, outer: tuple) -> float:
        owner_ranks = runner.tied_weights.owner_ranks
        return copies(outer, len(owner_ranks[weight])) if group is None else of_shard(outer, group)

    gradients = module_gradients(runner.stages) if sharding is None else sharding.local_gradients()
    return [(gradient, count(weight, group, outer)) for gradient, weight, group, outer in gradients]


@torch.no_grad()
def clip_grad_norm_(runner, max_norm: float, sharding: GradientOwner | None = None) -> torch.Tensor:
    """Clip gradients by the norm over all stages, as torch.nn.utils.clip_grad_norm_ does. Returns the norm.

    Every rank adds up its squares, each divided by the number of ranks that have the same: one all-reduce over the
    default group, whose ranks train one model. sharding: the owner of the gradients; None: they are in `.grad`.
    """
    counted = gradients_of(runner, sharding)
    gradients = [gradient for gradient, _ in counted]
    square = torch.zeros((), device=next(runner.stages.parameters()).device)
    if counted:
        squares = torch._foreach_pow(torch._foreach_norm(gradients, dtype=torch.float32), 2)  # few launches for all
        torch._foreach_div_(squares, [copies for _, copies in counted])
        square += torch.stack(squares).sum()
    dist.all_reduce(square)
    norm = square.sqrt()
    if counted:
        torch._foreach_mul_(gradients, clip_factor(norm, max_norm))
    return norm
