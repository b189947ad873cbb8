"""Check of exercise 02.5: by how many percent full recomputation raises the FLOPs of the matmuls."""

from __future__ import annotations

import numbers

from course_kit.labs.recompute.measures import small_flops


def check(more_percent: float) -> None:
    """Assert the percentage within 2 points of the counted one."""
    assert isinstance(more_percent, numbers.Real) and more_percent > 1, "write a number in percent, such as 33"
    flops = small_flops()
    truth = 100 * (flops["full"] / flops["none"] - 1)
    assert abs(more_percent - truth) <= 2, (
        "more than 2 points off: forward is a third of the step. What part of it does the replay not need to run? "
        "It ends as soon as backward has all that it asks for"
    )
