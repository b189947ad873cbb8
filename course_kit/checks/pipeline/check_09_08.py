"""Check of exercise 09.8: micro-batches for a bubble of 10% of the time, and the cost of twice the stages."""

from __future__ import annotations


def check(micro_batches: int, slower: float) -> None:
    """Judge both numbers by (p - 1) / (m + p - 1)."""
    enough, one_less = (15 / (m + 15) for m in (micro_batches, micro_batches - 1))
    assert enough <= 0.1, f"m = {micro_batches}: the bubble is {enough:.1%} of the time"
    assert one_less > 0.1, f"fewer will do: try m = {micro_batches - 1}"
    wanted = 1 - (32 / (32 + 15)) / (32 / (32 + 7))
    assert abs(slower - wanted) < 0.02, f"{slower:.0%} is not it: compare m / (m + p - 1) for both (0.1 means 10%)"
