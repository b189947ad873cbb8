"""Pipeline schedules: for each rank a list of actions, in order; a test that all of them can be executed."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator
from typing import NamedTuple


class Action(NamedTuple):
    """One micro-batch in one stage, on the rank whose list has it."""

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
    """Raise ValueError for a p, m or v below 1."""
    if min(p, m, v) < 1:
        raise ValueError(f"p = {p}, m = {m}, v = {v}: ranks, micro-batches and stages per rank must be 1 or more")


class Progress:
    """The actions of a schedule that are done."""

    def __init__(self, schedule: Schedule):
        self.m = 1 + max(action.micro_batch for actions in schedule for action in actions)
        self.last = max(action.stage for actions in schedule for action in actions)
        entries = (self.last + 1) * self.m  # one for each stage and micro-batch, a stage's micro-batches together
        self.forward, self.backward = bytearray(entries), bytearray(entries)

    def mark(self, action: Action) -> None:
        """Note that an action is done. (Nothing waits for a W.)"""
        kind, stage, micro_batch = action
        if kind != "W":
            done = self.forward if kind == "F" else self.backward
            done[stage * self.m + micro_batch] = 1

    # exercise 09.5
    def missing(self, action: Action) -> tuple[bool, int, int] | None:
        """Return an unmet dependency of an action: (True if it is a forward, stage, micro-batch).

        None if nothing is missing. F needs F of the stage before. B and I need their own F and, tested after it, B or I
        of the stage after. W needs its own I. The first stage has no stage before it, the last one none after it.
        """
        kind, stage, micro_batch = action
        index = stage * self.m + micro_batch
        if kind == "F":
            return None if stage == 0 or self.forward[index - self.m] else (True, stage - 1, micro_batch)
        if kind == "W":
            return None if self.backward[index] else (False, stage, micro_batch)
        if not self.forward[index]:
            return True, stage, micro_batch
        return None if stage == self.last or self.backward[index + self.m] else (False, stage + 1, micro_batch)


def play(schedule: Schedule) -> Iterator[tuple[int, int, int]]:
    """Yield (rank, first, end): the rank's actions [first, end) are next, in an order in which each has its inputs.

    Raises ValueError for a deadlock: the remaining ranks wait for each other.
    """
    progress, position = Progress(schedule), [0] * len(schedule)
    waiting: dict[tuple[bool, int, int], list[int]] = collections.defaultdict(list)
    ready = list(range(len(schedule)))
    while ready:
        rank = ready.pop()
        actions, first = schedule[rank], position[rank]
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
        position[rank] = first
    stuck = [
        f"rank {rank} at {row[i]}" for rank, (row, i) in enumerate(zip(schedule, position, strict=True)) if row[i:]
    ]
    if stuck:
        raise ValueError(f"a deadlock: all wait for each other, {'; '.join(stuck)}")


# exercise 09.6
def validate(schedule: Schedule, m: int | None = None) -> list[int]:
    """Return how many micro-batches' activations each rank holds at most, counting each of its stages apart.

    m: the number of micro-batches; None: one more than the largest index. Raises ValueError unless each stage does
    each micro-batch once, on one rank, as F and B or as F, I and W, and no others, and for a deadlock (with that word
    in the message). An F adds one to what a rank holds, a B or a W takes one away; a
    rank without actions holds 0.
    """
    done: dict[tuple[int, int], list[tuple[str, int]]] = collections.defaultdict(list)
    for rank, actions in enumerate(schedule):
        for kind, stage, micro_batch in actions:
            done[stage, micro_batch].append((kind, rank))
    if not done:
        raise ValueError("a schedule without an action")
    stages, counted = (1 + max(pair[i] for pair in done) for i in (0, 1))
    m = counted if m is None else m
    if negative := [pair for pair in done if min(pair) < 0]:
        raise ValueError(f"stage {negative[0][0]}, micro-batch {negative[0][1]}: both count from 0")
    for stage, i in itertools.product(range(stages), range(max(m, counted))):
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
    return [max(itertools.accumulate(row), default=0) for row in changes]
