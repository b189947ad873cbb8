"""A run of four ranks against its schedule and against one process: order, memory, results."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from course_kit.labs.pipeline.models import TINY, batch_of, one_process
from course_kit.labs.tensor_parallel.models import relative_error
from course_kit.ranks import shared
from course_lib.pipeline import runner
from course_lib.pipeline.schedules import Schedule, num_stages
from course_lib.pipeline.stages import split_stages
from course_lib.single_gpu.model import ModelConfig, Transformer

EVENTS = {"F": "F", "B": "IW", "I": "I", "W": "W"}  # what a stage notes of an action


class Token:
    """Counts how many of its kind are alive."""

    def __init__(self, log: dict):
        self.log = log
        log["live"] += 1
        log["peak"] = max(log["peak"], log["live"])

    def __del__(self):
        self.log["live"] -= 1


class Noted(torch.autograd.Function):
    """Returns x, and notes that it went by; what its graph holds is alive as long as the graph."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, stage: int, log: dict) -> torch.Tensor:
        log["events"].append(("F", stage))
        ctx.stage, ctx.log, ctx.token = stage, log, Token(log)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        ctx.log["events"].append(("I", ctx.stage))
        return gradient, None, None


class Probe(nn.Module):
    """A stage that notes when its forward, its backward, and its weight's gradient come."""

    def __init__(self, stage: int, log: dict):
        super().__init__()
        self.linear, self.stage, self.log = nn.Linear(4, 4), stage, log
        self.linear.weight.register_post_accumulate_grad_hook(lambda _: log["events"].append(("W", stage)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Noted.apply(self.linear(x), self.stage, self.log)


def squares(out: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The sum of the squared differences, as a loss."""
    return (out - targets).square().sum()


def probed(schedule: Schedule) -> tuple[list[tuple[str, int]], int, int, int]:
    """On a rank: what happened, in order, as (kind, stage), how many graphs were alive at most, how many outputs were
    kept, and how many passes are left.
    """
    log = {"events": [], "live": 0, "peak": 0}
    own = {action.stage for action in schedule[dist.get_rank()]}
    pipeline = runner.PipelineRunner({stage: Probe(stage, log) for stage in own}, schedule, loss_of=squares)
    m = 1 + max(action.micro_batch for action in schedule[0])
    batch = torch.randn(m, 4), torch.randn(m, 4)
    pipeline.step(*batch, tokens=1)
    log.update(events=[], peak=0)
    run, kept = pipeline.run, []
    pipeline.run = lambda action: (
        run(action),
        kept.extend(each for each in pipeline.passes.values() if each.out is not None),
    )
    pipeline.step(*batch, tokens=1)
    return log["events"], log["peak"], len(kept), len(pipeline.passes)


def held_by(actions: list) -> int:
    """How many passes a rank's list has open at most: an F opens one, a B or a W closes one."""
    held = most = 0
    for action in actions:
        held += {"F": 1, "I": 0}.get(action.kind, -1)
        most = max(most, held)
    return most


def check_order(schedule: Schedule, name: str) -> None:
    """Assert that four ranks do what the schedule says, in its order, and hold no more than it says."""
    for rank, (events, peak, outputs, left) in enumerate(shared(4)(probed, schedule)):
        expected = [(each, action.stage) for action in schedule[rank] for each in EVENTS[action.kind]]
        assert len(events) == len(expected), (
            f"{name}, rank {rank}: {len(events)} events (forward, input's, weight's gradient), not {len(expected)}"
        )
        place = next((i for i, both in enumerate(zip(events, expected, strict=True)) if both[0] != both[1]), None)
        assert place is None, (
            f"{name}, rank {rank}: not the schedule's order: its event {place} is {events[place][0]} of stage "
            f"{events[place][1]}, and should be {expected[place][0]} of stage {expected[place][1]}"
        )
        held = held_by(schedule[rank])
        assert peak <= held, f"{name}, rank {rank}: {peak} graphs alive at once, and the schedule needs {held}"
        assert not outputs, f"{name}, rank {rank}: passes keep their outputs: drop `out` once it is handed on"
        assert not left, f"{name}, rank {rank}: {left} passes are left after the step: after B or W it is over"


def run_schedule(schedule: Schedule, sequences: int, config: ModelConfig) -> tuple[float, dict[str, torch.Tensor]]:
    """On a rank: the loss of a step, and this rank's gradients by name."""
    pipeline = runner.PipelineRunner(split_stages(Transformer(config), num_stages(schedule)), schedule)
    part = pipeline.step(*batch_of(sequences, config=config))
    dist.all_reduce(part)
    own = {name: weight.grad for stage in pipeline.stages.values() for name, weight in stage.named_parameters()}
    return part.item(), own


def check_same(schedule: Schedule, name: str, sequences: int = 8, config: ModelConfig = TINY) -> None:
    """Assert that four ranks have the loss and the gradients of one process."""
    expected_loss, expected = one_process(config, sequences)
    for rank, (found, own) in enumerate(shared(4)(run_schedule, schedule, sequences, config)):
        assert abs(found - expected_loss) < 1e-5 * expected_loss, (
            f"{name}: loss {found:.5f}, in one process {expected_loss:.5f}"
        )
        for each, gradient in own.items():
            off = relative_error(gradient, expected[each])
            assert off < 1e-5, f"{name}, rank {rank}: gradient of {each} is {off:.2g} off"
