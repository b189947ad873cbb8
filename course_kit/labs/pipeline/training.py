"""Three steps of AdamW: on four ranks, on two pipelines of two ranks, in one process; and how far they are apart."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch import nn

from course_kit.labs.pipeline.models import TINY, batch_of
from course_kit.labs.tensor_parallel.models import relative_error
from course_lib.collectives.traffic import count_traffic
from course_lib.data_parallel.replicas import DataParallel
from course_lib.pipeline.norm import clip_grad_norm_
from course_lib.pipeline.runner import PipelineRunner
from course_lib.pipeline.schedules import Schedule, num_stages
from course_lib.pipeline.stages import split_stages
from course_lib.single_gpu.model import ModelConfig, Transformer, loss
from course_lib.zero.optimizer import ZeroOptimizer

ADAMW = {"lr": 1e-2, "eps": 1e-4}  # a smaller eps would blow rounding errors up where a gradient is nearly 0
MAX_NORM = 0.5
Numbers = list[tuple[float, float]]  # loss and norm of each step
Trained = tuple[Numbers, dict[str, torch.Tensor]]  # and the weights after them, by name


def weights_of(runner: PipelineRunner) -> dict[str, torch.Tensor]:
    """The weights of this rank's stages, by name."""
    return {name: weight.detach() for stage in runner.stages.values() for name, weight in stage.named_parameters()}


def three_steps(schedule: Schedule, config: ModelConfig = TINY) -> Trained:
    """On a rank: losses and norms of three steps, and this rank's weights after them."""
    runner = PipelineRunner(split_stages(Transformer(config), num_stages(schedule)), schedule)
    optimizer, found = torch.optim.AdamW(runner.stages.parameters(), **ADAMW), []
    for _ in range(3):
        optimizer.zero_grad()
        part = runner.step(*batch_of(8, config=config))
        dist.all_reduce(part)
        found.append((part.item(), clip_grad_norm_(runner, MAX_NORM).item()))
        optimizer.step()
    return found, weights_of(runner)


@functools.cache
def three_alone(config: ModelConfig = TINY) -> Trained:
    """The same in one process."""
    model = Transformer(config)
    optimizer, found = torch.optim.AdamW(model.parameters(), **ADAMW), []
    inputs, targets = batch_of(8, config=config)
    for _ in range(3):
        optimizer.zero_grad()
        value = loss(model(inputs), targets)
        value.backward()
        found.append((value.item(), nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item()))
        optimizer.step()
    return found, {name: w.detach() for name, w in model.named_parameters(remove_duplicate=False)}


def on_two_pipelines(schedule: Schedule, zero: bool, config: ModelConfig = TINY) -> tuple[Trained, int]:
    """On a rank: as three_steps, on two pipelines of two ranks, each with half of the batch; and how many all-reduces
    or reduce-scatters a step has. zero: ZeRO-1 instead of DataParallel.
    """
    dp_group, group = dist.init_device_mesh("cpu", (2, 2)).get_all_groups()
    runner = PipelineRunner(split_stages(Transformer(config), num_stages(schedule)), schedule, group, dp_group=dp_group)
    if zero:
        optimizer = wrapped = ZeroOptimizer(runner.stages, torch.optim.AdamW, dp_group, stage=1, **ADAMW)
    else:
        wrapped = DataParallel(runner.stages, dp_group)
        optimizer = torch.optim.AdamW(runner.stages.parameters(), **ADAMW)
    inputs, targets = (each.chunk(2)[dp_group.rank()] for each in batch_of(8, config=config))
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        with count_traffic() as traffic:
            part = runner.step(inputs, targets, no_sync=wrapped.no_sync)
            wrapped.finish()
        dist.all_reduce(part)
        found.append((part.item() / 2, clip_grad_norm_(runner, MAX_NORM, wrapped if zero else None).item()))
        optimizer.step()
    if zero:
        optimizer.wait()
    sums = [record for record in traffic.records if record.collective in ("all_reduce", "reduce_scatter")]
    return (found, weights_of(runner)), len(sums)


def farthest(results: list[Trained], expected: Trained) -> tuple[float, float]:
    """How far the ranks' losses and norms, and their weights, are from what is expected, relative, at most."""
    numbers, weights = expected
    off = max(
        abs(a - b) / b
        for found, _ in results
        for row, wanted in zip(found, numbers, strict=True)
        for a, b in zip(row, wanted, strict=True)
    )
    return off, max(relative_error(own, weights[name]) for _, held in results for name, own in held.items())


def beside_one_process(name: str, results: list[Trained]) -> str:
    """A line that says how far ranks are from one process. Raises AssertionError where that is more than 1e-5."""
    off, apart = farthest(results, three_alone())
    assert off < 1e-5 and apart < 1e-5, f"{name}: losses and norms are {off:.1e} off, weights {apart:.1e}"
    return f"{name:22s} losses and norms {off:.1e}, weights {apart:.1e}"
