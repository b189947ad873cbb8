"""Small models and batches of notebook 09, a reference in one process, the naive step, and the memory of a step."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from course_kit.typed import grad_of
from course_lib.pipeline import runner, stages
from course_lib.pipeline.schedules import Schedule
from course_lib.single_gpu.model import ModelConfig, Transformer, loss
from course_lib.single_gpu.profile import MemoryProfile

TINY = ModelConfig(6, 32, 4, 2, 40, 97, tied=True)  # six layers, an odd vocabulary, one matrix for embedding and head
DEEP = ModelConfig(14, 256, 8, 4, 704, 256)
WIDE = ModelConfig(10, 192, 6, 3, 528, 4096)  # a large vocabulary
MiB = 2**20
Span = tuple[str, float, float]  # (kind of the action, start in ms, end in ms)


def batch_of(sequences: int = 8, seq: int = 12, config: ModelConfig = TINY) -> torch.Tensor:
    """Return inputs and targets of a batch, [2, b, s], the same on all ranks and in every call."""
    return torch.randint(config.vocab, (2, sequences, seq), generator=torch.Generator().manual_seed(100))


@functools.cache
def one_process(config: ModelConfig = TINY, sequences: int = 8) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and the gradients by name of the full batch in one process."""
    model = Transformer(config)
    inputs, targets = batch_of(sequences, config=config)
    step_loss = loss(model(inputs), targets)
    step_loss.backward()
    named = model.named_parameters(remove_duplicate=False)
    return step_loss.item(), {name: grad_of(parameter) for name, parameter in named}


def common_zero() -> float:
    """Return rank 0's `time.time()` after all ranks have met, the same on all ranks, in s."""
    dist.barrier()
    zero = torch.tensor(time.time(), dtype=torch.float64)
    dist.broadcast(zero, 0)
    return zero.item()


def there_and_back(stage: nn.Module, x: torch.Tensor, targets: torch.Tensor, noted: Callable) -> torch.Tensor:
    """Run one batch through this rank's stage, and its gradient back. x: the tokens on rank 0, a receive buffer on the
    other ranks; noted(kind): a context whose time is noted. Returns the output, in the last stage the loss.
    """
    rank, p = dist.get_rank(), dist.get_world_size()
    if rank > 0:
        dist.recv(x, rank - 1)
    with noted("F"):
        done = stages.StagePass(stage, x, lambda out: loss(out, targets) if rank == p - 1 else out)
    output = done.out
    gradient = torch.ones(()) if rank == p - 1 else torch.empty_like(output)
    if rank < p - 1:
        dist.send(output, rank + 1)
        dist.recv(gradient, rank + 1)
    with noted("B"):
        input_gradient = done.backward(gradient)
    if input_gradient is not None and rank > 0:
        dist.send(input_gradient, rank - 1)
    return output


def naive_step(sequences: int, config: ModelConfig) -> tuple[float | None, dict[str, torch.Tensor], list[Span]]:
    """On a rank: run one batch through all stages in sequence. Returns the loss (in the last stage), the local
    gradients by name, and the times of forward and backward.
    """
    torch.set_num_threads(1)
    rank, p = dist.get_rank(), dist.get_world_size()
    stage = stages.split_stages(Transformer(config), p)[rank]
    inputs, targets = batch_of(sequences, config=config)
    spans: list[Span] = []

    @contextlib.contextmanager
    def noted(kind: str) -> Iterator[None]:
        start = time.time()
        yield
        spans.append((kind, 1e3 * (start - zero), 1e3 * (time.time() - zero)))

    for _ in range(2):  # the first one warms up
        stage.zero_grad()
        spans.clear()
        x = inputs if rank == 0 else torch.empty(*inputs.shape, config.hidden)
        zero = common_zero()
        out = there_and_back(stage, x, targets, noted)
        dist.barrier()
    return out.item() if rank == p - 1 else None, {n: grad_of(w) for n, w in stage.named_parameters()}, spans


def peaks_of_steps(lists: list[Schedule], config: ModelConfig) -> list[float]:
    """On a rank: MiB of activations and temporary tensors at the peak of a step, for each schedule."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # PyTorch's profiler writes no log lines between our outputs
    torch.set_num_threads(1)
    pipeline, peaks = runner.PipelineRunner(stages.split_stages(Transformer(config), len(lists[0])), lists[0]), []
    inputs, targets = batch_of(pipeline.m, 128, config)
    pipeline.step(inputs, targets)  # makes the first gradients
    for schedule in lists:
        pipeline.use(schedule)
        with MemoryProfile(pipeline.stages) as profile:
            profile.mark("step")
            inputs, targets = batch_of(pipeline.m, 128, config)
            pipeline.step(inputs, targets)
        peak = profile.peak("step")
        peaks.append((peak["activations"] + peak["temporary"]) / MiB)
    return peaks
