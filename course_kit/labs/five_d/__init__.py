"""Labs of notebook 10: small models in any layout against one process, memory and traffic of ranks, jobs that hang."""

from __future__ import annotations

from course_kit.labs.five_d.counts import (
    bytes_by_axis,
    counted_copies,
    layer_text,
    local_shapes,
    sent_by_all,
    sent_per_step,
    sent_per_token,
    three_norms,
)
from course_kit.labs.five_d.hangs import hung_jobs, slow_runs
from course_kit.labs.five_d.memory import (
    agreement,
    bytes_by_sequence,
    bytes_of_each_alone,
    formula_sizes,
    measured_sizes,
    published_activations,
)
from course_kit.labs.five_d.models import MOE, TINY
from course_kit.labs.five_d.pairs import FEATURES, all_pairs
from course_kit.labs.five_d.programs import largest_spread, program_logs, refusals
from course_kit.labs.five_d.rivals import against_torch, compare

__all__ = [
    "FEATURES",
    "MOE",
    "TINY",
    "against_torch",
    "agreement",
    "all_pairs",
    "bytes_by_axis",
    "bytes_by_sequence",
    "bytes_of_each_alone",
    "compare",
    "counted_copies",
    "formula_sizes",
    "hung_jobs",
    "largest_spread",
    "layer_text",
    "local_shapes",
    "measured_sizes",
    "program_logs",
    "published_activations",
    "refusals",
    "sent_by_all",
    "sent_per_step",
    "sent_per_token",
    "slow_runs",
    "three_norms",
]
