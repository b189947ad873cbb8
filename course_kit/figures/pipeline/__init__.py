"""Figures of notebook 09: schedules by rank and time, drawings, and what was measured."""

from __future__ import annotations

from course_kit.figures.pipeline.drawings import (
    backward_in_two_halves,
    cut_by_layers,
    deadlock,
    delayed_weight_gradients,
    interleaved_order,
    p2p_buffers,
)
from course_kit.figures.pipeline.gantt import (
    any_schedule,
    naive_step,
    simulated,
    simulated_and_measured,
    two_directions,
)
from course_kit.figures.pipeline.measured import (
    bubble_rates,
    bubble_ratios,
    busy_share,
    links_and_traffic,
    losses,
    memory_by_stages,
    pair_overlap,
    peak_memory,
    searched,
)

__all__ = [
    "any_schedule",
    "backward_in_two_halves",
    "bubble_rates",
    "bubble_ratios",
    "busy_share",
    "cut_by_layers",
    "deadlock",
    "delayed_weight_gradients",
    "interleaved_order",
    "links_and_traffic",
    "losses",
    "memory_by_stages",
    "naive_step",
    "p2p_buffers",
    "pair_overlap",
    "peak_memory",
    "searched",
    "simulated",
    "simulated_and_measured",
    "two_directions",
]
