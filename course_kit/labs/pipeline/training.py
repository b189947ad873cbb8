"""Three steps of AdamW on four ranks, on two pipelines of two ranks and in one process, and their differences."""

from __future__ import annotations

import functools
from typing import Any

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

ADAMW: dict[str, Any] = {"lr": 1e-2, "eps": 1e-4}  # a smaller eps amplifies rounding errors of gradients near 0
MAX_NORM = 0.5
Numbers = list[tuple[float, float]]  # loss and norm of each step
Trained = tuple[Numbers, dict[str, torch.Tensor]]  # and the weights after the last step, by name


def weights_of(runner: PipelineRunner) -> dict[str, torch.Tensor]:
    """Return the weights of this rank's stages, by name."""
    return {name: weight.detach() for stage in runner.stages.values() for name, weight in stage.named_parameters()}


def three_steps(schedule: Schedule, config: ModelConfig = TINY) -> Trained:
    """On a rank: losses and norms of three steps, and the local weights after them."""
    runner = PipelineRunner(split_stages(Transformer(config), num_stages(schedule)), schedule)
    optimizer, numbers = torch.optim.AdamW(runner.stages.parameters(), **ADAMW), []
    for _ in range(3):
        optimizer.zero_grad()
        inputs, targets = batch_of(8, config=config)
        step_loss = runner.step(inputs, targets)
        dist.all_reduce(step_loss)
        numbers.append((step_loss.item(), clip_grad_norm_(runner, MAX_NORM).item()))
        optimizer.step()
    return numbers, weights_of(runner)


@functools.cache
def three_alone(config: ModelConfig = TINY) -> Trained:
    """Return losses, norms and weights of three steps in one process."""
    model = Transformer(config)
    optimizer, numbers = torch.optim.AdamW(model.parameters(), **ADAMW), []
    inputs, targets = batch_of(8, config=config)
    for _ in range(3):
        optimizer.zero_grad()
        value = loss(model(inputs), targets)
        value.backward()
        numbers.append((value.item(), nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item()))
        optimizer.step()
    return numbers, {name: w.detach() for name, w in model.named_parameters(remove_duplicate=False)}


def on_two_pipelines(schedule: Schedule, zero: bool, config: ModelConfig = TINY) -> tuple[Trained, int]:
    """On a rank: the results of three_steps on two pipelines of two ranks, each with half of the batch, and the number
    of all-reduces or reduce-scatters in a step. zero: ZeRO-1 instead of DataParallel.
    """
    dp_group, group = dist.init_device_mesh("cpu", (2, 2)).get_all_groups()
    runner = PipelineRunner(split_stages(Transformer(config), num_stages(schedule)), schedule, group, dp_group=dp_group)
    wrapped: ZeroOptimizer | DataParallel
    optimizer: torch.optim.Optimizer
    if zero:
        optimizer = wrapped = ZeroOptimizer(runner.stages, torch.optim.AdamW, dp_group, stage=1, **ADAMW)
    else:
        wrapped = DataParallel(runner.stages, dp_group)
        optimizer = torch.optim.AdamW(runner.stages.parameters(), **ADAMW)
    inputs, targets = (each.chunk(2)[dp_group.rank()] for each in batch_of(8, config=config))
    numbers = []
    for _ in range(3):
        optimizer.zero_grad()
        with count_traffic() as traffic:
            step_loss = runner.step(inputs, targets, no_sync=wrapped.no_sync)
            wrapped.finish()
        dist.all_reduce(step_loss)
        norm = clip_grad_norm_(runner, MAX_NORM, wrapped if isinstance(wrapped, ZeroOptimizer) else None)
        numbers.append((step_loss.item() / 2, norm.item()))
        optimizer.step()
    if isinstance(wrapped, ZeroOptimizer):
        wrapped.wait()
    sums = [record for record in traffic.records if record.collective in ("all_reduce", "reduce_scatter")]
    return (numbers, weights_of(runner)), len(sums)


def farthest(results: list[Trained], expected: Trained) -> tuple[float, float]:
    """Return the largest relative differences from `expected`: of losses and norms, and of weights."""
    numbers, weights = expected
    off = max(
        abs(a - b) / b
        for row_of_rank, _ in results
        for row, wanted in zip(row_of_rank, numbers, strict=True)
        for a, b in zip(row, wanted, strict=True)
    )
    return off, max(relative_error(weight, weights[name]) for _, of_rank in results for name, weight in of_rank.items())


def beside_one_process(name: str, results: list[Trained]) -> str:
    """Return a line with the relative differences of ranks from one process. Raises AssertionError above 1e-5."""
    off, weights_off = farthest(results, three_alone())
    assert off < 1e-5 and weights_off < 1e-5, f"{name}: losses and norms are {off:.1e} off, weights {weights_off:.1e}"
    return f"{name:22s} losses and norms {off:.1e}, weights {weights_off:.1e}"
