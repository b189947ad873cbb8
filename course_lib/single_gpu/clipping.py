"""Gradient clipping where one process does not have all gradients."""

from __future__ import annotations

import torch


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return the factor, at most 1, that scales gradients of norm `norm` to `max_norm`, as torch.nn.utils does."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
