"""Figures of notebook 06: how a layer is split over ranks, what each keeps and waits for, and when it pays."""

from __future__ import annotations

from course_kit.figures.tensor_parallel.drawings import (
    backward_of_column_layer,
    block_and_shapes,
    heads_of_ranks,
    loss_of_a_token,
    matmul_in_chunks,
    mlp_between_f_and_f_star,
    split_matmul,
)
from course_kit.figures.tensor_parallel.measured import (
    checkpoints,
    dropout_masks,
    fits_by_tp,
    layer_on_the_clock,
    losses,
    memory_by_tp,
    memory_of_stage_3,
    published_speed,
    speed_by_ratio,
    steps_over_time,
)

__all__ = [
    "backward_of_column_layer",
    "block_and_shapes",
    "checkpoints",
    "dropout_masks",
    "fits_by_tp",
    "heads_of_ranks",
    "layer_on_the_clock",
    "loss_of_a_token",
    "losses",
    "matmul_in_chunks",
    "memory_by_tp",
    "memory_of_stage_3",
    "mlp_between_f_and_f_star",
    "published_speed",
    "speed_by_ratio",
    "split_matmul",
    "steps_over_time",
]
