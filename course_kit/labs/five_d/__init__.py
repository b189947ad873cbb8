"""Labs of notebook 10: small models in any layout against one process, memory and traffic of ranks, jobs that hang."""

from __future__ import annotations

from course_kit.labs.five_d.counts import (
    by_axis,
    counted_copies,
    local_shapes,
    sent_by_all,
    sent_per_step,
    three_norms,
)
from course_kit.labs.five_d.hangs import hung_jobs, slow_runs
from course_kit.labs.five_d.memory import formula_sizes, measured_sizes
from course_kit.labs.five_d.models import MOE, TINY
from course_kit.labs.five_d.pairs import FEATURES, all_pairs
from course_kit.labs.five_d.rivals import against_torch, compare

__all__ = [
    "FEATURES",
    "MOE",
    "TINY",
    "against_torch",
    "all_pairs",
    "by_axis",
    "compare",
    "counted_copies",
    "formula_sizes",
    "hung_jobs",
    "local_shapes",
    "measured_sizes",
    "sent_by_all",
    "sent_per_step",
    "slow_runs",
    "three_norms",
]
