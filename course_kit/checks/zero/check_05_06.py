"""Check of exercise 05.6: gradients move to a flat buffer, and are sent from there."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from course_kit.checks.watchers import SizesFit
from course_kit.checks.zero.comparing import noted_waits
from course_kit.labs.zero import in_group
from course_kit.typed import grad_of
from course_lib.collectives.into_tensor import all_gather_into_tensor
from course_lib.collectives.traffic import count_traffic
from course_lib.zero.shards import FlatLayout, GradientBuffer

HINTS = (
    "stored twice: added",
    "stored once: not added to what was there",
    "no rank has it: zeros",
    "rank 0 alone has it",
)


def buffer_trial(group: dist.ProcessGroup) -> tuple:
    """Store gradients, one of them twice, in a used buffer that is too long, and send them.

    Return the numbers of the gradients that are still in memory, how often send() waits, whether it returns a work,
    the traffic, the sums over the ranks and the expected ones, the padding, and whether the rest of the buffer is as
    it was.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((5, 3), (2,), (), (4, 4))]
    layout = FlatLayout([*parameters], group)
    buffer, shard = torch.full((layout.padded + 8,), torch.nan), torch.full((layout.shard_numel,), torch.nan)
    gradients, memory = GradientBuffer(parameters, layout), []
    gradients.attach(buffer)
    for number in [0, 1, 0] if rank else [0, 1, 3, 0]:  # no rank has a gradient of 2, rank 0 alone has one of 3
        parameters[number].grad = torch.full_like(parameters[number], rank + number + 1.0)
        memory.append((number, grad_of(parameters[number]).untyped_storage()._weak_ref()))
        gradients.store(parameters[number])
    saved = [i for i, parameter in enumerate(parameters) if parameter.grad is not None]
    saved += [number for number, storage in memory if not torch.UntypedStorage._expired(storage)]
    with SizesFit(), count_traffic() as traffic, noted_waits() as waits:
        work = gradients.send(shard)
    returns_work = hasattr(work, "wait")
    if returns_work:
        work.wait()
    full = torch.empty(layout.padded)
    all_gather_into_tensor(full, shard, group=group)
    sums, padding = [view.flatten().tolist() for view in layout.views(full)], full[layout.numel :].tolist()
    expected = [sum(2.0 * (r + 1) for r in range(world)), sum(r + 2.0 for r in range(world)), 0.0, 4.0]
    is_guarded = buffer[layout.padded :].isnan().all().item()
    return saved, len(waits), returns_work, traffic, sums, expected, padding, is_guarded


def check() -> None:
    """Assert on 3 ranks that gradients move and add up, what is sent, without a wait, and that the rest is zeros."""
    from course_kit.ranks import shared

    ranks = shared(4)
    with ranks.within(20):
        outcomes = ranks(in_group, 3, buffer_trial)[:3]
    for rank, result in enumerate(outcomes):
        saved, waits, returns_work, traffic, sums, expected, padding, is_guarded = result
        where = f"3 ranks, rank {rank}"
        assert not saved, (
            f"{where}: after store() a gradient of parameter {saved[0]} is still in memory: .grad becomes None, and "
            "nothing else may refer to it"
        )
        assert returns_work, f"{where}: send() returns the work, to wait for later: async_op=True"
        assert waits == 0, f"{where}: send() waits; backward should continue"
        bytes_sent = [record.collective for record in traffic.records]
        assert bytes_sent == ["reduce_scatter"], (
            f"{where}: send() sends by {bytes_sent}; one reduce-scatter, nothing else"
        )
        for i, (got, want) in enumerate(zip(sums, expected, strict=True)):
            wrong = [value for value in got if value != want]
            assert not wrong, f"{where}: the sum for parameter {i} is {wrong[0]}, not {want} ({HINTS[i]})"
        assert not any(padding), f"{where}: the padding is {padding}, not zeros; it would count in the norm"
        assert is_guarded, f"{where}: you wrote beyond layout.padded, into another's memory"
