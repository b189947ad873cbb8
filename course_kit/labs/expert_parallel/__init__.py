"""Labs of notebook 08: experts on the clock, trainings of routers, tokens that travel, models on groups of ranks."""

from __future__ import annotations

from course_kit.labs.expert_parallel.experts import (
    some_scores,
    timed_dense,
    timed_experts,
    timed_mixture,
)
from course_kit.labs.expert_parallel.models import one_process, parallel_trial
from course_kit.labs.expert_parallel.rivals import against_transformers
from course_kit.labs.expert_parallel.routers import counted_training, dropped, lab_runs, unevenness
from course_kit.labs.expert_parallel.traffic import (
    bytes_for,
    compare_dispatch,
    crossings,
    even_copies,
    fresh_routing,
    hops_trial,
    rows_sent,
    timeline,
)
from course_kit.labs.tensor_parallel.models import on_first, relative_error

__all__ = [
    "against_transformers",
    "bytes_for",
    "counted_training",
    "crossings",
    "compare_dispatch",
    "dropped",
    "even_copies",
    "fresh_routing",
    "hops_trial",
    "lab_runs",
    "on_first",
    "one_process",
    "parallel_trial",
    "relative_error",
    "rows_sent",
    "some_scores",
    "timed_dense",
    "timed_experts",
    "timed_mixture",
    "timeline",
    "unevenness",
]
