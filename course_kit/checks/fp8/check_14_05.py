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


def assert_rounded(q: Quantized, x: torch.Tensor, dtype: torch.dtype, block: tuple[int, int], name: str) -> None:
    """Assert that q is x, each element in one byte and off by at most half a unit of its block's scale."""
    assert q.values.dtype == dtype and q.values.nbytes == x.numel(), f"{name}: one byte per element"
    assert tuple(q.scale.shape) == blocks_of(x.shape, block)[:2] and q.scale.dtype == torch.float32, (
        f"{name}: one float32 scale per block"
    )
    scale = out_of_blocks(in_blocks(torch.ones_like(x), block) * q.scale[:, None, :, None], x.shape)
    off, half = (dequantize(q) - x).abs(), 0.5001 * ulp(x / scale, FORMATS[dtype]) * scale
    worst = (off - half).argmax()
    assert (off <= half).all(), (
        f"{name}: {int((off > half).sum()):,} of {x.numel():,} elements are off by over half a unit: "
        f"{x.flatten()[worst]:g} becomes {dequantize(q).flatten()[worst]:g}, with the scale {scale.flatten()[worst]:g}"
    )


def assert_quantized(q: Quantized, x: torch.Tensor, dtype: torch.dtype, block: tuple[int, int], to_power: bool) -> None:
    """Assert that q is x, rounded, and that its blocks use the dtype's range."""
    name = f"{dtype}, blocks of {block}"
    assert_rounded(q, x, dtype, block, name)
    top = block_amax(q.values.float(), block)
    assert (top >= LARGEST[dtype] * (0.49 if to_power else 0.99)).all(), (
        f"{name}: the largest number of a block is {top.min():g}, of {LARGEST[dtype]:g}: the range is not used"
    )


def check_powers(dtype: torch.dtype, largest: float) -> None:
    """Assert that a power of two stays, and that what is just above it becomes the next one."""
    above = torch.nextafter(torch.tensor(1024.0), torch.tensor(math.inf))
    for scale, expected in ((4.0, 4), (5.0, 8), (above, 2048)):
        power = quantization.scale_of(torch.as_tensor(largest * scale), dtype, power_of_two=True).item()
        assert power == expected, (
            f"{dtype}, power_of_two: a scale of {float(scale):.9g} becomes {power:g} and not {expected}, the next "
            "power of two that is not smaller: is it rounded down, is a logarithm rounded, or a power doubled?"
        )


def check_given_scales(x: torch.Tensor, dtype: torch.dtype, block: tuple[int, int]) -> None:
    """Assert that given scales of blocks are used as they are, and that no rank is asked for them."""
    shape = blocks_of(x.shape, block)[:2]
    factors = 1 + torch.rand(shape, generator=torch.Generator().manual_seed(2))
    given = factors * quantization.scale_of(block_amax(x, block), dtype)
    with two_more_ranks(1.0) as calls:
        q = quantization.quantize(x, dtype, block, True, given.clone(), (cast(dist.ProcessGroup, "ranks"),))
    name = f"{dtype}, blocks of {block}, with given scales"
    assert torch.equal(q.scale, given), f"{name}: they are used as they are, not rounded, and not the blocks' own"
    assert not calls, f"{name}: nothing is to be agreed on with other ranks, so no all-reduce"
    assert_rounded(q, x, dtype, block, name)


def check_inputs(x: torch.Tensor) -> None:
    """Assert a bfloat16 matrix that needs a gradient, and two groups of ranks."""
    half = x.bfloat16().requires_grad_()
    q = quantization.quantize(half, block=TILE)
    assert_rounded(q, half.detach().float(), torch.float8_e4m3fn, TILE, "a bfloat16 matrix")
    assert not q.values.requires_grad and not q.scale.requires_grad, (
        "values and scales belong to no graph, which would keep x in full precision: x.detach()"
    )
    with two_more_ranks(448.0) as calls:
        quantization.quantize(torch.ones(2, 2), groups=(cast(dist.ProcessGroup, "one"), cast(dist.ProcessGroup, "two")))
    assert [group for _, group in calls] == ["one", "two"], f"the largest over the ranks of each group, not {calls}"


def check() -> None:
    """Assert rounding and scales by all blocks, powers of two, given scales, tiny and bad numbers, ranks, refusals."""
    quantize = quantization.quantize
    x = torch.randn(200, 300, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 3, 300)
    check_inputs(x)
    for dtype, largest in LARGEST.items():
        check_powers(dtype, largest)
        for block in (TENSOR, ROW, TILE, SQUARE, (7, 5)):
            assert_quantized(quantize(x, dtype, block), x, dtype, block, False)
            q = quantize(x, dtype, block, power_of_two=True)
            assert_quantized(q, x, dtype, block, True)
            assert (torch.frexp(q.scale)[0] == 0.5).all(), f"{dtype}, blocks of {block}: scales are no powers of two"
            check_given_scales(x, dtype, block)
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
    for value in (1e-45, 2.0**-140, 3e38, 1.0):
        same = quantize(torch.full((3, 5), value), block=(2, 2))
        assert dequantize(same).isfinite().all() and same.scale.min() > 0, (
            f"a block of {value}: scale {same.scale[0, 0]}"
        )
    tiny = quantize(torch.full((1, 1), 2.0**-130))
    assert tiny.scale == 2.0**-126 and dequantize(tiny) == 2.0**-130, (
        f"2⁻¹³⁰ alone has the smallest scale, 2⁻¹²⁶, and stays itself: scale {tiny.scale.item():g}"
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
