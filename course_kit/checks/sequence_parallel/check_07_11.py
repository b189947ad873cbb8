"""Check of exercise 07.11: a sequence in the order of the zig-zag split, and back."""

from __future__ import annotations

import torch

from course_lib.sequence_parallel import shards


def check() -> None:
    """Judge to_zigzag and from_zigzag for 1 to 4 ranks."""
    for n, size in ((1, 3), (2, 1), (4, 2), (3, 5)):
        full = torch.arange(2 * 2 * n * size * 3).view(2, 2 * n * size, 3)
        copy = full.clone()
        zigzag = shards.to_zigzag(full, n)
        assert zigzag.shape == full.shape, f"{n} ranks: a tensor [b, s, ...] of the same shape"
        for rank, part in enumerate(zigzag.chunk(n, 1)):
            expected = torch.cat([full.chunk(2 * n, 1)[chunk] for chunk in (rank, 2 * n - 1 - rank)], 1)
            assert torch.equal(part, expected), (
                f"{n} ranks: rank {rank} is to have chunks {rank} and {2 * n - 1 - rank}"
            )
        assert torch.equal(shards.from_zigzag(zigzag, n), full), f"{n} ranks: from_zigzag does not undo to_zigzag"
        assert torch.equal(full, copy), "leave the given tensor as it is"
