"""Activations computed twice in place of kept, gradients of many micro-batches, and a step's profile."""

from course_lib.recompute.modes import accumulate, apply_recompute
from course_lib.recompute.profiling import hfu, profile_step

__all__ = ["apply_recompute", "accumulate", "hfu", "profile_step"]
