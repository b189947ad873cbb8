"""Check of exercise 05.6: gradients move to a flat buffer, and are sent from there."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from course_kit.checks.tensor_parallel.cases import in_case
from course_kit.checks.tensor_parallel.memory import AtOnce
from course_kit.checks.watchers import SizesFit
from course_kit.checks.zero.comparing import noted_waits, results_of
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


CASES = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
)  # dtypes of the gradients and of the buffer


def buffer_trial(group: dist.ProcessGroup, dtype: torch.dtype, sent_dtype: torch.dtype) -> tuple:
    """Store gradients, one of them twice, in a used buffer that is too long, and send them.

    Return the numbers of the gradients that are still in memory, how often send() waits, whether it returns a work,
    the traffic, the sums over the ranks and the expected ones, the padding, whether the rest of the buffer is
    as it was, whether `stored` is, how many tensors of the buffer's size send() makes, and the bytes that are enough to
    send.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((5, 3), (2,), (), (4, 4))]
    layout = FlatLayout([*parameters], group)
    buffer = torch.full((layout.padded + 8,), torch.nan, dtype=sent_dtype)
    shard = torch.full((layout.shard_numel,), torch.nan, dtype=sent_dtype)
    gradients, memory = GradientBuffer(parameters, layout), []
    gradients.attach(buffer)
    for number in [0, 1, 0] if rank else [0, 1, 3, 0]:  # no rank has a gradient of 2, rank 0 alone has one of 3
        parameter = parameters[number]
        filled = torch.full(parameter.shape[::-1], rank + number + 1.0, dtype=dtype)
        parameter.grad = filled.permute(*reversed(range(filled.dim())))  # a matrix's is not contiguous
        strides = filled.stride()[::-1]
        del filled
        memory.append((number, grad_of(parameters[number]).untyped_storage()._weak_ref()))
        with in_case(f"store() of a gradient in {dtype}, strides {strides}, in a buffer in {sent_dtype}"):
            gradients.store(parameters[number])
    saved = [i for i, parameter in enumerate(parameters) if parameter.grad is not None]
    saved += [number for number, storage in memory if not torch.UntypedStorage._expired(storage)]
    stored = set(gradients.stored)
    with (
        SizesFit(),
        count_traffic() as traffic,
        noted_waits() as waits,
        AtOnce(layout.padded * sent_dtype.itemsize) as large,
    ):
        work = gradients.send(shard)
    returns_work = hasattr(work, "wait")
    if returns_work:
        work.wait()
    full = torch.empty(layout.padded, dtype=sent_dtype)
    all_gather_into_tensor(full, shard, group=group)
    sums, padding = [view.flatten().tolist() for view in layout.views(full)], full[layout.numel :].tolist()
    expected = [sum(2.0 * (r + 1) for r in range(world)), sum(r + 2.0 for r in range(world)), 0.0, 4.0]
    is_guarded = buffer[layout.padded :].isnan().all().item()
    enough = layout.shard_numel * (world - 1) * sent_dtype.itemsize
    others = is_guarded, gradients.stored == stored, large.most, enough
    return saved, len(waits), returns_work, traffic, sums, expected, padding, *others


def check() -> None:
    """Assert on 3 ranks that gradients move and add up, what is sent, without a wait, and that the rest is zeros."""
    from course_kit.ranks import shared

    ranks = shared(4)
    with ranks.within(20):
        outcomes = [
            (f"3 ranks, rank {rank}, gradients in {dtype}, a buffer in {sent_dtype}", result)
            for (dtype, sent_dtype), results in zip(
                CASES, results_of([(3, buffer_trial, *case) for case in CASES]), strict=True
            )
            for rank, result in enumerate(results)
        ]
    for where, result in outcomes:
        saved, waits, returns_work, traffic, sums, expected, padding, is_guarded, same, large, enough = result
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
        assert same, f"{where}: send() changes self.stored: the caller clears it, after waiting"
        assert not large, f"{where}: send() makes a tensor as large as the buffer: send from the buffer itself"
        assert traffic.bytes == enough, f"{where}: {traffic.bytes} bytes sent, not {enough}: in the buffer's dtype"
