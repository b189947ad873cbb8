"""Check of exercise 01.2: `apply_rope` rotates pairs (i, i + d/2) of queries and keys."""

from __future__ import annotations

import torch

from course_lib.single_gpu import model
from course_lib.single_gpu.model import ModelConfig, rope_angles

CONFIG = ModelConfig(1, 32, 4, 2, 64, 256)


def rope_scores(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the scores of queries and keys at these positions. q, k: [b, s, a, d]; returns [b, a, s, s]."""
    rotated = [model.apply_rope(x, *rope_angles(positions, CONFIG)) for x in (q, k)]
    return torch.einsum("bsad,btad->bast", *rotated)


def check() -> None:
    """Assert shape, dtype, lengths, distances, which elements are pairs, positions of each sample, and backward."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 16, 4, 8, generator=generator) for _ in range(2))
    before = q.clone()
    rotated = model.apply_rope(q, *rope_angles(torch.arange(16), CONFIG))
    assert torch.equal(q, before), "x itself has changed: write the rotated pairs into a new tensor"
    assert rotated.shape == q.shape, f"apply_rope should keep the shape {tuple(q.shape)}, got {tuple(rotated.shape)}"
    torch.testing.assert_close(rotated[:, 0], q[:, 0], msg="position 0 has angle 0: it should not change")
    x = q.bfloat16().requires_grad_()
    in_bf16 = model.apply_rope(x, *(part.bfloat16() for part in rope_angles(torch.arange(16), CONFIG)))
    assert in_bf16.dtype == torch.bfloat16, f"x, cos and sin are BF16: return x's dtype, not {in_bf16.dtype}"
    assert not (rotated[:, 1:] == q[:, 1:]).all(-1).any(), "positions after 0 should change, in every sample and head"
    torch.testing.assert_close(rotated.norm(dim=-1), q.norm(dim=-1), msg="rotation keeps the length: look at the signs")
    torch.testing.assert_close(
        rope_scores(q, k, torch.arange(16)),
        rope_scores(q, k, torch.arange(16) + 100),
        rtol=1e-3,
        atol=1e-3,
        msg="scores should depend on the distance of two positions only: are q and k rotated the same way?",
    )
    assert not torch.allclose(rope_scores(q, k, torch.arange(16)), rope_scores(q, k, torch.arange(16) * 2)), (
        "scores should change with the distance"
    )
    slow = model.apply_rope(torch.ones(1, 2, 1, 8), *rope_angles(torch.arange(2), CONFIG))[0, 1, 0]
    expected = torch.cat([angle.cos() - angle.sin() for angle in [10_000.0 ** -(torch.arange(0, 8, 2) / 8)]])
    torch.testing.assert_close(slow[:4], expected, msg="element i pairs with i + d/2, and becomes x cos - y sin")
    per_sample = model.apply_rope(q, *rope_angles(torch.stack([torch.arange(16), torch.arange(16) + 5]), CONFIG))
    later = model.apply_rope(q, *rope_angles(torch.arange(16) + 5, CONFIG))
    torch.testing.assert_close(
        per_sample,
        torch.stack([rotated[0], later[1]]),
        msg="cos and sin may also come as [b, s, d/2]: each sample has its own positions",
    )
    assert in_bf16.requires_grad, "autograd does not see what you do: no no_grad, no detach, no .data"
    (rotated_back,) = torch.autograd.grad(in_bf16, x, in_bf16.detach())
    torch.testing.assert_close(
        rotated_back, x.detach(), rtol=0, atol=0.1, msg="backward should rotate the gradient back: no detach, no .data"
    )
