"""Check of exercise 14.8: `Fp8LinearFunction` makes Dgrad and Wgrad in 8 bits, and keeps one byte per element of x."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from course_lib.fp8 import linear
from course_lib.fp8.linear import Fp8Linear, LayerQuantizers
from course_lib.fp8.operands import Cast, Casts, Split
from course_lib.fp8.quantization import LARGEST, ROW, SQUARE, TILE, in_blocks, out_of_blocks
from course_lib.mixed_precision.block_formats import relative_error

TOKENS, IN, OUT = 128, 160, 96
E5M2, TILES, ROWS = Cast(torch.float8_e5m2), Cast(block=TILE), Cast(block=ROW)
RECIPES = (
    Casts(Cast(), Cast(), E5M2),
    Casts(TILES, Cast(block=SQUARE), TILES),
    Casts(ROWS, ROWS, Cast(torch.float8_e5m2, ROW)),
)
FPROP, DGRAD, WGRAD = ((TOKENS, IN), (OUT, IN)), ((TOKENS, OUT), (IN, OUT)), ((OUT, TOKENS), (IN, TOKENS))


@contextlib.contextmanager
def watched_matmuls() -> Iterator[list]:
    """Yield the events inside, in order: the operands (a, b) of each fp8_matmul; "all-reduce", as if one more rank
    had the same; "wait". Assert that each sum of matrices is over the group "ranks", in the dtype of the matmuls.
    """
    seen, finished, dtypes = [], linear.fp8_matmul, set()

    def matmul(a, b, *extra, **named):
        seen.append((a, b))
        out = finished(a, b, *extra, **named)
        dtypes.add(out.dtype)
        return out

    def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        work = mock.Mock()
        work.wait.side_effect = lambda: (seen.append("wait"), tensor.mul_(2))
        seen.append("all-reduce")
        if op == dist.ReduceOp.SUM:
            assert group == "ranks", f"dx is summed over ctx.group, {'ranks'!r}, and not over {group!r}"
            assert tensor.dtype in dtypes, f"{tensor.dtype} is sent, though the matmuls write {dtypes}"
        if async_op:
            return work
        work.wait()

    with mock.patch.object(linear, "fp8_matmul", matmul), mock.patch.object(dist, "all_reduce", all_reduce):
        yield seen


@contextlib.contextmanager
def must_work(case: str) -> Iterator[None]:
    """Report an error of the answer inside, where only the case is special, as a failure of the check."""
    try:
        yield
    except (RuntimeError, ValueError, LookupError, TypeError) as error:
        raise AssertionError(f"{case}: your code raised {type(error).__name__}: {error}") from error


def in_eight_bits(m: torch.Tensor, cast: Cast) -> torch.Tensor:
    """Return the values of a matrix in 8 bits."""
    blocks = in_blocks(m, cast.block)
    scale = blocks.abs().amax((1, 3), keepdim=True) / LARGEST[cast.dtype]
    return out_of_blocks((blocks / scale).to(cast.dtype).float() * scale, m.shape)


def exact_gradients(
    rows: torch.Tensor, weights: list[torch.Tensor], dys: list[torch.Tensor], casts: Casts
) -> list[torch.Tensor]:
    """Return dx, then a dw for each weight, of the quantized operands. rows: [tokens, in]; weights: [out, in]."""
    if casts.weight.block == ROW:  # a scale for each k of Dgrad
        weights = [in_eight_bits(weight.t(), casts.weight).t() for weight in weights]
    else:
        weights = [in_eight_bits(weight, casts.weight) for weight in weights]
    zero = torch.zeros(())
    dx = sum((in_eight_bits(dy, casts.gradient) @ weight for dy, weight in zip(dys, weights, strict=True)), zero)
    saved = in_eight_bits(in_eight_bits(rows, casts.input).t(), casts.input).t()  # of x there are 8 bits alone
    return [dx] + [in_eight_bits(dy.t(), casts.gradient) @ saved for dy in dys]


def check() -> None:
    """Assert the matmuls and gradients of three weights that share x, only those needed, and the saved tensors."""
    torch.manual_seed(3)
    x = torch.randn(2, 64, IN, requires_grad=True)
    weights = [torch.randn(OUT, IN, requires_grad=True) for _ in range(3)]
    dys = torch.randn(3, 2, 64, OUT).unbind()
    for casts in RECIPES:
        check_matmuls(x, weights, dys, casts)
    flat, flat_dys = x.detach().flatten(0, 1).requires_grad_(), [dy.flatten(0, 1) for dy in dys[:2]]
    with must_work("two weights that share an x [tokens, in]"):
        check_matmuls(flat, weights[:2], flat_dys, RECIPES[0])
    with must_work("x in bfloat16, one dy that is not contiguous"):
        check_dtypes(x, weights, dys)
    check_forward_scales(x, weights, dys)
    layer = Fp8Linear(nn.Linear(IN, OUT, bias=False), RECIPES[-1])
    for given, asked in ((x, x), (x.detach(), layer.weight)):
        layer.weight.requires_grad_(asked is layer.weight)
        transposed = layer.quantizers.input.transposed
        with (
            watched_matmuls() as seen,
            mock.patch.object(layer.quantizers.input, "transposed", wraps=transposed) as calls,
        ):
            torch.autograd.grad(layer(given), asked, dys[0])
        assert asked is not x or not calls.called, "x is transposed, though no weight needs a gradient"
        assert len(seen) == 2, f"{len(seen)} matmuls, where {'the weight' if asked is x else 'x'} needs no gradient: 2"
    check_saved(layer, x)


def check_dtypes(x: torch.Tensor, weights: list, dys: tuple) -> None:
    """Assert a bfloat16 x, beside weights in bfloat16 and float32, and a dy that is not contiguous."""
    kinds = torch.float32, torch.bfloat16, torch.float32
    mixed = [weight.detach().to(kind).requires_grad_() for weight, kind in zip(weights, kinds, strict=True)]
    half, quantizers = x.detach().bfloat16().requires_grad_(), [LayerQuantizers(RECIPES[0]) for _ in weights]
    upper = [dys[0].bfloat16(), dys[1].bfloat16().transpose(0, 1).contiguous().transpose(0, 1), dys[2].bfloat16()]
    outs = linear.Fp8LinearFunction.apply(half, "ranks", quantizers, *mixed)
    made: list[tuple] = []
    with watched_matmuls():
        watched = linear.fp8_matmul

        def matmul(a, b, *extra, **named):
            out = watched(a, b, *extra, **named)
            made.append((tuple(out.shape), out.dtype))
            return out

        with mock.patch.object(linear, "fp8_matmul", matmul):
            _, *dw = torch.autograd.grad(outs, [half, *mixed], upper)
    wanted = [((TOKENS, IN), torch.bfloat16)] * 3 + [((OUT, IN), kind) for kind in kinds]
    assert sorted(made, key=str) == sorted(wanted, key=str), (
        "x in bfloat16, weights in float32, bfloat16, float32: matmuls write dx in x's dtype, each dw in the dtype "
        f"of ctx.grad_dtypes: {wanted}, not {made}"
    )
    assert [each.dtype for each in dw] == [*kinds], "each dw has the dtype of ctx.grad_dtypes"


def check_matmuls(x: torch.Tensor, weights: list, dys: Sequence, casts: Casts) -> None:
    """Assert operands, their order beside the all-reduce, and the gradients."""
    rows, dy_rows, n = x.detach().reshape(-1, IN), [dy.reshape(-1, OUT) for dy in dys], len(weights)
    wanted = [FPROP] * n + [DGRAD] * n + [WGRAD] * n
    quantizers, cast = [LayerQuantizers(casts) for _ in weights], []
    for number, quantizer in enumerate(quantizers):
        quantizer.gradient.register_forward_hook(lambda *_, number=number: cast.append(number))
        quantizer.weight.register_forward_pre_hook(lambda _, given, number=number: assert_its_weight(given[0], number))

    def assert_its_weight(given: torch.Tensor, number: int) -> None:
        is_its_weight = given.data_ptr() == weights[number].data_ptr()
        assert is_its_weight, f"the weight's quantizer of the layer {number} gets another weight"

    with watched_matmuls() as seen:
        result = torch.autograd.grad(
            linear.Fp8LinearFunction.apply(x, "ranks", quantizers, *weights), [x, *weights], dys
        )
    assert sorted(cast) == [*range(n)], (
        f"quantizer.gradient(dy) ran for the quantizers {cast}, of {n}: once for each dy, by its own weight's quantizer"
    )
    operands = [each for each in seen if not isinstance(each, str)]
    shapes = [(tuple(a.values.shape), tuple(b.values.shape)) for a, b in operands]
    assert sorted(shapes) == sorted(wanted), f"operands of Fprop, Dgrad, Wgrad for {n} weights: {wanted}, not {shapes}"
    last = [pair for pair, shape in zip(operands, shapes, strict=True) if shape == WGRAD]
    blocks = {(a.block, b.block) for a, b in last}
    assert blocks == {(casts.gradient.block, casts.input.block)}, f"Wgrad: blocks lie along tokens, not {blocks}"
    assert len({id(b.values) for _, b in last}) == 1, "x is transposed once for all weights that share it"
    order = [each if isinstance(each, str) else "matmul" for each in seen[2 * n :]]
    assert order == ["all-reduce", *["matmul"] * n, "wait"], (
        f"with a group, dx is summed over it beside Wgrad's matmuls; after Dgrad come {order}"
    )
    exact = exact_gradients(rows, [weight.detach() for weight in weights], dy_rows, casts)
    off = [relative_error(dw, each) for dw, each in zip(result[1:], exact[1:], strict=True)]
    assert relative_error(result[0].reshape(-1, IN), 2 * exact[0]) < 1e-5, (
        "dx is not all dy w of the quantized operands"
    )
    assert max(off) < 1e-5, f"dw is not dyᵀ x of the quantized operands (x from its 8 bits): off by {off}"


def check_forward_scales(x: torch.Tensor, weights: list, dys: tuple) -> None:
    """Assert that backward asks no rank for scales, skips frozen weights, and has each weight's own dtype."""
    split = Split(0, cast(dist.ProcessGroup, "ranks"))
    quantizers = [LayerQuantizers(Casts(Cast(), Cast(), Cast()), {"weight": (split,)}) for _ in weights]
    with watched_matmuls() as seen:
        frozen = [weights[0].detach(), weights[1], weights[2].detach()]
        outs = linear.Fp8LinearFunction.apply(x.bfloat16(), None, quantizers, *frozen)
        in_forward = len(seen)
        _, dw = torch.autograd.grad(outs, [x, weights[1]], [dy.bfloat16() for dy in dys])
    assert "all-reduce" not in seen[in_forward:], (
        "backward asks the ranks for the weights' scales again: forward has saved them"
    )
    assert len(seen) - in_forward == 4, (
        f"3 matmuls for dx and one for the one weight that needs a gradient, not {len(seen) - in_forward}"
    )
    assert not torch.equal(dw, dw.bfloat16().float()), "a float32 weight's gradient is rounded to x's dtype, bfloat16"


def check_saved(layer: Fp8Linear, x: torch.Tensor) -> None:
    """Assert that backward keeps x in 8 bits, and not x itself."""
    hidden = x * 1
    out, left = layer(hidden), StorageWeakRef(hidden.untyped_storage())
    saved = [
        each for each in (*out.grad_fn.saved_tensors, *vars(out.grad_fn).values()) if isinstance(each, torch.Tensor)
    ]
    saved_bytes = sum(each.nbytes for each in saved if each.data_ptr() != layer.weight.data_ptr())
    del hidden
    assert saved_bytes <= 1.05 * x.numel() and left.expired(), "backward keeps more than a byte for each element of x"
