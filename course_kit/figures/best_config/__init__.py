"""Figures of notebook 11: parts of a step, predicted beside measured, heatmaps of layouts, rankings of a search."""

from course_kit.figures.best_config.errors import (
    cell_errors,
    overlap_ratios,
    predicted_and_measured,
    published_errors,
    tensor_parallel,
)
from course_kit.figures.best_config.heatmaps import heatmap
from course_kit.figures.best_config.parts import memory_of_layouts, step_shares
from course_kit.figures.best_config.rankings import ranking, rejections

__all__ = [
    "cell_errors",
    "heatmap",
    "memory_of_layouts",
    "overlap_ratios",
    "predicted_and_measured",
    "published_errors",
    "ranking",
    "rejections",
    "step_shares",
    "tensor_parallel",
]
