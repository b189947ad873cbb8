"""The numbers of a float format by its formula, and one of six bits that PyTorch has no dtype for."""

from __future__ import annotations

import math

import torch

from course_lib.mixed_precision.formats import FloatFormat

E3M2 = FloatFormat("E3M2", 3, 2, "finite")  # one of MX's formats
LOWEST = -1022
POWERS = torch.tensor([math.ldexp(1.0, exponent) for exponent in range(LOWEST, 1024)], dtype=torch.float64)


def numbers(codes: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """Return the numbers, float64, that some codes (int64) represent."""
    steps = 2**fmt.mantissa_bits
    mantissa = (codes % steps).double() / steps
    exponent = codes // steps % 2**fmt.exponent_bits
    unit = POWERS[exponent.clamp(min=1) - fmt.bias - LOWEST]
    value = torch.where(exponent > 0, 1 + mantissa, mantissa) * unit
    no_number = math.inf if fmt.top_codes == "ieee" else math.nan
    top = torch.where(mantissa == 0, no_number, math.nan)
    magnitude = torch.where(codes % 2 ** (fmt.bits - 1) > fmt.largest_code, top, value)
    return torch.where(codes // 2 ** (fmt.bits - 1) % 2 == 1, -magnitude, magnitude)
