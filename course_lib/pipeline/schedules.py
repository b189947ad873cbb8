"""Pipeline schedules as data: for each rank a list of actions, in order.

p ranks, m micro-batches, v stages per rank. t_f, t_i, t_w: times of F, I, W; B takes t_i + t_w. Bubble: idle time of a
rank between its first and its last action; live: micro-batches whose activations a rank holds, by stage.

    schedule         bubble                               live, at most     stages per rank
    naive            (p-1) m (t_f + t_i + t_w)            1                 1
    afab             (p-1) (t_f + t_i + t_w)              m                 1
    one_f_one_b      (p-1) (t_f + t_i + t_w)              p                 1
    interleaved      (p-1) (t_f + t_i + t_w)              p + (p-1)/v ... m (each 1/v as large)   v
    zero_bubble_h1   (p-1) (t_f + t_i - t_w)              p                 1
    zero_bubble_h2   (p-1) (t_f + t_i - 2 t_w)            2p - 1            1
    zero_bubble_v    0 for equal times                    2p (half as large)   2, in a V
    dualpipe         (p/2-1) (t_f + 2 t_i - t_w)          p + 1             2, of which each is on two ranks

Times are per action: one of interleaved takes 1/v of a whole rank's. zero_bubble: t_w at most t_f and t_i, m
at least p (H1), 2p - 1 (H2 and V); dualpipe: t_f at most t_i. Huang et al. 2018 (GPipe: afab); Narayanan et al.
2019, 2021 (PipeDream, Megatron-LM: 1F1B, interleaved); Llama Team 2024, §3.3.2 (runs); Qi et al. 2023 (zero bubble:
H1, H2, V); DeepSeek-V3 2024, §3.2.1 (DualPipe).
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Sequence

from course_lib.pipeline.actions import Action, Overlapped, Schedule, check_sizes


def naive(p: int, m: int) -> Schedule:
    """Each micro-batch goes forward and backward through all stages before the next one begins."""
    check_sizes(p, m)
    return [[Action(kind, rank, i) for i in range(m) for kind in "FB"] for rank in range(p)]


def afab(p: int, m: int) -> Schedule:
    """All forwards, then all backwards (GPipe)."""
    check_sizes(p, m)
    return [[Action(kind, rank, i) for kind in "FB" for i in range(m)] for rank in range(p)]


# exercise 09.4
def steady_1f1b(forwards: list[Action], backwards: list[list[Action]], warmup_microbatches: int) -> list[Action]:
    """Return 1F1B's order: `warmup_microbatches` forwards (at most all), then forwards and backwards alternately, then
    the remaining backwards. Each backward is a list of actions; there are as many backwards as forwards.
    """
    warmup = min(warmup_microbatches, len(forwards))
    pairs = zip(forwards[warmup:], backwards, strict=False)
    steady = [action for forward, backward in pairs for action in (forward, *backward)]
    rest = [action for backward in backwards[len(forwards) - warmup :] for action in backward]
    return forwards[:warmup] + steady + rest


# exercise 09.4
def one_f_one_b(p: int, m: int) -> Schedule:
    """One forward, one backward: rank r, which has stage r, begins with p - 1 - r forwards, or m if that is less.

    Micro-batches are in the order 0 … m - 1, forward and backward. Narayanan et al. 2021, §2.2.
    """
    check_sizes(p, m)
    return [
        steady_1f1b([Action("F", rank, i) for i in range(m)], [[Action("B", rank, i)] for i in range(m)], p - 1 - rank)
        for rank in range(p)
    ]


# exercise 09.10
def interleaved(p: int, m: int, v: int, run: int | None = None) -> Schedule:
    """1F1B with v stages on each rank: stage s is on rank s mod p.

    run: micro-batches in a row that go through a stage before the next one; p, also the default: depth first; m:
    breadth first. Backwards take the same runs, through the rank's last stage first. Rank r begins with
    (v - 1) run + 2 (p - 1 - r) forwards. With v = 1 it is one_f_one_b. Raises ValueError if a run is shorter than p
    or does not divide m. Narayanan et al. 2021, §2.2; Llama Team 2024, §3.3.2.
    """
    check_sizes(p, m, v)
    run = p if run is None else run
    if v == 1:
        return one_f_one_b(p, m)
    if run < p or m % run:
        raise ValueError(f"interleaved: run = {run} must be at least p = {p}, and divide m = {m}")

    def in_runs(kind: str, rank: int, chunks) -> list[Action]:
        starts = itertools.product(range(0, m, run), chunks)
        return [Action(kind, chunk * p + rank, i) for first, chunk in starts for i in range(first, first + run)]

    schedule = []
    for rank in range(p):
        forwards = in_runs("F", rank, range(v))
        backwards = [[action] for action in in_runs("B", rank, reversed(range(v)))]
        schedule.append(steady_1f1b(forwards, backwards, (v - 1) * run + 2 * (p - 1 - rank)))
    return schedule


# exercise 09.13
def delay_weight_grads(p: int, m: int, k: int) -> Schedule:
    """1F1B with k times the warmup, in which rank r delays its W's by k r micro-batches.

    Each backward is I and, once there is one to do, the W that is due; the remaining W's come at the end.
    """
    check_sizes(p, m)
    schedule = []
    for rank in range(p):
        late = k * rank
        forwards = [Action("F", rank, i) for i in range(m)]
        backwards = [[Action("I", rank, i)] + ([Action("W", rank, i - late)] if i >= late else []) for i in range(m)]
        left = [Action("W", rank, i) for i in range(max(0, m - late), m)]
        schedule.append(steady_1f1b(forwards, backwards, k * (p - 1 - rank)) + left)
    return schedule


def zero_bubble_h1(p: int, m: int) -> Schedule:
    """ZB-H1: a third of 1F1B's bubble if F, I, W take the same time; a rank holds p. Qi et al. 2023, §2.1."""
    return delay_weight_grads(p, m, 1)


