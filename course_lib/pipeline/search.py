"""Search a schedule for unequal times: greedy, exact for small p and m, never worse than the handmade ones.

It minimizes the cost of simulate: the longest time of a rank from its first to its last action, under a limit of live
micro-batches. The exact search keeps, for each count of done F, I and W of all ranks, the Pareto front of the states
that have it. Qi et al. 2023, §3 (their search is greedy, or an integer program).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from course_lib.pipeline.actions import validate
from course_lib.pipeline.schedules import Action, Schedule, check_sizes, one_f_one_b, zero_bubble_h1, zero_bubble_h2
from course_lib.pipeline.simulation import Times, simulate


class Greedy:
    """Builds a schedule in time: each rank takes the action that can start first, and a W if it would wait otherwise
    or its memory is full.

    live: micro-batches that a rank may hold; max_lead: F's that may be done more than I's, by rank; fill: the shortest
    wait that a W fills, in times of a W.
    """

    def __init__(
        self,
        p: int,
        m: int,
        times: Mapping[str, Sequence[float]],
        t_comm: float,
        live: int,
        max_lead: list[int],
        fill: float,
    ):
        self.p, self.m, self.times, self.t_comm = p, m, times, t_comm
        self.live, self.max_lead, self.fill = live, max_lead, fill
        self.done = [dict.fromkeys("FIW", 0) for _ in range(p)]
        self.free: list[float] = [0] * p
        self.ended: dict[tuple[str, int, int], float] = {}  # by kind, rank and micro-batch
        self.schedule: Schedule = [[] for _ in range(p)]

    def input_ready(self, kind: str, rank: int, i: int) -> float | None:
        """Return when the input of micro-batch i's F or I is on a rank; None: not known yet."""
        before = rank - 1 if kind == "F" else rank + 1
        if not 0 <= before < self.p:
            return 0
        ended = self.ended.get((kind, before, i))
        return None if ended is None else ended + self.t_comm

    # exercise 09.14
    def options(self, rank: int) -> dict:
        """Return the kinds of action, F, I or W, that the rank could do next, each with the time when it could begin.

        An F if micro-batches are left, fewer than self.live are held, and F's are fewer than self.max_lead[rank] ahead
        of I's; an I if its own F is done; both only if it is known when their input is there. A W if an I is without
        one and, besides, self.live are held or the rank would wait, for at least self.fill times a W. self.done[rank]:
        how many F, I, W are done; self.free[rank]: when the last of them ends.
        """
        f, i, w = (self.done[rank][kind] for kind in "FIW")
        times: dict[str, float | None] = {}
        if f < self.m and f - w < self.live and f - i < self.max_lead[rank]:
            times["F"] = self.input_ready("F", rank, f)
        if i < f:
            times["I"] = self.input_ready("I", rank, i)
        starts = {kind: max(self.free[rank], time) for kind, time in times.items() if time is not None}
        wait = min(starts.values(), default=math.inf) - self.free[rank]
        if w < i and (f - w >= self.live or wait > 0 and wait >= self.fill * self.times["W"][rank]):
            starts["W"] = self.free[rank]
        return starts

    def run(self) -> Schedule:
        """Return the schedule."""
        for _ in range(3 * self.p * self.m):
            start, order, rank = min(
                (start, "IFW".index(kind), rank) for rank in range(self.p) for kind, start in self.options(rank).items()
            )
            kind = "IFW"[order]
            i = self.done[rank][kind]
            self.done[rank][kind] += 1
            self.free[rank] = self.ended[kind, rank, i] = start + self.times[kind][rank]
            self.schedule[rank].append(Action(kind, rank, i))
        return self.schedule


class State(NamedTuple):
    """A point of the exact search: the state that determines the next possible actions and their times."""

    free: tuple[float, ...]  # when each rank is free
    hidden: tuple[tuple[float, ...], ...]  # when the hidden states that wait for their F arrive, by rank
    gradients: tuple[tuple[float, ...], ...]  # when the gradients that wait for their I arrive, by rank
    last: float  # when the last action began


Path = tuple["Path", int, str] | None  # the actions up to a state: those before, the last one's rank and kind


class Way(NamedTuple):
    """A state, its times in one tuple, and the actions that lead there."""

    state: State
    times: tuple[float, ...]
    path: Path


def pareto_front(ways: list[Way]) -> list[Way]:
    """Return the Pareto front of the ways: no other one is at least as early in every time."""
    front: list[Way] = []
    for way in ways:
        if not any(all(a <= b for a, b in zip(other.times, way.times, strict=True)) for other in front):
            front = [each for each in front if not all(a <= b for a, b in zip(way.times, each.times, strict=True))]
            front.append(way)
    return front


