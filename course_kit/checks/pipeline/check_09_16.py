"""Check of exercise 09.16: which of the four runners of the lab has which fault."""

from __future__ import annotations

from course_kit.labs.pipeline.faults import RUNS


def check(who: dict[str, str]) -> None:
    """Judge a dict from letter to fault."""
    assert sorted(who.values()) == sorted(RUNS), "who = {'A': 'sound', …}: each of sound, lost, cut, scaled once"
    names = dict(zip("ABCD", RUNS, strict=True))
    wrong = [letter for letter in "ABCD" if who.get(letter) != names[letter]]
    assert not wrong, (
        f"{len(wrong)} of 4 are wrong: look in which stages the cosine is below 1, and in which the ratio is"
    )
