"""Figures of notebook 07, part two: the sequence in shards, attention over a ring, and what it keeps and sends."""

from course_kit.figures.context_parallel.measured import (
    exchange_ratios,
    layouts_for_long_sequences,
    overlap,
    saved_and_peak,
    work_by_rank,
)
from course_kit.figures.context_parallel.rings import all_to_all, masks, merged_blocks, ring, ring_step, visible_blocks

__all__ = [
    "all_to_all",
    "exchange_ratios",
    "saved_and_peak",
    "layouts_for_long_sequences",
    "masks",
    "merged_blocks",
    "overlap",
    "ring",
    "ring_step",
    "visible_blocks",
    "work_by_rank",
]
