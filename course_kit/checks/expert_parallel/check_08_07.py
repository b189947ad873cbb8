"""Check of exercise 08.7: the diagnosis of the lab's four routers."""

from __future__ import annotations

from course_kit.labs.expert_parallel.routers import FAULTS, LETTERS, lab_runs

HINTS = {
    "sound": "its choices stay spread, and its router learns",
    "detached": "its router has no gradient, and each token makes two choices",
    "normalized": "its router has no gradient, and each token makes one choice",
    "rewarded": "its router learns, and to prefer the same experts",
}


def check(diagnosis: dict[str, str | None]) -> None:
    """Judge the diagnosis; see that the runs show what it takes to make one."""
    for letter, (_, counts, norms) in lab_runs().items():
        truth, message = LETTERS[letter], diagnosis.get(letter)
        assert message in FAULTS, f"run {letter}: {message!r} is none of {', '.join(FAULTS)}"
        silent, top_one = norms.mean() < 1e-6, counts[0, 1].sum() == 1024
        assert message == truth, f"run {letter} is not {message}: " + HINTS[truth]
        assert silent == (truth in ("detached", "normalized")) and top_one == (truth == "normalized"), (
            f"run {letter} does not show what makes it {truth} on this machine: not your fault"
        )
