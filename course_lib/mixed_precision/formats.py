"""Floating-point formats bit by bit: `decode` from bits to numbers, `encode` from numbers to bits, and what rounding
does to a number on the way.

A number is a sign s, an exponent field E of e bits and a mantissa field M of m bits, one after the other:

    normal       E > 0     (-1)^s · (1 + M / 2^m) · 2^(E - bias)         bias = 2^(e - 1) - 1
    subnormal    E = 0     (-1)^s · M / 2^m · 2^(1 - bias)               zero is one of them

Exponent bits buy range: each doubles it, on a log axis. Mantissa bits buy resolution: between two powers of two lie
2^m - 1 numbers, equally far apart. That distance is the unit in the last place (`ulp`); rounding to the nearest number
is wrong by half of it at most. Below the smallest normal number the distance stays, and the relative error grows.

The top codes differ. IEEE 754 spends the whole highest exponent on infinities and NaN, so do float16, bfloat16 and
e5m2. E4M3 has but 16 exponents and spends one code a sign: all ones is NaN, and there is no infinity. Hence 448 instead
of 240. E2M1, of 4 bits, has neither: it can't say that something went wrong.

Without its sign, a code is an integer that counts the numbers upwards from zero. So rounding up is adding 1 to it, and
the carry goes from the mantissa into the exponent by itself. `encode` uses that twice: a mantissa that rounds up to
2^m, and a number past the largest, which becomes the code after it: infinity, or E4M3's NaN.

`stochastic_round` goes up with a probability that is the part it cuts off, so that the expectation is the number
itself. Rounding to nearest loses each update below half a unit, for good; rounded so, a thousand of them add up.

IEEE 754-2019, §3.4 and §4.3.1; Micikevicius et al. 2022 (FP8 Formats for Deep Learning, §3 and table 1); OCP
Microscaling Formats v1.0, §5.3.3 (E2M1); Gupta et al. 2015 (stochastic rounding, §3.1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

DOUBLE_MANTISSA, DOUBLE_BIAS = 52, 1023  # of float64, whose bits `encode` takes apart
RANDOM_BITS = 62  # of an int64, the sign and one bit to spare for a sum


@dataclass(frozen=True)
class FloatFormat:
    """A sign bit, exponent_bits and mantissa_bits; all else follows from them and from what the top codes mean."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    top_codes: str = "ieee"  # highest exponent is inf and NaN; "fn": all ones is NaN, no inf; "finite": all are numbers
    dtype: torch.dtype | None = None  # torch's, where it has one

    @property
    def bits(self) -> int:
        """Of one number, the sign's included."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        """What the exponent field is above the exponent."""
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def largest_code(self) -> int:
        """Code of the largest number. The next one, where there is one, is what an overflow becomes: inf, or NaN."""
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
        """How many numbers lie strictly between 1 and 2, as between any two powers of two in the normal range."""
        return 2**self.mantissa_bits - 1


FP32 = FloatFormat("FP32", 8, 23, dtype=torch.float32)
TF32 = FloatFormat("TF32", 8, 10)  # what tensor cores make of a float32 operand; it lies in memory as a float32
FP16 = FloatFormat("FP16", 5, 10, dtype=torch.float16)
BF16 = FloatFormat("BF16", 8, 7, dtype=torch.bfloat16)
E4M3 = FloatFormat("E4M3", 4, 3, "fn", torch.float8_e4m3fn)
E5M2 = FloatFormat("E5M2", 5, 2, dtype=torch.float8_e5m2)
E2M1 = FloatFormat("E2M1", 2, 1, "finite", torch.float4_e2m1fn_x2)  # two in a byte
FORMATS = {fmt.name: fmt for fmt in (FP32, TF32, FP16, BF16, E4M3, E5M2, E2M1)}


def check_floating(values: torch.Tensor) -> None:
    """Raise ValueError unless these are floating-point numbers that float64 holds exactly."""
    if not isinstance(values, torch.Tensor) or not values.is_floating_point():
        kind = values.dtype if isinstance(values, torch.Tensor) else type(values).__name__
        raise ValueError(f"expected a tensor of floating-point numbers, not {kind}")


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent as float64, exactly, from int64 exponents of -1022 to 1023: such a number is its exponent field."""
    return ((exponent + DOUBLE_BIAS) << DOUBLE_MANTISSA).view(torch.float64)


