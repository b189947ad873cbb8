"""Floating-point formats bit by bit: `decode` from bits to numbers, `encode` from numbers to bits, and rounding.

A number is a sign s, an exponent field E of e bits and a mantissa field M of m bits, in this order:

    normal       E > 0     (-1)^s · (1 + M / 2^m) · 2^(E - bias)         bias = 2^(e - 1) - 1
    subnormal    E = 0     (-1)^s · M / 2^m · 2^(1 - bias)               zero is one of them

Exponent bits buy range: each doubles it, on a log axis. Mantissa bits buy resolution: between two powers of two there
are 2^m - 1 numbers, equally spaced. The spacing is the unit in the last place (`ulp`); rounding to the nearest number
is wrong by at most half of it. Below the smallest normal number the spacing is constant, and the relative error grows.

The top codes differ. IEEE 754 spends the highest exponent on infinities and NaN; so do float16, bfloat16 and E5M2.
E4M3 has only 16 exponents and spends one code per sign: all ones is NaN, and there is no infinity. Its largest number
is therefore 448 instead of 240. E2M1, of 4 bits, has neither: it cannot signal that something went wrong.

Without its sign, a code is an integer that counts the numbers upward from zero. Rounding up adds 1 to it, and the carry
goes from the mantissa into the exponent by itself. `encode` relies on this twice: for a mantissa that rounds up to 2^m,
and for a number past the largest, which becomes the next code: infinity, or E4M3's NaN.

`stochastic_round` rounds up with a probability equal to the fraction that it cuts off, so that the expectation is the
number itself. Rounding to nearest loses every update below half a unit, for good; with stochastic rounding, a thousand
of them add up.

IEEE 754-2019, §3.4 and §4.3.1; Micikevicius et al. 2022 (FP8 Formats for Deep Learning, §3 and table 1); OCP
Microscaling Formats v1.0, §5.3.3 (E2M1); Gupta et al. 2015 (stochastic rounding, §3.1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

DOUBLE_MANTISSA, DOUBLE_BIAS = 52, 1023  # of float64, whose bits `encode` splits
RANDOM_BITS = 62  # of an int64, without the sign and one bit for the carry of a sum


@dataclass(frozen=True)
class FloatFormat:
    """A format of a sign bit, exponent_bits and mantissa_bits; `top_codes` defines the meaning of the highest codes."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    top_codes: str = "ieee"  # highest exponent is inf and NaN; "fn": all ones is NaN, no inf; "finite": all are numbers
    dtype: torch.dtype | None = None  # torch's dtype, if it has one

    @property
    def bits(self) -> int:
        """Bits of a number, including the sign."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        """The exponent field minus the exponent."""
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def largest_code(self) -> int:
        """Code of the largest number. The next code, if there is one, is the result of an overflow: inf, or NaN."""
        codes = 2 ** (self.bits - 1)  # without the sign
        reserved = {"ieee": 2**self.mantissa_bits, "fn": 1, "finite": 0}[self.top_codes]
        return codes - reserved - 1

    @property
    def largest(self) -> float:
        exponent, mantissa = divmod(self.largest_code, 2**self.mantissa_bits)
        return (1 + mantissa / 2**self.mantissa_bits) * 2.0 ** (exponent - self.bias)

    @property
    def smallest_normal(self) -> float:
        return 2.0 ** (1 - self.bias)

    @property
    def smallest_subnormal(self) -> float:
        return self.smallest_normal * self.epsilon

    @property
    def epsilon(self) -> float:
        """The first number after 1, minus 1."""
        return 2.0**-self.mantissa_bits

    @property
    def between_one_and_two(self) -> int:
        """The number of values strictly between 1 and 2, or between successive powers of two in the normal range."""
        return 2**self.mantissa_bits - 1


FP32 = FloatFormat("FP32", 8, 23, dtype=torch.float32)
TF32 = FloatFormat("TF32", 8, 10)  # what tensor cores round a float32 operand to; it is stored as a float32
FP16 = FloatFormat("FP16", 5, 10, dtype=torch.float16)
BF16 = FloatFormat("BF16", 8, 7, dtype=torch.bfloat16)
E4M3 = FloatFormat("E4M3", 4, 3, "fn", torch.float8_e4m3fn)
E5M2 = FloatFormat("E5M2", 5, 2, dtype=torch.float8_e5m2)
E2M1 = FloatFormat("E2M1", 2, 1, "finite", torch.float4_e2m1fn_x2)  # two per byte
FORMATS = {fmt.name: fmt for fmt in (FP32, TF32, FP16, BF16, E4M3, E5M2, E2M1)}


def check_floating(values: torch.Tensor) -> None:
    """Raise ValueError unless `values` is a tensor of floating-point numbers, which float64 represents exactly."""
    if not isinstance(values, torch.Tensor) or not values.is_floating_point():
        kind = values.dtype if isinstance(values, torch.Tensor) else type(values).__name__
        raise ValueError(f"expected a tensor of floating-point numbers, not {kind}")


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """Return 2^exponent as float64, exactly, from int64 exponents of -1022 to 1023: only the exponent field is set."""
    return ((exponent + DOUBLE_BIAS) << DOUBLE_MANTISSA).view(torch.float64)


# exercise 14.1
def decode(codes: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """Return the numbers that these codes represent, as float64, exactly.

    codes: integers, of which the lowest fmt.bits bits count, so that `x.view(torch.int16)` works. Raises ValueError for
    codes that are not integers.
    """
    if codes.is_floating_point() or codes.is_complex() or codes.dtype == torch.bool:
        raise ValueError(f"codes are integers, not {codes.dtype}")
    codes = codes.long()
    mantissa = codes & (2**fmt.mantissa_bits - 1)
    exponent = (codes >> fmt.mantissa_bits) & (2**fmt.exponent_bits - 1)
    negative = (codes >> (fmt.bits - 1)) & 1 == 1
    significand = torch.where(exponent > 0, mantissa + 2**fmt.mantissa_bits, mantissa)  # the leading 1 isn't stored
    unit = power_of_two(exponent.clamp(min=1) - fmt.bias - fmt.mantissa_bits)
    value = significand.double() * unit
    past_largest = (codes & (2 ** (fmt.bits - 1) - 1)) > fmt.largest_code
    infinite = (mantissa == 0) & (fmt.top_codes == "ieee")
    value = torch.where(past_largest, torch.where(infinite, torch.inf, torch.nan), value)
    return torch.where(negative, -value, value)


class CutNumbers(NamedTuple):
    """Values as |value| = (significand / 2^cut + base) units, where base counts codes: only the first term is left to
    round to an integer. All fields are int64, of the values' shape, except `negative` (bool).
    """

    negative: torch.Tensor
    significand: torch.Tensor  # of the float64, with its leading 1: below 2^53
    cut: torch.Tensor  # how many of its low bits the format has no room for, 1 or more
    base: torch.Tensor  # the code to which the rounded significand is added


def cut_numbers(values: torch.Tensor, fmt: FloatFormat) -> CutNumbers:
    """Cut the float64 bits of `values` at the format's last bit."""
    bits = values.detach().double().view(torch.int64)
    field = (bits >> DOUBLE_MANTISSA) & 0x7FF
    mantissa = bits & (2**DOUBLE_MANTISSA - 1)
    significand = torch.where(field > 0, mantissa + 2**DOUBLE_MANTISSA, mantissa)
    exponent = field - DOUBLE_BIAS
    unit_exponent = exponent.clamp(min=1 - fmt.bias)  # below it numbers are subnormal, and their unit is constant
    cut = DOUBLE_MANTISSA - fmt.mantissa_bits + unit_exponent - exponent
    base = (unit_exponent + fmt.bias - 1) << fmt.mantissa_bits  # a normal number's leading 1 adds the last exponent
    return CutNumbers(bits < 0, significand, cut, base)


