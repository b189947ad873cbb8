"""Check of exercise 01.6: `saved_bytes` counts each storage that autograd keeps once, and no parameter."""

from __future__ import annotations

import weakref

import torch
import torch.nn.functional as F
from torch import nn

from course_lib.single_gpu import profile


def check() -> None:
    """Assert the bytes of inputs, outputs, views and copies, frozen parameters, and that nothing stays alive."""
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(64, 32, bias=False)
    x = torch.randn(16, 64, generator=generator).requires_grad_()
    assert profile.saved_bytes(linear, lambda: linear(x)) == x.nbytes, (
        "a linear layer saves its input (4,096 bytes); its weight is resident: do not count it"
    )
    alike = torch.randn(32, 64, generator=generator).requires_grad_()
    assert profile.saved_bytes(linear, lambda: linear(alike)) == alike.nbytes, (
        "an input of the weight's shape is no parameter: know a parameter by its storage"
    )
    assert profile.saved_bytes(linear, lambda: x.sum()) == 0, "a sum saves nothing"
    y = torch.randn(100, generator=generator).requires_grad_()
    assert profile.saved_bytes(linear, lambda: y.exp()) == 400, "exp saves its output"
    assert profile.saved_bytes(linear, lambda: y.bfloat16().exp()) == 200, "count bytes: an element of BF16 has two"
    assert profile.saved_bytes(linear, lambda: (x * x.sin(), x.cos())) == 2 * x.nbytes, (
        "x is saved three times here, sin(x) once: count each storage once"
    )
    assert profile.saved_bytes(linear, lambda: x[:2].sin()) == x.nbytes, "a view keeps its whole storage alive"
    assert profile.saved_bytes(linear, lambda: (x.sin(), x[:2].sin(), x[2:].sin(), x.t().sin())) == x.nbytes, (
        "x is saved in full, as two slices and transposed: one storage, count it once"
    )
    both = profile.saved_bytes(linear, lambda: [linear(torch.ones(16, 64)).square() for _ in range(3)])
    assert both == 3 * (16 * 64 + 16 * 32) * 4, (
        "tensors of one forward must not be mistaken for each other: return tensor.detach() from pack, which keeps "
        "their memory alive"
    )
    with torch.no_grad():
        assert profile.saved_bytes(linear, lambda: linear(x)) == 0, "without a graph nothing is saved"
    linear.requires_grad_(False)
    assert profile.saved_bytes(linear, lambda: F.linear(x, linear.weight[8:])) == 0, (
        "backward needs rows 8 to 31 of a frozen weight here: memory of a parameter does not count"
    )
    both_ways = nn.Bilinear(4, 5, 3)
    one, other = torch.randn(7, 4), torch.randn(7, 5)
    assert profile.saved_bytes(both_ways, lambda: both_ways(one, other)) == one.nbytes + other.nbytes, (
        "a bilinear layer saves both inputs, and its own weight is resident: take the parameters from `module`"
    )
    table, angles = nn.Module(), torch.ones(16, 64)
    table.register_buffer("angles", angles)
    assert profile.saved_bytes(table, lambda: x * angles) == 16 * 64 * 4, (
        "a product saves a buffer of the module, 4,096 bytes: parameters alone do not count"
    )
    saved = []
    profile.saved_bytes(linear, lambda: saved.append(weakref.ref(y.exp().untyped_storage())))
    assert saved[0]() is None, (
        "what exp saves, its output, is alive after the call: keep nothing, and return tensor.detach() from pack"
    )
