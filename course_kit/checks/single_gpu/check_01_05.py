"""Check of exercise 01.5: `state_bytes` by policy and ZeRO stage, and the bytes that AdamW really holds."""

from __future__ import annotations

import torch
from torch import nn

from course_lib.single_gpu import memory


def total_gb(params: float, policy: str, zero_stage: int = 0, dp: int = 1) -> float:
    """Return the GB of all three states."""
    return sum(memory.state_bytes(int(params), policy, zero_stage, dp).values(), 0.0) / 1e9


def check() -> None:
    """Assert the keys, every policy, every ZeRO stage, a KeyError for an unknown policy, and AdamW's own bytes."""
    assert list(memory.state_bytes(1)) == ["parameters", "gradients", "optimizer states"], (
        "return a dictionary with the keys 'parameters', 'gradients' and 'optimizer states', in this order"
    )
    for policy, expected in {
        "fp32": 112.0,
        "bf16": 112,
        "bf16, fp32 gradients": 140,
        "bf16, no master weights": 84,
    }.items():
        assert abs(total_gb(7e9, policy) - expected) < 1e-9, (
            f"7B, {policy}: {expected} GB expected, got {total_gb(7e9, policy):.1f}"
        )
    for stage, expected in enumerate([112, 38.5, 26.25, 14.0]):
        got = total_gb(7e9, "bf16", zero_stage=stage, dp=8)
        assert abs(got - expected) < 1e-9, (
            f"7B, ZeRO-{stage} on 8 GPUs: {expected} GB expected, got {got:.2f}: what is divided from which stage on?"
        )
    for stage, parts in enumerate([(2, 6, 12), (2, 6, 3), (2, 1.5, 3), (0.5, 1.5, 3)]):
        got_parts = tuple(memory.state_bytes(1, "bf16, fp32 gradients", stage, dp=4).values())
        assert got_parts == parts, (
            f"FP32 gradients, ZeRO-{stage} on 4 GPUs: {parts} bytes per parameter for parameters, gradients and "
            f"optimizer states expected, got {got_parts}"
        )
    try:
        unknown = memory.state_bytes(1, "fp16")
    except KeyError:
        unknown = None
    assert unknown is None, f"'fp16' is not in POLICIES: raise KeyError, do not return {unknown}"
    measured = nn.Linear(1000, 100, bias=False)
    optimizer = torch.optim.AdamW(measured.parameters())
    measured(torch.ones(2, 1000)).sum().backward()
    optimizer.step()
    moments = sum(t.nbytes for state in optimizer.state.values() for t in state.values() if t.dim())
    assert memory.state_bytes(100_000, "fp32")["optimizer states"] == moments, (
        f"AdamW really holds {moments:,} bytes for 100,000 parameters"
    )
