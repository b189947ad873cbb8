"""Check of exercise 02.9: `fp32_gradients`, sums in float32 while backward runs."""

from __future__ import annotations

import contextlib
from typing import cast

import torch
from torch import nn

from course_lib.recompute import modes


def check() -> None:
    """Assert the sums of 40 backwards, that each gradient moves at once, and that hooks go, also after an error."""
    generator = torch.Generator().manual_seed(0)
    half = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1))
    with torch.no_grad():
        for parameter in half.parameters():
            parameter.uniform_(-0.4, 0.4, generator=generator)
    half.bfloat16()[1].bias.requires_grad_(False)
    exact = [torch.zeros(p.shape, dtype=torch.float64) for p in half.parameters()]
    batches = torch.randn(40, 5, 6, generator=generator).bfloat16()
    for x in batches:
        half.zero_grad()
        half(x).sum().backward()
        exact = [e if p.grad is None else e + p.grad.double() for e, p in zip(exact, half.parameters(), strict=True)]
    assert half[0].weight.grad is not None  # of the last backward: it must not get into the sums
    check_sums(half, batches, exact)
    half(batches[0]).sum().backward()
    assert half[0].weight.grad is not None, "after the `with` the hooks must be gone"
    with contextlib.suppress(KeyError), modes.fp32_gradients(nn.Linear(2, 2).bfloat16()) as sums:
        broken = next(iter(sums))
        raise KeyError
    broken.sum().backward()
    assert broken.grad is not None, "an error inside the `with` must take the hooks off as well"


def check_sums(half: nn.Sequential, batches: torch.Tensor, exact: list[torch.Tensor]) -> None:
    """Assert the sums against the exact ones, and when each gradient moves."""
    early, first_sums = [], []
    linear, last = (cast(nn.Linear, half[i]) for i in (0, 1))
    hook = linear.weight.register_hook(lambda gradient: early.append(last.weight.grad is None))
    with modes.fp32_gradients(half) as sums:
        assert last.bias not in sums and len(sums) == 3, "one sum for each parameter that requires a gradient"
        for x in batches:
            half(x).sum().backward()
            assert all(p.grad is None for p in half.parameters()), "no .grad may be left after a backward"
            first_sums.append(sums[cast(nn.Parameter, linear.weight)].abs().sum().item())
    hook.remove()
    assert all(early), "move a gradient as soon as it is there, not when backward is over: in a hook of its parameter"
    assert first_sums[0] > 0, "add to the sum at once: what is kept in a list until the end is a copy of each gradient"
    for (name, p), e in zip(half.named_parameters(), exact, strict=True):
        if p.requires_grad:
            assert sums[p].dtype == torch.float32 and sums[p].shape == p.shape, (
                f"{name}: a float32 sum of the same shape"
            )
            error = ((sums[p].double() - e).norm() / e.norm()).item()
            assert error < 1e-5, (
                f"{name}: the sum of 40 backwards is {error:.1e} off: add in float32, add all, and begin at zero: drop "
                "gradients from before the `with`"
            )
