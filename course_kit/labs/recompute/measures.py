"""Measurements of notebook 02: saved bytes, FLOPs, times and peaks by recomputation mode and micro-batch."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TypedDict

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from course_kit.labs.gpt import GPT
from course_kit.labs.recompute.gradients import (
    called_by,
    full_batch,
    gradients_of,
    micro_batches,
    relative_difference,
    uneven,
    usual_loop,
)
from course_kit.labs.single_gpu import this_device
from course_kit.typed import grad_of, override, transformer_blocks
from course_lib.recompute import by_hand, modes, profiling
from course_lib.single_gpu.data import TokenBatches
from course_lib.single_gpu.memory import parameter_parts
from course_lib.single_gpu.model import PRESETS, ModelConfig, Transformer, causal_attention, loss
from course_lib.single_gpu.profile import MemoryProfile

MiB = 2**20
PROBE = ModelConfig(2, 64, 4, 2, 96, 256)


def plain_core(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return causal attention that saves its scores. q: [b, s, a, d]; k, v: [b, s, kv, d]."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    future = torch.full((q.shape[1], q.shape[1]), -torch.inf, dtype=q.dtype, device=q.device).triu(1)
    scores = torch.einsum("bsad,btad->bast", q, k) / q.shape[-1] ** 0.5 + future
    return torch.einsum("bast,btad->bsad", scores.softmax(-1), v)


def with_core(model: nn.Module, core: Callable) -> nn.Module:
    """Give each block this attention core, and return the model."""
    for block in transformer_blocks(model):
        override(block.attention, core=core)
    return model


def synchronize() -> None:
    """Wait for the accelerator if there is one."""
    if this_device().type != "cpu":
        torch.accelerator.synchronize()


def gpt3_flops() -> dict[str, int]:
    """Return the FLOPs of forward and backward of one layer of GPT-3 by mode, counted on the meta device."""
    with torch.device("meta"):
        gpt3 = GPT(1, 12288, 96).bfloat16()
    flops = {}
    for mode in ("none", "selective", "full"):
        modes.apply_recompute(gpt3, mode)
        with FlopCounterMode(display=False) as counter:
            gpt3(torch.empty(1, 2048, 12288, dtype=torch.bfloat16, device="meta", requires_grad=True)).sum().backward()
        flops[mode] = counter.get_total_flops()
    return flops


@functools.cache
def small_flops() -> dict[str, int]:
    """Return the FLOPs of a step's matmuls (without attention) without and with full recomputation: preset small,
    4 x 128 tokens.
    """
    model, (inputs, targets) = Transformer(PRESETS["small"]), torch.zeros(2, 4, 128, dtype=torch.int64)
    flops = {}
    for mode in ("none", "full"):
        modes.apply_recompute(model, mode)
        with FlopCounterMode(display=False) as counter:
            loss(model(inputs), targets).backward()
        flops[mode] = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    return flops


def small_flops_by_part() -> dict[str, dict[str, int]]:
    """Return the same FLOPs by part, by formula: recomputation runs all matmuls of a block again but for the last."""
    config, tokens = PRESETS["small"], 4 * 128
    parts = parameter_parts(config)
    mlp, head = parts["mlp"] // 3, config.vocab * config.hidden
    in_layers = {"Q, O": parts["q_o"], "K, V": parts["kv"], "gate, up": 2 * mlp}
    at_the_end = {"down": config.layers * mlp, "head": head}
    return {
        mode: {part: 2 * times * config.layers * weights * tokens for part, weights in in_layers.items()}
        | {part: 2 * 3 * weights * tokens for part, weights in at_the_end.items()}
        for mode, times in (("none", 3), ("full", 4))
    }


def mode_styles() -> dict[str, tuple[str, bool]]:
    """Return, by row, the mode (matmuls: with the policy), and whether attention keeps its scores."""
    return {name: ("matmuls" if policy else mode, core is plain_core) for name, core, mode, policy in mode_rows()}


def mode_rows() -> list[tuple[str, Callable, str, Callable | None]]:
    """Return the rows of section 3: (name, attention core, mode, policy)."""
    return [
        ("plain core, none", plain_core, "none", None),
        ("plain core, selective", plain_core, "selective", None),
        ("flash, none", causal_attention, "none", None),
        ("flash, selective", causal_attention, "selective", None),
        ("flash, keep_matmuls", causal_attention, "selective", modes.keep_matmuls),
        ("flash, full", causal_attention, "full", None),
    ]


def measured_modes(repeats: int = 3) -> tuple[dict[str, int], dict[str, list[float]]]:
    """Return, by row, the bytes that a forward saves, and the seconds of forward and backward in alternation.

    Preset small, 2 x 256 tokens, FP32.
    """
    model, tokens = Transformer(PRESETS["small"]).to(this_device()), torch.randint(256, (2, 2, 256)).to(this_device())
    rows = mode_rows()
    saved: dict[str, int] = {}
    times: dict[str, list[float]] = {row[0]: [] for row in rows}
    for turn in range(repeats + 1):  # in alternation, so that a slow moment affects all rows alike
        for name, core, mode, policy in rows:
            modes.apply_recompute(with_core(model, core), mode, policy)
            if turn == 0:
                saved[name] = modes.retained_bytes(model, lambda: loss(model(tokens[0]), tokens[1]))
                continue
            model.zero_grad()
            start = time.perf_counter()
            loss(model(tokens[0]), tokens[1]).backward()
            synchronize()
            times[name].append(time.perf_counter() - start)
        modes.apply_recompute(model, "none")
    return saved, times


def best_rate(n: int = 1024, repeats: int = 5) -> float:
    """Return the FLOPs per second of the best of some n x n matmuls in float32."""
    x, seconds = torch.randn(n, n, device=this_device()), []
    for _ in range(repeats):
        start = time.perf_counter()
        y = x @ x
        y[0, 0].item()
        seconds.append(time.perf_counter() - start)
    return 2 * n**3 / min(seconds)


def weighting_errors(lengths: list[int]) -> dict[str, list[float]]:
    """Return the relative errors of the gradient of the usual loop and of `accumulate`, for each of `lengths`.

    Four micro-batches of one row; the first row has 48 targets, the other rows have `length` targets.
    """
    probe = Transformer(PROBE)
    errors: dict[str, list[float]] = {"mean of means": [], "accumulate": []}
    for length in lengths:
        inputs, targets = uneven(4, 48, [48, length, length, length])
        batches = micro_batches(inputs, targets, 1)
        _, full = full_batch(probe, inputs, targets)
        usual_loop(probe, batches)
        errors["mean of means"].append(relative_difference(full, [grad_of(p) for p in probe.parameters()]))
        probe.zero_grad()
        modes.accumulate(probe, batches)
        errors["accumulate"].append(relative_difference(full, [grad_of(p) for p in probe.parameters()]))
    return errors


def step_peak(
    tokens: torch.Tensor, micro: int, batch: int, mode: str = "none", policy: Callable | None = None
) -> float:
    """Return the peak MiB of forward and backward of `batch` sequences of 64 tokens, `micro` at a time."""
    model = modes.apply_recompute(Transformer(PRESETS["small"]).to(this_device()), mode, policy)
    inputs, targets = (part.to(this_device()) for part in next(TokenBatches(tokens, batch, 64)))
    with MemoryProfile(model) as profile:
        modes.accumulate(model, micro_batches(inputs, targets, micro))
    return sum(profile.peak().values()) / MiB


def accumulation_speed(tokens: torch.Tensor, repeats: int = 3) -> dict[int, float]:
    """Return the tokens per second of a batch of 8 sequences of 64 tokens, by micro-batch size."""
    model = Transformer(PRESETS["small"]).to(this_device())
    inputs, targets = (part.to(this_device()) for part in next(TokenBatches(tokens, 8, 64)))
    seconds: dict[int, list[float]] = {micro: [] for micro in (8, 4, 2, 1)}
    for _ in range(repeats):
        for micro, taken in seconds.items():
            start = time.perf_counter()
            modes.accumulate(model, micro_batches(inputs, targets, micro)).item()
            taken.append(time.perf_counter() - start)
    return {micro: inputs.numel() / float(np.median(taken[1:])) for micro, taken in seconds.items()}


def buffer_errors(tokens: torch.Tensor, counts: list[int]) -> dict[str, list[float]]:
    """Return the relative errors of a sum of BF16 gradients in a BF16 and in an FP32 buffer, after `counts` gradients.

    Each gradient belongs to one sequence of 64 tokens; the exact sum is of the same gradients in float64.
    """
    half, singles = Transformer(PRESETS["debug"]).bfloat16(), TokenBatches(tokens, 1, 64)
    exact = [torch.zeros(p.shape, dtype=torch.float64) for p in half.parameters()]
    in_bf16, in_fp32 = (
        [torch.zeros_like(p) for p in half.parameters()],
        [torch.zeros(p.shape) for p in half.parameters()],
    )
    errors: dict[str, list[float]] = {"BF16": [], "FP32": []}
    for number in range(1, max(counts) + 1):
        inputs, targets = next(singles)
        half.zero_grad()
        loss(half(inputs), targets).backward()
        for buffers in (exact, in_bf16, in_fp32):
            for buffer, parameter in zip(buffers, half.parameters(), strict=True):
                buffer.add_(grad_of(parameter))
        if number in counts:
            for name, buffers in (("BF16", in_bf16), ("FP32", in_fp32)):
                errors[name].append(relative_difference(exact, [buffer.double() for buffer in buffers]))
    return errors


def grad_dtype_rows(tokens: torch.Tensor) -> list[tuple[str, float, bool]]:
    """Compare the gradients that PyTorch keeps in FP32 (grad_dtype) with `fp32_gradients`'.

    Returns, by parameter, its name, their relative difference, and True if PyTorch's gradient rounded to BF16 equals
    the other.
    """
    native, ours = Transformer(PRESETS["debug"]).bfloat16(), Transformer(PRESETS["debug"]).bfloat16()
    for parameter in native.parameters():
        parameter.grad_dtype = torch.float32
    one_batch = [next(TokenBatches(tokens, 1, 64))]
    modes.accumulate(native, one_batch)
    with modes.fp32_gradients(ours) as sums:
        modes.accumulate(ours, one_batch)
    return [
        (name, relative_difference([grad_of(p)], [sums[q]]), torch.equal(grad_of(p).bfloat16().float(), sums[q]))
        for (name, p), q in zip(native.named_parameters(), ours.parameters(), strict=True)
    ]


def pytorch(reentrant: bool, function: Callable, *args):
    """Call PyTorch's checkpoint; its older, reentrant variant is an autograd function like ours."""
    return checkpoint(function, *args, use_reentrant=reentrant)


