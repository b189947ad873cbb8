"""Figures of notebook 14: floating-point formats, and training in 16 bits."""

from course_kit.figures.mixed_precision.formats import bits, ranges, rounding
from course_kit.figures.mixed_precision.training import (
    gradient_sizes,
    losses,
    small_updates,
    underflow_by_batch,
    unmoved_weights,
)

__all__ = [
    "bits",
    "gradient_sizes",
    "losses",
    "ranges",
    "rounding",
    "small_updates",
    "underflow_by_batch",
    "unmoved_weights",
]
