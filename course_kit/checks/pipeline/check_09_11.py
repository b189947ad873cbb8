"""Check of exercise 09.11: the backward of `Linear` makes the gradients that it is asked for, and no others."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from course_kit.labs.pipeline.halves import flops
from course_kit.labs.tensor_parallel.models import relative_error
from course_lib.pipeline import split_backward

NEEDS = (
    ((True, False, False), 1),
    ((False, True, False), 1),
    ((True, True, True), 2),
    ((False, False, True), 0),
)  # of x, weight and bias, and how many matmuls


class MatmulDtypes(TorchDispatchMode):
    """Collects the dtypes of the matrices that are multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function._schema.name in ("aten::mm", "aten::bmm", "aten::addmm", "aten::matmul"):
            self.dtypes |= {each.dtype for each in args if isinstance(each, torch.Tensor)}
        return function(*args, **(kwargs or {}))


def check_views() -> None:
    """Assert the gradients of an x and an output gradient that are not contiguous."""
    x, gradient = (torch.randn(5, 2, n, dtype=torch.float64).transpose(0, 1) for n in (3, 4))
    weight = torch.randn(4, 3, dtype=torch.float64)
    context = SimpleNamespace(saved_tensors=(x, weight), needs_input_grad=(True, True, True))
    try:
        _, of_weight, _ = split_backward.Linear.backward(context, gradient)
    except RuntimeError as error:
        raise AssertionError(f"x and gradient may be transposed views: flatten copies where it must; {error}") from None
    wanted = torch.einsum("bso,bsi->oi", gradient, x)
    assert relative_error(of_weight, wanted) < 1e-12, "x and gradient are transposed views: wrong gradient of weight"


def check() -> None:
    """Assert gradients against F.linear, FLOPs for four wishes, and dtypes as under autocast."""
    functions = split_backward.Linear.apply, nn.functional.linear
    for tokens, into, out in (((7,), 6, 2), ((2, 5), 3, 4)):
        shapes = (*tokens, into), (out, into), (out,)
        x, weight, bias = inputs = [torch.randn(*s, dtype=torch.float64).requires_grad_() for s in shapes]
        gradient = torch.randn(*tokens, out, dtype=torch.float64)
        try:
            result, expected = (torch.autograd.grad(function(*inputs), inputs, gradient) for function in functions)
        except RuntimeError as error:
            raise AssertionError(
                f"x {list(x.shape)}, weight {list(weight.shape)}: the shapes do not fit; {error}"
            ) from None
        for name, got, wanted in zip(("x", "weight", "bias"), result, expected, strict=True):
            assert got.shape == wanted.shape and relative_error(got, wanted) < 1e-12, (
                f"x {list(x.shape)}, weight {list(weight.shape)}: the gradient of {name} differs from F.linear's"
            )
    check_views()
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
        with MatmulDtypes() as seen:
            result = split_backward.Linear.backward(context, gradient.bfloat16())
    except RuntimeError as error:
        raise AssertionError(f"x and gradient in BF16, weight in float32: cast the weight; {error}") from None
    dtypes = [each.dtype for each in result[:2]]
    assert dtypes == [torch.bfloat16] * 2, f"under autocast matmuls are in the gradient's dtype, BF16, not {dtypes}"
    wide = seen.dtypes - {torch.bfloat16}
    assert not wide, f"x and gradient in BF16: a matmul runs in {wide.pop()}, and matmuls are in the gradient's dtype"
