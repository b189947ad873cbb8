"""Backward in one pass and in two halves: gradients, FLOPs, hooks, times."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from course_lib.pipeline import split_backward, stages
from course_lib.single_gpu.model import loss

Result = TypeVar("Result")


def flops(run: Callable[[], Result]) -> tuple[Result, int]:
    """Return the result of a function, and the FLOPs of its matmuls."""
    with FlopCounterMode(display=False) as counter:
        result = run()
    return result, counter.get_total_flops()


class TwoWays(NamedTuple):
    """A stage's gradients by name, with "x", from autograd's backward and from the two halves."""

    expected: dict[str, torch.Tensor | None]
    gradients: dict[str, torch.Tensor | None]
    flops: tuple[int, int, int]  # of B, I and W
    early: list[str]  # parameters with a gradient, and hooks that have fired, before W
    fired: collections.Counter[str]  # how often each hook has fired; "tensor hook of ..." for register_hook


def two_ways(stage: nn.Module, x: torch.Tensor) -> TwoWays:
    """Run autograd's backward, then a SplitPass, of the squares of the stage's output for x."""
    leaf = x.detach().requires_grad_()
    out = stage(leaf).square()
    _, of_b = flops(lambda: out.backward(torch.ones_like(out)))
    expected = {name: weight.grad for name, weight in stage.named_parameters()} | {"x": leaf.grad}
    stage.zero_grad()
    fired = collections.Counter[str]()
    done = split_backward.SplitPass(stage, x, lambda out: out.square())
    handles = []
    for name, weight in stage.named_parameters():
        handles.append(weight.register_post_accumulate_grad_hook(lambda _, name=name: fired.update([name])))
        handles.append(weight.register_hook(lambda _, name=name: fired.update([f"tensor hook of {name}"])))
    grad_x, of_i = flops(lambda: done.input_gradient(torch.ones_like(done.out)))
    early = [name for name, weight in stage.named_parameters() if weight.grad is not None] + list(fired)
    _, of_w = flops(done.weight_gradients)
    result = {name: weight.grad for name, weight in stage.named_parameters()} | {"x": grad_x}
    for handle in handles:
        handle.remove()
    return TwoWays(expected, result, (of_b, of_i, of_w), early, fired)


def flops_of_halves(stage: nn.Module, x: torch.Tensor) -> tuple[float, float]:
    """Return the FLOPs of I and of W, relative to B's."""
    of_b, of_i, of_w = two_ways(stage, x).flops
    return of_i / of_b, of_w / of_b


def ms_of_halves(stage: nn.Module, x: torch.Tensor, repeats: int = 9) -> tuple[float, ...]:
    """Return the ms of F and B, and of F, I and W: the median of some repeats."""
    runs = []
    for _ in range(repeats):
        clock = [time.perf_counter()]
        done = stages.StagePass(stage, x, lambda out: out)
        clock.append(time.perf_counter())
        done.backward(torch.ones_like(done.out))
        clock.append(time.perf_counter())
        runs.append(ms_between(clock) + split_ms(stage, x, lambda out: out)[1])
    return tuple(sorted(spans)[repeats // 2] for spans in zip(*runs, strict=True))


def split_ms(stage: nn.Module, x: torch.Tensor, finish: Callable) -> tuple[torch.Tensor, list[float]]:
    """Return the output of a stage, and the ms of F, I and W."""
    clock = [time.perf_counter()]
    done = split_backward.SplitPass(stage, x, finish)
    clock.append(time.perf_counter())
    done.input_gradient(torch.ones_like(done.out))
    clock.append(time.perf_counter())
    done.weight_gradients()
    clock.append(time.perf_counter())
    return done.out, ms_between(clock)


def ms_between(clock: list[float]) -> list[float]:
    """Return the ms from each time to the next."""
    return [1e3 * (after - before) for before, after in zip(clock, clock[1:], strict=False)]


def times_of(
    model_stages: list[nn.Module], inputs: torch.Tensor, targets: torch.Tensor, repeats: int = 5
) -> dict[str, list[float]]:
    """Return the ms of F, I and W of each stage, run in sequence in this process: the fastest of some repeats."""
    times: dict[str, list[float]] = {"F": [], "I": [], "W": []}
    for stage in model_stages:
        finish = (lambda out: out) if stage.head is None else (lambda out: loss(out, targets))
        outcomes = [split_ms(stage, inputs, finish) for _ in range(repeats)]
        inputs = outcomes[-1][0]
        for kind, spans in zip("FIW", zip(*(ms for _, ms in outcomes), strict=True), strict=True):
            times[kind].append(round(min(spans), 2))
    return times
