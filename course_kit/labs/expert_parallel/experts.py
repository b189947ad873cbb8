"""Random experts and choices, a reference token by token, and the times of three ways to compute experts."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from course_lib.expert_parallel import experts as library
from course_lib.expert_parallel import router
from course_lib.expert_parallel.experts import Experts
from course_lib.expert_parallel.mixture import MoE
from course_lib.single_gpu.model import MLP, PRESETS, init_parameter

KINDS = ("plain", "empty experts", "one expert takes all")  # of choices


def some_scores(tokens: int = 6, experts: int = 5, seed: int = 0) -> torch.Tensor:
    """Return softmax scores [t, E]."""
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed)).softmax(-1)


def some_choices(
    kind: str = "plain", tokens: int = 20, experts: int = 8, k: int = 2, seed: int = 5, hidden: int = 32
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return x [t, h] and gates [t, E] of a kind, which both require gradients, and the number of choices."""
    generator = torch.Generator().manual_seed(seed)
    x, logits = (torch.randn(tokens, size, generator=generator) for size in (hidden, experts))
    logits[:, : experts // 2 + 1] -= 50 * (kind == "empty experts")
    logits[:, 3] += 50 * (kind == "one expert takes all")
    k = 1 if kind == "one expert takes all" else k
    choices = logits.topk(k).indices
    gates = torch.zeros_like(logits).scatter(1, choices, logits.softmax(-1).gather(1, choices) + 0.1)
    return x.requires_grad_(), gates.requires_grad_(), tokens * k


def some_experts(
    experts: int = 8, hidden: int = 32, ffn: int = 24, compute: Callable = library.grouped_experts
) -> Experts:
    """Return experts with random weights, the same at each call."""
    module, generator = Experts(experts, hidden, ffn, compute), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    return module


def by_token(experts: Experts, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """Return the results of all tokens [t, h], one token and one expert at a time, by the formula."""
    weights = [part.weight for part in (experts.gate_proj, experts.up_proj, experts.down_proj)]
    rows = []
    for token, row in zip(x, gates, strict=True):
        selected = [part for part in zip(row, *weights, strict=True) if part[0] != 0]
        parts = [gate * F.linear(F.silu(g @ token) * (u @ token), d) for gate, g, u, d in selected]
        rows.append(sum(parts, torch.zeros_like(token)))
    return torch.stack(rows)


def fastest(run: Callable[[], object], repeats: int = 4) -> float:
    """Return the milliseconds of the fastest of some runs, after a warm-up run."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start))
    return min(times[1:])


def timed_layer(module: nn.Module, tokens: int = 1024, hidden: int = 256) -> float:
    """Return the milliseconds of a forward and backward of a layer on random tokens."""
    x = torch.randn(1, tokens, hidden)

    def run() -> None:
        module.zero_grad()
        module(x).square().mean().backward()

    return fastest(run, 2)


def timed_dense(ffn: int) -> float:
    """Return the milliseconds of a forward and backward of an MLP of this width, of the preset `small`."""
    return timed_layer(MLP(dataclasses.replace(PRESETS["small"], ffn_hidden=ffn)))


def timed_mixture(experts: int, ffn: int) -> float:
    """Return the milliseconds of a forward and backward of a mixture of experts of this width, two per token."""
    mixture = MoE(PRESETS["small"], experts, 2, ffn_hidden=ffn)
    for name, parameter in mixture.named_parameters():
        init_parameter(name, parameter, PRESETS["small"])
    return timed_layer(mixture)


def timed_experts(number: int, skew: int, tokens: int = 1024, hidden: int = 256, ffn: int = 176) -> dict[str, float]:
    """Return the milliseconds of forward and backward by "loop", "batched" and "grouped". skew/4 of the choices are
    expert 0.
    """
    module, logits = some_experts(number, hidden, ffn), torch.randn(tokens, number)
    logits[: tokens * skew // 2, 0] += 50  # these tokens choose expert 0 and another one
    gates = router.top_k_gates(logits.softmax(-1), logits, 2).requires_grad_()
    x, slots = torch.randn(tokens, hidden, requires_grad=True), int((gates != 0).sum(0).max())
    ways = {
        "loop": (library.loop_experts, 2 * tokens),
        "batched": (library.batched_experts, slots),
        "grouped": (library.grouped_experts, 2 * tokens),
    }

    def run(way: Callable[..., torch.Tensor], n: int) -> None:
        way(module, x, gates, n).sum().backward()

    return {name: fastest(functools.partial(run, way, n), repeats=2) for name, (way, n) in ways.items()}
