"""course_lib.mixed_precision.formats: every code against torch's dtypes, every midpoint against torch's casts. CPU."""

import math

import pytest
import torch

from course_lib.mixed_precision.formats import (
    BF16,
    E2M1,
    E4M3,
    E5M2,
    FORMATS,
    FP16,
    FP32,
    TF32,
    FloatFormat,
    decode,
    encode,
    round_to,
    stochastic_round,
    ulp,
)

CAST_BY_TORCH = [FP16, BF16, E4M3, E5M2]  # with float32 numbers between their own, and few enough to try all
INTEGERS = {8: torch.uint8, 16: torch.int16, 32: torch.int32}
ALL = pytest.mark.parametrize("fmt", FORMATS.values(), ids=list(FORMATS))
THOSE_CAST = pytest.mark.parametrize("fmt", CAST_BY_TORCH, ids=[fmt.name for fmt in CAST_BY_TORCH])


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def some_codes(fmt: FloatFormat) -> torch.Tensor:
    """All codes of a format; of FP32 its ends, those about each exponent, and 100,000 at random."""
    if fmt.bits < 32:
        return torch.arange(2**fmt.bits)
    edges = (torch.arange(512)[:, None] << 23) + torch.arange(-2, 3)
    return torch.cat([edges.flatten() % 2**32, torch.randint(2**32, (100_000,), generator=seeded())])


def positive_codes(fmt: FloatFormat) -> torch.Tensor:
    """Codes of numbers from 0 to the one before the largest."""
    codes = some_codes(fmt)
    return codes[codes < fmt.largest_code]


