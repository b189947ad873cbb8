"""Steps of our runner and of torch.distributed.pipelining in alternation, on the same ranks."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from course_kit.labs.pipeline.models import batch_of
from course_kit.labs.tensor_parallel.models import relative_error
from course_kit.typed import grad_of
from course_lib.pipeline.runner import PipelineRunner
from course_lib.pipeline.schedules import Schedule, num_stages
from course_lib.pipeline.stages import split_stages
from course_lib.single_gpu.model import ModelConfig, Transformer, loss


def against_torch(
    ours: Schedule, theirs: str, config: ModelConfig, repeats: int = 3
) -> tuple[list[float], list[float], float]:
    """On a rank: seconds of steps of our runner, and of PyTorch's class of that name; and the largest difference of a
    gradient, relative.
    """
    from torch.distributed.pipelining import PipelineStage, schedules

    torch.set_num_threads(1)
    rank, n = dist.get_rank(), num_stages(ours)
    m = 1 + max(action.micro_batch for action in ours[0])
    inputs, targets = batch_of(m, 64, config)
    models = [Transformer(config) for _ in range(2)]
    runner = PipelineRunner(split_stages(models[0], n), ours)
    parts, local = split_stages(models[1], n), sorted({action.stage for action in ours[rank]})
    stages = [PipelineStage(parts[i], i, n, torch.device("cpu")) for i in local]
    kind = getattr(schedules, theirs)
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    schedule = kind(stages[0] if single else stages, m, loss_fn=loss)

    def their_step() -> None:
        target = {"target": targets} if n - 1 in local else {}
        schedule.step(*([inputs] if 0 in local else []), **target)

    times = []
    for _ in range(repeats + 1):  # the first repeat is a warm-up
        for step, model in ((lambda: runner.step(inputs, targets), models[0]), (their_step, models[1])):
            model.zero_grad()
            dist.barrier()
            start = time.perf_counter()
            step()
            dist.barrier()
            times.append(time.perf_counter() - start)
    far = max(
        relative_error(a.grad, grad_of(b))
        for a, b in zip(*(model.parameters() for model in models), strict=True)
        if a.grad is not None
    )
    return times[2::2], times[3::2], far
