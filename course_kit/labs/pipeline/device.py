"""A simulated device that takes given times and no core, and the timeline of a pipeline of four ranks on it."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import nn

from course_kit.labs.pipeline.models import common_zero
from course_kit.ranks import Ranks
from course_lib.pipeline import simulation
from course_lib.pipeline.actions import Action
from course_lib.pipeline.runner import PipelineRunner, Step
from course_lib.pipeline.schedules import Schedule

Span = tuple[str, int, int, float, float]  # kind, stage, micro-batch, start, end; in ms


class Device(torch.autograd.Function):
    """Computes x plus weight; each pass takes the time of a matmul on a device that needs no core of this machine."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, times: list[float]) -> torch.Tensor:
        ctx.times = times
        time.sleep(times[0])
        return x + weight

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            time.sleep(ctx.times[1])
            grad_x = gradient
        if ctx.needs_input_grad[1]:
            time.sleep(ctx.times[2])
            grad_weight = gradient.sum(0)
        return grad_x, grad_weight, None


class Sleeper(nn.Module):
    """A stage on the simulated device; times of F, I and W in s."""

    def __init__(self, times: list[float]):
        super().__init__()
        self.times, self.norm, self.weight = times, nn.RMSNorm(8), nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Device.apply(self.norm(x), self.weight, self.times)


class Timed(PipelineRunner):
    """A runner that notes when each action begins, with its input received, and when it ends."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.spans: list[Span] = []

    def run(self, action: Action, step: Step) -> None:
        wait_recv, key = step.p2p.wait_recv, ("F" if action.kind == "F" else "B", *action[1:])
        if key in step.p2p.incoming:  # wait here, outside of the recorded time
            step.p2p.incoming[key] = None, wait_recv(*key)
        start = time.time()
        super().run(action, step)
        self.spans.append((*action, start, time.time()))


def timed_steps(schedule: Schedule, times_ms: tuple[float, ...]) -> list[list[Span]]:
    """On a rank: its actions in each of three steps. times_ms: of F, I and W, per rank."""
    local = sorted({action.stage for action in schedule[dist.get_rank()]})
    scale = [each / 1e3 / len(local) for each in times_ms]
    runner = Timed({stage: Sleeper(scale) for stage in local}, schedule, loss_of=lambda out, _: out.square().sum())
    batch = torch.randn(1 + max(action.micro_batch for action in schedule[0]), 8)
    repeats = []
    for _ in range(3):
        runner.spans.clear()
        zero = common_zero()
        runner.step(batch, batch, tokens=1)
        repeats.append([(*each[:3], 1e3 * (each[3] - zero), 1e3 * (each[4] - zero)) for each in runner.spans])
    return repeats


def timed(
    ranks: Ranks, schedule: Schedule, times_ms: tuple[float, ...] = (12, 12, 12)
) -> tuple[simulation.Simulation, list[list[Span]]]:
    """Return a schedule simulated, and the ranks' actions by rank in the fastest of some steps.

    times_ms: of F, I and W, per rank; a rank's stages take equal shares of them.
    """
    per_rank = len({action.stage for action in schedule[0]})
    simulated = simulation.simulate(schedule, *(each / per_rank for each in times_ms))
    repeats = zip(*ranks(timed_steps, schedule, times_ms), strict=True)
    return simulated, list(min(repeats, key=lambda each: max(row[-1][-1] for row in each)))