def with_top_codes(code: torch.Tensor, values: torch.Tensor, fmt: FloatFormat, saturate: bool) -> torch.Tensor:
    """Return the codes of `values`, given the codes of |values|: fix overflows and NaN, and set the sign bits."""
    exists = fmt.top_codes != "finite"
    overflow = fmt.largest_code + (exists and not saturate)
    code = torch.where(code > fmt.largest_code, overflow, code)
    not_a_number = fmt.largest_code + exists
    if fmt.top_codes == "ieee":
        not_a_number += 2 ** (fmt.mantissa_bits - 1)  # a quiet NaN
    code = torch.where(values.isnan(), not_a_number, code)
    keeps_sign = values.signbit() & (values.isnan().logical_not() | exists)
    return torch.where(keeps_sign, code + 2 ** (fmt.bits - 1), code)


# exercise 14.2
def encode(values: torch.Tensor, fmt: FloatFormat, saturate: bool = False) -> torch.Tensor:
    """Return the codes (int64) of the nearest numbers, ties to the even code. Values are rounded once, from float64:
    torch's casts go through float32, and round twice.

    A value that rounds past the largest number becomes inf, or NaN in E4M3; with saturate, and always in E2M1, it
    becomes the largest number, as does inf. (torch's cast to float8_e4m3fn saturates since 2.13, and gave NaN
    before; its cast to float8_e5m2 gives inf.) Zeros and NaN keep their signs; NaN in E2M1 becomes the largest positive
    number, as in CUDA's conversion: OCP MX §5.3.3 leaves it open. Raises ValueError for values that are not
    floating-point.
    """
    check_floating(values)
    _, significand, cut, base = cut_numbers(values, fmt)
    cut = cut.clamp(max=DOUBLE_MANTISSA + 2)  # with a larger cut the value is below half a unit anyway
    odd = (significand >> cut) & 1
    half = 1 << (cut - 1)
    rounded = (significand + half - 1 + odd) >> cut  # up from half a unit if odd, otherwise from just above it
    return with_top_codes(base + rounded, values, fmt, saturate)


