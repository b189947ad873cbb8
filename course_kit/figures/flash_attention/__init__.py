"""Figures of notebook 13."""

from course_kit.figures.flash_attention.measured import (
    attention_rates,
    error_ratios,
    issue_clocks,
    time_and_memory,
    traffic_bars,
    traffic_by_tokens,
)
from course_kit.figures.flash_attention.tiles import error_maps, mask_tiles, online_softmax, tile_kinds
from course_kit.figures.flash_attention.walk import walk_step, walk_strip

__all__ = [
    "attention_rates",
    "error_maps",
    "error_ratios",
    "issue_clocks",
    "mask_tiles",
    "online_softmax",
    "tile_kinds",
    "time_and_memory",
    "traffic_bars",
    "traffic_by_tokens",
    "walk_step",
    "walk_strip",
]
