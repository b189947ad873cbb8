"""Check of exercise 08.8: the balance loss and the z-loss against their formulas."""

from __future__ import annotations

import math

import torch

from course_kit.checks.expert_parallel import formulas
from course_kit.labs.tensor_parallel.models import relative_error
from course_lib.expert_parallel import router


def check() -> None:
    """Judge balance_loss and z_loss."""
    logits = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(7), requires_grad=True)
    for scores in (logits.softmax(-1), logits.sigmoid()):
        counts = torch.tensor([9, 3, 0, 6, 2, 4])
        total, result = formulas.balance_loss(scores, counts), router.balance_loss(scores, counts)
        assert result.requires_grad, "balance_loss has no gradient: counts have none, scores have"
        assert torch.allclose(result, total), f"balance_loss is {result.item():.4f}, not {total.item():.4f}"
        gradient, right = (torch.autograd.grad(each, logits, retain_graph=True)[0] for each in (result, total))
        assert relative_error(gradient, right) < 1e-4, "the gradient of balance_loss is not the formula's"
    even = torch.full((2, 5, 6), 1 / 6)
    assert abs(router.balance_loss(even, torch.full((6,), 5)) - 1) < 1e-6, "even shares have a loss of 1"
    assert torch.allclose(router.z_loss(logits), formulas.z(logits)), (
        "z_loss is the mean of (log sum exp)² over the tokens"
    )
    assert router.z_loss(torch.full((1, 1, 4), 1e4)).isfinite(), "large logits: logsumexp does not overflow"
    large, right_large = router.z_loss(torch.full((1, 1, 4), -300.0)).item(), (math.log(4) - 300) ** 2
    assert abs(large / right_large - 1) < 1e-5, (
        f"all logits -300, whose exp is 0: z_loss is {large:g}, not {right_large:g}: subtract the row's largest logit, "
        "or use logsumexp"
    )
