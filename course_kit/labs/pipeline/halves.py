"""A backward whole and in two halves: gradients, FLOPs, hooks, times."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from course_lib.pipeline import split_backward, stages
from course_lib.single_gpu.model import loss


def flops(run: Callable[[], object]) -> tuple[object, int]:
    """What it returns, and the FLOPs of its matrix products."""
    with FlopCounterMode(display=False) as counter:
        found = run()
    return found, counter.get_total_flops()


class TwoWays(NamedTuple):
    """A stage's gradients by name, "x" among them, of autograd's backward and of the two halves."""

    expected: dict[str, torch.Tensor | None]
    found: dict[str, torch.Tensor | None]
    flops: tuple[int, int, int]  # of B, I and W
    early: list[str]  # what has its gradient, or whose hook has fired, before W
    fired: collections.Counter  # how often each hook has fired; "tensor hook of ..." for register_hook


def two_ways(stage: nn.Module, x: torch.Tensor) -> TwoWays:
    """Run autograd's own backward, then a SplitPass: of the squares of what the stage makes of x."""
    leaf = x.detach().requires_grad_()
    out = stage(leaf).square()
    _, of_b = flops(lambda: out.backward(torch.ones_like(out)))
    expected = {name: weight.grad for name, weight in stage.named_parameters()} | {"x": leaf.grad}
    stage.zero_grad()
    fired, done = collections.Counter(), split_backward.SplitPass(stage, x, lambda out: out.square())
    handles = []
    for name, weight in stage.named_parameters():
        handles.append(weight.register_post_accumulate_grad_hook(lambda _, name=name: fired.update([name])))
        handles.append(weight.register_hook(lambda _, name=name: fired.update([f"tensor hook of {name}"])))
    grad_x, of_i = flops(lambda: done.input_gradient(torch.ones_like(done.out)))
    early = [name for name, weight in stage.named_parameters() if weight.grad is not None] + list(fired)
    _, of_w = flops(done.weight_gradients)
    found = {name: weight.grad for name, weight in stage.named_parameters()} | {"x": grad_x}
    for handle in handles:
        handle.remove()
    return TwoWays(expected, found, (of_b, of_i, of_w), early, fired)


def flops_of_halves(stage: nn.Module, x: torch.Tensor) -> tuple[float, float]:
    """FLOPs of I and of W, as parts of those of B."""
    of_b, of_i, of_w = two_ways(stage, x).flops
    return of_i / of_b, of_w / of_b


def ms_of_halves(stage: nn.Module, x: torch.Tensor, rounds: int = 9) -> tuple[float, ...]:
    """ms of F and B, and of F, I and W; the median of some rounds."""
    found = []
    for _ in range(rounds):
        clock = [time.perf_counter()]
        done = stages.StagePass(stage, x, lambda out: out)
        clock.append(time.perf_counter())
        done.backward(torch.ones_like(done.out))
        clock.append(time.perf_counter())
        found.append(ms_between(clock) + split_ms(stage, x, lambda out: out)[1])
    return tuple(sorted(spans)[rounds // 2] for spans in zip(*found, strict=True))


def split_ms(stage: nn.Module, x: torch.Tensor, finish: Callable) -> tuple[torch.Tensor, list[float]]:
    """What comes out of a stage, and the ms of F, I and W."""
    clock = [time.perf_counter()]
    done = split_backward.SplitPass(stage, x, finish)
    clock.append(time.perf_counter())
    done.input_gradient(torch.ones_like(done.out))
    clock.append(time.perf_counter())
    done.weight_gradients()
    clock.append(time.perf_counter())
    return done.out, ms_between(clock)


def ms_between(clock: list[float]) -> list[float]:
    """The ms from each time to the next one."""
    return [1e3 * (after - before) for before, after in zip(clock, clock[1:], strict=False)]


def times_of(
    model_stages: list[nn.Module], inputs: torch.Tensor, targets: torch.Tensor, rounds: int = 5
) -> dict[str, list[float]]:
    """ms of F, I and W of each stage, one after the other in this process; the quickest of some rounds."""
    found = {"F": [], "I": [], "W": []}
    for stage in model_stages:
        finish = (lambda out: out) if stage.head is None else (lambda out: loss(out, targets))
        outcomes = [split_ms(stage, inputs, finish) for _ in range(rounds)]
        inputs = outcomes[-1][0]
        for kind, spans in zip("FIW", zip(*(ms for _, ms in outcomes), strict=True), strict=True):
            found[kind].append(round(min(spans), 2))
    return found
