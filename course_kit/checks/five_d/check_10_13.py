"""Check of exercise 10.13: the diagnosis of three jobs that hang."""

from __future__ import annotations

from course_kit.labs.five_d.hangs import FAULTS, JOBS, planted


def check(verdict: dict[str, tuple[str, list[int]]]) -> None:
    """Judge the fault and the ranks to blame of each job."""
    for number, job in enumerate(JOBS):
        fault, guilty = planted(number)
        assert verdict[job][0] in FAULTS, f"job {job}: {verdict[job][0]!r} is none of the three faults"
        assert verdict[job][0] == fault, (
            f"job {job}: not {verdict[job][0]!r}; look for a rank that waits nowhere, and at the message"
        )
        assert sorted(verdict[job][1]) == guilty, f"job {job}: the fault is right, the ranks are not: {verdict[job][1]}"
