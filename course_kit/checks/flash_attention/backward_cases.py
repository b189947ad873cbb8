"""Shapes and inputs with which the checks of 13.7 and 13.8 launch a backward kernel."""

from __future__ import annotations

import torch

from course_kit.labs.flash_attention import exact_attention

CASES = (
    (100, 100, 2, 1, 16, True, torch.float32),
    (40, 100, 2, 2, 24, False, torch.float32),
    (100, 40, 2, 1, 16, True, torch.bfloat16),
)


def backward_inputs(
    s_q: int, s_k: int, heads: int, kv_heads: int, d: int, dtype: torch.dtype, causal: bool, scale: float
) -> tuple[torch.Tensor, ...]:
    """Return gradient, q, k, v, and lse and delta as the kernels take them: [b, a, s], float32."""
    q, k, v = (torch.randn(1, s, a, d).to(dtype) for s, a in ((s_q, heads), (s_k, kv_heads), (s_k, kv_heads)))
    v = torch.stack([v, v], 2)[:, :, 0]  # its rows are further apart than those of k
    gradient = torch.randn(q.shape).to(dtype)
    return gradient, q, k, v, *lse_and_delta(gradient, q, k, v, causal, scale)


def lse_and_delta(
    gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return lse and delta as the kernels take them: [b, a, s], float32."""
    out, lse = exact_attention(q, k, v, causal, scale)
    delta = (gradient.double() * out).sum(-1)
    return lse.mT.float().contiguous(), delta.mT.float().contiguous()
