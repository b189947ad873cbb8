"""The forwards of a schedule alone, for an evaluation: nothing is kept for a backward, and no gradient changes."""

from __future__ import annotations

import copy

import torch

from course_lib.pipeline.actions import Action
from course_lib.pipeline.runner import PipelineRunner, check_step
from course_lib.pipeline.schedules import Schedule


def forwards_of(runner: PipelineRunner, schedule: Schedule) -> PipelineRunner:
    """Return a runner of the same stages for forward_only: its schedule has the forwards of `schedule`, in their order.
    `runner` does not change.
    """
    forwards = copy.copy(runner)
    forwards.use([[Action(*action) for action in actions if action.kind == "F"] for actions in schedule])
    return forwards


@torch.no_grad()
def forward_only(
    forwards: PipelineRunner,
    inputs: torch.Tensor | None,
    targets: torch.Tensor | None,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return this rank's part of the sum of a batch's losses, a float64 scalar. Arguments: of PipelineRunner.step.

    forwards: the result of forwards_of. The stages are in the mode (train, eval) in which the caller has put them.
    """
    check_step(forwards, inputs, targets)
    with forwards.begin(inputs, targets, positions, torch.float32, 1) as step:
        step.loss = step.loss.double()
        for index, action in enumerate(forwards.actions):
            step.p2p.start(index)
            forwards.run(action, step)
            step.passes.clear()  # its output is sent
        step.p2p.start(len(forwards.actions))
        step.p2p.wait_for_sends(0)
    return step.loss
