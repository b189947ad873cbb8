"""Check of exercise 01.12: `flops_per_token` and `mfu`, against the counted parameters and a published run."""

from __future__ import annotations

from course_kit.checks.single_gpu.counting import counted_parameters
from course_lib.single_gpu import training
from course_lib.single_gpu.model import PRESETS, ModelConfig


def check() -> None:
    """Assert published GFLOP, both terms for every preset and for heads wider than h, and MFU at two speeds."""
    for name, expected in {"bench-1B": 9.66, "bench-3B": 25.67, "bench-8B": 59.59, "bench-80B": 512.2}.items():
        got = training.flops_per_token(PRESETS[name], 4096) / 1e9
        assert abs(got / expected - 1) < 1e-3, (
            f"{name} at 4,096 tokens: {expected} GFLOP per token expected, got {got:.2f}"
        )
    wide = ModelConfig(28, 1024, 16, 8, 3072, 151936, tied=True, head_size=128, qk_norm=True)
    for name, config in {**PRESETS, "Qwen3-0.6B": wide}.items():
        weights = training.flops_per_token(config, 0)
        attention = training.flops_per_token(config, 100) - weights
        # param_count leaves the norms of q and k out
        n = sum(
            count for each, count in counted_parameters(config).items() if ".attention." not in each or "proj" in each
        )
        assert weights == 6 * n, f"{name}, no attention: 6N is {6 * n:,}"
        seen = 12 * config.layers * config.heads * config.head_dim
        assert attention == 100 * seen, (
            f"{name}, {config.heads} heads of {config.head_dim}: attention adds 12·L·a·d = {seen:,} for each token "
            f"seen, yours adds {attention / 100:,.0f}"
        )
    got = training.mfu(PRESETS["bench-1B"], 4096, 40149.94, 989.5e12)  # the playbook's 1B run on 8 H100
    assert abs(got - 0.392) < 1e-3, f"40,150 tokens/s of the 1B model on an H100 are an MFU of 39.2%, got {got:.3f}"
    other = training.mfu(PRESETS["bench-8B"], 2048, 12000.0, 312e12)
    wanted = 12000 * training.flops_per_token(PRESETS["bench-8B"], 2048) / 312e12
    assert abs(other / wanted - 1) < 1e-9, (
        f"12,000 tokens/s of the 8B model, 2,048 tokens, on a GPU of 312 TFLOP/s: {wanted:.3f}, got {other:.3f}"
    )
    half = training.mfu(PRESETS["bench-1B"], 4096, 40149.94 / 2, 989.5e12)
    assert abs(half - got / 2) < 1e-9, f"half the speed is half the MFU: {got / 2:.3f} expected, got {half:.3f}"
