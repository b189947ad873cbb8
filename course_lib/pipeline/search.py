"""A schedule for times that are not equal: greedy, exact where p and m are small, never worse than those by hand.

What is made least is the cost of simulate: the longest time of a rank from its first to its last action, under a limit
of live micro-batches. The exact search keeps, for each count of done F, I and W of all ranks, the ways to get there of
which none is later in everything. Qi et al. 2023, §3 (their search is greedy, or an integer program).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from course_lib.pipeline.actions import validate
from course_lib.pipeline.schedules import Action, Schedule, check_sizes, one_f_one_b, zero_bubble_h1, zero_bubble_h2
from course_lib.pipeline.simulation import simulate


class Greedy:
    """Builds a schedule in time: each rank takes what can start first; a W where it would wait otherwise, or where
    memory is full.
    """

    def __init__(self, p: int, m: int, times: dict[str, list], t_comm, live: int, ahead: list[int], fill: float):
        self.p, self.m, self.times, self.t_comm = p, m, times, t_comm
        self.live, self.max_lead, self.fill = live, ahead, fill
        self.done = [dict.fromkeys("FIW", 0) for _ in range(p)]
        self.free, self.ended, self.schedule = [0] * p, {}, [[] for _ in range(p)]

    def arrival(self, kind: str, rank: int, i: int):
        """When micro-batch i can begin its F or I on a rank, as far as others are concerned; None: not known yet."""
        before = rank - 1 if kind == "F" else rank + 1
        if not 0 <= before < self.p:
            return 0
        ended = self.ended.get((kind, before, i))
        return None if ended is None else ended + self.t_comm

    # exercise 09.14
    def options(self, rank: int) -> dict:
        """Return what the rank could do next, F, I or W, each with the time when it could begin.

        An F if micro-batches are left, fewer than self.live are held, and F's are fewer than self.max_lead[rank] ahead of
        I's; an I if its own F is done; both only where it is known when what they need arrives. A W if an I is without
        one and, besides, self.live are held or the rank would wait, for a gap of self.fill times a W or more.
        self.done[rank]: how many F, I, W are done; self.free[rank]: when the last of them ends.
        """
        f, i, w = (self.done[rank][kind] for kind in "FIW")
        found = {}
        if f < self.m and f - w < self.live and f - i < self.max_lead[rank]:
            found["F"] = self.arrival("F", rank, f)
        if i < f:
            found["I"] = self.arrival("I", rank, i)
        found = {kind: max(self.free[rank], time) for kind, time in found.items() if time is not None}
        wait = min(found.values(), default=math.inf) - self.free[rank]
        if w < i and (f - w >= self.live or wait > 0 and wait >= self.fill * self.times["W"][rank]):
            found["W"] = self.free[rank]
        return found

    def run(self) -> Schedule:
        """The whole schedule."""
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


def without_dominated(ways: list[tuple]) -> list[tuple]:
    """Of (state, times, path), those than which no other is earlier or equal in every time."""
    kept = []
    for way in ways:
        if not any(all(a <= b for a, b in zip(other[1], way[1], strict=True)) for other in kept):
            kept = [other for other in kept if not all(a <= b for a, b in zip(way[1], other[1], strict=True))]
            kept.append(way)
    return kept


def next_states(state: tuple, counts: tuple, p: int, m: int, times: dict, t_comm, live: int):
    """Each action that may come next, none earlier than the last: (rank, kind, new counts, new state, its end).

    state: when each rank is free; when the inputs that wait for it arrive, F's and I's; when the last action began.
    counts: of F, I, W, rank by rank.
    """
    free, hidden, gradients, last = state
    for rank in range(p):
        f, i, w = counts[3 * rank : 3 * rank + 3]
        ready = {}
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
            place = 3 * rank + "FIW".index(kind)
            new_counts = (*counts[:place], counts[place] + 1, *counts[place + 1 :])
            new_free = (*free[:rank], end, *free[rank + 1 :])
            yield rank, kind, new_counts, (new_free, tuple(new_hidden), tuple(new_gradients), start), end


def exact(p: int, m: int, times: dict[str, list], t_comm, live: int, bound) -> Schedule | None:
    """A schedule of the least cost, below `bound`; None where there is none."""
    begins = [sum(times["F"][:rank]) + rank * t_comm for rank in range(p)]  # of the first action, in any schedule
    layer = {(0,) * (3 * p): [(((0,) * p, ((),) * p, ((),) * p, 0), (), None)]}
    for _ in range(3 * p * m):
        following = {}
        for counts, ways in layer.items():
            for state, _, path in ways:
                for rank, kind, new_counts, new, end in next_states(state, counts, p, m, times, t_comm, live):
                    left = zip((times[each][rank] for each in "FIW"), new_counts[3 * rank : 3 * rank + 3], strict=True)
                    if end + sum(time * (m - count) for time, count in left) - begins[rank] < bound:
                        flat = (*new[0], *(t for row in new[1] + new[2] for t in row), new[3])
                        following.setdefault(new_counts, []).append((new, flat, (path, rank, kind)))
        layer = {counts: without_dominated(ways) for counts, ways in following.items()}
    ways = [way for each in layer.values() for way in each]
    if not ways:
        return None
    path = min(ways, key=lambda way: max(end - begin for end, begin in zip(way[0][0], begins, strict=True)))[2]
    kinds = [[] for _ in range(p)]
    while path:
        path, rank, kind = path
        kinds[rank].insert(0, kind)
    return [[Action(kind, rank, row[:k].count(kind)) for k, kind in enumerate(row)] for rank, row in enumerate(kinds)]


FILLS = (0, 0.5, 1)  # how large a gap must be for a W, in parts of it
SMALL = 12  # p m up to which all orders are searched


def search(p: int, m: int, t_f=1, t_i=1, t_w=1, t_comm=0, live: int | None = None) -> Schedule:
    """A schedule of F, I and W with one stage a rank, for these times (numbers, or a sequence each, by rank).

    live: how many micro-batches a rank may hold; None: p, as 1F1B. The best of a greedy search, of 1F1B, ZB-H1 and
    ZB-H2 where they hold no more, and for p m up to SMALL of all orders. Raises ValueError for a live below 1.
    """
    check_sizes(p, m)
    live = p if live is None else live
    if live < 1:
        raise ValueError(f"live = {live}: a rank holds 1 micro-batch or more")
    times = {k: list(t) if isinstance(t, Sequence) else [t] * p for k, t in zip("FIW", (t_f, t_i, t_w), strict=True)}

    def cost(schedule: Schedule):
        return simulate(schedule, *times.values(), t_comm).cost

    found = [
        each for each in (one_f_one_b(p, m), zero_bubble_h1(p, m), zero_bubble_h2(p, m)) if max(validate(each)) <= live
    ]
    for k in (1, 2, 3):
        ahead = [min(live, k * (p - 1 - rank) + 1) for rank in range(p)]
        found += [Greedy(p, m, times, t_comm, live, ahead, fill).run() for fill in FILLS]
    best = min(found, key=cost)
    return (exact(p, m, times, t_comm, live, cost(best)) if p * m <= SMALL else None) or best
