"""Check of exercise 14.5: `scale_of` and `quantize` use the format's range, and hide no infinity and no NaN."""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.distributed as dist

from course_kit.checks.watchers import NoHostReads, refused, two_more_ranks
from course_lib.fp8 import quantization
from course_lib.fp8.quantization import (
    LARGEST,
    ROW,
    SQUARE,
    TENSOR,
    TILE,
    Quantized,
    block_amax,
    blocks_of,
    dequantize,
    in_blocks,
    out_of_blocks,
)
from course_lib.mixed_precision.formats import E4M3, E5M2, ulp

FORMATS = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2}


def assert_quantized(q: Quantized, x: torch.Tensor, dtype: torch.dtype, block: tuple[int, int], to_power: bool) -> None:
    """Assert that q is x, each element in one byte and off by at most half a unit, and that its blocks use the dtype's
    range.
    """
    name, fmt = f"{dtype}, blocks of {block}", FORMATS[dtype]
    assert q.values.dtype == dtype and q.values.nbytes == x.numel(), f"{name}: one byte per element"
    assert tuple(q.scale.shape) == blocks_of(x.shape, block)[:2] and q.scale.dtype == torch.float32, (
        f"{name}: one float32 scale per block"
    )
    scale = out_of_blocks(in_blocks(torch.ones_like(x), block) * q.scale[:, None, :, None], x.shape)
    off = (dequantize(q) - x).abs()
    assert (off <= 0.5001 * ulp(x / scale, fmt) * scale).all(), f"{name}: some elements are off by over half a unit"
    top = block_amax(q.values.float(), block)
    assert (top >= LARGEST[dtype] * (0.49 if to_power else 0.99)).all(), (
        f"{name}: the largest number of a block is {top.min():g}, of {LARGEST[dtype]:g}: the range is not used"
    )


def check() -> None:
    """Assert rounding and scales by all blocks, powers of two, given scales, tiny and bad numbers, ranks, refusals."""
    quantize = quantization.quantize
    x = torch.randn(200, 300, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 3, 300)
    for dtype, largest in LARGEST.items():
        for block in (TENSOR, ROW, TILE, SQUARE, (7, 5)):
            assert_quantized(quantize(x, dtype, block), x, dtype, block, False)
            q = quantize(x, dtype, block, power_of_two=True)
            assert_quantized(q, x, dtype, block, True)
            assert (torch.frexp(q.scale)[0] == 0.5).all(), f"{dtype}, blocks of {block}: scales are no powers of two"
        q = quantize(torch.tensor([[4 * largest]]), dtype, power_of_two=True)
        assert q.scale == 4, (
            f"{dtype}: a scale that is a power of two, 4, becomes {q.scale.item():g}: quantizing again changes it"
        )
        clipped = dequantize(quantize(torch.tensor([[1e9, -1e9, 1.0]]), dtype, scale=torch.ones(1, 1)))
        assert clipped.tolist() == [[largest, -largest, 1]], (
            f"{dtype}: beyond a given scale's range, use the largest number"
        )
        beyond = dequantize(quantize(torch.tensor([[1e30]]), dtype, scale=torch.full((1, 1), 1e-30)))
        assert beyond == largest * 1e-30, (
            f"{dtype}: 1e30 with a given scale of 1e-30 becomes {beyond.item():g}, not {largest * 1e-30:g}: x is "
            "finite, though x / scale is not"
        )
        above = torch.nextafter(torch.tensor(1024.0), torch.tensor(math.inf))
        next_power = quantization.scale_of(largest * above, dtype, power_of_two=True).item()
        assert next_power == 2048, (
            f"{dtype}: a scale just above 1024 becomes {next_power:g}, not the next larger power of two: is a "
            "logarithm rounded?"
        )
    for value in (1e-45, 2.0**-140, 3e38, 1.0):
        same = quantize(torch.full((3, 5), value), block=(2, 2))
        assert dequantize(same).isfinite().all() and same.scale.min() > 0, (
            f"a block of {value}: scale {same.scale[0, 0]}"
        )
    assert quantize(torch.zeros(2, 2)).scale == 1, "zeros have scale 1"
    bad = torch.ones(2, 256)
    bad[0, 0], bad[1, 200] = math.inf, math.nan
    values = dequantize(quantize(bad, block=TILE))
    assert values[0, 0].isnan() and values[1, 200].isnan(), "inf and NaN must stay visible: they mark a broken step"
    assert bool((values[0, 1:] == 1).all()) and bool((values[1, :200] == 1).all()), "an inf or NaN spoils its neighbors"
    with two_more_ranks(448.0) as calls, NoHostReads():
        split = quantize(torch.ones(2, 2), groups=(cast(dist.ProcessGroup, "ranks"),)).scale
    assert calls and split == 1, (
        f"a part of a matrix whose largest is 448 elsewhere has scale {split.item():g}: groups?"
    )
    assert refused(quantize, torch.ones(2, 2, 2)), "what doesn't fit is refused: `check_scales`"
