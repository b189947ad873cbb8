"""Labs of notebook 09: runs against one process, a pretend device, halves of a backward, faults, PyTorch's pipeline."""

from __future__ import annotations

from course_kit.labs.pipeline.device import timed
from course_kit.labs.pipeline.faults import first_gradients, lab_runs
from course_kit.labs.pipeline.halves import flops_of_halves, ms_of_halves, times_of
from course_kit.labs.pipeline.models import (
    DEEP,
    TINY,
    WIDE,
    batch_of,
    naive_step,
    one_process,
    peaks_of_steps,
    there_and_back,
)
from course_kit.labs.pipeline.overlap import forward_and_backward, median_repeats, overlap_saves
from course_kit.labs.pipeline.plans import transfer_plan
from course_kit.labs.pipeline.published import memory_by_stages, published_bandwidth, published_bubble_rates
from course_kit.labs.pipeline.rivals import against_torch
from course_kit.labs.pipeline.same import check_order, check_same
from course_kit.labs.pipeline.training import beside_one_process, on_two_pipelines, three_steps
from course_kit.labs.tensor_parallel.models import relative_error

__all__ = [
    "DEEP",
    "TINY",
    "WIDE",
    "against_torch",
    "batch_of",
    "beside_one_process",
    "check_order",
    "check_same",
    "first_gradients",
    "flops_of_halves",
    "forward_and_backward",
    "lab_runs",
    "median_repeats",
    "memory_by_stages",
    "ms_of_halves",
    "naive_step",
    "on_two_pipelines",
    "one_process",
    "overlap_saves",
    "peaks_of_steps",
    "published_bandwidth",
    "published_bubble_rates",
    "relative_error",
    "there_and_back",
    "three_steps",
    "timed",
    "times_of",
    "transfer_plan",
]
