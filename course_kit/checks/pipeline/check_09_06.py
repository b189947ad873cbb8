"""Check of exercise 09.6: `validate` refuses wrong schedules, and counts the passes that ranks hold."""

from __future__ import annotations

from course_lib.pipeline import actions, schedules
from course_lib.pipeline.actions import Action


def taken(*actions: tuple[str, int, int]) -> list[Action]:
    """Actions of (kind, stage, micro-batch)."""
    return [Action(*word) for word in actions]


GOOD = [  # 1F1B, two ranks, four micro-batches
    [Action(kind, 0, int(i)) for kind, i in ("F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3")],
    [Action(kind, 1, i) for i in range(4) for kind in "FB"],
]
WRONG = {
    "a micro-batch less than asked for": (GOOD, 5),
    "a micro-batch more than asked for": (GOOD, 3),
    "a B left out": ([GOOD[0][:-1], GOOD[1]], 4),
    "a B twice": ([GOOD[0] + GOOD[0][-1:], GOOD[1]], 4),
    "a B twice on the last rank": ([GOOD[0], GOOD[1] + GOOD[1][-1:]], 4),
    "micro-batch 1 left out everywhere": ([[each for each in row if each[2] != 1] for row in GOOD], None),
    "B and W of one": ([GOOD[0] + taken(("W", 0, 3)), GOOD[1]], 4),
    "I without W": ([taken(("F", 0, 0), ("I", 0, 0))], 1),
    "W before I": ([taken(("F", 0, 0), ("W", 0, 0), ("I", 0, 0))], 1),
    "backward on another rank": ([taken(("F", 0, 0), ("F", 1, 0)), taken(("B", 1, 0), ("B", 0, 0))], 1),
    "a stage that no rank has": ([GOOD[0], [each._replace(stage=2) for each in GOOD[1]]], 4),
    "a micro-batch -1": ([GOOD[0] + taken(("F", 0, -1), ("B", 0, -1)), GOOD[1]], 4),
    "a stage -1": ([GOOD[0] + taken(("F", -1, 0), ("B", -1, 0)), GOOD[1]], 4),
    "a deadlock": ([GOOD[0], sorted(GOOD[1], key=lambda each: each.kind)], 4),
}


def refused(schedule: list, m: int | None) -> str:
    """Return validate's message for a wrong schedule; "" if it accepts it."""
    try:
        actions.validate(schedule, m)
    except ValueError as error:
        return str(error)
    return ""


def check() -> None:
    """Assert the passes that ranks hold in right schedules, and that wrong ones are refused."""
    for p, m in ((1, 1), (2, 4), (4, 8), (4, 9), (4, 2)):
        assert actions.validate(schedules.naive(p, m), m) == [1] * p, (
            f"naive, p = {p}, m = {m}: one micro-batch at a time"
        )
        assert actions.validate(schedules.afab(p, m)) == [m] * p, f"AFAB, p = {p}, m = {m}: all {m} are held"
        held = actions.validate(schedules.one_f_one_b(p, m), m)
        assert held == [min(p - rank, m) for rank in range(p)], f"1F1B, p = {p}, m = {m}: {held}"
    halves = [taken(*((kind, 0, i) for kind, i in (("F", 0), ("I", 0), ("F", 1), ("I", 1), ("W", 0), ("W", 1))))]
    assert actions.validate(halves, 2) == [2], "what W needs is held until W: an I frees nothing"
    at_once = taken(*((kind, 0, i) for i in range(2) for kind in "FIW"))
    assert actions.validate([at_once], 2) == [1], "F I W F I W: a W takes one away, so one is held at most"
    both = [
        taken(("F", 0, 0), ("F", 1, 1), ("B", 1, 1), ("B", 0, 0)),
        taken(("F", 0, 1), ("F", 1, 0), ("B", 1, 0), ("B", 0, 1)),
    ]
    assert not refused(both, 2), f"a stage may be on two ranks, each with micro-batches of its own: {refused(both, 2)}"
    try:
        idle = actions.validate([taken(("F", 0, 0), ("B", 0, 0)), []])
    except ValueError as error:
        raise AssertionError(f"a rank without actions holds 0 micro-batches, and is no error: {error}") from None
    assert idle == [1, 0], f"a rank without actions holds 0 micro-batches: {idle}, not [1, 0]"
    for what, case in WRONG.items():
        assert refused(*case), f"{what}: should raise ValueError"
    assert "deadlock" in refused(*WRONG["a deadlock"]), "the deadlock's error should say so: let play raise it"
