"""Pipeline parallelism: schedules as lists of actions, and one runner for all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from course_lib.lazy import lazy_exports

if TYPE_CHECKING:
    from course_lib.pipeline.actions import Action, validate
    from course_lib.pipeline.runner import PipelineRunner
    from course_lib.pipeline.schedules import (
        afab,
        dualpipe,
        interleaved,
        naive,
        one_f_one_b,
        zero_bubble_h1,
        zero_bubble_h2,
        zero_bubble_v,
    )
    from course_lib.pipeline.simulation import simulate
    from course_lib.pipeline.stages import split_stages
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "pipeline.actions": "Action validate",
            "pipeline.runner": "PipelineRunner",
            "pipeline.schedules": "afab dualpipe interleaved naive one_f_one_b "
            "zero_bubble_h1 zero_bubble_h2 zero_bubble_v",
            "pipeline.simulation": "simulate",
            "pipeline.stages": "split_stages",
        },
    )

__all__ = [
    "Action",
    "validate",
    "PipelineRunner",
    "naive",
    "afab",
    "one_f_one_b",
    "interleaved",
    "zero_bubble_h1",
    "zero_bubble_h2",
    "zero_bubble_v",
    "dualpipe",
    "simulate",
    "split_stages",
]
