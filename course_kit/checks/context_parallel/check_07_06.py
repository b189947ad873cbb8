"""Check of exercise 07.6: chunks of a softmax, merged in any order, against float64 over all keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from course_kit.labs.tensor_parallel.models import relative_error
from course_lib.context_parallel import blocks


def far_rows(dtype: torch.dtype) -> tuple[float, float]:
    """Errors of out and lse for scores that are all near -300."""
    z = -300 + torch.randn(1, 4, 2, 8, dtype=dtype)
    v = torch.randn(8, 3, dtype=dtype)
    out, lse = torch.zeros(1, 4, 2, 3, dtype=dtype), torch.full((1, 4, 2), -torch.inf, dtype=dtype)
    for scores, values in zip(z.split(4, -1), v.split(4), strict=True):
        blocks.merge(out, lse, scores.softmax(-1) @ values, scores.logsumexp(-1))
    z, v = z.double(), v.double()
    return relative_error(out.double(), z.softmax(-1) @ v), relative_error(lse.double(), z.logsumexp(-1))


def merged_chunks() -> float:
    """Error of out of 16 chunks in BF16, merged into float32, as they are: they have been rounded before."""
    lses = torch.randn(2, 5, 3, 16)
    parts = torch.randn(2, 5, 3, 16, 4).bfloat16()
    out, lse = torch.zeros(2, 5, 3, 4), torch.full((2, 5, 3), -torch.inf)
    for part, part_lse in zip(parts.unbind(3), lses.unbind(3), strict=True):
        blocks.merge(out, lse, part, part_lse)
    return relative_error(out.double(), (lses.double().softmax(-1)[..., None] * parts.double()).sum(3))


def merged(
    sizes: list[int], scale: float, dtype: torch.dtype = torch.float32, order: Sequence[int] | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """merge over chunks of so many keys: out and lse, then float64's; scores about as large as scale."""
    generator = torch.Generator().manual_seed(6)
    z = scale * torch.randn(2, 5, 3, sum(sizes), generator=generator, dtype=torch.float64)  # [b, s, a, keys]
    v = torch.randn(sum(sizes), 4, generator=generator, dtype=torch.float64)
    out, lse = torch.zeros(2, 5, 3, 4), torch.full((2, 5, 3), -torch.inf)
    parts = list(zip(z.split(sizes, -1), v.split(sizes), strict=True))
    for number in order or range(len(sizes)):
        scores, values = parts[number]
        part, part_lse = (scores.softmax(-1) @ values).to(dtype), scores.logsumexp(-1).float()
        given = part.clone(), part_lse.clone()
        result: object = blocks.merge(out, lse, part, part_lse)  # type: ignore[func-returns-value]  # an answer may return
        assert (lse > -torch.inf).all(), "out and lse are as before: write into them (lerp_, copy_, out=...)"
        assert result is None and torch.equal(part, given[0]) and torch.equal(part_lse, given[1]), (
            "merge changes out and lse in place, leaves the chunk as it is, and returns nothing"
        )
    return out.double(), lse.double(), z.softmax(-1) @ v, z.logsumexp(-1)


def check() -> None:
    """Judge merge."""
    for sizes, scale, order in (
        ([7], 1, None),
        ([4, 4], 1, None),
        ([1, 5, 2, 8], 3, None),
        ([1, 5, 2, 8], 3, [2, 0, 3, 1]),
    ):
        out, lse, expected, expected_lse = merged(sizes, scale, order=order)
        assert relative_error(lse, expected_lse) < 1e-6, (
            f"chunks of {sizes} keys: lse is not the logsumexp over all keys"
        )
        assert relative_error(out, expected) < 1e-6, f"chunks of {sizes} keys: out is not the attention over all keys"
    out, lse, expected, expected_lse = merged([3, 3, 3], 200)
    assert torch.isfinite(out).all() and torch.isfinite(lse).all(), "scores of 200 and more overflow: use differences"
    assert relative_error(out, expected) < 1e-4 and relative_error(lse, expected_lse) < 1e-5, (
        "scores of 200 and more: wrong numbers"
    )
    out, lse, expected, _ = merged([4] * 16, 1, torch.bfloat16)
    assert relative_error(out, expected) < 4e-3, "chunks in BF16, sums in float32: out lost digits"
    assert merged_chunks() < 1e-5, "chunks in BF16, out in float32: cast the chunk and multiply in out's dtype"
    for dtype, most in ((torch.float32, 1e-4), (torch.float64, 1e-11)):
        error, lse_error = far_rows(dtype)
        assert error < most and lse_error < most, (
            f"all scores near -300, {dtype}: out is off by {error:.1e}, lse by {lse_error:.1e}: "
            "take differences of the two lse, in their own dtype"
        )