# exercise 14.1
def decode(codes: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """Return the numbers that these codes stand for, float64, exactly.

    codes: integers, whose lowest fmt.bits bits count, so that `x.view(torch.int16)` will do. Raises ValueError for
    codes that aren't integers.
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
    """|value| = (significand / 2^cut + base) units, where base counts codes: what is left is to round the first part to
    an integer. All int64, of the values' shape, but for `negative` (bool).
    """

    negative: torch.Tensor
    significand: torch.Tensor  # of the float64, its leading 1 included: below 2^53
    cut: torch.Tensor  # how many of its low bits the format has no room for, 1 or more
    base: torch.Tensor  # the code to which the rounded significand is added


def cut_numbers(values: torch.Tensor, fmt: FloatFormat) -> CutNumbers:
    """The float64 bits of `values`, cut where the format's last bit lies."""
    bits = values.detach().double().view(torch.int64)
    field = (bits >> DOUBLE_MANTISSA) & 0x7FF
    mantissa = bits & (2**DOUBLE_MANTISSA - 1)
    significand = torch.where(field > 0, mantissa + 2**DOUBLE_MANTISSA, mantissa)
    exponent = field - DOUBLE_BIAS
    kept_exponent = exponent.clamp(min=1 - fmt.bias)  # below it, numbers are subnormal: their unit shrinks no further
    cut = DOUBLE_MANTISSA - fmt.mantissa_bits + kept_exponent - exponent
    base = (kept_exponent + fmt.bias - 1) << fmt.mantissa_bits  # a normal number's leading 1 adds the last exponent
    return CutNumbers(bits < 0, significand, cut, base)


def with_top_codes(code: torch.Tensor, values: torch.Tensor, fmt: FloatFormat, saturate: bool) -> torch.Tensor:
    """The codes of |values|, put right where a value is past the largest number or NaN; then the sign's bit."""
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
    """Return the codes (int64) of the nearest numbers, ties to the even code. From float64 in one rounding: torch's own
    casts go by float32, and round twice.

    What rounds past the largest number becomes inf; in E4M3 NaN; with saturate, and always in E2M1, the largest, inf
    too. (torch's cast to float8_e4m3fn saturates since 2.13, and gave NaN before; that to float8_e5m2 gives inf.) Zeros
    and NaN keep their signs; NaN in E2M1 is the largest, positive, as by CUDA's conversion: OCP MX §5.3.3 leaves it
    open. Raises ValueError for values that aren't floating-point.
    """
    check_floating(values)
    _, significand, cut, base = cut_numbers(values, fmt)
    cut = cut.clamp(max=DOUBLE_MANTISSA + 2)  # from here on, all of it is below half a unit
    odd = (significand >> cut) & 1
    half = 1 << (cut - 1)
    rounded = (significand + half - 1 + odd) >> cut  # up from half a unit where odd, else from just above it
    return with_top_codes(base + rounded, values, fmt, saturate)


def round_to(values: torch.Tensor, fmt: FloatFormat, saturate: bool = False) -> torch.Tensor:
    """The format's numbers nearest to `values`, as float64; see `encode`."""
    return decode(encode(values, fmt, saturate), fmt)


def ulp(values: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """The unit in the last place: how far apart the format's numbers lie around `values`, float64. At a power of two,
    that above it; past the largest number, that below it; NaN for NaN.
    """
    check_floating(values)
    magnitude = values.detach().double().abs().clamp(fmt.smallest_normal, fmt.largest)
    exponent = torch.frexp(magnitude).exponent - 1  # frexp's mantissas begin at 0.5
    unit = power_of_two(torch.where(values.isnan(), 0, exponent).long() - fmt.mantissa_bits)
    return torch.where(values.isnan(), torch.nan, unit)


def stochastic_round(values: torch.Tensor, fmt: FloatFormat, generator: torch.Generator | None = None) -> torch.Tensor:
    """One of the two neighbors of each value, as float64: the upper with a probability of (value - lower) / ulp, so
    that the mean is the value. A number of the format stays; past the largest, the largest; NaN as in `encode`.

    A random integer below one unit is added to the bits before they are cut. Raises ValueError as `encode`.
    """
    check_floating(values)
    _, significand, cut, base = cut_numbers(values, fmt)
    far_below = (cut - RANDOM_BITS).clamp(0, RANDOM_BITS)  # bits that weigh less than 2^-62 of a unit
    significand, cut = significand >> far_below, cut.clamp(max=RANDOM_BITS)
    random = torch.randint(2**RANDOM_BITS, values.shape, generator=generator, device=values.device)
    rounded = (significand + (random >> (RANDOM_BITS - cut))) >> cut
    return decode(with_top_codes(base + rounded, values, fmt, saturate=True), fmt)