def zero_bubble_h2(p: int, m: int) -> Schedule:
    """ZB-H2: no bubble if F, I, W take the same time and m >= 2p - 1; a rank holds 2p - 1. Qi et al. 2023, §2.2."""
    return delay_weight_grads(p, m, 2)


def assign_microbatches(order: Sequence[tuple[str, int]], first: dict[int, int]) -> list[Action]:
    """Return actions for a rank's (kind, stage): the k-th F of a stage, and its k-th B or I, is of micro-batch
    first[stage] + k. A W, whose stage is not read, belongs to the oldest I without one.
    """
    actions: list[Action] = []
    counts: collections.Counter[tuple[bool, int]] = collections.Counter()
    without_w: collections.deque[Action] = collections.deque()
    for kind, stage in order:
        if kind == "W":
            actions.append(without_w.popleft()._replace(kind="W"))
            continue
        key = kind == "F", stage
        actions.append(Action(kind, stage, first[stage] + counts[key]))
        counts[key] += 1
        if kind == "I":
            without_w.append(actions[-1])
    return actions


# notebook 09, cell zero-bubble-v
def zero_bubble_v(p: int, m: int) -> Schedule:
    """ZB-V: stages r and 2p - 1 - r on rank r; no bubble if F, I, W take the same time and m is at least 2p - 1.

    A rank holds the activations of 2p micro-batches in a stage of half the size. Qi et al. 2023, §6.
    """
    check_sizes(p, m)
    schedule, full = [], max(m, 2 * p - 1)
    for rank in range(p):
        down, up, rest = rank, 2 * p - 1 - rank, p - rank
        Fa, Ia, Fb, Ib, W = ([each] for each in (("F", down), ("I", down), ("F", up), ("I", up), ("W", -1)))
        todo = Fa * (2 * rest - 1) + (Fb + Fa) * rank + (Fb + Ib + W) * rest
        todo += (Fa + Ia + W + Fb + Ib + W) * (full - p - rest + 1) + (Ia + W + Fb + Ib + W) * (rest - 1)
        todo += (Ia + Ib) * rank + (Ia + W) * rest + W * 2 * rank
        schedule.append([action for action in assign_microbatches(todo, {down: 0, up: 0}) if action.micro_batch < m])
    return schedule


# notebook 09, cell dualpipe
def dualpipe(p: int, m: int) -> Schedule:
    """DualPipe: stages r and p - 1 - r on rank r; micro-batches 0 … m/2 - 1 enter at rank 0, the others at rank p - 1.

    Each stage is on two ranks, a rank holds p + 1. DeepSeek-V3 2024, §3.2.1. Raises ValueError unless p and m are even
    and m is at least 2p.
    """
    check_sizes(p, m)
    if p % 2 or m % 2 or m < 2 * p:
        raise ValueError(f"dualpipe: p = {p} and m = {m} must be even, and m at least 2p")
    schedule = []
    for rank in range(p):
        near = min(rank, p - 1 - rank)
        far, inner = p - 1 - near, p // 2 - 1 - near
        Fa, Ba, Ia = ([(kind, near)] for kind in "FBI")
        Fb, Bb, Ib = ([(kind, far)] for kind in "FBI")
        W, backwards = [("W", -1)], near + 1
        todo = Fa * 2 * inner + (Fa + Fb) * (near + 1) + (Ib + W + Fb) * inner
        todo += (Fa + Bb + Fb + Ba) * (m // 2 - p + near + 1) + (Bb + Fb + Ba) * inner
        todo += ((Bb + Ba) * backwards)[:backwards] + ((Ib + Ia) * backwards)[backwards:]
        todo += (W + Ia) * inner + W * (near + 1)
        actions = assign_microbatches(todo, {near: 0, far: m // 2} if rank < p // 2 else {near: m // 2, far: 0})
        pairs = [a.kind == "F" and b.kind == "B" for a, b in itertools.pairwise(actions)] + [False]
        schedule.append([Overlapped(*action) if pair else action for action, pair in zip(actions, pairs, strict=True)])
    return schedule


SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "naive": naive,
    "afab": afab,
    "1f1b": one_f_one_b,
    "zb-h1": zero_bubble_h1,
    "zb-h2": zero_bubble_h2,
}
SCHEDULES |= {"zb-v": zero_bubble_v, "dualpipe": dualpipe}


def schedule_by_name(name: str, p: int, m: int, v: int = 2, run: int | None = None) -> Schedule:
    """Return one of SCHEDULES, or "interleaved" with v stages per rank. Raises ValueError for sizes that it refuses."""
    return interleaved(p, m, v, run) if name == "interleaved" else SCHEDULES[name](p, m)


def num_stages(schedule: Schedule) -> int:
    """Return the number of stages of a schedule."""
    return 1 + max(action.stage for actions in schedule for action in actions)
