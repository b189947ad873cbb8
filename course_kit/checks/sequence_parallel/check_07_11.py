"""Check of exercise 07.11: a sequence in the order of the zig-zag split, and back."""

from __future__ import annotations

import math

import torch

from course_lib.sequence_parallel import shards


def check() -> None:
    """Judge to_zigzag and from_zigzag for 1 to 4 ranks."""
    for n, size, *rest in ((1, 3, 3), (2, 1, 3), (4, 2), (3, 5, 2, 3)):  # [b, s], [b, s, h] and [b, s, heads, d]
        shape = 2, 2 * n * size, *rest
        full = torch.arange(math.prod(shape)).view(shape[1], 2, *rest).transpose(0, 1)  # not contiguous
        copy = full.clone()
        zigzag = shards.to_zigzag(full, n)
        assert zigzag.shape == full.shape, f"{n} ranks: {list(full.shape)} becomes {list(zigzag.shape)}"
        for rank, part in enumerate(zigzag.chunk(n, 1)):
            expected = torch.cat([full.chunk(2 * n, 1)[chunk] for chunk in (rank, 2 * n - 1 - rank)], 1)
            assert torch.equal(part, expected), (
                f"{n} ranks: rank {rank} is to have chunks {rank} and {2 * n - 1 - rank}"
            )
        assert torch.equal(shards.from_zigzag(zigzag, n), full), f"{n} ranks: from_zigzag does not undo to_zigzag"
        assert torch.equal(full, copy), "leave the given tensor as it is"
    x = torch.randn(1, 8, 2, requires_grad=True)
    for name, function in (("to_zigzag", shards.to_zigzag), ("from_zigzag", shards.from_zigzag)):
        assert function(x, 2).requires_grad, f"{name} cuts the graph: gradients must pass through it"
