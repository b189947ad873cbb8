"""The sends and receives of a schedule: one order for all ranks, and what each rank starts before which action.

All transfers of a schedule have one order: by the times at which a simulation has them ready. Every rank starts its
transfers in this order, so the first transfer that is not complete has nothing before it on either side: none can wait
forever, even if a send waits for its receive. Transfers that become ready at the same time start as one batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from course_lib.pipeline.actions import Action
from course_lib.pipeline.schedules import Schedule
from course_lib.pipeline.simulation import simulate


class Transfer(NamedTuple):
    """One tensor's way from a rank of the group to another."""

    kind: str  # F: a hidden state, for the forward of `stage`; B: a gradient, for its backward
    stage: int
    micro_batch: int
    source: int
    target: int


class StageInput(NamedTuple):
    """The shape and dtype of a stage's input, and of the gradient that it sends back."""

    shape: torch.Size
    dtype: torch.dtype


class ReadyTransfer(NamedTuple):
    """A transfer, when it is ready in the simulation, and which action of its source makes the tensor."""

    time: float
    action: int  # index in the source's list
    transfer: Transfer


def find_transfers(schedule: Schedule) -> list[ReadyTransfer]:
    """Return all transfers of a schedule, in the order of the times when they are ready."""
    owner = {(action.stage, action.micro_batch): rank for rank, row in enumerate(schedule) for action in row}
    transfers = []
    for rank, row in enumerate(simulate(schedule).timeline):
        for i, ((kind, stage, micro_batch), _, end) in enumerate(row):
            receiver = stage + (1 if kind == "F" else -1)
            target = owner.get((receiver, micro_batch), rank)  # beyond both ends there is no receiver
            if kind != "W" and target != rank:
                way = "F" if kind == "F" else "B"
                transfers.append(ReadyTransfer(end, i, Transfer(way, receiver, micro_batch, rank, target)))
    return sorted(transfers)


def plan_send_recv(schedule: Schedule, rank: int) -> list[list[list[Transfer]]]:
    """Return the batches of transfers, in order, that a rank starts before each of its actions and after the last."""
    local = [each for each in find_transfers(schedule) if rank in (each.transfer.source, each.transfer.target)]
    actions = schedule[rank]
    needed = {("F" if a.kind == "F" else "B", *a[1:]): i for i, a in enumerate(actions) if a.kind != "W"}
    starts, earliest = [], 0  # the index of the action before which each transfer starts
    for _, i, transfer in local:
        if transfer.source == rank:
            starts.append(earliest := i + 1)  # as soon as it is made
        else:
            starts.append(max(earliest, needed[transfer[:3]] - 1))
    for k in reversed(range(len(starts) - 1)):  # nothing starts after what comes later in the order
        starts[k] = min(starts[k], starts[k + 1])
    plan: list[dict[float, list[Transfer]]] = [{} for _ in range(len(actions) + 1)]
    for (ready, _, transfer), start in zip(local, starts, strict=True):
        plan[start].setdefault(ready, []).append(transfer)
    return [list(batches.values()) for batches in plan]


@torch.no_grad()
def infer_stage_shapes(
    stages: nn.ModuleDict,
    schedule: Schedule,
    inputs: torch.Tensor | None,
    args: tuple,
    group: dist.ProcessGroup,
    device: torch.device,
) -> list[StageInput | None]:
    """Return the shape and dtype of each stage's input, None for the first one; the same on all ranks. Collective.

    The stages run one after another, the first on `inputs`, the others on noise; the rank that has a stage broadcasts
    the shape of its output. args: a stage's other arguments.
    """
    owner = {action.stage: rank for rank, actions in reversed(list(enumerate(schedule))) for action in actions}
    shapes: list[StageInput | None] = [None] * len(owner)
    with torch.random.fork_rng([device.index] if device.type == "cuda" else []):
        for stage in range(len(owner) - 1):
            message: list[StageInput | None] = [None]
            if owner[stage] == group.rank():
                known = shapes[stage]
                x = inputs if known is None else torch.randn(known.shape, dtype=known.dtype, device=device)
                out = stages[str(stage)](x, *args)
                message = [StageInput(out.shape, out.dtype)]
            dist.broadcast_object_list(message, group=group, group_src=owner[stage])
            shapes[stage + 1] = message[0]
    return shapes


