"""The GPT layer that Korthikanti et al. (2022) count, with an attention core that can be wrapped."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class GPTAttention(nn.Module):
    """Plain softmax attention with dropout on the scores; `core` is the computation between Q, K, V and the output."""

    def __init__(self, hidden: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.p = heads, dropout
        self.q, self.k, self.v, self.out = (nn.Linear(hidden, hidden) for _ in range(4))

    def core(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q, k, v: [b, a, s, d]; returns [b, a, s, d]."""
        future = torch.full((q.shape[2], q.shape[2]), -torch.inf, dtype=q.dtype, device=q.device).triu(1)
        scores = q @ k.transpose(-1, -2) / k.shape[-1] ** 0.5 + future  # [b, a, s, s]
        return torch.native_dropout(scores.softmax(-1), self.p, True)[0] @ v  # keeps a mask of one byte per element

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [b, s, h]; returns [b, s, h]."""
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        return self.out(self.core(q, k, v).transpose(1, 2).flatten(-2))


class GPTBlock(nn.Module):
    """LayerNorm, attention, dropout; LayerNorm, GELU MLP of 4h, dropout."""

    def __init__(self, hidden: int, heads: int, dropout: float = 0.1):
        super().__init__()
        self.p, self.attention = dropout, GPTAttention(hidden, heads, dropout)
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [b, s, h]; returns [b, s, h]."""
        x = x + torch.native_dropout(self.attention(self.norm1(x)), self.p, True)[0]
        return x + torch.native_dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.p, True)[0]


class GPT(nn.Module):
    """Only the layers: hidden states in, hidden states out, [b, s, h]."""

    def __init__(self, layers: int, hidden: int, heads: int):
        super().__init__()
        self.blocks = nn.ModuleList(GPTBlock(hidden, heads) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [b, s, h]; returns [b, s, h]."""
        return nn.Sequential(*self.blocks)(x)
