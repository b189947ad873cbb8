"""Weights that several ranks of a pipeline own, and the actions after which a rank's gradients are complete.

Tied embeddings are on the ranks of the first and the last stage; DualPipe has each stage on two ranks. All replicas of
a weight begin with the values of its first owner rank, and their gradients are summed: at the end of a step, or,
together with the sum over dp, by the wrapper that reads `reduce_group` (DataParallel, ZeRO). Not in backward: ranks get
there at different times, and would wait for each other.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from course_lib.collectives.simulation import all_gather_object
from course_lib.pipeline.schedules import Action, Schedule
from course_lib.single_gpu.placement import placement_of
from course_lib.tensor_parallel.linear import new_disjoint_subgroups


# exercise 09.15
def owner_ranks(schedule: Schedule, stages: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ranks of the pipeline that have one of these stages, each once, in order."""
    return tuple(r for r, actions in enumerate(schedule) if any(action.stage in stages for action in actions))


# exercise 09.15
def final_backwards(stages: nn.ModuleDict, actions: list[Action]) -> set[int]:
    """Return the indices of a rank's actions after which weights have all of their gradient.

    These are the last B or W of each stage, in the order of the list; of stages that share a weight, only the last.
    stages: this rank's, by number as a string.
    """
    last = {action.stage: i for i, action in enumerate(actions) if action.kind in "BW"}
    weights = {int(number): set(stage.parameters()) for number, stage in stages.items()}
    return {i for a, i in last.items() if not any(j > i and weights[a] & weights[b] for b, j in last.items())}


class TiedWeights:
    """The weights of this rank that other ranks own as well.

    owner_ranks: of each weight of this rank, the ranks of the pipeline that own it; groups: of each trained weight with
    several owners, their group; reduced_elsewhere: a wrapper (DataParallel, ZeRO) sums their gradients.
    """

    def __init__(
        self,
        owner_ranks: dict[nn.Parameter, tuple[int, ...]],
        groups: dict[nn.Parameter, dist.ProcessGroup],
        reduced_elsewhere: bool,
    ):
        self.owner_ranks, self.groups, self.reduced_elsewhere = owner_ranks, groups, reduced_elsewhere
        self.earlier_grads: dict[nn.Parameter, torch.Tensor | None] = {}

    def set_grads_aside(self) -> None:
        """Set aside the gradients of earlier steps, which are summed already. Call it before a step."""
        self.earlier_grads = {}
        for weight in () if self.reduced_elsewhere else self.groups:
            self.earlier_grads[weight], weight.grad = weight.grad, None

    def all_reduce_grads(self) -> None:
        """Sum the gradients over the owner ranks, unless a wrapper does. Call it after a step. Collective."""
        works = []
        for weight in self.earlier_grads:
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            works.append((weight.grad, dist.all_reduce(weight.grad, group=self.groups[weight], async_op=True)))
        for (grad, work), earlier in zip(works, self.earlier_grads.values(), strict=True):
            work.wait()
            if earlier is not None:
                grad.add_(earlier)
        self.earlier_grads = {}


class ReduceKey(NamedTuple):
    """Over which ranks a weight's gradient is summed: its owner ranks, once for each rank that reduces it already."""

    owner_ranks: tuple[int, ...]  # of the pipeline
    reduced: tuple[int, ...]  # global ranks


def disjoint_lists(groups: list[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """Return the groups of ranks in lists whose groups do not overlap: each list is one split of the communicator."""
    lists: list[list[tuple[int, ...]]] = []
    for ranks in groups:
        disjoint = next((each for each in lists if set(ranks).isdisjoint(itertools.chain(*each))), None)
        if disjoint is None:
            lists.append(disjoint := [])
        disjoint.append(ranks)
    return lists


def sync_tied_weights(
    stages: nn.ModuleDict, schedule: Schedule, group: dist.ProcessGroup, dp_group: dist.ProcessGroup | None = None
) -> TiedWeights:
    """Find the weights with several owner ranks, and broadcast the values of the first owner. Collective over the
    default group.

    dp_group: the ranks over which gradients are reduced beside the pipeline; each of these weights then gets a
    `reduce_group`: its owner ranks, times dp_group or the reduce_group that it has.
    """
    numbers_of = {
        w: placement_of(w).stages or (int(number),) for number, stage in stages.items() for w in stage.parameters()
    }
    owners = {weight: owner_ranks(schedule, numbers) for weight, numbers in numbers_of.items()}
    keys = {}
    for weight in (weight for weight, ranks in owners.items() if len(ranks) > 1):
        reduced = (placement_of(weight).reduce_group or dp_group) if dp_group else None
        ranks = tuple(dist.get_process_group_ranks(reduced)) if reduced else (dist.get_rank(),)
        keys[weight] = ReduceKey(owners[weight], ranks)
    gathered: list = [None] * dist.get_world_size()
    all_gather_object(gathered, (dist.get_process_group_ranks(group), set(keys.values())))

    def members(key: ReduceKey) -> tuple[int, ...]:
        return tuple(sorted({gathered[rank][0][owner] for rank in key.reduced for owner in key.owner_ranks}))

    lists = disjoint_lists(sorted({members(key) for _, of_rank in gathered for key in of_rank}))
    local_groups = [each for each in map(new_disjoint_subgroups, lists) if each is not None]
    by_ranks = {tuple(dist.get_process_group_ranks(each)): each for each in local_groups}
    names = {weight: name for stage in stages.values() for name, weight in stage.named_parameters()}

    def order(weight: nn.Parameter) -> tuple:
        """Return a key that is the same on all owner ranks, which may have other stages as well."""
        return members(keys[weight]), numbers_of[weight], names[weight]

    groups = {weight: by_ranks[members(keys[weight])] for weight in sorted(keys, key=order)}
    for weight, its_group in groups.items():
        if not weight.is_meta:
            dist.broadcast(weight.detach(), group=its_group, group_src=0)
        if dp_group is not None:
            placement_of(weight).reduce_group = its_group
    trained = {weight: its_group for weight, its_group in groups.items() if weight.requires_grad}
    return TiedWeights(owners, trained, dp_group is not None)
