"""Trials of a way to compute experts: results and gradients against the formula, multiplications, edges."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from course_kit.checks.expert_parallel.work import Work
from course_kit.labs.expert_parallel.experts import by_token, some_choices, some_experts
from course_kit.labs.tensor_parallel.models import relative_error

NAMES = ("out", "x's gradient", "the gates' gradient", *(f"the gradient of {n}_proj" for n in ("gate", "up", "down")))
ONE_CHOICE = 3 * 32 * 24  # multiplications: three matrices of 32 x 24


def experts_trial(
    function: Callable, kind: str, experts: int, number: int | None
) -> tuple[dict[str, float], Work, Work, int]:
    """Errors of out and of the gradients of x, gates and weights, by name; the work of forward and of backward; the
    multiplications that forward needs. number: the function's argument; None: the number of choices.
    """
    module, (x, gates, choices) = some_experts(experts), some_choices(kind, experts=experts)
    wanted, result = [x, gates, *module.parameters()], {}
    expected = by_token(module, x, gates)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    gradients = torch.autograd.grad(expected, wanted, weight)
    with Work() as forward:
        out = function(module, x, gates, choices if number is None else number)
    with Work() as backward:
        got = torch.autograd.grad(out, wanted, weight, allow_unused=True)
    selected = (gates.detach() != 0).float()  # of the others no gate wants a gradient
    for name, mine, right in zip(NAMES, (out, *got), (expected, *gradients), strict=True):
        of_gates = name == "the gates' gradient" and mine is not None
        result[name] = relative_error(mine * selected, right * selected) if of_gates else relative_error(mine, right)
    return result, forward, backward, choices * ONE_CHOICE


def judge_way(
    function: Callable, kind: str, experts: int = 8, number: int | None = None, enough: int | None = None
) -> tuple[Work, Work]:
    """Judge results and multiplications (enough: of forward); return the work of forward and of backward."""
    result, forward, backward, fewest = experts_trial(function, kind, experts, number)
    for name, error in result.items():
        wrong = "is not what the formula gives" if math.isfinite(error) else "is missing, of another shape or NaN"
        assert error < 1e-5, f"{kind}: {name} {wrong}"
    for word, done, least in (("forward", forward, enough or fewest), ("backward", backward, 2 * (enough or fewest))):
        assert done.multiplications <= least, (
            f"{kind}, {word}: {done.multiplications:,} multiplications, {least:,} are enough: "
            "do experts work on tokens that are not theirs?"
        )
    return forward, backward


def judge_edges(function: Callable, number: int) -> None:
    """Judge the gradients of weights of experts without tokens, and the dtype of the result."""
    module, (x, gates, _) = some_experts(), some_choices()
    out = function(module, x.detach(), gates.detach() * 0, number)
    assert out.requires_grad, "without tokens, an expert's weights must get gradients of zeros: multiply empty rows too"
    gradients = torch.autograd.grad(out.sum(), list(module.parameters()), allow_unused=True)
    for name, gradient in zip(("gate_proj", "up_proj", "down_proj"), gradients, strict=True):
        assert gradient is not None and not gradient.any(), f"without tokens {name}'s gradient is zeros, not {gradient}"
    out = function(module.bfloat16(), x.bfloat16(), gates, 40)
    assert out.dtype == torch.bfloat16, f"x is bfloat16, gates are float32, out is {out.dtype}: it should be as x"
    judge_sums(function, number or 6)


def judge_sums(function: Callable, number: int) -> None:
    """Judge that bfloat16 rows are weighted and summed in float32, and rounded once: the rows are 256, 1, 1 and 1."""
    module, x = some_experts(4, 8, 8).bfloat16(), torch.eye(8, dtype=torch.bfloat16)[[0, 0]]
    with torch.no_grad():
        module.gate_proj.weight[:], module.up_proj.weight[:] = 64, 1 / 64  # silu(64) is 64 in BF16
        module.down_proj.weight[:] = torch.tensor([256, 1, 1, 1])[:, None, None] / 8  # 8: the width of the MLP
    gates = torch.tensor([[1, 1, 1, 1], [1 + 2**-8, 1, 0, 0]])  # BF16 has no number between 1 and 1 + 2**-7
    (many, *_), (one, *_) = function(module, x, gates, number).tolist()
    assert many == 260, f"x in BF16: 256 + 1 + 1 + 1 is 260 when it is rounded once, not {many}: sum in float32"
    assert one == 258, f"x in BF16: (1 + 2**-8) * 256 + 1 is 258, not {one}: multiply by the gates in float32"
