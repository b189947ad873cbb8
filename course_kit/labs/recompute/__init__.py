"""Labs of notebook 02: gradients through a checkpoint, measurements by mode, and a slow loop."""

from __future__ import annotations

from course_kit.labs.recompute.gradients import (
    called_by,
    gradients_of,
    other_random_numbers,
    relative_difference,
)
from course_kit.labs.recompute.loops import (
    fresh_model,
    ms_per_step,
    slow_clip,
    slow_data,
    slow_sgd,
    slow_training,
    text,
)
from course_kit.labs.recompute.measures import (
    accumulation_speed,
    against_checkpoint,
    best_rate,
    buffer_errors,
    gpt3_flops,
    grad_dtype_rows,
    measured_modes,
    mode_rows,
    mode_styles,
    plain_core,
    small_flops,
    small_flops_by_part,
    step_peak,
    weighting_errors,
)

__all__ = [
    "accumulation_speed",
    "against_checkpoint",
    "relative_difference",
    "best_rate",
    "buffer_errors",
    "called_by",
    "fresh_model",
    "gpt3_flops",
    "grad_dtype_rows",
    "gradients_of",
    "mode_rows",
    "mode_styles",
    "measured_modes",
    "ms_per_step",
    "other_random_numbers",
    "plain_core",
    "slow_clip",
    "slow_data",
    "slow_sgd",
    "slow_training",
    "small_flops",
    "small_flops_by_part",
    "step_peak",
    "text",
    "weighting_errors",
]
