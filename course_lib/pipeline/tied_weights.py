"""Weights that several ranks of a pipeline hold, and when a rank's weights have their whole gradient.

Tied embeddings are on the first and the last stage's rank; DualPipe has each stage on two ranks. All copies begin with
the values of the first rank that has them, and their gradients are summed: at the end of a step, or, over dp as well,
by whoever reduces gradients and reads `reduce_group` (DataParallel, ZeRO). Not in backward: ranks get there at
different times, and would wait for each other.
"""

from __future__ import annotations

import itertools

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

    These are the last B or W of each stage, as the list has them; of stages that share a weight, only the last of all.
    stages: this rank's, by number as a word.
    """
    last = {action.stage: i for i, action in enumerate(actions) if action.kind in "BW"}
    weights = {int(number): set(stage.parameters()) for number, stage in stages.items()}
    return {i for a, i in last.items() if not any(j > i and weights[a] & weights[b] for b, j in last.items())}


class Copies:
    """This rank's weights of which other ranks have copies. owner_ranks: of each weight of this rank, as of `owner_ranks`."""

    def __init__(self, owner_ranks: dict[nn.Parameter, tuple[int, ...]], groups: dict, by_others: bool):
        self.owner_ranks, self.groups, self.by_others, self.earlier = owner_ranks, groups, by_others, {}

    def set_aside(self) -> None:
        """Before a step: keep what earlier steps have added up, which is summed already."""
        self.earlier = {}
        for weight in () if self.by_others else self.groups:
            self.earlier[weight], weight.grad = weight.grad, None

    def sum_gradients(self) -> None:
        """After a step: sum the copies' gradients, unless somebody else does it. Collective over the pipeline."""
        works = []
        for weight in self.earlier:
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            works.append(dist.all_reduce(weight.grad, group=self.groups[weight], async_op=True))
        for work, (weight, earlier) in zip(works, self.earlier.items(), strict=True):
            work.wait()
            if earlier is not None:
                weight.grad += earlier
        self.earlier = {}


def sync_tied_weights(stages: nn.ModuleDict, schedule: Schedule, group, dp_group=None) -> Copies:
    """Find the copies, and give them the values of the first rank that has them. Collective over the default group.

    dp_group: the ranks over which gradients are reduced beside the pipeline; each copy then gets a `reduce_group`: its
    copies' ranks, times dp_group or the reduce_group that it has.
    """
    of_stages = {
        w: placement_of(w).stages or (int(number),) for number, stage in stages.items() for w in stage.parameters()
    }
    has = {weight: owner_ranks(schedule, numbers) for weight, numbers in of_stages.items()}
    over = {}  # of each weight with copies: who has them, and over which ranks each is reduced
    for weight in (weight for weight, ranks in has.items() if len(ranks) > 1):
        reduced = (placement_of(weight).reduce_group or dp_group) if dp_group else None
        over[weight] = has[weight], tuple(dist.get_process_group_ranks(reduced)) if reduced else (dist.get_rank(),)
    of_all = [None] * dist.get_world_size()
    all_gather_object(of_all, (dist.get_process_group_ranks(group), set(over.values())))

    def members(key: tuple) -> tuple[int, ...]:
        return tuple(sorted({of_all[rank][0][place] for rank in key[1] for place in key[0]}))

    splits = []  # lists of sets of ranks that do not overlap: each list is one split of the communicator
    for ranks in sorted({members(key) for _, keys in of_all for key in keys}):
        split = next((split for split in splits if set(ranks).isdisjoint(itertools.chain(*split))), None)
        if split is None:
            splits.append(split := [])
        split.append(ranks)
    own = [its_group for its_group in map(new_disjoint_subgroups, splits) if its_group is not None]
    made = {tuple(dist.get_process_group_ranks(its_group)): its_group for its_group in own}
    names = {weight: name for stage in stages.values() for name, weight in stage.named_parameters()}

    def order(weight: nn.Parameter) -> tuple:
        """The same on all ranks that have it, which may have other stages beside."""
        return members(over[weight]), of_stages[weight], names[weight]

    groups = {weight: made[members(over[weight])] for weight in sorted(over, key=order)}
    for weight, its_group in groups.items():
        if not weight.is_meta:
            dist.broadcast(weight.detach(), group=its_group, group_src=0)
        if dp_group is not None:
            placement_of(weight).reduce_group = its_group
    trained = {weight: its_group for weight, its_group in groups.items() if weight.requires_grad}
    return Copies(has, trained, dp_group is not None)
