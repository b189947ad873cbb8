"""Figures of notebook 14b: errors of FP8 numbers and sums, a layer in 8 bits, and training with it."""

from course_kit.figures.fp8.drawings import data_flow, operand_blocks, ranks_of_a_layout
from course_kit.figures.fp8.numbers import errors_by_scale, outlier_errors, speedups, sum_errors
from course_kit.figures.fp8.training import (
    gaps_by_learning_rate,
    layer_errors,
    losses_with_outliers,
    recorded_curves,
    second_moment_losses,
    spike_gaps,
)

__all__ = [
    "data_flow",
    "errors_by_scale",
    "gaps_by_learning_rate",
    "layer_errors",
    "losses_with_outliers",
    "operand_blocks",
    "outlier_errors",
    "ranks_of_a_layout",
    "recorded_curves",
    "second_moment_losses",
    "speedups",
    "spike_gaps",
    "sum_errors",
]
