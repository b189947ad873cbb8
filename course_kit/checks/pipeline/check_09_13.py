"""Check of exercise 09.13: `delay_weight_grads`, of which ZB-H1 and ZB-H2 are made."""

from __future__ import annotations

from course_kit.checks.pipeline.lists import bubble, fault, held, words
from course_kit.labs.pipeline.same import check_order, check_same
from course_kit.ranks import shared
from course_lib.pipeline import schedules


def check() -> None:
    """Assert three lists, bubbles and memory by formulas, few micro-batches, and runs on four ranks."""
    for where, actions, wanted in (
        ("k = 1 (H1), rank 1 of 3", schedules.delay_weight_grads(3, 4, 1)[1], "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3"),
        ("k = 2 (H2), rank 0 of 2", schedules.delay_weight_grads(2, 4, 2)[0], "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3"),
        ("k = 3, rank 0 of 2", schedules.delay_weight_grads(2, 4, 3)[0], "F0 F1 F2 F3 I0 W0 I1 W1 I2 W2 I3 W3"),
    ):
        assert words(actions) == wanted, f"{where}: {words(actions)}, not {wanted}"
    for k, name in ((1, "ZB-H1"), (2, "ZB-H2")):
        for p, m in ((2, 4), (4, 8), (4, 9), (8, 16)):
            where, schedule = f"{name}, p = {p}, m = {m}", schedules.delay_weight_grads(p, m, k)
            wrong = fault(schedule, p, m)
            assert not wrong, f"{where}: {wrong}"
            holds = held(schedule)
            assert holds == [k * (p - 1) + 1] * p, f"{where}: ranks hold {holds}, not {k * (p - 1) + 1}"
            for t_f, t_i, t_w in ((1, 1, 1), (3, 3, 2), (2, 3, 1)):
                expected, result = (p - 1) * (t_f + t_i - k * t_w), bubble(schedule, t_f, t_i, t_w)
                assert result == expected, f"{where}, times {t_f}, {t_i}, {t_w}: bubble {result}, not {expected}"
        few = schedules.delay_weight_grads(4, 2, k)
        wrong = fault(few, 4, 2)
        assert not wrong, f"{name}, fewer micro-batches than ranks, p = 4, m = 2: {wrong}"
        assert all(len(row) == 6 for row in few), f"{name}, p = 4, m = 2: {words(few[3])}"
        with shared(4).within(20):
            check_order(schedules.delay_weight_grads(4, 8, k), name)
            check_same(schedules.delay_weight_grads(4, 4 * k + 1, k), name, 4 * k + 1)
