"""Check of exercise 09.7: `simulate` lets each action begin when its rank is free and its inputs have arrived."""

from __future__ import annotations

import time
from fractions import Fraction

from course_lib.pipeline import schedules, simulation
from course_lib.pipeline.actions import Action, Overlapped

TIMES = (1, 1, 1), (3, 2, 5), (Fraction(1, 3), Fraction(2, 7), 1)  # of F, I and W
ONE_RANK = [[Action(kind, stage, 0) for kind, stage in (("F", 0), ("F", 1), ("I", 1), ("I", 0), ("W", 1), ("W", 0))]]


def check_bubble(make, p: int, m: int, times: tuple, wanted: int) -> None:
    """Assert the bubble of a schedule, in units of a rank's work for one micro-batch, and the work itself."""
    result, work = simulation.simulate(make(p, m), *times), sum(times)
    where = f"{make.__name__}, p = {p}, m = {m}, times {', '.join(map(str, times))}"
    why = "too early: wait for what it needs, and for its rank" if result.bubble < wanted * work else "too late"
    assert result.bubble == wanted * work, (
        f"{where}: bubble {result.bubble}, not {wanted * work}: an action begins {why}"
    )
    assert result.busy == [m * work] * p, f"{where}: ranks work for {result.busy}"


def check() -> None:
    """Assert bubbles against the formulas, times of messages, and the time of a large schedule."""
    simulate = simulation.simulate
    for p, m in ((1, 4), (2, 4), (4, 8), (4, 9), (4, 2)):
        for times in TIMES:
            bubbles = (schedules.naive, (p - 1) * m), (schedules.afab, p - 1), (schedules.one_f_one_b, p - 1)
            for make, wanted in bubbles:
                check_bubble(make, p, m, times, wanted)
    result = simulate(schedules.naive(3, 1), 1, 1, 1, 5).makespan
    assert result == 9 + 4 * 5, (
        f"t_comm = 5, three ranks, one micro-batch: {result}, not 29: four trips, all on the way"
    )
    result = simulate(schedules.afab(2, 4), 1, 1, 1, 1).makespan
    assert result == 5 * 3 + 2, f"t_comm: AFAB, p = 2, m = 4 takes {result}, not 17: a rank computes during sends"
    by_stage = [1, 2, 4], [1, 1, 1], [0, 0, 8]
    assert simulate(schedules.naive(3, 1), *by_stage).makespan == 7 + 3 + 8, "times may differ by stage"
    assert simulate(ONE_RANK, 1, 1, 1, 5).makespan == 6, "what the same rank has made need not travel"
    in_pairs = [Action("F", 0, 0), Overlapped("F", 0, 1), Action("B", 0, 0), Action("B", 0, 1)]
    for t_pair, end in ((None, 6.0), (2.5, 5.5)):
        done = simulate([in_pairs], 1, 1, 1, 0, t_pair).makespan
        assert done == end, f"a pair, t_pair = {t_pair}: all done at {done}, not {end}: F, the pair, B"
    start = time.process_time()
    large = simulate(schedules.one_f_one_b(64, 1024))
    assert large.bubble == 63 * 3 and time.process_time() - start < 4, "p = 64, m = 1024: too slow or wrong"