class CheckpointRow(TypedDict):
    """Measurements of one checkpoint function."""

    equal: bool  # all gradients have the same bits as without a checkpoint
    saved_mib: float  # MiB saved for backward
    gflop: float
    ms: list[float]


def against_checkpoint(repeats: int = 3) -> dict[str, CheckpointRow]:
    """Return a row for ours and for both of PyTorch's checkpoints: preset small, 2 x 128 tokens, in alternation."""
    model, tokens = Transformer(PRESETS["small"]).to(this_device()), torch.randint(256, (2, 2, 128)).to(this_device())
    variants = {"ours": by_hand.recompute}
    variants |= {name: functools.partial(pytorch, name == "reentrant") for name in ("reentrant", "checkpoint")}
    _, plain = gradients_of(model, *tokens)
    measured = {name: CheckpointRow(equal=False, saved_mib=0.0, gflop=0.0, ms=[]) for name in variants}
    for turn in range(repeats + 1):
        for name, around in variants.items():
            with called_by(around, model):
                if turn == 0:
                    _, same = gradients_of(model, *tokens)
                    measured[name]["equal"] = all(torch.equal(plain[key], same[key]) for key in plain)
                    measured[name]["saved_mib"] = (
                        modes.retained_bytes(model, lambda: loss(model(tokens[0]), tokens[1])) / MiB
                    )
                    flops = profiling.count_flops(lambda: loss(model(tokens[0]), tokens[1]).backward())
                    measured[name]["gflop"] = flops / 1e9
                    continue
                start = time.perf_counter()
                gradients_of(model, *tokens)
                measured[name]["ms"].append(1e3 * (time.perf_counter() - start))
    return measured
