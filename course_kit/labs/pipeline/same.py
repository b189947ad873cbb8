"""A run of four ranks compared with its schedule and with one process: order, memory, results."""

from __future__ import annotations

from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from course_kit.labs.pipeline.models import TINY, batch_of, one_process
from course_kit.labs.tensor_parallel.models import relative_error
from course_kit.ranks import shared
from course_kit.typed import grad_of
from course_lib.pipeline import runner
from course_lib.pipeline.actions import Action
from course_lib.pipeline.schedules import Schedule, num_stages
from course_lib.pipeline.stages import split_stages
from course_lib.single_gpu.model import ModelConfig, Transformer

EVENTS = {"F": "F", "B": "IW", "I": "I", "W": "W"}  # the events that a stage notes for an action


class Log:
    """Events of this rank's stages, and the number of graphs alive, now and at most."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []  # (kind, stage)
        self.live = self.peak = 0


class Token:
    """An object that counts as alive in a log."""

    def __init__(self, log: Log):
        self.log = log
        log.live += 1
        log.peak = max(log.peak, log.live)

    def __del__(self) -> None:
        self.log.live -= 1


class Noted(torch.autograd.Function):
    """Returns x and notes the passes; its graph holds a Token, which lives as long as the graph."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, stage: int, log: Log) -> torch.Tensor:
        log.events.append(("F", stage))
        ctx.stage, ctx.log, ctx.token = stage, log, Token(log)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        ctx.log.events.append(("I", ctx.stage))
        return gradient, None, None


class Probe(nn.Module):
    """A stage that notes its forward, its backward and its weight's gradient."""

    def __init__(self, stage: int, log: Log):
        super().__init__()
        self.linear, self.stage, self.log = nn.Linear(4, 4), stage, log
        self.linear.weight.register_post_accumulate_grad_hook(lambda _: log.events.append(("W", stage)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Noted.apply(self.linear(x), self.stage, self.log)


def squares(out: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the sum of the squared differences, as a loss."""
    return (out - targets).square().sum()


def probed(schedule: Schedule) -> tuple[list[tuple[str, int]], int, int, int]:
    """On a rank: the events in order as (kind, stage), the most graphs alive at once, the number of outputs that passes
    kept, and the number of passes left.
    """
    log = Log()
    local = {action.stage for action in schedule[dist.get_rank()]}
    pipeline = runner.PipelineRunner({stage: Probe(stage, log) for stage in local}, schedule, loss_of=squares)
    m = 1 + max(action.micro_batch for action in schedule[0])
    inputs, targets = torch.randn(m, 4), torch.randn(m, 4)
    pipeline.step(inputs, targets, tokens=1)
    log.events, log.peak = [], 0
    run, outputs, left = pipeline.run, 0, 0

    def watched(action: Action, step: runner.Step) -> None:
        nonlocal outputs, left
        run(action, step)
        outputs += sum(each.out is not None for each in step.passes.values())
        left = len(step.passes)

    with mock.patch.object(pipeline, "run", watched):
        pipeline.step(inputs, targets, tokens=1)
    return log.events, log.peak, outputs, left


def open_passes(actions: list) -> int:
    """Return the most open passes in a rank's list of actions: an F opens a pass, a B or a W closes one."""
    passes = most = 0
    for action in actions:
        passes += {"F": 1, "I": 0}.get(action.kind, -1)
        most = max(most, passes)
    return most


def check_order(schedule: Schedule, name: str) -> None:
    """Assert that four ranks follow the schedule's order and hold no more passes than it needs."""
    for rank, (events, peak, outputs, left) in enumerate(shared(4)(probed, schedule)):
        expected = [(each, action.stage) for action in schedule[rank] for each in EVENTS[action.kind]]
        assert len(events) == len(expected), (
            f"{name}, rank {rank}: {len(events)} events (forward, input's, weight's gradient), not {len(expected)}"
        )
        index = next((i for i, both in enumerate(zip(events, expected, strict=True)) if both[0] != both[1]), None)
        assert index is None, (
            f"{name}, rank {rank}: not the schedule's order: its event {index} is {events[index][0]} of stage "
            f"{events[index][1]}, and should be {expected[index][0]} of stage {expected[index][1]}"
        )
        needed = open_passes(schedule[rank])
        assert peak <= needed, f"{name}, rank {rank}: {peak} graphs alive at once, and the schedule needs {needed}"
        assert not outputs, f"{name}, rank {rank}: passes keep their outputs: drop `out` after it is passed on"
        assert not left, f"{name}, rank {rank}: {left} passes are left after the step: remove a pass after its B or W"


def run_schedule(schedule: Schedule, sequences: int, config: ModelConfig) -> tuple[float, dict[str, torch.Tensor]]:
    """On a rank: the loss of a step, and the local gradients by name."""
    pipeline = runner.PipelineRunner(split_stages(Transformer(config), num_stages(schedule)), schedule)
    inputs, targets = batch_of(sequences, config=config)
    step_loss = pipeline.step(inputs, targets)
    dist.all_reduce(step_loss)
    gradients = {
        name: grad_of(weight) for stage in pipeline.stages.values() for name, weight in stage.named_parameters()
    }
    return step_loss.item(), gradients


def check_same(schedule: Schedule, name: str, sequences: int = 8, config: ModelConfig = TINY) -> None:
    """Assert that four ranks have the loss and the gradients of one process."""
    expected_loss, expected = one_process(config, sequences)
    for rank, (step_loss, gradients) in enumerate(shared(4)(run_schedule, schedule, sequences, config)):
        assert abs(step_loss - expected_loss) < 1e-5 * expected_loss, (
            f"{name}: loss {step_loss:.5f}, in one process {expected_loss:.5f}"
        )
        for each, gradient in gradients.items():
            off = relative_error(gradient, expected[each])
            assert off < 1e-5, f"{name}, rank {rank}: relative error {off:.2g} in the gradient of {each}"
