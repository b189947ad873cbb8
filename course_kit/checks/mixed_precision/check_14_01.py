"""Check of exercise 14.1: from codes to numbers, for every code of six formats."""

from __future__ import annotations

from typing import cast

import torch

from course_kit.checks.mixed_precision.numbers import E3M2
from course_kit.checks.watchers import refused
from course_lib.mixed_precision import formats
from course_lib.mixed_precision.formats import BF16, E2M1, E4M3, E5M2, FP16, TF32, FloatFormat


def check_against_torch(fmt: FloatFormat) -> None:
    """Assert all codes of a format against PyTorch's own dtype, as int64 and as the integers that it is stored in."""
    codes = torch.arange(2**fmt.bits)
    stored = codes.to(torch.int16 if fmt.bits == 16 else torch.int8)  # the upper half is negative
    expected = stored.view(cast(torch.dtype, fmt.dtype)).double()
    for given in (codes, stored):
        result = formats.decode(given, fmt)
        assert torch.is_tensor(result) and result.dtype == torch.float64, (
            "return float64, which holds the numbers of all formats"
        )
        same = (result == expected) & (result.signbit() == expected.signbit()) | result.isnan() & expected.isnan()
        wrong = codes[~same]
        assert same.all(), (
            f"{fmt.name}: {len(wrong)} of {len(codes)} codes are wrong, as {given.dtype}; the first is "
            f"{wrong[0]:0{fmt.bits}b}: {result[wrong[0]]:g} for {expected[wrong[0]]:g}"
        )


def check_matrix() -> None:
    """Assert codes in a matrix, with bits above the format's that do not count, and that they stay as they are."""
    codes = torch.tensor([[0x38, 0x138, -0x48], [0, 0x7E, 0x1FE]])
    given = codes.clone()
    result = formats.decode(given, E4M3)
    expected = torch.tensor([[1.0, 1.0, -1.0], [0.0, 448.0, -448.0]], dtype=torch.float64)
    assert torch.equal(given, codes), "the codes have changed: `codes.long()` is no copy if they are int64 already"
    assert torch.is_tensor(result) and result.shape == codes.shape, (
        f"codes of shape [2, 3] are as many numbers, of that shape: {result}"
    )
    assert torch.equal(result, expected), f"E4M3: only the lowest 8 bits of a code count: {result.tolist()}"


def check() -> None:
    """Assert the numbers of four of PyTorch's dtypes, of E2M1, E3M2 and TF32, a matrix, and that 1.0 is no code."""
    for fmt in (FP16, BF16, E4M3, E5M2):
        check_against_torch(fmt)
    for fmt, unit, exponents in ((E2M1, 1 / 2, 3), (E3M2, 1 / 16, 7)):  # from 0 on, then in steps twice as long
        half = 2**fmt.mantissa_bits
        upwards = [unit * n for n in (*range(half), *(n << k for k in range(exponents) for n in range(half, 2 * half)))]
        result = formats.decode(torch.arange(2**fmt.bits), fmt).tolist()
        assert result == upwards + [-x for x in upwards], f"{fmt.name}, without infinity and NaN, is wrong: {result}"
    result = formats.decode(torch.tensor([1, 2**18 - 2**10 - 1]), TF32).tolist()
    assert result == [2.0**-136, TF32.largest], f"TF32's smallest and largest number are {result}"
    check_matrix()
    assert refused(formats.decode, torch.ones(2), E4M3), "codes are integers: 1.0 is none, raise ValueError"
    assert refused(formats.decode, torch.ones(2) > 0, E4M3), "codes are integers: True is none, raise ValueError"
