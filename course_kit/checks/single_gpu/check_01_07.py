"""Check of exercise 01.7: `gpt_layer_bytes`, the bytes that one GPT layer keeps per token."""

from __future__ import annotations

import torch

from course_kit.checks.single_gpu.counting import retained_bytes
from course_kit.labs.gpt import GPTBlock
from course_lib.single_gpu import memory

GiB = 2**30


def check() -> None:
    """Assert a real layer's bytes, the three settings at two sizes, and the published sizes of full models."""
    gpt, sample = GPTBlock(64, 4).bfloat16(), torch.ones(2, 128, 64, dtype=torch.bfloat16, requires_grad=True)
    expected = retained_bytes(gpt, lambda: gpt(sample)) // (2 * 128) - 8
    got = memory.gpt_layer_bytes(64, 4, 128)
    assert got == expected, (
        f"the block above keeps {expected:,} bytes per token (norm statistics aside), you count {got:,}"
    )
    for hidden, heads, seq in ((4096, 32, 1024), (96, 6, 40)):
        counts = {"none": 34 * hidden + 5 * heads * seq, "selective": 34 * hidden, "full": 2 * hidden}
        for mode, count in counts.items():
            got = memory.gpt_layer_bytes(hidden, heads, seq, mode)
            assert got == count, f"h = {hidden}, a = {heads}, s = {seq}, {mode}: {count:,} bytes per token, got {got:,}"
    shapes = {"8B": (32, 4096, 32), "70B": (80, 8192, 64), "405B": (126, 16384, 128)}
    for mode, sizes in {
        "none": [9.25, 46.25, 145.6875],
        "selective": [4.25, 21.25, 66.9375],
        "full": [0.25, 1.25, 3.9375],
    }.items():
        for name, size in zip(shapes, sizes, strict=True):
            gib = memory.gpt_activation_bytes(*shapes[name], batch=1, seq=1024, recompute=mode) / GiB
            assert abs(gib - size) < 1e-6, f"{name}, 1,024 tokens, recompute {mode}: {size} GiB expected, got {gib:.4f}"
