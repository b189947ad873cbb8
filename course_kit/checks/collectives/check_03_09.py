"""Check of exercise 03.9: when the last rank is done, without and with a barrier after each step, predicted."""

from __future__ import annotations

import numpy as np

from course_kit.labs.collectives import last_done_ms


def check(without_ms: float, with_ms: float) -> None:
    """Assert that both are within 5 % of the sums of the pauses."""
    for name, guess, barrier in (("without_ms", without_ms, False), ("with_ms", with_ms, True)):
        assert isinstance(guess, (int, float, np.number)), f"set {name} to a number"
        hint = "in each step all wait for the slowest rank" if barrier else "each rank adds up its own 12 steps"
        assert abs(guess - last_done_ms(barrier)) < 0.05 * last_done_ms(barrier), f"{name} is not within 5 %: {hint}"
