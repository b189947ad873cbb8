"""Figures of notebook 03: what collectives move, how, and how fast."""

from course_kit.figures.collectives.bandwidths import (
    bus_bandwidths,
    crossing_size,
    elements_sent,
    published_bandwidth,
    ring_or_tree,
)
from course_kit.figures.collectives.drawings import collectives, steps_over_time, tree, two_nodes
from course_kit.figures.collectives.rings import ring_circles, ring_step, ring_tables

__all__ = [
    "bus_bandwidths",
    "collectives",
    "crossing_size",
    "elements_sent",
    "published_bandwidth",
    "ring_circles",
    "ring_or_tree",
    "ring_step",
    "ring_tables",
    "steps_over_time",
    "tree",
    "two_nodes",
]