def next_states(
    state: State, counts: tuple[int, ...], p: int, m: int, times: dict[str, list[float]], t_comm: float, live: int
) -> Iterator[tuple[int, str, tuple[int, ...], State, float]]:
    """Yield each possible next action, none earlier than the last: (rank, kind, new counts, new state, its end).

    counts: of done F, I, W, rank by rank.
    """
    free, hidden, gradients, last = state
    for rank in range(p):
        f, i, w = counts[3 * rank : 3 * rank + 3]
        ready: dict[str, float] = {}  # when the input is there
        if f < m and f - w < live and (rank == 0 or hidden[rank]):
            ready["F"] = hidden[rank][0] if rank else 0
        if gradients[rank]:
            ready["I"] = gradients[rank][0]
        if w < i:
            ready["W"] = 0
        for kind, arrived in ready.items():
            start = max(free[rank], arrived)
            if start < last:
                continue
            end = start + times[kind][rank]
            new_hidden, new_gradients = list(hidden), list(gradients)
            if kind == "F":
                new_hidden[rank] = hidden[rank][1:]
                if rank < p - 1:
                    new_hidden[rank + 1] += (end + t_comm,)
                else:
                    new_gradients[rank] += (end,)
            elif kind == "I":
                new_gradients[rank] = gradients[rank][1:]
                if rank > 0:
                    new_gradients[rank - 1] += (end + t_comm,)
            index = 3 * rank + "FIW".index(kind)
            new_counts = (*counts[:index], counts[index] + 1, *counts[index + 1 :])
            new_free = (*free[:rank], end, *free[rank + 1 :])
            yield rank, kind, new_counts, State(new_free, tuple(new_hidden), tuple(new_gradients), start), end


def exact_search(
    p: int, m: int, times: dict[str, list[float]], t_comm: float, live: int, bound: float
) -> Schedule | None:
    """Return a schedule of the least cost, if that is below `bound`; else None."""
    begins = [sum(times["F"][:rank]) + rank * t_comm for rank in range(p)]  # of the first action, in any schedule
    start = State((0,) * p, ((),) * p, ((),) * p, 0)
    layer: dict[tuple[int, ...], list[Way]] = {(0,) * (3 * p): [Way(start, (), None)]}  # by counts
    for _ in range(3 * p * m):
        following: dict[tuple[int, ...], list[Way]] = {}
        for counts, ways in layer.items():
            for state, _, path in ways:
                for rank, kind, new_counts, new, end in next_states(state, counts, p, m, times, t_comm, live):
                    left = zip((times[each][rank] for each in "FIW"), new_counts[3 * rank : 3 * rank + 3], strict=True)
                    if end + sum(time * (m - count) for time, count in left) - begins[rank] < bound:
                        flat = (*new.free, *(t for row in new.hidden + new.gradients for t in row), new.last)
                        following.setdefault(new_counts, []).append(Way(new, flat, (path, rank, kind)))
        layer = {counts: pareto_front(ways) for counts, ways in following.items()}
    ends = [way for ways in layer.values() for way in ways]
    if not ends:
        return None
    path = min(ends, key=lambda way: max(end - begin for end, begin in zip(way.state.free, begins, strict=True))).path
    kinds: list[list[str]] = [[] for _ in range(p)]
    while path:
        path, rank, kind = path
        kinds[rank].insert(0, kind)
    return [[Action(kind, rank, row[:k].count(kind)) for k, kind in enumerate(row)] for rank, row in enumerate(kinds)]


FILLS = (0, 0.5, 1)  # values of Greedy's `fill`
SMALL = 12  # p m up to which all orders are searched


def search(
    p: int, m: int, t_f: Times = 1, t_i: Times = 1, t_w: Times = 1, t_comm: float = 0, live: int | None = None
) -> Schedule:
    """Return a schedule of F, I and W with one stage per rank, for these times (numbers, or sequences by rank).

    live: how many micro-batches a rank may hold; None: p, as 1F1B. It is the best of a greedy search, of 1F1B, ZB-H1
    and ZB-H2 if they hold no more, and for p m up to SMALL of all orders. Raises ValueError for a live below 1.
    """
    check_sizes(p, m)
    live = p if live is None else live
    if live < 1:
        raise ValueError(f"live = {live}: a rank must be able to hold 1 micro-batch or more")
    times = {k: list(t) if isinstance(t, Sequence) else [t] * p for k, t in zip("FIW", (t_f, t_i, t_w), strict=True)}

    def cost(schedule: Schedule) -> float:
        return simulate(schedule, times["F"], times["I"], times["W"], t_comm).cost

    handmade = one_f_one_b(p, m), zero_bubble_h1(p, m), zero_bubble_h2(p, m)
    schedules = [schedule for schedule in handmade if max(validate(schedule)) <= live]
    for k in (1, 2, 3):
        max_lead = [min(live, k * (p - 1 - rank) + 1) for rank in range(p)]
        schedules += [Greedy(p, m, times, t_comm, live, max_lead, fill).run() for fill in FILLS]
    best = min(schedules, key=cost)
    return (exact_search(p, m, times, t_comm, live, cost(best)) if p * m <= SMALL else None) or best
