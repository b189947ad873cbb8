"""Check of exercise 10.21: the state that each of three runs has forgotten."""

from __future__ import annotations

from course_kit.labs.checkpoint.restarts import FORGOTTEN, drawn


def check(forgot: dict[str, str]) -> None:
    """Judge the diagnosis of runs A, B and C."""
    assert set(forgot) == {"A", "B", "C"}, f"an answer for A, B and C: {forgot}"
    assert sorted(forgot.values()) == [*FORGOTTEN], f"each of the three once: {forgot}"
    wrong = [letter for letter, what in drawn().items() if forgot[letter] != what]
    assert not wrong, f"look again at {' and '.join(wrong)}"
