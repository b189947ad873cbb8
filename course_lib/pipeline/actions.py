"""What a pipeline schedule is: for each rank a list of actions, in order; and whether all can be carried out."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator
from typing import NamedTuple


class Action(NamedTuple):
    """What a rank does with one micro-batch in one stage."""

    kind: str  # F forward, B backward; or B's halves: I, the input's gradient, and W, the weights' gradients
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind} of stage {self.stage}, micro-batch {self.micro_batch}"


class Overlapped(Action):
    """A forward that is meant to run at the same time as the backward after it (DualPipe)."""

    __slots__ = ()


Schedule = list[list[Action]]  # of each rank, in order


def check_sizes(p: int, m: int, v: int = 1) -> None:
    """Raise ValueError where one of them is below 1."""
    if min(p, m, v) < 1:
        raise ValueError(f"p = {p}, m = {m}, v = {v}: there are 1 or more ranks, micro-batches, and stages a rank")


class Progress:
    """What of a schedule is done."""

    def __init__(self, schedule: Schedule):
        self.m = 1 + max(action.micro_batch for actions in schedule for action in actions)
        self.last = max(action.stage for actions in schedule for action in actions)
        entries = (self.last + 1) * self.m  # one for each stage and micro-batch, a stage's micro-batches together
        self.forward, self.backward = bytearray(entries), bytearray(entries)

    def mark(self, action: Action) -> None:
        """It is done. (Nothing waits for a W.)"""
        kind, stage, micro_batch = action
        if kind != "W":
            done = self.forward if kind == "F" else self.backward
            done[stage * self.m + micro_batch] = 1

    # exercise 09.5
    def missing(self, action: Action) -> tuple[bool, int, int] | None:
        """Return what must be done before an action and is not: (whether that is a forward, stage, micro-batch).

        None where nothing is missing. F needs F of the stage before. B and I need their own F and, asked for after it,
        B or I of the stage after. W needs its own I. The first stage has none before it, the last one none after it.
        """
        kind, stage, micro_batch = action
        place = stage * self.m + micro_batch
        if kind == "F":
            return None if stage == 0 or self.forward[place - self.m] else (True, stage - 1, micro_batch)
        if kind == "W":
            return None if self.backward[place] else (False, stage, micro_batch)
        if not self.forward[place]:
            return True, stage, micro_batch
        return None if stage == self.last or self.backward[place + self.m] else (False, stage + 1, micro_batch)


def play(schedule: Schedule) -> Iterator[tuple[int, int, int]]:
    """Yield (rank, first, end): the rank's actions [first, end) are next, in an order in which all find what they need.

    Raises ValueError, a deadlock, where the ranks that are left wait for each other.
    """
    progress, at = Progress(schedule), [0] * len(schedule)
    waiting, ready = collections.defaultdict(list), list(range(len(schedule)))
    while ready:
        rank = ready.pop()
        actions, first = schedule[rank], at[rank]
        while first < len(actions):
            end = first + 1 + (type(actions[first]) is Overlapped)
            missing = next(filter(None, map(progress.missing, actions[first:end])), None)
            if missing:
                waiting[missing].append(rank)
                break
            yield rank, first, end
            for action in actions[first:end]:
                progress.mark(action)
                if action.kind != "W":
                    ready += waiting.pop((action.kind == "F", *action[1:]), ())
            first = end
        at[rank] = first
    stuck = [f"rank {rank} at {schedule[rank][at[rank]]}" for rank in range(len(at)) if at[rank] < len(schedule[rank])]
    if stuck:
        raise ValueError(f"a deadlock: all wait for each other, {'; '.join(stuck)}")


# exercise 09.6
def validate(schedule: Schedule, m: int | None = None) -> list[int]:
    """Return how many micro-batches' activations each rank holds at most, those of each of its stages counted apart.

    m: how many micro-batches there are; None: as many as the largest number says. Raises ValueError where a stage does
    not do each of them once, on one rank, as F and B or as F, I and W, where there is another micro-batch, and where
    the ranks end in a deadlock (with that word). An F adds one to what a rank holds, a B or a W takes one away.
    """
    done = collections.defaultdict(list)
    for rank, actions in enumerate(schedule):
        for kind, stage, micro_batch in actions:
            done[stage, micro_batch].append((kind, rank))
    if not done:
        raise ValueError("a schedule without an action")
    stages, found = (1 + max(pair[i] for pair in done) for i in (0, 1))
    m = found if m is None else m
    if wrong := [pair for pair in done if min(pair) < 0]:
        raise ValueError(f"stage {wrong[0][0]}, micro-batch {wrong[0][1]}: both count from 0")
    for stage, i in itertools.product(range(stages), range(max(m, found))):
        kinds = "".join(sorted(kind for kind, _ in done[stage, i]))
        if kinds not in ("BF", "FIW") or i >= m:
            raise ValueError(
                f"stage {stage}, micro-batch {i} of {m}: has {kinds or 'nothing'}, not F and B, or F, I and W"
            )
        if len({rank for _, rank in done[stage, i]}) > 1:
            raise ValueError(f"stage {stage}, micro-batch {i}: is on more than one rank")
    for _ in play(schedule):
        pass
    changes = [[{"F": 1, "I": 0}.get(action.kind, -1) for action in actions] for actions in schedule]
    return [max(itertools.accumulate(each), default=0) for each in changes]
