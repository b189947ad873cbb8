"""The sends and receives of a schedule: one order for all ranks, and what each rank starts before which action.

All transfers of a schedule have one order, that of the times at which a simulation has them ready. Every rank starts
its own in this order, so the first transfer that is not complete has nothing before it on either side: none can wait
for ever, even where a send waits for its receive. Those that become ready at once go out as one batch.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
import torch.distributed as dist

from course_lib.pipeline.schedules import Schedule
from course_lib.pipeline.simulation import simulate


class Transfer(NamedTuple):
    """Of one tensor: what for, and from which rank of the group to which."""

    kind: str  # F: a hidden state, for the forward of `stage`; B: a gradient, for its backward
    stage: int
    micro_batch: int
    source: int
    target: int


def find_transfers(schedule: Schedule) -> list[tuple]:
    """All transfers, in order: (time when it is ready, index of the source's action that makes it, transfer)."""
    on = {(each.stage, each.micro_batch): rank for rank, actions in enumerate(schedule) for each in actions}
    found = []
    for rank, row in enumerate(simulate(schedule).timeline):
        for i, ((kind, stage, micro_batch), _, end) in enumerate(row):
            stage += 1 if kind == "F" else -1  # the one that waits for it
            target = on.get((stage, micro_batch), rank)  # beyond both ends nobody waits
            if kind != "W" and target != rank:
                found.append((end, i, Transfer("F" if kind == "F" else "B", stage, micro_batch, rank, target)))
    return sorted(found)


def plan_send_recv(schedule: Schedule, rank: int) -> list[list[list[Transfer]]]:
    """What a rank starts before each of its actions and after the last: batches of transfers, in order."""
    own = [each for each in find_transfers(schedule) if rank in each[2][3:]]
    actions = schedule[rank]
    needed = {("F" if a.kind == "F" else "B", *a[1:]): i for i, a in enumerate(actions) if a.kind != "W"}
    places, earliest = [], 0
    for _, i, transfer in own:
        if transfer.source == rank:
            places.append(earliest := i + 1)  # as soon as it is made
        else:
            places.append(max(earliest, needed[transfer[:3]] - 1))
    for k in reversed(range(len(places) - 1)):  # nothing starts after what comes later in the order
        places[k] = min(places[k], places[k + 1])
    plan = [{} for _ in range(len(actions) + 1)]
    for (ready, _, transfer), place in zip(own, places, strict=True):
        plan[place].setdefault(ready, []).append(transfer)
    return [list(batches.values()) for batches in plan]


MAX_SENDS_IN_FLIGHT = 4  # sends that a rank has not yet waited for


class P2PBuffers:
    """One step's sends and receives of this rank. shapes: of what enters each stage, (shape, dtype)."""

    def __init__(self, plan: list[list[list[Transfer]]], group: dist.ProcessGroup, shapes: list, device: torch.device):
        self.plan, self.group, self.rank, self.shapes, self.device = plan, group, group.rank(), shapes, device
        self.arriving, self.leaving, self.sent = {}, {}, deque()
        self.sends = {t[:3] for batches in plan for batch in batches for t in batch if t.source == self.rank}

    # notebook 09, cell mail
    def post_send(self, kind: str, stage: int, micro_batch: int, tensor: torch.Tensor) -> None:
        """Hand over what this rank has made for another rank, or for itself."""
        key = kind, stage, micro_batch
        if key in self.sends:
            self.leaving[key] = tensor.contiguous()
        else:
            self.arriving[key] = None, tensor

    # notebook 09, cell mail
    def wait_recv(self, kind: str, stage: int, micro_batch: int) -> torch.Tensor:
        """What has come for this rank; waits for it."""
        work, tensor = self.arriving.pop((kind, stage, micro_batch))
        if work is not None:
            work.wait()
        return tensor

    def start(self, place: int) -> None:
        """Start what the plan has before action `place`."""
        for batch in self.plan[place]:
            operations = [self.operation(transfer) for transfer in batch]
            works = dist.batch_isend_irecv(operations)  # one for each, or (NCCL) one for all
            for transfer, operation, work in zip(batch, operations, works * (len(batch) // len(works)), strict=True):
                if transfer.source == self.rank:
                    self.sent.append((work, operation.tensor))  # which must live until then
                else:
                    self.arriving[transfer[:3]] = work, operation.tensor
        self.wait_for_sends(MAX_SENDS_IN_FLIGHT)

    def operation(self, transfer: Transfer) -> dist.P2POp:
        """A send of what is there, or a receive into a new tensor."""
        if transfer.source == self.rank:
            tensor = self.leaving.pop(transfer[:3])
            return dist.P2POp(dist.isend, tensor, group=self.group, group_peer=transfer.target)
        shape, dtype = self.shapes[transfer.stage + (transfer.kind == "B")]  # a gradient is as what it belongs to
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        return dist.P2POp(dist.irecv, tensor, group=self.group, group_peer=transfer.source)

    def wait_for_sends(self, left: int) -> None:
        """Until no more than `left` sends may be on their way. (The other side starts to receive them by itself.)"""
        while len(self.sent) > left:
            self.sent.popleft()[0].wait()
