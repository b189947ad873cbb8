"""Check of exercise 03.11: the rank that left the common path, and the call in which it waits."""

from __future__ import annotations


def check(guilty_rank: int, guilty_call: str) -> None:
    """Assert that both match the hang report."""
    assert guilty_rank == 2, "the guilty rank is the one that waits alone, at another line than the others"
    assert guilty_call == "broadcast", "the report says 'in ...' before the line of the guilty rank"
