"""Labs of notebook 10b: chunks of one layout in another one, saves and their cost, kills, runs that forget
something.
"""

from __future__ import annotations

from course_kit.labs.checkpoint.resharding import (
    assembled,
    farthest,
    local_chunks_with_values,
    merged,
    positions_in_full,
)
from course_kit.labs.checkpoint.restarts import (
    forgetful_runs,
    killed_run,
    losses_without_kill,
    published_interruptions,
    recorded_run,
)
from course_kit.labs.checkpoint.saves import load_checkpoint, print_stalls, save_checkpoint_of_run, stalls
from course_kit.labs.checkpoint.transformers_models import to_and_from_transformers
from course_kit.labs.five_d.models import SHALLOW

__all__ = [
    "SHALLOW",
    "assembled",
    "local_chunks_with_values",
    "farthest",
    "forgetful_runs",
    "killed_run",
    "load_checkpoint",
    "losses_without_kill",
    "merged",
    "positions_in_full",
    "published_interruptions",
    "recorded_run",
    "save_checkpoint_of_run",
    "stalls",
    "print_stalls",
    "to_and_from_transformers",
]
