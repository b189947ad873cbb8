"""Activation recomputation, gradient accumulation over micro-batches, and the profile of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from course_lib.lazy import lazy_exports

if TYPE_CHECKING:
    from course_lib.recompute.modes import accumulate, apply_recompute
    from course_lib.recompute.profiling import hfu, profile_step
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "recompute.modes": "accumulate apply_recompute",
            "recompute.profiling": "hfu profile_step",
        },
    )

__all__ = ["apply_recompute", "accumulate", "hfu", "profile_step"]
