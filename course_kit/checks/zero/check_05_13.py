"""Check of exercise 05.13: by how many percent an arena must be larger than the memory alive at once."""

from __future__ import annotations

PERCENT = 13.2  # in the replay of the recorded step; tests/kit/test_zero_labs_ranks.py makes it again


def check(percent_lost: float | None) -> None:
    """Assert the percentage within a factor of 2."""
    assert isinstance(percent_lost, (int, float)), "write a number of percent, such as 3"
    times = percent_lost / PERCENT
    assert 0.5 <= times <= 2, (
        f"more than a factor of 2 too {'much' if times > 1 else 'little'}: the largest tensor over what is "
        "alive, times 100"
    )
