"""Labs of notebook 07's first half: g and g* swapped into a split model, its memory, and a layer on the clock."""

from __future__ import annotations

from course_kit.labs.sequence_parallel.drift import drift_trial, evidence, swap_gates
from course_kit.labs.sequence_parallel.memory import gpt_saved_bytes, published_scaling, saved_by_rank
from course_kit.labs.sequence_parallel.models import one_process
from course_kit.labs.sequence_parallel.timeline import layer_timeline
from course_kit.labs.tensor_parallel.models import TINY, on_first, relative_error

__all__ = [
    "TINY",
    "drift_trial",
    "evidence",
    "gpt_saved_bytes",
    "saved_by_rank",
    "layer_timeline",
    "on_first",
    "one_process",
    "published_scaling",
    "relative_error",
    "swap_gates",
]
