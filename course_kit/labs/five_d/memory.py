"""Bytes that a rank holds: a large model with each technique alone, six layouts by the formulas, and measured."""

from __future__ import annotations

from typing import Any

from course_kit.labs.five_d.models import ADAMW, built, local_batch
from course_kit.ranks import Ranks
from course_lib.single_gpu.memory import gpt_activation_bytes, param_count, state_bytes, training_bytes
from course_lib.single_gpu.model import PRESETS, ModelConfig
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
ALONE: dict[str, dict[str, Any]] = {  # degrees for the formula
    "one GPU, or data parallel": {},
    "ZeRO-3, 16,384 GPUs": {"zero_stage": 3, "dp": 16384},
    "tensor + sequence, 8": {"tp": 8, "sp": True},
    "tensor + sequence, 128": {"tp": 128, "sp": True},
    "pipeline, 126": {"pp": 126},
    "context, 64": {"cp": 64},
    "tp 8, pp 16, ZeRO-1 over 128": {"tp": 8, "sp": True, "pp": 16, "zero_stage": 1, "dp": 128},
}
EIGHT: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # degrees that divide the parameters, the states, the activations
    "none": ({}, {}, {}),
    "DP 8, ZeRO-3": ({}, {"zero_stage": 3, "dp": 8}, {}),
    "TP 8 with SP": ({"tp": 8}, {}, {"tp": 8, "sp": True}),
    "PP 8": ({"pp": 8}, {}, {}),
    "CP 8": ({}, {}, {"cp": 8}),
    "EP 8": ({"ep": 8}, {}, {}),
}
DRAWN: dict[str, dict[str, Any]] = {"TP 8 with SP": {"tp": 8}, "CP 8": {"cp": 64}}  # the playbook's activations
LENGTHS = (1024, 4096, 16384)
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


def bytes_of_each_alone(preset: str = "llama3-405B", seq: int = 8192) -> Sizes:
    """Return the bytes on the fullest GPU for one sequence with each of ALONE: BF16, each layer's input kept."""
    config = PRESETS[preset]
    return {name: training_bytes(config, 1, seq, "bf16", "full", **degrees) for name, degrees in ALONE.items()}


def activations_of(recompute: str, seq: int, degrees: dict[str, Any], preset: str = "llama3-8B") -> float:
    """Return the bytes of a GPT's activations for one sequence, with a preset's sizes."""
    config = PRESETS[preset]
    return gpt_activation_bytes(config.layers, config.hidden, config.heads, 1, seq, recompute, **degrees)


def bytes_by_sequence(preset: str = "llama3-8B") -> dict[str, dict[str, dict[int, dict[str, float]]]]:
    """Return the bytes of a GPU by kind of recomputation, technique of EIGHT, length of the sequence, and part."""
    result: dict[str, dict[str, dict[int, dict[str, float]]]] = {}
    for recompute in ("selective", "full"):
        result[recompute] = {}
        for name, (divided, zero, split) in EIGHT.items():
            states = state_bytes(param_count(PRESETS[preset], **divided), "bf16, no master weights", **zero)
            result[recompute][name] = {
                seq: states | {"activations": activations_of(recompute, seq, split, preset)} for seq in LENGTHS
            }
    return result


def published_activations() -> dict[str, dict[int, float]]:
    """Return the bytes of activations that the playbook draws in its two wrong panels, by length of the sequence."""
    return {name: {seq: activations_of("selective", seq, split) for seq in LENGTHS} for name, split in DRAWN.items()}


def agreement(measured: Sizes, formulas: Sizes) -> str:
    """Return measured bytes over the formula's as a table, by run and part."""
    lines = [f"{'measured / formula':20s}" + "".join(f"{part:>18s}" for part in PARTS)]
    for name, parts in formulas.items():
        ratios = [measured[name][part] / max(parts[part], 1) for part in PARTS]
        lines.append(f"{name:20s}" + "".join(f"{ratio:18.3f}" for ratio in ratios))
    return "\n".join(lines)
