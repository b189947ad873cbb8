"""Check of exercise 09.4: `steady_1f1b`, and `one_f_one_b` made of it."""

from __future__ import annotations

from course_kit.checks.pipeline.lists import words
from course_lib.pipeline import schedules
from course_lib.pipeline.actions import Action


def check() -> None:
    """Assert three lists of steady_1f1b, and the kinds and numbers of 1F1B for six p and m."""
    F, B = (lambda n, kind=kind: [Action(kind, 0, i) for i in range(n)] for kind in "FB")
    pairs = [[Action("I", 0, i), Action("W", 0, i)] for i in range(2)]
    for forwards, backwards, warmup, wanted in (
        (F(5), [[each] for each in B(5)], 2, "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4"),
        (F(2), [[each] for each in B(2)], 7, "F0 F1 B0 B1"),
        (F(2), pairs, 1, "F0 F1 I0 W0 I1 W1"),
    ):
        result = words(schedules.steady_1f1b(forwards, backwards, warmup))
        assert result == wanted, f"steady_1f1b, {warmup} warmup forwards of {len(forwards)}: {result}, not {wanted}"
    for p, m in ((1, 3), (2, 4), (4, 8), (4, 9), (4, 2), (8, 20)):
        schedule = schedules.one_f_one_b(p, m)
        assert len(schedule) == p, f"p = {p}, m = {m}: {len(schedule)} ranks"
        for rank, actions in enumerate(schedule):
            where = f"p = {p}, m = {m}, rank {rank}"
            assert {each.stage for each in actions} == {rank}, f"{where}: has stage {rank} alone"
            for kind in "FB":
                numbers = [each.micro_batch for each in actions if each.kind == kind]
                assert numbers == list(range(m)), (
                    f"{where}: {kind} of micro-batches {numbers}, not 0 … {m - 1} in order"
                )
            kinds = "".join(each.kind for each in actions)
            warmup = min(p - 1 - rank, m)
            assert kinds == "F" * warmup + "FB" * (m - warmup) + "B" * warmup, (
                f"{where}: {words(actions)}; expected {warmup} warmup F, then alternating F and B"
            )
