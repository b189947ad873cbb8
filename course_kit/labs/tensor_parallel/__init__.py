"""Labs of notebook 06: a small model in groups of ranks, training with a fault, timelines, PyTorch's DTensor."""

from __future__ import annotations

from course_kit.labs.tensor_parallel.dropout import dropout_masks
from course_kit.labs.tensor_parallel.faults import diverged, evidence, lab_runs
from course_kit.labs.tensor_parallel.models import (
    MHA,
    TINY,
    Training,
    batch_of,
    in_groups,
    on_first,
    one_process,
    relative_error,
    sgd,
    split_model,
)
from course_kit.labs.tensor_parallel.scaling import Scaling, published_ratios, published_scaling
from course_kit.labs.tensor_parallel.step import checkpoint_trial, saved_by_rank, sent_per_step
from course_kit.labs.tensor_parallel.timeline import forward_times, profiled, steps_of, waiting_ms, waiting_shares

__all__ = [
    "MHA",
    "Scaling",
    "TINY",
    "Training",
    "batch_of",
    "checkpoint_trial",
    "diverged",
    "dropout_masks",
    "evidence",
    "forward_times",
    "in_groups",
    "saved_by_rank",
    "lab_runs",
    "on_first",
    "one_process",
    "profiled",
    "published_ratios",
    "published_scaling",
    "relative_error",
    "sent_per_step",
    "sgd",
    "split_model",
    "steps_of",
    "waiting_ms",
    "waiting_shares",
]
