"""Check of exercise 02.7: `step_flops` against PyTorch's counter."""

from __future__ import annotations

import torch

from course_lib.recompute import profiling
from course_lib.recompute.modes import apply_recompute
from course_lib.single_gpu.model import PRESETS, ModelConfig, Transformer, loss

CONFIGS = (
    PRESETS["debug"],
    ModelConfig(3, 96, 6, 2, 100, 300),
    ModelConfig(1, 64, 4, 4, 88, 256, tied=True),
    ModelConfig(2, 48, 6, 2, 100, 300, head_size=16),  # 6 heads of 16 are twice as wide as the hidden state
)


def check() -> None:
    """Assert executed and needed FLOPs of odd models, without recomputation, with selective and with full."""
    for config, b, s in zip(CONFIGS, (3, 3, 2, 3), (40, 40, 24, 40), strict=True):
        for mode in ("none", "selective", "full"):
            probe, tokens = apply_recompute(Transformer(config), mode), torch.zeros(2, b, s, dtype=torch.int64)
            counted = profiling.count_flops(lambda: loss(probe(tokens[0]), tokens[1]).backward())  # noqa: B023
            flops = profiling.step_flops(config, b, s, mode)
            assert isinstance(flops, tuple) and len(flops) == 2, "return a tuple of two numbers: needed, executed"
            flash_again = b * s * config.layers * 2 * config.heads * config.head_dim * s
            assert counted - flops[1] != flash_again, (
                f"{mode}: executed lacks the scores of flash's backward, 2·L·a·d·s per token"
            )
            assert flops[1] == counted, (
                f"{config.layers} layers, {config.heads} heads of {config.head_dim}, {mode}: {counted:,} executed, you "
                f"count {flops[1]:,}"
            )
            assert flops[0] == profiling.step_flops(config, b, s)[0], "the model needs the same, whatever is recomputed"
            assert flops[0] == profiling.step_flops(config, b, s)[1] - flash_again, (
                "needed: without the scores of flash's backward"
            )