def round_to(values: torch.Tensor, fmt: FloatFormat, saturate: bool = False) -> torch.Tensor:
    """Return the format's numbers nearest to `values`, as float64; see `encode`."""
    return decode(encode(values, fmt, saturate), fmt)


def ulp(values: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """Return the unit in the last place, the spacing of the format's numbers around `values`, as float64: at a power of
    two the spacing above it, past the largest number the spacing below it, NaN for NaN.
    """
    check_floating(values)
    magnitude = values.detach().double().abs().clamp(fmt.smallest_normal, fmt.largest)
    exponent = torch.frexp(magnitude).exponent - 1  # frexp's mantissas begin at 0.5
    unit = power_of_two(torch.where(values.isnan(), 0, exponent).long() - fmt.mantissa_bits)
    return torch.where(values.isnan(), torch.nan, unit)


def stochastic_round(values: torch.Tensor, fmt: FloatFormat, generator: torch.Generator | None = None) -> torch.Tensor:
    """Round each value to one of its two neighbors, as float64: up with a probability of (value - lower) / ulp, so that
    the mean is the value. A number of the format does not change; past the largest, the result is the largest; NaN as
    in `encode`.

    A random integer below one unit is added to the bits before they are cut. Raises ValueError as `encode` does.
    """
    check_floating(values)
    _, significand, cut, base = cut_numbers(values, fmt)
    far_below = (cut - RANDOM_BITS).clamp(0, RANDOM_BITS)  # bits that weigh less than 2^-62 of a unit
    significand, cut = significand >> far_below, cut.clamp(max=RANDOM_BITS)
    random = torch.randint(2**RANDOM_BITS, values.shape, generator=generator, device=values.device)
    rounded = (significand + (random >> (RANDOM_BITS - cut))) >> cut
    return decode(with_top_codes(base + rounded, values, fmt, saturate=True), fmt)
