"""Check of exercise 05.5: the norm that the ranks of a run clip by."""

from __future__ import annotations

from collections.abc import Callable

from course_kit.labs.zero import FAULTS, clipped_runs


def check(diagnose: Callable[[list[list[float]], list[list[float]]], str | None]) -> None:
    """Assert the diagnosis of the lab's three runs, and None for norms that fit no explanation."""
    from course_kit.ranks import shared

    for number, (fault, run) in enumerate(zip(FAULTS, clipped_runs(shared(4)), strict=True)):
        shards, used = ([rank[name] for rank, _ in run] for name in ("shard", "used"))
        answer = diagnose(shards, used)
        assert answer == (fault or "right"), f"run {number}: {answer!r} is not what its ranks have clipped by"
        steps = [[2.0 * x for x in rank] for rank in used]
        assert diagnose(shards, steps) is None, (
            f"run {number}, norms twice as large: they fit no explanation, so the answer is None"
        )
        spoiled = [list(rank) for rank in used]
        spoiled[3][-1] *= 1.003
        answer = diagnose(shards, spoiled)
        assert answer is None, f"run {number}, but rank 3 is 0.3% off in its last step: None, not {answer!r}"
        rounded = [[1.0005 * x for x in rank] for rank in used]
        assert diagnose(shards, rounded) == (fault or "right"), (
            f"run {number}, all norms 0.05% off, as rounding may have it: still {fault or 'right'!r}"
        )
    assert diagnose([[3.0], [4.0]], [[5.0], [5.0]]) == "right", "two ranks with shards of norm 3 and 4: 5 is right"
