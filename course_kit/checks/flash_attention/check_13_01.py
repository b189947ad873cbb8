"""Check of exercise 13.1: `online_step` takes a tile of scores into the sums, with any offset, masked rows too."""

from __future__ import annotations

import math

import torch

from course_lib.flash_attention import reference


def walk_row(scores: torch.Tensor, values: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return highest, total and out of the rows after all tiles of `block` scores."""
    highest = torch.full(scores.shape[:-1], -math.inf, dtype=torch.float64)
    total, out = torch.zeros_like(highest), torch.zeros(*scores.shape[:-1], values.shape[-1], dtype=torch.float64)
    for tile, part in zip(scores.split(block, -1), values.split(block, -2), strict=True):
        before = [x.clone() for x in (highest, total, out)]
        after = reference.online_step(highest, total, out, tile, part)
        same = [torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, (highest, total, out), strict=True)]
        assert all(same), "online_step changed one of its arguments: return new tensors"
        highest, total, out = after
    return highest, total, out


def check() -> None:
    """Assert highest, total and out after tiles of several sizes, and that p is rounded for its matmul alone."""
    for offset in (1000.0, 0.0, -1000.0):
        scores = 3 * torch.randn(2, 5, 12, dtype=torch.float64) + offset
        values = torch.randn(2, 12, 4, dtype=torch.float64)
        for block in (1, 3, 5, 12):
            highest, total, out = walk_row(scores, values, block)
            case = f"scores around {offset:.0f}, in tiles of {block}"
            assert torch.isfinite(out).all(), f"{case}: the result is {out.flatten()[0]}: is the maximum taken off?"
            assert torch.equal(highest, scores.amax(-1)), f"{case}: highest is not the maximum of the row"
            sums = (scores - scores.amax(-1, keepdim=True)).exp().sum(-1)
            assert torch.allclose(total, sums), (
                f"{case}: total is up to {(total / sums).max().item():.3f} times the sum of exp(score - highest). Is "
                "what was there rescaled as the maximum rises?"
            )
            exact = scores.softmax(-1) @ values
            assert torch.allclose(out / total[..., None], exact), (
                f"{case}: out / total is not softmax(scores) @ values. Is out rescaled, and not yet divided?"
            )
    scores[..., :6], scores[0, 0] = -math.inf, -math.inf
    highest, total, out = walk_row(scores, values, 3)
    assert not out.isnan().any(), "a row whose first tiles are masked throughout (-inf) became NaN"
    assert (total[0, 0] == 0) and (out[0, 0] == 0).all(), "a row that is masked throughout has total 0 and out 0"
    exact = scores[1].softmax(-1) @ values[1]
    assert torch.allclose(out[1] / total[1][..., None], exact), "a row whose first tiles are masked is wrong"
    scores, values = torch.randn(4, 64), torch.randn(64, 8, dtype=torch.bfloat16)
    p = (scores - scores.amax(-1, keepdim=True)).exp()
    before = torch.full((4,), -math.inf), torch.zeros(4), torch.zeros(4, 8)
    highest, total, out = reference.online_step(*before, scores, values)
    dtypes = [str(x.dtype).removeprefix("torch.") for x in (highest, total, out)]
    assert dtypes == 3 * ["float32"], (
        f"values in bfloat16: highest, total and out are {', '.join(dtypes)}: expected float32"
    )
    unrounded, rounded = ((out - x).abs().mean() for x in (p @ values.float(), reference.rounded_matmul(p, values)))
    assert rounded < unrounded, "values in bfloat16: p is unrounded in the matmul. Use rounded_matmul, as a GPU does"
    assert torch.allclose(total, p.sum(-1)), (
        "values in bfloat16: total sums rounded exponentials. They are rounded for the matmul with the values only"
    )
