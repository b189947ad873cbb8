"""Check of exercise 01.10: the peak of the second training step over the peak of the first."""

from __future__ import annotations

import numbers

from course_kit.labs.single_gpu import step_peaks


def check(second_step_factor: float) -> None:
    """Assert the factor within 15% of the measured one."""
    assert isinstance(second_step_factor, numbers.Real), "write a number, such as 1.0 or 2.5"
    first, second = step_peaks()
    assert abs(second_step_factor * first / second - 1) <= 0.15, (
        "more than 15% off: AdamW makes its two moments (4 + 4 bytes per parameter) at the END of step 1"
    )
