"""Labs of notebook 14b: errors of 8 bits, costs of kernels, training by recipes, ranks, and layers with a fault."""

from __future__ import annotations

from course_kit.labs.fp8.errors import (
    ERROR_COLUMNS,
    ScaleErrors,
    error_at_scale,
    errors_at,
    errors_by_layer,
    fp8_name,
    in_e4m3,
    int8,
    losses_with_outliers,
    outlier_errors,
    short_sum_errors,
    stored_second_moment,
)
from course_kit.labs.fp8.faults import LAB_ORDER, lab_errors, linear_case, median_ms
from course_kit.labs.fp8.kernels import (
    RESULTS,
    bytes_per_element,
    count_casts,
    fp8_speedup,
    print_block_kernels,
    print_gpu_results,
)
from course_kit.labs.fp8.models import SMALL, WIDE, gradients_of, sentences, small_gradients, trained_model
from course_kit.labs.fp8.on_ranks import sharded_losses, split_gradients
from course_kit.labs.fp8.training import (
    bytes_per_parameter,
    losses_at_a_jump,
    print_recipes,
    recipe_curve,
    spike_gaps,
    trap_curve,
)
from course_kit.labs.kernels import device

__all__ = [
    "ERROR_COLUMNS",
    "LAB_ORDER",
    "RESULTS",
    "SMALL",
    "WIDE",
    "bytes_per_element",
    "count_casts",
    "device",
    "ScaleErrors",
    "error_at_scale",
    "errors_at",
    "errors_by_layer",
    "fp8_speedup",
    "fp8_name",
    "gradients_of",
    "in_e4m3",
    "int8",
    "bytes_per_parameter",
    "lab_errors",
    "linear_case",
    "losses_at_a_jump",
    "losses_with_outliers",
    "median_ms",
    "outlier_errors",
    "print_block_kernels",
    "print_gpu_results",
    "print_recipes",
    "recipe_curve",
    "sentences",
    "sharded_losses",
    "short_sum_errors",
    "small_gradients",
    "spike_gaps",
    "split_gradients",
    "stored_second_moment",
    "trained_model",
    "trap_curve",
]