MAX_SENDS_IN_FLIGHT = 4  # per rank
Key = tuple[str, int, int]  # kind, stage and micro-batch of a Transfer


class P2PBuffers:
    """The sends and receives of this rank in one step. shapes: of each stage's input, None for the first stage.

    `incoming` has the tensors for this rank's actions, each with the work to wait for (None: it is there); `outgoing`
    those that wait for their send; `in_flight` the sends that have started.
    """

    def __init__(
        self,
        plan: list[list[list[Transfer]]],
        group: dist.ProcessGroup,
        shapes: Sequence[StageInput | None],
        device: torch.device,
    ):
        self.plan, self.group, self.rank, self.shapes, self.device = plan, group, group.rank(), shapes, device
        self.incoming: dict[Key, tuple[dist.Work | None, torch.Tensor]] = {}
        self.outgoing: dict[Key, torch.Tensor] = {}
        self.in_flight: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self.sends = {t[:3] for batches in plan for batch in batches for t in batch if t.source == self.rank}

    # notebook 09, cell mail
    def post_send(self, kind: str, stage: int, micro_batch: int, tensor: torch.Tensor) -> None:
        """Queue an output of this rank for its planned send, or store it if an action of this rank is to receive it."""
        key = kind, stage, micro_batch
        if key in self.sends:
            self.outgoing[key] = tensor.contiguous()
        else:
            self.incoming[key] = None, tensor

    # notebook 09, cell mail
    def wait_recv(self, kind: str, stage: int, micro_batch: int) -> torch.Tensor:
        """Wait for the input of an action of this rank, and return it. Raises KeyError if there is none."""
        key = kind, stage, micro_batch
        if key not in self.incoming:
            raise KeyError(self.no_tensor(key))
        work, tensor = self.incoming.pop(key)
        if work is not None:
            work.wait()
        return tensor

    def no_tensor(self, key: Key) -> str:
        """Return the message for a tensor that should be here: for which action, and what is here."""
        present = [f"{Action(*each)}, to send" for each in self.outgoing]
        for each, (work, _) in self.incoming.items():
            present.append(f"{Action(*each)}, {'posted here' if work is None else 'received'}")
        return (
            f"rank {self.rank} has no tensor for {Action(*key)}. It has: {'; '.join(present) or 'none'}. "
            "(Kind, stage and micro-batch are those of the action that takes the tensor.)"
        )

    def start(self, index: int) -> None:
        """Start the transfers that the plan has before action `index`."""
        for batch in self.plan[index]:
            operations = [self.operation(transfer) for transfer in batch]
            works = dist.batch_isend_irecv(operations)  # one for each, or (NCCL) one for all
            for transfer, operation, work in zip(batch, operations, works * (len(batch) // len(works)), strict=True):
                if transfer.source == self.rank:
                    self.in_flight.append((work, operation.tensor))  # the tensor must live until the send is complete
                else:
                    self.incoming[transfer[:3]] = work, operation.tensor
        self.wait_for_sends(MAX_SENDS_IN_FLIGHT)

    def operation(self, transfer: Transfer) -> dist.P2POp:
        """Return a send of a tensor in `outgoing`, or a receive into a new tensor."""
        if transfer.source == self.rank:
            if transfer[:3] not in self.outgoing:
                raise KeyError(self.no_tensor(transfer[:3]))
            tensor = self.outgoing.pop(transfer[:3])
            return dist.P2POp(dist.isend, tensor, group=self.group, group_peer=transfer.target)
        # The gradient for the backward of a stage is like the input of the stage after it.
        expected = self.shapes[transfer.stage + (transfer.kind == "B")]
        assert expected is not None, "nothing is sent to the first stage's forward"
        tensor = torch.empty(expected.shape, dtype=expected.dtype, device=self.device)
        return dist.P2POp(dist.irecv, tensor, group=self.group, group_peer=transfer.source)

    def wait_for_sends(self, left: int) -> None:
        """Wait until at most `left` sends are in flight. (The receiver starts its side by itself.)"""
        while len(self.in_flight) > left:
            self.in_flight.popleft()[0].wait()
