"""Check of exercise 10.11: the learning rate and the batch by step."""

from __future__ import annotations

import itertools

from course_lib.five_d import plan


def check_rates() -> None:
    """Assert warm-up, cosine and end of the learning rate."""
    rates = [plan.learning_rate(step, 1.0, 10, 100) for step in range(1, 101)]
    assert abs(rates[0] - 0.1) < 1e-9, f"step 1 of 10 of warm-up should have a tenth of the peak, and has {rates[0]}"
    assert abs(rates[9] - 1) < 1e-9 and max(rates) == rates[9], f"the peak is at step 10: {rates[8:11]}"
    assert abs(rates[54] - 0.55) < 1e-6, f"half-way down, at step 55, it should be 0.55, and is {rates[54]}"
    assert abs(rates[39] - 0.775) < 1e-6, (
        f"a third of the way, at step 40, a cosine is at 0.775, and yours at {rates[39]}"
    )
    assert abs(rates[-1] - 0.1) < 1e-9, f"the last step should have a tenth of the peak, and has {rates[-1]}"
    assert all(a >= b for a, b in itertools.pairwise(rates[9:])), "after the peak it should only fall"
    first = plan.learning_rate(1, 2.0, 0, 5)
    assert 1.7 < first <= 2.0, f"without warm-up it begins near the peak, which is 2 here, and not at {first}"
    low = plan.learning_rate(100, 1.0, 10, 100, least=0.25)
    assert abs(low - 0.25) < 1e-9, f"least = 0.25: the last step should have a quarter of the peak, and has {low}"
    assert abs(plan.learning_rate(7, 1.0, 0, 5) - 0.1) < 1e-9, "beyond the last step it stays at the least"


def check_sizes() -> None:
    """Assert the batches of three ramps."""
    sizes = [plan.batch_at(step, 8, 64, 10) for step in range(1, 14)]
    assert sizes[0] == 8 and sizes[10:] == [64] * 3, f"8 at step 1, 64 from step 11 on: {sizes}"
    assert all(size % 8 == 0 for size in sizes), f"each should be a multiple of the first: {sizes}"
    assert sizes == sorted(sizes) and len(set(sizes)) > 5, f"it should grow evenly: {sizes}"
    wanted = [8, 8, 16, 24, 24, 32, 40, 40, 48, 56]
    assert sizes[:10] == wanted, (
        f"from 8 to 64 in ten steps, rounded down to multiples of 8: {wanted}, not {sizes[:10]}"
    )
    short = [plan.batch_at(step, 8, 64, 2) for step in (1, 2, 3)]
    assert short == [8, 32, 64], f"a ramp of two steps: 8, then half-way (36, so 32), then 64; and not {short}"
    assert plan.batch_at(1, 4, 4, 0) == 4, "no ramp: the full batch from step 1 on"


def check() -> None:
    """Assert both ramps."""
    check_rates()
    check_sizes()
