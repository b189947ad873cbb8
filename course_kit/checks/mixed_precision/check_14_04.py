"""Check of exercise 14.4: gradients are unscaled, and the loss scale follows a script of good and bad steps."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from course_kit.checks.watchers import NoHostReads, refused, two_more_ranks
from course_kit.typed import grad_of
from course_lib.mixed_precision.masters import LossScaler

# Gradients of the first parameter, by step; the second one's are 1.
SCRIPT = (1, 1, 1e-9, 1, math.inf, 1, 1, math.nan, 1, 1, 1, 1, 1, 1)


def check_against_torch() -> None:
    """Assert gradients, scale and weights after each step of the script against torch.amp.GradScaler."""
    ours, theirs = LossScaler(2.0**10, interval=3), torch.amp.GradScaler("cpu", 2.0**10, growth_interval=3)
    pairs = [[nn.Parameter(torch.ones(4)) for _ in range(2)] for _ in range(2)]
    optimizers = [torch.optim.AdamW(pair, lr=0.1, fused=True) for pair in pairs]
    for number, value in enumerate(SCRIPT):
        scalers: tuple[Any, Any] = ours, theirs
        for pair, scaler in zip(pairs, scalers, strict=True):
            for weight, gradient in zip(pair, (value, 1), strict=True):
                weight.grad = torch.full((4,), gradient * scaler.scale(torch.tensor(1.0)).item())
        theirs.unscale_(optimizers[1])
        with NoHostReads():
            ours.unscale(pairs[0])
        if math.isfinite(value):
            grads = [grad_of(pair[0])[0].item() for pair in pairs]
            assert grads[0] == grads[1], f"step {number}: a gradient of {grads[1]} becomes {grads[0]}: 1/S, in float32"
        with NoHostReads():
            ours.step(optimizers[0])
            ours.update()
        theirs.step(optimizers[1])
        theirs.update()
        mine, wanted = cast(torch.Tensor, ours.factor).item(), theirs.get_scale()
        assert mine == wanted, f"after step {number}, with a gradient of {value}, S is {mine:g}, not {wanted:g}"
        assert torch.equal(torch.cat([*pairs[0]]), torch.cat([*pairs[1]])), (
            f"step {number}, with a gradient of {value}, changes the weights differently from torch.amp's"
        )
    counts = [int(optimizer.state[pair[0]]["step"]) for optimizer, pair in zip(optimizers, pairs, strict=True)]
    assert counts == [12, 12], "a skipped step must not count in Adam's correction of the bias"


def check_settings() -> None:
    """Assert other settings than the usual ones, parameters from a generator, and a scale that stays finite."""
    layer, script = nn.Linear(2, 3), (0, 0, 1, 0, 0)
    scaler = LossScaler(2.0**10, growth=3.0, backoff=0.25, interval=2)
    for weight in layer.parameters():
        weight.grad = torch.full_like(weight, 2.0**10)
    unused = nn.Parameter(torch.ones(2))
    try:
        scaler.unscale(weight for weight in (unused, *layer.parameters()))
    except AttributeError as error:
        raise AssertionError(f"a parameter without a gradient is left out ({error})") from None
    assert (grad_of(layer.weight) == 1).all() and (grad_of(layer.bias) == 1).all(), (
        f"given a generator, as model.parameters() is, a gradient of S becomes {grad_of(layer.bias)[0]:g} and not 1: "
        "it is empty when you iterate a second time"
    )
    factors = []
    for bad in script:
        cast(torch.Tensor, scaler.found_inf).fill_(bad)
        scaler.update()
        factors.append(cast(torch.Tensor, scaler.factor).item())
    assert factors == [1024, 3072, 768, 768, 2304], (
        f"growth 3, backoff 1/4, interval 2, the third step bad: S is {factors}, from 1,024 on, and not 1,024, 3,072, "
        "768, 768, 2,304: are self.growth, self.backoff and self.interval used?"
    )
    highest = LossScaler(2.0**127, interval=1)
    highest.update()
    assert highest.factor == 2.0**127, f"S grows to {highest.factor:g}: with an infinite S each step is skipped"
    lowest = LossScaler(2.0**-126)
    cast(torch.Tensor, lowest.found_inf).fill_(1.0)
    lowest.update()
    assert lowest.factor == 2.0**-126, f"S shrinks to {lowest.factor:g}, not below 2⁻¹²⁶: from there on 1 / S is inf"


def with_gradient(values: list[float], dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """Return a parameter with this gradient, of the same dtype."""
    weight = nn.Parameter(torch.ones(len(values), dtype=dtype))
    weight.grad = torch.tensor(values, dtype=dtype)
    return weight


def check_gradients() -> None:
    """Assert gradients in place and in their dtype, a sum that would overflow, and flags that add up in a step."""
    scaler, weights = LossScaler(0.25), [with_gradient([0.25] * 4, dtype) for dtype in (torch.bfloat16, torch.float32)]
    before = [(grad_of(weight).data_ptr(), weight.dtype) for weight in weights]
    try:
        scaler.unscale(weights)
    except ValueError as error:
        raise AssertionError(f"gradients in bfloat16 have float32's range, and are not refused ({error})") from None
    for weight, (memory, dtype) in zip(weights, before, strict=True):
        grad = grad_of(weight)
        assert grad.dtype == dtype and grad.data_ptr() == memory, (
            f"a gradient in {dtype} is divided in place, in its own memory: a bucket may hold views of it"
        )
        assert (grad == 1).all(), f"S is 1/4: a gradient of 1/4 in {dtype} becomes {grad[0]:g}, not 1"
    scaler.unscale([with_gradient([8e37, 8e37, 8e37, 8e37, 8e37])])
    assert scaler.found_inf == 0, "finite gradients whose sum overflows are good: look at each element"
    scaler.unscale([with_gradient([math.inf])])
    scaler.unscale([with_gradient([1.0])])
    assert scaler.found_inf == 1, "found_inf is of all gradients of a step: `update` alone sets it to 0"


def check() -> None:
    """Assert the script, the settings, the gradients, what other ranks have found, and that a float16 gradient is
    refused.
    """
    check_against_torch()
    check_settings()
    check_gradients()
    good = nn.Parameter(torch.ones(4))
    good.grad = torch.ones(4)
    shared = LossScaler(group=cast(dist.ProcessGroup, "ranks"))
    with two_more_ranks(1.0) as calls:
        shared.unscale([good])
    assert [group for _, group in calls] == ["ranks"], (
        "one all-reduce over self.group: the others may have found an inf"
    )
    assert shared.found_inf == 1, f"two other ranks have an inf: found_inf is {shared.found_inf:g}, and 1 skips"
    with two_more_ranks(1.0) as calls:
        shared.unscale([])
    assert len(calls) == 1, "a rank without gradients joins the all-reduce, too: the other ranks wait for it"
    assert refused(LossScaler(2.0**10).unscale, [good, with_gradient([1.0], torch.float16)]), (
        "a float16 gradient divided by S underflows again: raise ValueError, also if other gradients are float32"
    )
