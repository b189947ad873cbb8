"""Figures of notebook 05: what each stage shares out, when its transfers travel, and what a rank keeps."""

from __future__ import annotations

from course_kit.figures.zero.drawings import flat_buffer, hidden_gather, stage_1_step, stage_3_step, stages, two_buffers
from course_kit.figures.zero.measured import (
    arenas,
    clipping,
    fits_by_stage,
    gather_over_forward,
    gradient_memory,
    measured_by_stage,
    memory_by_rank,
    memory_by_stage,
    states_by_stage,
    step_over_time,
)

__all__ = [
    "arenas",
    "clipping",
    "fits_by_stage",
    "flat_buffer",
    "gather_over_forward",
    "gradient_memory",
    "hidden_gather",
    "measured_by_stage",
    "memory_by_rank",
    "memory_by_stage",
    "stage_1_step",
    "stage_3_step",
    "stages",
    "states_by_stage",
    "step_over_time",
    "two_buffers",
]
