"""Check of exercise 09.14: `Greedy.options` lists a rank's next actions, and their times."""

from __future__ import annotations

from course_kit.checks.pipeline.lists import cost, fault, held
from course_lib.pipeline import search

BY_HAND = ((2, 4, (1, 1, 1), 1), (4, 8, (3, 3, 2), 1), (4, 8, (1, 1, 1), 2), (8, 16, (2, 3, 1), 1))  # p, m, times, k


def expect(probe, rank: int, wanted: dict, why: str) -> None:
    """Assert the options of a rank."""
    result = probe.options(rank)
    assert result == wanted, f"rank {rank}: {why}: the options are {wanted}, not {result}"


def check_options() -> None:
    """Assert the options of two ranks, from the start on."""
    probe = search.Greedy(2, 3, {kind: [2, 2] for kind in "FIW"}, 1, 2, [2, 2], 0.5)
    expect(probe, 0, {"F": 0}, "at the start rank 0 can do its first F")
    expect(probe, 1, {}, "at the start rank 1 can do nothing: no F has arrived, and an I needs its own F")
    probe.done[0]["F"], probe.free[0], probe.ended["F", 0, 0] = 1, 2, 2
    expect(probe, 1, {"F": 3}, "rank 1's first F begins when it arrives, t_comm after its end")
    expect(probe, 0, {"F": 2}, "no rank knows when the gradient comes: I is no option yet")
    probe.done[0]["F"], probe.free[0] = 2, 4
    expect(probe, 0, {}, "two are live, and F leads by two: no F")
    probe.ended["I", 1, 0] = 8
    expect(probe, 0, {"I": 9}, "I begins when its gradient arrives")
    probe.done[0].update(F=2, I=1)
    probe.free[0] = 11
    probe.ended["I", 1, 1] = 12
    expect(probe, 0, {"I": 13, "W": 11}, "a W, since memory is full, and the next I comes at 13")
    probe.fill = 1.5
    expect(probe, 0, {"I": 13, "W": 11}, "memory is full: a W, however short the gap is")
    probe.live = 3
    expect(probe, 0, {"F": 11, "I": 13}, "not full, and an F can start at once: no W")
    probe.fill = 0
    expect(probe, 0, {"F": 11, "I": 13}, "an F can start at once, so there is no gap, and no W with a fill of 0 either")
    probe.fill = 1.5
    probe.max_lead = [1, 1]
    expect(probe, 0, {"I": 13}, "a gap of 2 is below 1.5 times a W of 2")
    del probe.ended["I", 1, 1]
    expect(probe, 0, {"W": 11}, "no rank knows when the next I can begin: a W")


def check_rank_1() -> None:
    """Assert that a rank's own times and its own lead count: rank 1's W is long, and its lead is short."""
    probe = search.Greedy(2, 3, {"F": [2, 2], "I": [2, 2], "W": [2, 6]}, 1, 3, [5, 1], 0.6)
    probe.done[0]["F"], probe.free[0], probe.ended["F", 0, 0], probe.ended["F", 0, 1] = 2, 8, 2, 8
    probe.done[1].update(F=1, I=1)
    probe.free[1] = 6
    expect(probe, 1, {"F": 9}, "a gap of 3 is below 0.6 times its own W of 6: times[kind][rank]")
    probe.fill = 0.5
    expect(probe, 1, {"F": 9, "W": 6}, "a gap of 3 is at least 0.5 times its own W of 6: a W")
    probe.done[1]["I"] = 0
    expect(probe, 1, {"I": 6}, "its F leads by 1, and may by max_lead[1] = 1: no F")


def check() -> None:
    """Assert options, and the cost of four schedules against costs by hand."""
    check_options()
    check_rank_1()
    for p, m, times, k in BY_HAND:
        live, (t_f, t_i, t_w) = k * (p - 1) + 1, times
        warmup = [min(live, k * (p - 1 - rank) + 1) for rank in range(p)]
        by_kind = {kind: [time] * p for kind, time in zip("FIW", times, strict=True)}
        schedule = search.Greedy(p, m, by_kind, 0, live, warmup, 0.0).run()
        wrong = fault(schedule, p, m)
        assert not wrong, f"p = {p}, m = {m}: {wrong}"
        assert max(held(schedule)) <= live, f"p = {p}, m = {m}: holds {max(held(schedule))}, and may hold {live}"
        by_hand, result = m * sum(times) + (p - 1) * (t_f + t_i - k * t_w), cost(schedule, *times)
        assert result <= 1.1 * by_hand, f"p = {p}, m = {m}, times {times}: cost {result}, by hand {by_hand}"
