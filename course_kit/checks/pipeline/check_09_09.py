"""Check of exercise 09.9: `PipelineRunner.run` runs any schedule, in its order, and keeps nothing too long."""

from __future__ import annotations

import torch
import torch.distributed as dist

from course_kit.labs.pipeline.same import Log, Probe, check_order, check_same, squares
from course_kit.ranks import RankError, shared
from course_lib.pipeline import runner
from course_lib.pipeline.actions import Action
from course_lib.pipeline.schedules import afab, naive


def one_f_one_b(p: int, m: int) -> list[list[Action]]:
    """Return 1F1B by its kinds: warmup F's, F and B in alternation, the remaining B's."""
    schedule = []
    for rank in range(p):
        warmup, numbers = min(p - 1 - rank, m), {"F": iter(range(m)), "B": iter(range(m))}
        kinds = "F" * warmup + "FB" * (m - warmup) + "B" * warmup
        schedule.append([Action(kind, rank, next(numbers[kind])) for kind in kinds])
    return schedule


def in_a_v(p: int) -> list[list[Action]]:
    """Return a schedule with stages r and 2p - 1 - r on rank r, for two micro-batches: backwards are a B for the first
    and I and W for the second.
    """
    schedule = []
    for rank in range(p):
        down, up = rank, 2 * p - 1 - rank
        kinds = [("F", down, 0), ("F", down, 1), ("F", up, 0), ("F", up, 1)]
        for stage in (up, down):
            kinds += [("B", stage, 0), ("I", stage, 1), ("W", stage, 1)]
        schedule.append([Action(*each) for each in kinds])
    return schedule


def split_action(action: Action) -> list[Action]:
    """Return I and W of a B, and any other action unchanged."""
    return [action._replace(kind=kind) for kind in "IW"] if action.kind == "B" else [action]


class StageLog(Log):
    """A log that also has, by forward, True if it runs in autocast, and its positions."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: list[bool] = []
        self.positions: list[list | None] = []


class Sees(Probe):
    """A stage that notes whether it runs in autocast, and its positions. Its output has the expected size."""

    log: StageLog

    def forward(self, x: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        self.log.inside.append(torch.is_autocast_enabled("cpu"))
        self.log.positions.append(None if positions is None else positions.tolist())
        return super().forward(x.float()).bfloat16()


def seen(schedule: list[list[Action]]) -> tuple[bool, list]:
    """On a rank: whether its stage runs in autocast, all through a step in BF16 with positions 0 of micro-batch 0 and 1
    of micro-batch 1; and the positions that it was given for these two.
    """
    rank, log = dist.get_rank(), StageLog()
    pipeline = runner.PipelineRunner({rank: Sees(rank, log)}, schedule, loss_of=squares)
    pipeline.step(torch.randn(2, 4), torch.randn(2, 4), torch.bfloat16, 1, positions=torch.tensor([[0], [1]]))
    return all(log.inside), log.positions[-2:]


def check_v() -> None:
    """Assert order, memory, loss and gradients of two stages per rank, and of B's beside I's and W's."""
    name = "two stages per rank, the first and the last on rank 0, B for micro-batch 0, I and W for 1"
    try:
        check_order(in_a_v(4), name)
        check_same(in_a_v(4), name, 2)
    except RankError as error:
        raise AssertionError(
            f"{name}: passes are by (stage, micro-batch), an action's module is self.stages[str(stage)], and the first "
            f"and the last stage may be on any rank; {error}"
        ) from error


def check() -> None:
    """Assert order and memory of six schedules, loss and gradients of two, autocast, and positions."""
    with shared(4).within(20):
        for make in (naive, afab, one_f_one_b):
            check_order(make(4, 6), make.__name__)
        swapped = one_f_one_b(4, 4)
        swapped[3] = [swapped[3][i] for i in (0, 2, 1, 3, 4, 5, 6, 7)]  # F0 F1 B0 B1 F2 …
        check_order(swapped, "a schedule that has no name")
        halves = [[each for action in row for each in split_action(action)] for row in one_f_one_b(4, 5)]
        halves[3] = [a for a in halves[3] if a.kind != "W"] + [a for a in halves[3] if a.kind == "W"]
        halves[2] = one_f_one_b(4, 5)[2]  # rank 2 at once
        check_order(halves, "B as I and W, rank 3's W's last")
        check_same(one_f_one_b(4, 6), "one_f_one_b, m = 6", 6)
        check_v()
        for kinds, split in (("F and B", False), ("F, I and W", True)):
            schedule = [[each for a in row for each in (split_action(a) if split else [a])] for row in afab(4, 2)]
            inside, given = zip(*shared(4)(seen, schedule), strict=True)
            assert all(inside), f"{kinds}, dtype=torch.bfloat16: a stage runs outside of `step.autocast`"
            wrong = [each for each in given if each != [[[0]], [[1]]]]
            assert not wrong, (
                f"{kinds}: for two micro-batches a stage gets positions {wrong[0]}, not [[[0]], [[1]]]: "
                "pass on step.args[micro_batch]"
            )
