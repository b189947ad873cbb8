"""Collectives as rings of sends and receives, their bandwidth, and what each rank sends."""

from course_lib.collectives.rings import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from course_lib.collectives.traffic import count_traffic

__all__ = ["ring_all_reduce", "ring_reduce_scatter", "ring_all_gather", "count_traffic"]
