"""References of several checks of notebook 04: one process that has all batches, and how many buckets it takes."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist

from course_kit.labs.data_parallel import batch_of, sgd_step
from course_kit.typed import grad_of
from course_lib.collectives.traffic import Traffic
from course_lib.single_gpu.model import ModelConfig, Transformer, loss

TINY = ModelConfig(1, 48, 4, 2, 100, 97, tied=True)  # odd sizes on purpose
Tensors = dict[str, torch.Tensor]  # by the parameter's name


@functools.cache
def one_process(world: int, steps: int = 1) -> tuple[Tensors, Tensors]:
    """Return the gradients of the last step, and the weights after it, of one process that has all ranks' batches."""
    model = Transformer(TINY)
    inputs, targets = torch.cat([batch_of(rank, TINY) for rank in range(world)], dim=1)
    for _ in range(steps):
        model.zero_grad()
        loss(model(inputs), targets).backward()
        sgd_step(model)
    named = list(model.named_parameters())
    return {name: grad_of(p) for name, p in named}, {name: p.detach() for name, p in named}


def farthest(got: Tensors, expected: Tensors) -> tuple[str, float]:
    """Return the name whose tensor is farthest from the expected one, and how far, relative to its largest element."""
    apart = {name: ((got[name] - e).abs().max() / e.abs().max()).item() for name, e in expected.items()}
    name = max(apart, key=lambda name: apart[name] if apart[name] == apart[name] else 1e9)
    return name, apart[name]


def cause(got: torch.Tensor, expected: torch.Tensor, n: int) -> str:
    """Describe the error of a gradient of n ranks."""
    factor = (got.norm() / expected.norm()).item()
    if abs(factor / n - 1) < 1e-3:
        return f"is {n} times one process's: a sum, not the mean: divide by the number of ranks"
    if abs(factor * n - 1) < 1e-3:
        return f"is one process's divided by {n}: it is divided twice"
    return f"has a norm {factor:.3f} times one process's: is it of this rank alone, or has a gradient been left out?"


def check_traffic(rank: int, traffic: Traffic, members: tuple[int, ...], nbytes: list[int]) -> None:
    """Assert that a rank sent only within the group, and no more than an all-reduce of each tensor sends."""
    assert {record.group for record in traffic.records} == {members}, f"rank {rank}: reduce over `group`"
    enough = sum(2 * (len(members) - 1) * size // len(members) for size in nbytes)
    assert traffic.bytes <= enough, f"rank {rank} sends {traffic.bytes:,} bytes, {enough:,} are enough"


def bucket_count(model: torch.nn.Module, bucket_bytes: float) -> int:
    """Return how many buckets the parameters of a model take, all of one dtype, from the last one to the first."""
    count, room = 0, -1.0
    for parameter in reversed(list(model.parameters())):
        if parameter.nbytes > room:
            count, room = count + 1, bucket_bytes
        room -= parameter.nbytes
    return count


def in_group(n: int, function: Callable, *args) -> list:
    """Return the results of function(group, *args) on the ranks of a group: the last n of 4; None, the default, for 4.

    The others run it in a group of their own: an answer that takes the default group by mistake gets wrong numbers, and
    no deadlock.
    """
    from course_kit.ranks import shared

    def on_rank():
        world = list(range(dist.get_world_size()))
        if n == len(world):
            return function(None, *args)
        groups = [dist.new_group(members) for members in (world[-n:], world[:-n])]
        group = groups[dist.get_rank() < len(world) - n]
        result = function(group, *args)
        dist.barrier(group)
        return result

    return shared(4)(on_rank)[-n:]
