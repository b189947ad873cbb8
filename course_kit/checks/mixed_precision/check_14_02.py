"""Check of exercise 14.2: from numbers to codes, at every number and midpoint of four formats, and beside midpoints."""

from __future__ import annotations

from typing import cast

import torch

from course_kit.checks.mixed_precision.numbers import E3M2, numbers
from course_kit.checks.watchers import refused
from course_lib.mixed_precision import formats
from course_lib.mixed_precision.formats import BF16, E2M1, E4M3, E5M2, FORMATS, FP16, FloatFormat


def neighborhood(dtype: torch.dtype) -> torch.Tensor:
    """Return every finite number of a dtype, the midpoints between neighbors, and the float32 numbers next to each."""
    kind = torch.int16 if dtype.itemsize == 2 else torch.uint8
    finite = torch.arange(2 ** (8 * dtype.itemsize)).to(kind).view(dtype).float()
    finite = finite[finite.isfinite()].unique()
    middle = (finite[1:].double() + finite[:-1].double()).div(2).float()
    points = torch.cat([finite, middle, finite * 1.001])
    infinity = torch.tensor(torch.inf)
    return torch.cat([points, points.nextafter(infinity), points.nextafter(-infinity)])


def check_against_torch(fmt: FloatFormat) -> None:
    """Assert what PyTorch's cast gives, and overflow, infinity and NaN, with and without saturation."""
    points = neighborhood(cast(torch.dtype, fmt.dtype))
    points = points[points.abs() <= fmt.largest]
    expected = points.to(fmt.dtype).double()
    codes = formats.encode(points, fmt)
    assert torch.is_tensor(codes) and codes.dtype == torch.int64, f"encode returns codes, int64, not {codes!r}"
    result = numbers(codes, fmt)
    wrong = (result != expected) | (result.signbit() != expected.signbit())
    assert not wrong.any(), (
        f"{fmt.name}: {wrong.sum():,} of {len(points):,} points are wrong; {points[wrong][0]:.9g} becomes "
        f"{result[wrong][0]:g} and should be {expected[wrong][0]:g}"
    )
    ends = torch.tensor([2 * fmt.largest, -torch.inf, torch.nan])
    cut = numbers(formats.encode(ends, fmt, saturate=True), fmt)
    assert cut[:2].tolist() == [fmt.largest, -fmt.largest], f"{fmt.name}: saturate means the largest"
    over = numbers(formats.encode(ends, fmt), fmt)
    assert over[0].isinf() if fmt.top_codes == "ieee" else over[0].isnan(), f"{fmt.name}: what overflows must show"
    assert over[2].isnan() and cut[2].isnan(), f"{fmt.name}: NaN stays NaN"


def check_midpoints(fmt: FloatFormat) -> None:
    """Assert float64 numbers on midpoints and just beside them, in any format."""
    codes = torch.arange(0, fmt.largest_code, fmt.largest_code // 4001 | 1)
    middle = (numbers(codes, fmt) + numbers(codes + 1, fmt)) / 2
    cases = {
        "just below": (1 - 2.0**-40, codes),
        "on": (1, codes + codes % 2),
        "just above": (1 + 2.0**-40, codes + 1),
    }
    for where, (factor, expected) in cases.items():
        wrong = formats.encode(middle * factor, fmt) != expected
        assert not wrong.any(), (
            f"{fmt.name}: {wrong.sum():,} of {len(codes):,} points {where} a midpoint go to the wrong neighbor. "
            "Are they rounded twice, to float32 first? On a midpoint, to the even code?"
        )


def check_matrix() -> None:
    """Assert the codes of a bfloat16 matrix, which stays as it is."""
    values = torch.tensor([[0.3, -(2.0**-9), 1e-3], [500.0, -17.0, 0.0]]).bfloat16()
    given = values.clone()
    codes = formats.encode(given, E4M3, saturate=True)
    expected = values.float().clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).long()
    assert codes.shape == values.shape, f"values of shape [2, 3] have codes of shape {list(codes.shape)}"
    assert torch.equal(codes, expected), f"bfloat16 {values.tolist()} in E4M3: {codes.tolist()}"
    assert torch.equal(given, values), "encode has changed the values that it was given"


def check() -> None:
    """Assert the codes against PyTorch's casts, beside midpoints, of a matrix, and above E2M1's largest; integers are
    refused.
    """
    for fmt in (FP16, BF16, E4M3, E5M2):
        check_against_torch(fmt)
    for fmt in (*FORMATS.values(), E3M2):
        check_midpoints(fmt)
    check_matrix()
    tops = numbers(formats.encode(torch.tensor([7.0, -torch.inf, torch.nan]), E2M1), E2M1)
    assert tops.tolist() == [6, -6, 6], f"E2M1 has nothing above 6: 7, -inf and NaN become 6, -6 and 6, not {tops}"
    assert refused(formats.encode, torch.arange(3), E4M3), "integers are refused: `check_floating`"
