"""The loss on held-out sequences, in any layout: the same number for the same weights.

Every dp rank takes its share of the sequences, context parallelism splits them as in training, and a pipeline runs the
forwards of its schedule alone. The sum of the losses and the count of target tokens are float64 on the device; one
all-reduce at the end adds them up, and the host reads nothing before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from course_lib.five_d.layouts import Layout, check_sizes, schedule_of
from course_lib.five_d.model import ParallelModel
from course_lib.pipeline.forward_only import forward_only, forwards_of
from course_lib.pipeline.schedules import Schedule
from course_lib.recompute.modes import IGNORED
from course_lib.sequence_parallel.shards import local_positions, shard_sequence
from course_lib.zero.full_sharding import FullyShard


class Sequences(Protocol):
    """A fixed set of `count` sequences of one length."""

    count: int

    def sequences(self, first: int, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return inputs, targets [n, s] and positions [n, s] (None: 0 … s-1) of the sequences from `first` on, int64 on
        the CPU. Rows beyond `count` are padding, whose targets are all IGNORED.
        """


@contextlib.contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Put a module in evaluation mode, and every one of its modules back in its own mode afterward."""
    modes = {each: each.training for each in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for each, training in modes.items():
            each.training = training


def schedule_for(layout: Layout, sequences: int, most: int) -> Schedule:
    """Return the layout's schedule for `sequences` sequences of a dp rank: for the least number of micro-batches that
    holds them and that the schedule allows, but for no more than about `most`, which the schedule allows.
    """
    fewest = min(-(-sequences // layout.micro_batch), most)
    for m in range(max(1, fewest), most):
        with contextlib.suppress(ValueError):  # interleaved: multiples of pp; dualpipe: even, from 2 pp on
            return schedule_of(layout, m)
    return schedule_of(layout, most)


def evaluate(parallel: ParallelModel, sequences: Sequences) -> torch.Tensor:
    """Return the mean loss over the target tokens of `sequences` that are not IGNORED, a float64 scalar on the device,
    the same on all ranks. Collective over the default group; all ranks pass the same sequences.

    Forward only, with as many micro-batches at a time as in a training step, or fewer. Nothing of the training changes:
    gradients, counts and losses of routers, random state, modes of modules. NaN if no target counts. With experts of
    limited capacity the number depends on the micro-batches. Raises ValueError if the layout does not divide the
    sequence.
    """
    layout, mesh, runner = parallel.layout, parallel.mesh, parallel.runner
    device = next(parallel.stages.parameters()).device
    schedule = schedule_for(layout, -(-sequences.count // layout.dp), runner.m)
    forwards = forwards_of(runner, schedule)
    rows, total = forwards.m * layout.micro_batch, torch.zeros(2, dtype=torch.float64, device=device)
    with eval_mode(runner.stages):
        for first in range(0, sequences.count, layout.dp * rows):
            inputs, targets, positions = sequences.sequences(first + mesh.dp.rank() * rows, rows)
            check_sizes(layout, None, inputs.shape[1])
            inputs, targets = (local(each, parallel, device) for each in (inputs, targets))
            if positions is None:
                positions = local_positions(inputs.shape[1], mesh.cp, layout.order, device)
            else:
                positions = local(positions, parallel, device)
            total[0] += forward_only(forwards, inputs, targets, positions)
            total[1] += (targets != IGNORED).sum() * (mesh.pp.rank() == 0)
            if isinstance(parallel.sharding, FullyShard):
                parallel.sharding.wait()  # frees the weights that before_step has gathered
    total *= mesh.tp.rank() == 0  # all tp ranks have the same losses
    dist.all_reduce(total)
    return total[0] / total[1]


def local(full: torch.Tensor, parallel: ParallelModel, device: torch.device) -> torch.Tensor:
    """Return this rank's tokens [n, s/cp] of [n, s], on its device."""
    return shard_sequence(full.to(device, non_blocking=True), parallel.mesh.cp, parallel.layout.order)
