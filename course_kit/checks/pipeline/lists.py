"""Properties of a schedule that several checks of notebook 09 ask for, by formulas and a replay of their own.

The library's `validate` and `simulate` are exercises: a check takes nothing from them that it expects.
"""

from __future__ import annotations

import collections
from typing import Any

from course_kit.labs.pipeline.same import open_passes

KINDS = (["B", "F"], ["F", "I", "W"])  # what a stage does with a micro-batch


def words(actions: list) -> str:
    """F0 F1 B0 …"""
    return " ".join(f"{each.kind}{each.micro_batch}" for each in actions)


def listed(schedule: list) -> str:
    """Return the actions of each rank with stage and micro-batch: rank 0: F(0, 0) B(0, 0); rank 1: …"""
    ranks = (" ".join(f"{kind}({stage}, {i})" for kind, stage, i in actions) for actions in schedule)
    return "(stage, micro-batch) of rank " + "; rank ".join(f"{rank}: {each}" for rank, each in enumerate(ranks))


def held(schedule: list) -> list[int]:
    """Return how many passes each rank has open at most."""
    return [open_passes(actions) for actions in schedule]


def times_of(kind: str, t_f, t_i, t_w):
    """Return how long an action takes."""
    return {"F": t_f, "I": t_i, "W": t_w, "B": t_i + t_w}[kind]


def replayed(schedule: list, t_f=1, t_i=1, t_w=1) -> tuple[list[list[tuple]], str]:
    """Return (start, end) of each rank's actions, as far as they can run, and where ranks get stuck, or ""."""
    last = max(action.stage for actions in schedule for action in actions)
    ended: dict[tuple, Any] = {}
    spans: list[list[tuple]] = [[] for _ in schedule]
    going = True

    def ready(kind: str, stage: int, i: int):
        """Return when the action's inputs are ready; None: not yet."""
        if kind == "F":
            needs = [("F", stage - 1, i)] if stage else []
        elif kind == "W":
            needs = [("B", stage, i)]
        else:
            needs = [("F", stage, i)] + ([("B", stage + 1, i)] if stage < last else [])
        return max([ended[each] for each in needs], default=0) if all(each in ended for each in needs) else None

    while going:
        going = False
        for actions, done in zip(schedule, spans, strict=True):
            while len(done) < len(actions) and (present := ready(*actions[len(done)])) is not None:
                kind, stage, i = actions[len(done)]
                start = max(present, done[-1][1] if done else 0)
                done.append((start, start + times_of(kind, t_f, t_i, t_w)))
                if kind != "W":
                    ended["F" if kind == "F" else "B", stage, i] = done[-1][1]
                going = True
    stuck = [
        f"rank {rank} at {actions[len(done)]}"
        for rank, (actions, done) in enumerate(zip(schedule, spans, strict=True))
        if len(done) < len(actions)
    ]
    return spans, "; ".join(stuck)


def bubble(schedule: list, t_f=1, t_i=1, t_w=1):
    """Return the longest time of a rank from its first to its last action, minus the work of the busiest rank."""
    spans, _ = replayed(schedule, t_f, t_i, t_w)
    busy = max(sum(end - start for start, end in local) for local in spans)
    return cost(schedule, t_f, t_i, t_w) - busy


def cost(schedule: list, t_f=1, t_i=1, t_w=1):
    """Return the longest time of a rank from its first to its last action."""
    spans, _ = replayed(schedule, t_f, t_i, t_w)
    return max(local[-1][1] - local[0][0] for local in spans)


def fault(schedule: list, stages: int, m: int) -> str:
    """Describe a fault: an action too many or too few, a micro-batch on two ranks, a deadlock; "" if there is none."""
    done = collections.defaultdict(list)
    for rank, actions in enumerate(schedule):
        for kind, stage, i in actions:
            done[stage, i].append((kind, rank))
    wanted = {(stage, i) for stage in range(stages) for i in range(m)}
    if odd := sorted(done.keys() - wanted):
        return f"there is no micro-batch {odd[0][1]} in stage {odd[0][0]}, with {m} and {stages} of them"
    for stage, i in sorted(wanted):
        kinds = sorted(kind for kind, _ in done[stage, i])
        if kinds not in KINDS:
            has = " and ".join(kinds) or "nothing"
            return f"stage {stage}, micro-batch {i}: has {has}, not F and B, or F, I and W"
        if len({rank for _, rank in done[stage, i]}) > 1:
            return f"stage {stage}, micro-batch {i}: is on more than one rank"
    _, stuck = replayed(schedule)
    return f"a deadlock: all wait for each other, {stuck}" if stuck else ""
