"""Labs of notebook 05: memory and traffic of ranks, clipping by three norms, timelines, rivals, and replayed arenas."""

from __future__ import annotations

from course_kit.labs.data_parallel import batch_of
from course_kit.labs.zero.arenas import (
    arena_gib,
    arena_line,
    keep_both,
    keep_checkpoints,
    keep_gradients,
    recorded,
)
from course_kit.labs.zero.memory import (
    STATES,
    data_parallel_memory,
    gradient_bytes,
    gradient_levels,
    memory_by_stage,
    memory_table,
    offloaded,
)
from course_kit.labs.zero.models import EIGHT_UNITS, TINY, WIDE, in_group, storage_bytes
from course_kit.labs.zero.runs import (
    FAULTS,
    clipped_runs,
    farthest,
    gather_ratios,
    sent_by_hand,
    sent_per_step,
    sent_with_replicas,
    train_on,
)
from course_kit.labs.zero.timed import profiled, rivals, step_spans

__all__ = [
    "EIGHT_UNITS",
    "FAULTS",
    "STATES",
    "TINY",
    "WIDE",
    "arena_gib",
    "arena_line",
    "batch_of",
    "clipped_runs",
    "farthest",
    "gather_ratios",
    "gradient_bytes",
    "gradient_levels",
    "in_group",
    "keep_both",
    "keep_checkpoints",
    "keep_gradients",
    "data_parallel_memory",
    "memory_by_stage",
    "memory_table",
    "offloaded",
    "profiled",
    "recorded",
    "rivals",
    "sent_per_step",
    "sent_by_hand",
    "sent_with_replicas",
    "step_spans",
    "storage_bytes",
    "train_on",
]