def torch_decoded(codes: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    return codes.to(INTEGERS[fmt.bits]).view(fmt.dtype).double()


def torch_encoded(values: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """By torch's cast, with what it does past the largest number."""
    return values.to(fmt.dtype).view(INTEGERS[fmt.bits]).long() % 2**fmt.bits


def assert_same_numbers(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal, with the signs of zeros, and NaN where NaN is wanted."""
    assert found.dtype == wanted.dtype == torch.float64
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found.signbit() | found.isnan(), wanted.signbit() | wanted.isnan())


def random_values(fmt: FloatFormat, count: int, seed: int = 0) -> torch.Tensor:
    """float64 of both signs, of all magnitudes from below the smallest number to the largest."""
    low, high = math.log2(fmt.smallest_subnormal) - 3, math.log2(fmt.largest)
    exponent = low + (high - low) * torch.rand(count, dtype=torch.float64, generator=seeded(seed))
    sign = 1 - 2 * torch.randint(2, (count,), generator=seeded(seed + 1))
    return (sign * torch.exp2(exponent)).clamp(-fmt.largest, fmt.largest)


# What follows from the sizes of the fields.


@pytest.mark.parametrize("fmt", [FP32, *CAST_BY_TORCH], ids=lambda fmt: fmt.name)
def test_properties_are_those_torch_states(fmt):
    info = torch.finfo(fmt.dtype)
    found = fmt.bits, fmt.largest, fmt.smallest_normal, fmt.epsilon
    assert found == (info.bits, info.max, info.smallest_normal, info.eps)
    assert fmt.smallest_subnormal == info.smallest_normal * info.eps


def test_properties_are_those_of_the_published_tables():
    """Micikevicius et al. 2022, table 1, and OCP MX v1.0, table 5."""
    published = {E4M3: (8, 7, 448, 2**-6, 2**-9), E5M2: (8, 15, 57344, 2**-14, 2**-16), E2M1: (4, 1, 6, 1, 0.5)}
    for fmt, figures in published.items():
        assert (fmt.bits, fmt.bias, fmt.largest, fmt.smallest_normal, fmt.smallest_subnormal) == figures
    assert (TF32.bits, TF32.bias, TF32.epsilon) == (19, 127, FP16.epsilon)


@ALL
def test_the_numbers_between_1_and_2_are_counted_right(fmt):
    one, two = encode(torch.tensor([1.0, 2.0]), fmt).tolist()
    values = decode(torch.arange(one, two + 1), fmt)
    assert (values[0], values[-1]) == (1, 2) and (values.diff() == fmt.epsilon).all()
    assert len(values) - 2 == fmt.between_one_and_two
    assert (E4M3.between_one_and_two, E5M2.between_one_and_two) == (7, 3)


# Decoding.


@pytest.mark.parametrize("fmt", [FP32, *CAST_BY_TORCH], ids=lambda fmt: fmt.name)
def test_every_code_is_the_number_torch_sees_in_it(fmt):
    codes = some_codes(fmt)
    assert_same_numbers(decode(codes, fmt), torch_decoded(codes, fmt))


def test_tf32_codes_are_float32_without_13_bits():
    codes = some_codes(TF32)
    assert_same_numbers(decode(codes, TF32), torch_decoded(codes << 13, FP32))


def test_e2m1_has_these_sixteen_numbers():
    positive = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    assert_same_numbers(decode(torch.arange(16), E2M1), torch.cat([positive, -positive]))


@ALL
def test_without_their_signs_codes_are_in_the_order_of_their_numbers(fmt):
    codes = positive_codes(fmt)
    assert (decode(codes + 1, fmt) > decode(codes, fmt)).all()
    assert decode(torch.tensor(fmt.largest_code), fmt).item() == fmt.largest


def test_bits_above_a_code_do_not_count():
    values = torch.tensor([-1.5, -0.0, 3.0], dtype=torch.bfloat16)
    assert_same_numbers(decode(values.view(torch.int16), BF16), values.double())  # negative as integers


# Encoding.


@ALL
def test_every_code_round_trips(fmt):
    codes = some_codes(fmt)
    values = decode(codes, fmt)
    numbers = ~values.isnan()
    assert torch.equal(encode(values, fmt)[numbers], codes[numbers] % 2**fmt.bits)
    assert decode(encode(values[~numbers], fmt), fmt).isnan().all()
    signs = codes[~numbers] >> (fmt.bits - 1)
    assert torch.equal(encode(values[~numbers], fmt) >> (fmt.bits - 1), signs)


@ALL
def test_halfway_goes_to_even_and_any_nearer_goes_there(fmt):
    """Midpoints of neighbours are float64, as are the numbers just beside them, which rounding twice gets wrong."""
    codes = positive_codes(fmt)
    middle = (decode(codes, fmt) + decode(codes + 1, fmt)) / 2
    above, below = middle.nextafter(torch.tensor(torch.inf).double()), middle.nextafter(torch.tensor(0.0).double())
    for sign, negative in ((1, 0), (-1, 2 ** (fmt.bits - 1))):
        assert torch.equal(encode(sign * middle, fmt), negative + codes + (codes & 1))
        assert torch.equal(encode(sign * above, fmt), negative + codes + 1)
        assert torch.equal(encode(sign * below, fmt), negative + codes)


@THOSE_CAST
@pytest.mark.parametrize("saturate", [False, True])
def test_rounding_is_that_of_torch(fmt, saturate):
    """All numbers, midpoints, their neighbours in float32, and 500,000 of random bits. torch's E4M3 saturates, since
    2.13 by itself.
    """
    codes = positive_codes(fmt)
    middle = torch.cat([decode(codes, fmt), (decode(codes, fmt) + decode(codes + 1, fmt)) / 2])
    middle = torch.cat([middle, torch.tensor([fmt.largest, fmt.largest + ulp(middle[-1:], fmt).item() / 2])]).float()
    infinity = torch.tensor(torch.inf)
    random = torch.randint(-(2**31), 2**31, (500_000,), generator=seeded()).int().view(torch.float32)
    values = torch.cat([middle, middle.nextafter(infinity), middle.nextafter(-infinity), random])
    values = torch.cat([values, -values])
    values = values[~values.isnan()]
    wanted = torch_encoded(values.clamp(-448, 448) if fmt is E4M3 else values, fmt)
    sign = (values < 0) * 2 ** (fmt.bits - 1)
    if saturate:
        wanted = torch.where(decode(wanted, fmt).isinf(), sign + fmt.largest_code, wanted)
    elif fmt is E4M3:
        assert ((values.abs() > 464) & (values.abs() < 465)).any()
        wanted = torch.where(values.abs() > 464, sign + 127, wanted)
    assert torch.equal(encode(values, fmt, saturate), wanted)


def test_float64_to_float32_is_that_of_torch():
    bits = torch.randint(-(2**63), 2**63 - 1, (200_000,), generator=seeded())
    values = torch.cat([bits.view(torch.float64), random_values(FP32, 200_000)])
    assert_same_numbers(round_to(values, FP32), values.float().double())


def test_casts_of_torch_round_float64_twice():
    """1.0625 lies halfway between E4M3's 1 and 1.125. A little above it, float32 can't see that it is above."""
    value = torch.tensor([1.0625 + 2.0**-40], dtype=torch.float64)
    assert round_to(value, E4M3).item() == 1.125
    assert value.to(torch.float8_e4m3fn).double().item() == 1.0


# Overflow, zeros, NaN.


def test_past_the_largest_number():
    limits = {"FP16": 65520, "E5M2": 61440, "E4M3": 464, "E2M1": 5}  # first to overflow; last not to; or tie to even
    beyond = torch.tensor([465.0, 1e300, torch.inf], dtype=torch.float64)
    signed = torch.stack([beyond, -beyond])
    assert round_to(signed, E4M3).isnan().all() and torch.equal(encode(signed, E4M3)[:, 0], torch.tensor([127, 255]))
    assert round_to(torch.tensor(limits["E4M3"]).double(), E4M3) == 448
    for fmt in (FP16, E5M2):
        limit = torch.tensor(limits[fmt.name]).double()
        assert round_to(limit, fmt).isinf() and round_to(limit * (1 - 1e-15), fmt) == fmt.largest
        assert round_to(-limit, fmt) == -torch.inf
    for fmt in FORMATS.values():
        values = torch.tensor([fmt.largest * 1.5, 1e300, torch.inf], dtype=torch.float64)
        assert (round_to(torch.stack([values, -values]), fmt, saturate=True).abs() == fmt.largest).all()
    assert torch.equal(round_to(signed, E2M1), torch.tensor([6.0, -6.0]).double()[:, None].expand(2, 3))


def test_what_torch_does_past_the_largest_number():
    """The text says it: e4m3's cast saturates, infinity too, or gave NaN in older versions; e5m2's doesn't."""
    values = torch.tensor([464.1, 1e9, torch.inf, -torch.inf])
    found = values.to(torch.float8_e4m3fn).float()
    assert found.isnan().all() or found.tolist() == [448, 448, 448, -448]
    assert values[1:].to(torch.float8_e5m2).float().tolist() == [torch.inf, torch.inf, -torch.inf]


@ALL
def test_zeros_and_nan(fmt):
    sign = 2 ** (fmt.bits - 1)
    tiny = torch.tensor([0.0, -0.0, 1e-320, -1e-320, fmt.smallest_subnormal / 2, -fmt.smallest_subnormal / 2]).double()
    assert encode(tiny, fmt).tolist() == [0, sign, 0, sign, 0, sign]
    not_a_number = torch.tensor([math.nan, -math.nan])
    assert not_a_number.signbit().tolist() == [False, True]
    for saturate in (False, True):
        codes = encode(not_a_number, fmt, saturate)
        if fmt is E2M1:
            assert codes.tolist() == [7, 7]
        else:
            assert decode(codes, fmt).isnan().all() and codes.diff() == sign
            assert stochastic_round(not_a_number, fmt).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_any_floating_dtype_and_shape_is_taken_and_left_alone(dtype):
    values = torch.randn(6, 4, generator=seeded()).to(dtype).t()[::2].requires_grad_()
    before = values.detach().clone()
    for fmt in FORMATS.values():
        codes = encode(values, fmt)
        assert codes.dtype == torch.int64 and codes.shape == (2, 6) and not codes.requires_grad
        assert torch.equal(codes, encode(before.double().contiguous(), fmt))
        assert encode(values[0, 0], fmt) == codes[0, 0]
        assert encode(values[:0], fmt).shape == stochastic_round(values[:0], fmt).shape == (0, 6)
    assert torch.equal(values, before)


def test_what_is_not_floating_point_is_refused():
    for function in (encode, round_to, stochastic_round, ulp):
        with pytest.raises(ValueError, match="floating-point numbers, not torch.int64"):
            function(torch.tensor([1, 2]), E4M3)
        with pytest.raises(ValueError, match="floating-point numbers, not float"):
            function(1.5, E4M3)
    with pytest.raises(ValueError, match="codes are integers, not torch.float32"):
        decode(torch.tensor([1.0]), E4M3)


# Properties of rounding.


@ALL
def test_the_error_is_at_most_half_a_unit_in_the_last_place(fmt):
    values = random_values(fmt, 100_000)
    error = (round_to(values, fmt) - values).abs()
    assert (error <= ulp(values, fmt) / 2).all()
    assert error.max() > 0.4 * ulp(torch.tensor(fmt.largest).double(), fmt) or fmt is FP32
    normal = values.abs() >= fmt.smallest_normal
    assert (error[normal] <= fmt.epsilon / 2 * values[normal].abs()).all()


@ALL
def test_a_unit_in_the_last_place_is_the_way_to_the_next_number(fmt):
    codes = positive_codes(fmt)
    lower, upper = decode(codes, fmt), decode(codes + 1, fmt)
    middle = (lower + upper) / 2
    assert torch.equal(ulp(lower, fmt), upper - lower) and torch.equal(ulp(-middle, fmt), upper - lower)
    edge = torch.tensor([0.0, -0.0, 1e300, torch.inf, torch.nan], dtype=torch.float64)
    last = fmt.largest - decode(torch.tensor(fmt.largest_code - 1), fmt).item()
    assert ulp(edge, fmt)[:4].tolist() == [fmt.smallest_subnormal] * 2 + [last] * 2 and ulp(edge, fmt)[4].isnan()


@ALL
def test_rounding_keeps_the_order_and_is_done_once(fmt):
    values = random_values(fmt, 100_000).sort().values
    rounded = round_to(values, fmt)
    assert (rounded.diff() >= 0).all()
    assert torch.equal(round_to(rounded, fmt), rounded) and torch.equal(round_to(-values, fmt), -rounded)


# Stochastic rounding.


def neighbours(values: torch.Tensor, fmt: FloatFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers at or before and after |values|, with the values' signs: by search in a table of all of them."""
    table = decode(torch.arange(fmt.largest_code + 1), fmt)
    before = torch.searchsorted(table, values.abs(), right=True) - 1
    return table[before] * values.sign(), table[(before + 1).clamp(max=fmt.largest_code)] * values.sign()


@pytest.mark.parametrize("fmt", [FP16, BF16, TF32, E4M3, E5M2, E2M1], ids=lambda fmt: fmt.name)
def test_stochastic_rounding_is_unbiased_and_goes_to_neighbours(fmt):
    values = torch.cat([random_values(fmt, 60), torch.tensor([1.001, 1.5, -1.999, fmt.smallest_subnormal / 300])])
    trials = 20_000
    found = stochastic_round(values.expand(trials, -1), fmt, seeded(3))
    lower, upper = neighbours(values, fmt)
    assert ((found == lower) | (found == upper)).all()
    unit = upper - lower
    probability = torch.where(unit == 0, 0, (values - lower) / unit)
    standard_error = unit.abs() * (probability * (1 - probability) / trials).sqrt()
    assert ((found.mean(0) - values).abs() <= 5 * standard_error + 1e-12 * values.abs()).all()
    assert (found != lower).any(0).sum() > 20 and (found != upper).any(0).sum() > 20


@ALL
def test_stochastic_rounding_leaves_numbers_of_the_format_and_saturates(fmt):
    codes = some_codes(fmt)
    values = decode(codes, fmt)
    values = values[values.isfinite()]
    assert_same_numbers(stochastic_round(values, fmt, seeded()), values)
    beyond = torch.tensor([fmt.largest * (1 + fmt.epsilon / 4), 1e300, torch.inf]).double().repeat(100)
    assert (stochastic_round(torch.stack([beyond, -beyond]), fmt).abs() == fmt.largest).all()


def test_stochastic_rounding_of_numbers_far_below_the_smallest():
    """2^-60 of a unit comes up once in 2^60, and no shift wraps round."""
    far_below = torch.logspace(-300, -20, 20_000, dtype=torch.float64)
    for fmt in (E4M3, E2M1, FP16):
        assert not stochastic_round(far_below, fmt, seeded()).any()
    many = torch.full((200_000,), E4M3.smallest_subnormal / 1024, dtype=torch.float64)
    up = (stochastic_round(many, E4M3, seeded()) > 0).sum().item()
    assert abs(up - 195.3) < 5 * 195.3**0.5


def test_stochastic_rounding_follows_its_generator():
    values = random_values(E4M3, 1000)
    first, again, other = (stochastic_round(values, E4M3, seeded(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_small_updates_are_lost_by_rounding_to_nearest_and_kept_by_chance():
    """A thousand times 0.1% of a weight of 1: bfloat16's next number after 1 is 0.8% away."""
    nearest = by_chance = torch.ones(400, dtype=torch.float64)
    generator = seeded()
    for _ in range(1000):
        nearest = round_to(nearest + 0.001, BF16)
        by_chance = stochastic_round(by_chance + 0.001, BF16, generator)
    assert (nearest == 1).all()
    assert abs(by_chance.mean().item() - 2) < 5 * by_chance.std().item() / 20 and 0 < by_chance.std() < 0.1
