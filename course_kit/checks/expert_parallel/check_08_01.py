"""Check of exercise 08.1: which experts are chosen, and their gates and gradients."""

from __future__ import annotations

import torch

from course_kit.labs.expert_parallel.experts import some_scores
from course_lib.expert_parallel import router


def check() -> None:
    """Judge top_k_gates."""
    scores = some_scores().requires_grad_()
    for k in (1, 2, 3):
        gates = router.top_k_gates(scores, scores.detach(), k)
        assert gates.shape == scores.shape, f"gates are {list(gates.shape)}: dense, as the scores"
        best = scores.detach().topk(k).indices.sort().values
        for token, row in enumerate(gates):
            result = row.nonzero().flatten()
            assert result.tolist() == best[token].tolist(), f"k = {k}, token {token}: goes to {result.tolist()}"
        wanted = scores.detach().where(gates.detach() != 0, 0.0)
        wanted = wanted / wanted.sum(-1, keepdim=True) if k > 1 else wanted
        how = "divided by their sum" if k > 1 else "as they are"
        assert torch.allclose(gates.detach(), wanted), f"k = {k}: gates are the chosen scores, {how}"
        (gradient,) = torch.autograd.grad((gates * torch.arange(5.0)).sum(), scores)
        assert gradient.abs().sum() > 0, f"k = {k}: the scores get no gradient"
        assert (gradient != 0).sum() <= 6 * k, f"k = {k}: scores of experts that are not chosen get a gradient"
    reversed_gates = router.top_k_gates(scores, -scores.detach(), 1)
    lowest = scores.detach().min(-1).values
    assert torch.equal(reversed_gates.detach().max(-1).values, lowest), "`ranking` chooses, `scores` are the gates"
    alike = torch.full((1, 5), 0.2)
    selected = (router.top_k_gates(alike, alike, 2) > 0).sum()
    assert selected == 2, "five equal scores, k = 2: two are chosen, not more"
    tiny = 1e-9 * some_scores()
    halves = router.top_k_gates(tiny, tiny, 2).sum(-1)
    assert torch.allclose(halves, torch.ones_like(halves)), "scores of about 1e-9: their gates add up to 1, too"
    deep = some_scores().bfloat16().view(2, 3, 5)
    gates = router.top_k_gates(deep, deep, 2)
    assert gates.dtype == torch.bfloat16 and gates.shape == deep.shape, (
        f"scores [2, 3, 5] in BF16: gates are {list(gates.shape)}, {gates.dtype}; as the scores"
    )
    assert ((gates > 0).sum(-1) == 2).all(), "scores [2, 3, 5]: two experts for each of the six tokens"
    sharp = torch.tensor([[200.0, 0.0, -1.0]])
    selected = (router.top_k_gates(sharp.softmax(-1), sharp, 2) > 0).sum()
    assert selected == 2, "a chosen gate that underflows must stay above 0"
