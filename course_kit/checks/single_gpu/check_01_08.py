"""Check of exercise 01.8: `layer_activations` against autograd's saved bytes of one layer, to the byte."""

from __future__ import annotations

import torch

from course_kit.checks.single_gpu.counting import retained_bytes
from course_lib.single_gpu import memory
from course_lib.single_gpu.model import Block, ModelConfig, causal_attention, rope_angles

CONFIGS = (
    ModelConfig(3, 64, 4, 2, 176, 256),
    ModelConfig(3, 96, 6, 1, 100, 256),
    ModelConfig(3, 48, 6, 2, 100, 256, head_size=16),  # Q is twice as wide as the hidden state
    ModelConfig(3, 96, 6, 2, 100, 256, head_size=8),  # and here half as wide
    ModelConfig(3, 64, 4, 4, 88, 256),
)
NAMES = {"norms", "norm outputs", "attention", "mlp"}


def naive_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention that keeps its scores. q: [b, s, a, d]; k, v: [b, s, kv, d]."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))  # [b, s, a, d]
    scores = torch.einsum("bsad,btad->bast", q, k) / q.shape[-1] ** 0.5
    future = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).triu(1)
    mask = torch.zeros_like(future, dtype=q.dtype).masked_fill(future, -torch.inf)
    return torch.einsum("bast,btad->bsad", (scores + mask).softmax(-1), v)


def check() -> None:
    """Assert the sum and each entry for odd sizes, both kinds of attention, two precisions, and fused norms."""
    for number, config in enumerate(CONFIGS):
        for flash in (True, False):  # either in both precisions
            check_layer(config, flash, (torch.float32, torch.bfloat16)[(number + flash) % 2])
    check_layer(CONFIGS[0], False, torch.float32, b=2, s=24)
    for e in (2, 4):
        chain, fused = (memory.layer_activations(CONFIGS[-1], 40, e, fused_norm=fused) for fused in (False, True))
        assert fused == {**chain, "norms": 2 * (64 * e + 4)}, (
            f"e = {e}: fused, both norms keep e·h + 4 bytes each, the rest as without: {fused}, not fused {chain}"
        )


def check_layer(config: ModelConfig, flash: bool, dtype: torch.dtype, b: int = 3, s: int = 40) -> None:
    """Assert the bytes that one layer keeps, in total and by entry."""
    block = Block(config).to(dtype)
    block.attention.core = causal_attention if flash else naive_attention
    x = torch.ones(b, s, config.hidden, dtype=dtype, requires_grad=True)
    cos, sin = (part.to(dtype) for part in rope_angles(torch.arange(s), config))
    saved = retained_bytes(block, lambda: block(x, cos, sin)) - cos.nbytes - sin.nbytes
    parts = memory.layer_activations(config, s, dtype.itemsize, flash, fused_norm=False)
    assert set(parts) == NAMES, f"return the four entries {', '.join(sorted(NAMES))}"
    yours = sum(parts.values()) * b * s
    assert yours == saved, (
        f"hidden {config.hidden}, {config.heads} heads of {config.head_dim}, kv_heads {config.kv_heads}, "
        f"{dtype}, flash={flash}: autograd keeps {saved // (b * s)} bytes per token, you count "
        f"{yours // (b * s)}: {parts}"
    )
    shared = x.nbytes + cos.nbytes + sin.nbytes
    for name, nbytes in {
        "attention": retained_bytes(block.attention, lambda: block.attention(x, cos, sin)) - shared,
        "mlp": retained_bytes(block.mlp, lambda: block.mlp(x)) - x.nbytes,
        "norm outputs": 2 * x.nbytes,
    }.items():
        assert parts[name] * b * s == nbytes, (
            f"the sum is right, but {nbytes // (b * s)} bytes per token of it are {name}: {parts}"
        )
