"""Check of exercise 09.11: the backward of `Linear` makes the gradients that it is asked for, and no others."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import torch
from torch import nn

from course_kit.labs.pipeline.halves import flops
from course_kit.labs.tensor_parallel.models import relative_error
from course_lib.pipeline import split_backward

NEEDS = (
    ((True, False, False), 1),
    ((False, True, False), 1),
    ((True, True, True), 2),
    ((False, False, True), 0),
)  # of x, weight and bias, and how many matmuls


def check() -> None:
    """Assert gradients against F.linear, FLOPs for four wishes, and dtypes as under autocast."""
    functions = split_backward.Linear.apply, nn.functional.linear
    for tokens, into, out in (((7,), 6, 2), ((2, 5), 3, 4)):
        shapes = (*tokens, into), (out, into), (out,)
        x, weight, bias = inputs = [torch.randn(*s, dtype=torch.float64).requires_grad_() for s in shapes]
        gradient = torch.randn(*tokens, out, dtype=torch.float64)
        result, expected = (torch.autograd.grad(function(*inputs), inputs, gradient) for function in functions)
        for name, got, wanted in zip(("x", "weight", "bias"), result, expected, strict=True):
            assert got.shape == wanted.shape and relative_error(got, wanted) < 1e-12, (
                f"x {list(x.shape)}, weight {list(weight.shape)}: the gradient of {name} differs from F.linear's"
            )
    for needs, matmuls in NEEDS:
        context = SimpleNamespace(saved_tensors=(x.detach(), weight.detach()), needs_input_grad=needs)
        result, count = flops(functools.partial(split_backward.Linear.backward, context, gradient))
        assert count == matmuls * 2 * 10 * 3 * 4, (
            f"asked for {needs} (x, weight, bias): {count} FLOPs, a matmul has 240"
        )
        assert [each is not None for each in result] == list(needs), (
            f"asked for {needs} (x, weight, bias): gives {[each is not None for each in result]}; the others are None"
        )
    saved = x.detach().bfloat16(), weight.detach().float()
    context = SimpleNamespace(saved_tensors=saved, needs_input_grad=(True, True, True))
    try:
        result = split_backward.Linear.backward(context, gradient.bfloat16())
    except RuntimeError as error:
        raise AssertionError(f"x and gradient in BF16, weight in float32: cast the weight; {error}") from None
    dtypes = [each.dtype for each in result[:2]]
    assert dtypes == [torch.bfloat16] * 2, f"under autocast matmuls are in the gradient's dtype, BF16, not {dtypes}"
