"""Bytes that a rank holds in six layouts, measured and by the formulas."""

from __future__ import annotations

from typing import Any

from course_kit.labs.five_d.models import ADAMW, built, local_batch
from course_kit.ranks import Ranks
from course_lib.single_gpu.memory import training_bytes
from course_lib.single_gpu.model import ModelConfig
from course_lib.single_gpu.profile import MemoryProfile

SMALL = ModelConfig(2, 64, 8, 8, 176, 256)
PARTS = ("parameters", "gradients", "optimizer states", "activations")
RUNS: dict[str, tuple[str, dict | None, int, dict[str, Any] | None]] = {
    # layout, experts, sequences of all ranks, degrees for the formula
    "none": ("dp4", None, 4, {}),
    "DP 4, ZeRO-3": ("dp4,zero3", None, 4, {"zero_stage": 3, "dp": 4}),
    "TP 4 with SP": ("tp4,sp", None, 1, {"tp": 4, "sp": True}),
    "PP 4": ("pp4", None, 4, {"pp": 4}),
    "CP 4": ("cp4", None, 1, {"cp": 4}),
    "EP 4": ("dp4,ep4", {"experts": 4, "top_k": 1}, 4, None),
}
Sizes = dict[str, dict[str, float]]  # bytes by run and part


def held_bytes(text: str, moe: dict | None, batch: int) -> dict[str, int]:
    """On a rank: bytes of parameters, gradients and optimizer states after a step, and of activations at its peak."""
    layout, mesh, parallel = built(text, SMALL, moe, **ADAMW)
    inputs, targets = local_batch(layout, mesh, batch, 128, SMALL.vocab)
    parallel.step(inputs, targets)
    with MemoryProfile(parallel.stages, parallel.optimizer) as profile:
        parallel.step(inputs, targets)
    weights = list(parallel.stages.parameters())
    states = [s for state in parallel.optimizer.state.values() for s in state.values() if s.dim() > 0]
    sizes = [
        sum(t.numel() * 4 for t in group if t is not None) for group in (weights, [w.grad for w in weights], states)
    ]
    return dict(zip(PARTS, [*sizes, profile.peak()["activations"]], strict=True))


def measured_sizes(ranks: Ranks) -> Sizes:
    """Return the bytes of each part on the fullest of four ranks, for each of RUNS."""
    sizes = {name: ranks(held_bytes, text, moe, batch) for name, (text, moe, batch, _) in RUNS.items()}
    return {name: {part: max(each[part] for each in of_ranks) for part in PARTS} for name, of_ranks in sizes.items()}


def formula_sizes() -> Sizes:
    """Return the same bytes by `training_bytes`, for the RUNS that it covers."""
    return {
        name: training_bytes(SMALL, 1, 128, "fp32", **degrees)
        for name, (*_, degrees) in RUNS.items()
        if degrees is not None
    }
