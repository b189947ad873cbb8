"""A pipeline schedule played in time: when each action begins and ends, and how long ranks wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from course_lib.pipeline.actions import Schedule, play, validate

Times = float | Sequence[float]  # of an action in any stage, or one for each stage


@dataclass
class Simulation:
    """When each action of a schedule begins and ends, by rank, in the order of its actions."""

    schedule: Schedule
    starts: list[list]
    ends: list[list]
    busy: list  # time that each rank works

    @property
    def makespan(self):
        """Until the last rank is done."""
        return max(ends[-1] for ends in self.ends)

    @property
    def cost(self):
        """The longest time of a rank from its first action to the end of its last one (as Qi et al. 2023)."""
        return max(ends[-1] - starts[0] for starts, ends in zip(self.starts, self.ends, strict=True))

    @property
    def bubble(self):
        """What the cost is above the work of the busiest rank."""
        return self.cost - max(self.busy)

    @property
    def bubble_ratio(self):
        """The bubble over the work of the busiest rank; over the cost it would be ratio / (1 + ratio)."""
        return self.bubble / max(self.busy)

    @property
    def timeline(self) -> list[list[tuple]]:
        """For each rank (action, start, end)."""
        return [list(zip(*rows, strict=True)) for rows in zip(self.schedule, self.starts, self.ends, strict=True)]

    @property
    def peaks(self) -> list[int]:
        """Micro-batches that each rank holds at most; see validate."""
        return validate(self.schedule)


# exercise 09.7
def simulate(
    schedule: Schedule, t_f: Times = 1, t_i: Times = 1, t_w: Times = 1, t_comm: float = 0, t_pair: float | None = None
) -> Simulation:
    """Play a schedule in time: B takes t_i + t_w; what another rank has made arrives t_comm later.

    t_pair: time of an Overlapped pair, which begins and ends together; None: the sum. Raises ValueError for a deadlock.
    """
    m, stages = (1 + max(action[i] for actions in schedule for action in actions) for i in (2, 1))
    by_stage = [time if isinstance(time, Sequence) else [time] * stages for time in (t_f, t_i, t_w)]
    times = dict(zip("FIW", by_stage, strict=True)) | {"B": [i + w for i, w in zip(*by_stage[1:], strict=True)]}
    ended_f, ended_b, on = ([0] * (stages * m) for _ in range(3))
    free, busy = [0] * len(schedule), [0] * len(schedule)
    starts, ends = ([[] for _ in schedule] for _ in range(2))
    for rank, first, end in play(schedule):
        start, duration = free[rank], 0
        for kind, stage, micro_batch in schedule[rank][first:end]:
            duration, place = duration + times[kind][stage], stage * m + micro_batch
            if kind == "F":
                on[place] = rank
                if stage == 0:
                    continue
                source, there = place - m, ended_f[place - m]
            elif kind == "W" or stage == stages - 1:
                continue
            else:
                source, there = place + m, ended_b[place + m]
            there = there if on[source] == rank else there + t_comm
            start = there if there > start else start
        duration = t_pair if t_pair is not None and end > first + 1 else duration
        free[rank] = finish = start + duration
        busy[rank] += duration
        for kind, stage, micro_batch in schedule[rank][first:end]:
            if kind != "W":
                (ended_f if kind == "F" else ended_b)[stage * m + micro_batch] = finish
            starts[rank].append(start)
            ends[rank].append(finish)
    return Simulation(schedule, starts, ends, busy)
