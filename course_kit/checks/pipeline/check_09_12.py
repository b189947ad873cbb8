"""Check of exercise 09.12: `SplitPass.weight_gradients` gives each weight its gradient, and fires its hooks once."""

from __future__ import annotations

import copy

import torch
from torch import nn

from course_kit.labs.pipeline.halves import two_ways
from course_kit.labs.pipeline.models import TINY
from course_kit.labs.tensor_parallel.models import relative_error
from course_kit.typed import grad_of
from course_lib.pipeline import split_backward
from course_lib.pipeline.stages import split_stages
from course_lib.single_gpu.model import Transformer


class Opaque(torch.autograd.Function):
    """A matmul that computes both gradients, needed or not."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.flatten(0, -2).t() @ gradient.flatten(0, -2)


class Scaled(torch.autograd.Function):
    """x times a number that is not trained: its gradient is None."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(number)
        return x * number

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        return gradient * ctx.saved_tensors[0], None


class Several(nn.Module):
    """Weights: one used twice, one used twice behind a square, one behind a cast, one transposed, one in a Function
    that cannot be split, one whose Function has no gradient for it, one unused.
    """

    def __init__(self):
        super().__init__()
        self.twice, self.opaque = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8))
        self.wide, self.transposed = (
            nn.Parameter(torch.randn(8, 8, dtype=torch.float64)),
            nn.Parameter(torch.randn(8, 8)),
        )
        self.squared, self.number = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.tensor(0.5))
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.linear(self.twice(torch.tanh(self.twice(x))), self.transposed.t())
        squares = self.squared.square()  # both uses go back through it
        x = nn.functional.linear(torch.tanh(nn.functional.linear(Scaled.apply(x, self.number), squares)), squares)
        return nn.functional.linear(Opaque.apply(x, self.opaque), self.wide.float())


def check() -> None:
    """Assert gradients, FLOPs and hooks of I and W against autograd's backward, and a second micro-batch."""
    middle = split_stages(Transformer(TINY), 4)[1]
    cases = {"two layers": (middle, torch.randn(2, 7, 32)), "several kinds of weights": (Several(), torch.randn(3, 8))}
    for name, (stage, x) in cases.items():
        check_halves(name, stage, x)
    check_halves("BF16", copy.deepcopy(middle).bfloat16(), cases["two layers"][1].bfloat16())
    x = cases["two layers"][1]
    of_b, of_i, of_w = two_ways(middle, x).flops
    assert of_i == of_w == of_b // 2, f"two layers: I has {of_i} FLOPs and W {of_w}: half of B each"
    first = {name: grad_of(weight).clone() for name, weight in middle.named_parameters()}
    done = split_backward.SplitPass(middle, x, lambda out: out.square())
    done.input_gradient(torch.ones_like(done.out))
    done.weight_gradients()
    assert not done.deferred, "after W nothing should be kept: `deferred` holds activations"
    for each, weight in middle.named_parameters():
        off = relative_error(weight.grad, 2 * first[each])
        assert off < 1e-6, f"a second micro-batch should be added: gradient of {each}"


def check_halves(name: str, stage: nn.Module, x: torch.Tensor) -> None:
    """Assert that I and W together are a backward, and that weights get theirs in W, with one call of each hook."""
    try:
        expected, result, (of_b, of_i, of_w), early, fired = two_ways(stage, x)
    except RuntimeError as error:
        assert "second time" not in str(error), f"{name}: two edges lead through the same graph: set retain_graph=True"
        raise
    assert not early, f"{name}: {early[0]} has its gradient before W"
    for each, gradient in expected.items():
        if gradient is None:
            assert result[each] is None, (
                f"{name}: {each} is not used, or its Function gives None, and it has a gradient"
            )
            assert "unused" not in each or not fired[each], f"{name}: {each} is not used, and its hook fires"
        else:
            mine = result[each]
            assert mine is not None, f"{name}: {each} has no gradient after W"
            assert mine.dtype == gradient.dtype, f"{name}: the gradient of {each} is {mine.dtype}"
            assert relative_error(mine, gradient) < 1e-6, f"{name}: the gradient of {each} is wrong"
            wrong = [hook for hook in (each, f"tensor hook of {each}") if each != "x" and fired[hook] != 1]
            times = fired[wrong[0]] if wrong else 1
            assert not wrong, f"{name}: the hook on {each} fired {times} times, not once"
    assert of_i + of_w == of_b, f"{name}: I and W have {of_i} and {of_w} FLOPs, B has {of_b}"
