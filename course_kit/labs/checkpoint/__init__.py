"""Labs of notebook 10b: boxes of one layout in another one, saves and their cost, kills, runs that forget something."""

from __future__ import annotations

from course_kit.labs.checkpoint.resharding import assembled, boxes_with_values, farthest, merged, places_of
from course_kit.labs.checkpoint.restarts import forgetful_runs, killed_run, losses_without_kill
from course_kit.labs.checkpoint.saves import load_it, save_some, stalls, tell_stalls
from course_kit.labs.checkpoint.transformers_models import to_and_from_transformers
from course_kit.labs.five_d.models import SHALLOW

__all__ = [
    "SHALLOW",
    "assembled",
    "boxes_with_values",
    "farthest",
    "forgetful_runs",
    "killed_run",
    "load_it",
    "losses_without_kill",
    "merged",
    "places_of",
    "save_some",
    "stalls",
    "tell_stalls",
    "to_and_from_transformers",
]
