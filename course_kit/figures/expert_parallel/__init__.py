"""Figures of notebook 08: routers, experts, what they cost, and what travels to them."""

from course_kit.figures.expert_parallel.drawings import dispatch, gradient_groups, layer, mesh_layouts, sorted_rows
from course_kit.figures.expert_parallel.experts import dense_or_experts, parameters, ways_to_compute
from course_kit.figures.expert_parallel.routers import collapse, dropped_choices, lab_runs, remedies
from course_kit.figures.expert_parallel.traffic import (
    bytes_by_node_limit,
    dispatch_ratio_by_nodes,
    dispatch_ratios,
    rows_sent,
    timeline,
)

__all__ = [
    "bytes_by_node_limit",
    "collapse",
    "dense_or_experts",
    "dispatch",
    "dispatch_ratio_by_nodes",
    "dispatch_ratios",
    "dropped_choices",
    "gradient_groups",
    "lab_runs",
    "layer",
    "mesh_layouts",
    "parameters",
    "remedies",
    "rows_sent",
    "sorted_rows",
    "timeline",
    "ways_to_compute",
]
