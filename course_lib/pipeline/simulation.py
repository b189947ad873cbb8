"""Simulate a pipeline schedule: when each action begins and ends, and how long ranks wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from course_lib.pipeline.actions import Action, Schedule, play, validate

Times = float | Sequence[float]  # of an action in any stage, or one per stage


@dataclass
class Simulation:
    """The times when each action of a schedule begins and ends, by rank, in the order of its actions."""

    schedule: Schedule
    starts: list[list[float]]
    ends: list[list[float]]
    busy: list[float]  # time that each rank works

    @property
    def makespan(self) -> float:
        """Time until the last rank is done."""
        return max(ends[-1] for ends in self.ends)

    @property
    def cost(self) -> float:
        """The longest time of a rank from its first action to the end of its last one (as Qi et al. 2023)."""
        return max(ends[-1] - starts[0] for starts, ends in zip(self.starts, self.ends, strict=True))

    @property
    def bubble(self) -> float:
        """The cost less the work of the busiest rank."""
        return self.cost - max(self.busy)

    @property
    def bubble_ratio(self) -> float:
        """The bubble over the work of the busiest rank; over the cost it would be ratio / (1 + ratio)."""
        return self.bubble / max(self.busy)

    @property
    def timeline(self) -> list[list[tuple[Action, float, float]]]:
        """(action, start, end) of each action, by rank."""
        return [list(zip(*rows, strict=True)) for rows in zip(self.schedule, self.starts, self.ends, strict=True)]

    @property
    def peaks(self) -> list[int]:
        """The number of micro-batches that each rank holds at most; see validate."""
        return validate(self.schedule)


# exercise 09.7
def simulate(
    schedule: Schedule, t_f: Times = 1, t_i: Times = 1, t_w: Times = 1, t_comm: float = 0, t_pair: float | None = None
) -> Simulation:
    """Play a schedule in time: B takes t_i + t_w; a tensor from another rank arrives t_comm after it is made.

    t_pair: time of an Overlapped pair, which begins and ends together; None: the sum. Raises ValueError for a deadlock.
    """
    m = 1 + max(action.micro_batch for actions in schedule for action in actions)
    stages = 1 + max(action.stage for actions in schedule for action in actions)
    f, i, w = (list(time) if isinstance(time, Sequence) else [time] * stages for time in (t_f, t_i, t_w))
    times = {"F": f, "I": i, "W": w, "B": [of_i + of_w for of_i, of_w in zip(i, w, strict=True)]}
    ended_f: list[float] = [0] * (stages * m)  # by stage and micro-batch
    ended_b: list[float] = [0] * (stages * m)
    rank_of = [0] * (stages * m)
    free: list[float] = [0] * len(schedule)
    busy: list[float] = [0] * len(schedule)
    starts: list[list[float]] = [[] for _ in schedule]
    ends: list[list[float]] = [[] for _ in schedule]
    for rank, first, end in play(schedule):
        start: float = free[rank]
        duration: float = 0
        for kind, stage, micro_batch in schedule[rank][first:end]:
            duration, index = duration + times[kind][stage], stage * m + micro_batch
            if kind == "F":
                rank_of[index] = rank
                if stage == 0:
                    continue
                source, ready = index - m, ended_f[index - m]
            elif kind == "W" or stage == stages - 1:
                continue
            else:
                source, ready = index + m, ended_b[index + m]
            ready = ready if rank_of[source] == rank else ready + t_comm
            start = ready if ready > start else start
        duration = t_pair if t_pair is not None and end > first + 1 else duration
        free[rank] = finish = start + duration
        busy[rank] += duration
        for kind, stage, micro_batch in schedule[rank][first:end]:
            if kind != "W":
                (ended_f if kind == "F" else ended_b)[stage * m + micro_batch] = finish
            starts[rank].append(start)
            ends[rank].append(finish)
    return Simulation(schedule, starts, ends, busy)
