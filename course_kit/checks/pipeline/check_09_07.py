"""Check of exercise 09.7: `simulate` lets each action begin when its rank is free and its inputs have arrived."""

from __future__ import annotations

import time
from fractions import Fraction

from course_kit.checks.pipeline.lists import listed
from course_lib.pipeline import schedules, simulation
from course_lib.pipeline.actions import Action, Overlapped

TIMES = (1, 1, 1), (3, 2, 5), (Fraction(1, 3), Fraction(2, 7), 1)  # of F, I and W
SPLIT = [[Action(kind, stage, 0) for kind in "FIW"] for stage in range(2)]  # stage 0 on rank 0, 1 on rank 1
RANKS_SWAPPED = [[Action(kind, stage, 0) for kind in "FB"] for stage in (1, 0)]  # stage 0 on rank 1, 1 on rank 0
IN_A_V = [
    [Action(kind, stage, 0) for kind, stage in (("F", 0), ("F", 3), ("B", 3), ("B", 0))],
    [Action(kind, stage, 0) for kind, stage in (("F", 1), ("F", 2), ("B", 2), ("B", 1))],
]
PLACED = (  # schedule, t_comm, when all is done, why
    (SPLIT, 0, 5, "an I waits for the I of the stage after, as a B does"),
    (SPLIT, 2, 9, "what an I makes travels as what a B makes does; a W needs what its own rank has made"),
    (RANKS_SWAPPED, 5, 16, "stage 0 may be on another rank than 0: note the rank of each forward"),
    (IN_A_V, 5, 32, "stages 0 and 3 on rank 0, 1 and 2 on rank 1: what another rank has made travels, by rank_of"),
)
PAIR = [  # on rank 1 of three
    [Action(*each) for each in (("F", 0, 0), ("F", 0, 1), ("B", 0, 0), ("B", 0, 1))],
    [Action("F", 1, 0), Overlapped("F", 1, 1), Action("B", 1, 0), Action("B", 1, 1)],
    [Action(*each) for each in (("F", 2, 0), ("B", 2, 0), ("F", 2, 1), ("B", 2, 1))],
]
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
    for schedule, t_comm, end, why in PLACED:
        done = simulate(schedule, 1, 1, 1, t_comm).makespan
        assert done == end, f"{listed(schedule)}; t_comm = {t_comm}: all done at {done}, not {end}: {why}"
    in_pairs = [Action("F", 0, 0), Overlapped("F", 0, 1), Action("B", 0, 0), Action("B", 0, 1)]
    for t_pair, last in ((None, 6.0), (2.5, 5.5)):
        done = simulate([in_pairs], 1, 1, 1, 0, t_pair).makespan
        assert done == last, f"a pair, t_pair = {t_pair}: all done at {done}, not {last}: F, the pair, B"
    for f, i, end, why in (([5, 1, 1], [1, 1, 1], 20, "its F"), ([2, 1, 1], [1, 1, 4], 22, "its B")):
        done = simulate(PAIR, f, i, 1).makespan
        assert done == end, (
            f"{listed(PAIR)}; rank 1's second F and first B are a pair; t_f = {f}, t_i = {i}: all done at {done}, not "
            f"{end}: a pair begins when both of its inputs are there, and the later one is that of {why}"
        )
    start = time.process_time()
    large = simulate(schedules.one_f_one_b(64, 1024))
    assert large.bubble == 63 * 3 and time.process_time() - start < 4, "p = 64, m = 1024: too slow or wrong"
