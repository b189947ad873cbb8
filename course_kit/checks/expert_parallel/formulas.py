"""The router's losses by their formulas, for expected values."""

from __future__ import annotations

import torch


def balance_loss(scores: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """E sum f_i P_i, one token after the other. scores: [..., E]; counts: [E]."""
    rows, total = scores.flatten(0, -2), scores.new_zeros(())
    for row in rows:
        total = total + (counts / counts.sum() * row / row.sum()).sum()
    return len(counts) * total / len(rows)


def z(logits: torch.Tensor) -> torch.Tensor:
    """Return the mean (log sum exp)² of logits that are small."""
    return torch.stack([row.exp().sum().log() ** 2 for row in logits.flatten(0, -2)]).mean()
