"""Figures of notebook 10: memory by technique, ranks on four axes, one layer under all techniques, runs."""

from course_kit.figures.five_d.axes import bytes_by_axis, inter_node_traffic, layer_under_all, rank_map
from course_kit.figures.five_d.memory import measured_memory, memory_by_sequence, memory_of_each_alone
from course_kit.figures.five_d.runs import bytes_per_token, pairs_of_techniques, straggler_delays, training_run

__all__ = [
    "bytes_by_axis",
    "bytes_per_token",
    "inter_node_traffic",
    "layer_under_all",
    "measured_memory",
    "memory_by_sequence",
    "memory_of_each_alone",
    "pairs_of_techniques",
    "rank_map",
    "straggler_delays",
    "training_run",
]
