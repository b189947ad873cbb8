"""Check of exercise 09.10: `interleaved`, with runs of any length."""

from __future__ import annotations

import dataclasses

from course_kit.checks.pipeline.check_09_09 import one_f_one_b
from course_kit.checks.pipeline.lists import bubble, fault, held
from course_kit.labs.pipeline.models import TINY
from course_kit.labs.pipeline.same import check_order, check_same
from course_kit.ranks import shared
from course_lib.pipeline import schedules


def check() -> None:
    """Assert bubbles and memory by formulas, errors, and runs on four ranks."""
    for p, m, v in ((2, 4, 2), (4, 8, 2), (4, 4, 3), (4, 16, 4), (3, 9, 2)):
        for run in {p, m}:
            where, schedule = f"p = {p}, m = {m}, v = {v}, run = {run}", schedules.interleaved(p, m, v, run)
            wrong = fault(schedule, p * v, m)
            assert not wrong, f"{where}: {wrong}"
            assert {a.stage for a in schedule[1]} == set(range(1, p * v, p)), (
                f"{where}: rank 1 has stages 1, {p + 1}, …"
            )
            for times in ((1, 1, 1), (2, 1, 3)):
                result, wanted = bubble(schedule, *times), (p - 1) * sum(times)
                assert result == wanted, f"{where}: bubble {result}, not {wanted}"
    peaks = [max(held(schedules.interleaved(4, 16, 2, run))) for run in (4, 8, 16)]
    assert peaks == [11, 15, 23], (
        f"p = 4, m = 16, v = 2: runs of 4, 8, 16 hold {peaks}, not run (v - 1) + 2 (p - 1) + 1"
    )
    assert schedules.interleaved(4, 8, 1) == one_f_one_b(4, 8), "v = 1 is 1F1B"
    for p, m, v, bad_run in ((4, 9, 2, None), (4, 8, 2, 2), (2, 8, 2, 3)):
        try:
            schedules.interleaved(p, m, v, bad_run)
        except ValueError:
            continue
        raise AssertionError(f"p = {p}, m = {m}, run = {bad_run}: should raise ValueError")
    with shared(4).within(20):
        for run in (4, 8):
            check_order(schedules.interleaved(4, 8, 2, run), f"interleaved, run = {run}")
        check_same(schedules.interleaved(4, 4, 3), "interleaved, v = 3", 4, dataclasses.replace(TINY, layers=10))
