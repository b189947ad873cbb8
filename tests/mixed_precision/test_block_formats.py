"""course_lib.mixed_precision.block_formats: MXFP8 against torch's dtypes, the FP4 formats against their rules by hand.
CPU.
"""

import math

import pytest
import torch

from course_lib.mixed_precision.block_formats import (
    BLOCK_FORMATS,
    MXFP4,
    MXFP8,
    NVFP4,
    BlockFormat,
    block_errors,
    blocks_of_last_dim,
    decode_blocks,
    decode_e8m0,
    encode_blocks,
    encode_e8m0,
    relative_error,
    round_to_blocks,
)
from course_lib.mixed_precision.formats import E4M3, decode, round_to, ulp

ALL = pytest.mark.parametrize("fmt", BLOCK_FORMATS.values(), ids=list(BLOCK_FORMATS))
E2M1_NUMBERS = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def scales_of(x: torch.Tensor, fmt: BlockFormat) -> torch.Tensor:
    """What the elements of each block are multiplied by, [..., blocks, 1]."""
    codes = encode_blocks(x, fmt)
    scales = decode_e8m0(codes.scales) if fmt.scale is None else decode(codes.scales, fmt.scale)
    return (scales * codes.tensor_scale.double())[..., None]


def test_bits_a_number():
    assert [fmt.bits_per_number for fmt in BLOCK_FORMATS.values()] == [8.25, 4.25, 4.5]
    for fmt in BLOCK_FORMATS.values():
        codes = encode_blocks(normal(3, 64), fmt)
        assert codes.elements.shape == (3, 64 // fmt.block_size, fmt.block_size)
        bits = codes.elements.numel() * fmt.element.bits + codes.scales.numel() * 8
        assert bits == fmt.bits_per_number * 3 * 64
        assert 0 <= codes.elements.min() and codes.elements.max() < 2**fmt.element.bits
        assert 0 <= codes.scales.min() and codes.scales.max() < 255
        assert codes.tensor_scale.dtype == torch.float32 and codes.tensor_scale.ndim == 0


# Scales of the MX formats.


def test_every_e8m0_code_is_the_number_torch_sees_in_it():
    codes = torch.arange(256)
    wanted = codes.to(torch.uint8).view(torch.float8_e8m0fnu).double()
    torch.testing.assert_close(decode_e8m0(codes), wanted, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(encode_e8m0(wanted), codes)


def test_e8m0_rounds_down_where_torch_rounds_to_the_nearest():
    values = torch.tensor([1.0, 1.99, 2.0, 3.999, 0.75, 1e-30, 1e30, 2.0**-127, 1e-45, 0.0, -0.0])
    wanted = [1.0, 1, 2, 2, 0.5, 2.0**-100, 2.0**99, 2.0**-127, 2.0**-127, 2.0**-127, 2.0**-127]
    assert decode_e8m0(encode_e8m0(values)).tolist() == wanted
    assert torch.tensor([1.49, 1.5, 3.0]).to(torch.float8_e8m0fnu).float().tolist() == [1, 2, 4]
    assert encode_e8m0(torch.tensor([torch.inf, -torch.inf, torch.nan, -1.0])).tolist() == [255] * 4
    assert encode_e8m0(torch.tensor([1e300], dtype=torch.float64)).tolist() == [254]


def test_mxfp8_is_what_torchs_dtypes_make_of_it():
    """The scale from the exponent bits of the float32 amax, its bytes seen as e8m0, the elements cast by torch."""
    x = torch.cat([normal(64, 256), normal(64, 256) * torch.logspace(-38, 36, 64)[:, None], torch.zeros(1, 256)])
    x[-1, 40] = 2.0**-140  # below the smallest scale's elements
    blocks = x.unflatten(-1, (-1, 32))
    amax_exponent = blocks.abs().amax(-1).view(torch.int32) >> 23  # of float32, with its bias of 127
    scale_bytes = (amax_exponent - 8).clamp(min=0).to(torch.uint8)
    scale = scale_bytes.view(torch.float8_e8m0fnu).double()[..., None]
    elements = (blocks / scale).clamp(-448, 448).float().to(torch.float8_e4m3fn)
    codes = encode_blocks(x, MXFP8)
    assert torch.equal(codes.scales, scale_bytes.long())
    assert torch.equal(codes.elements, elements.view(torch.uint8).long())
    assert torch.equal(round_to_blocks(x, MXFP8), (elements.double() * scale).flatten(-2))


def nearest_e2m1(value: float) -> float:
    """By trying all; in a tie the one whose code is even: 0, 1, 2 or 4."""
    magnitude = min(range(8), key=lambda code: (abs(abs(value) - E2M1_NUMBERS[code]), code % 2))
    return math.copysign(E2M1_NUMBERS[magnitude], value)


def test_mxfp4_by_its_rule():
    x = normal(8, 96).double() * torch.logspace(-10, 10, 8, dtype=torch.float64)[:, None]
    found = round_to_blocks(x, MXFP4)
    for row in range(8):
        for start in range(0, 96, 32):
            block = x[row, start : start + 32].tolist()
            scale = 2.0 ** (math.floor(math.log2(max(map(abs, block)))) - 2)
            assert found[row, start : start + 32].tolist() == [scale * nearest_e2m1(value / scale) for value in block]


def test_nvfp4_by_its_rule():
    x = normal(8, 96).double() * torch.logspace(-2, 2, 8, dtype=torch.float64)[:, None]
    found = round_to_blocks(x, NVFP4)
    tensor_scale = (x.abs().max() / (6 * 448)).float().double()
    for row in range(8):
        for start in range(0, 96, 16):
            block = x[row, start : start + 16]
            block_scale = (block.abs().max() / 6 / tensor_scale).float().to(torch.float8_e4m3fn).double()
            scale = (block_scale * tensor_scale).item()
            wanted = [scale * nearest_e2m1(value / scale) for value in block.tolist()]
            assert found[row, start : start + 16].tolist() == pytest.approx(wanted, rel=1e-15)


# What the rules have for consequences.


@ALL
def test_errors_are_half_a_unit_of_the_scaled_format_or_a_cut(fmt):
    x = normal(64, 256)
    scale, blocks = scales_of(x, fmt), blocks_of_last_dim(x.double(), fmt.block_size)
    rounded = blocks_of_last_dim(round_to_blocks(x, fmt), fmt.block_size)
    cut = blocks.abs() > fmt.element.largest * scale
    error = (rounded - blocks).abs()
    assert (error <= scale * ulp(blocks / scale, fmt.element) / 2 * (1 + 1e-12))[~cut].all()
    assert cut.any() and torch.equal(rounded[cut].abs(), (fmt.element.largest * scale).expand_as(cut)[cut])
    assert (rounded[blocks != 0].sign() * blocks[blocks != 0].sign() >= 0).all()


def test_the_largest_of_a_block_is_cut_by_up_to_an_eighth_or_a_quarter():
    """By the rule of MX; NVFP4 gets it right but for the rounding of its scale: 1/17, as 1.0625 becomes 1 or 1.125."""
    blocks = torch.zeros(10_000, 32)
    blocks[:, 5] = torch.linspace(1, 4, 10_000)
    for fmt, low, high in ((MXFP8, 1 / 8, 1 / 17), (MXFP4, 1 / 4, 1 / 5), (NVFP4, 1 / 17, 1 / 17)):
        relative = round_to_blocks(blocks, fmt)[:, 5] / blocks[:, 5].double() - 1
        assert -low <= relative.min() < -0.98 * low and 0.98 * high < relative.max() <= high * (1 + 1e-12), fmt.name


def test_errors_on_normal_data():
    """Relative root mean squares. One scale for all beats MXFP8's: there, 17% of the blocks' largest are cut."""
    x = normal(512, 512)
    errors = block_errors(x)
    assert {name: round(error, 3) for name, error in errors.items()} == {"MXFP8": 0.029, "MXFP4": 0.115, "NVFP4": 0.095}
    scale = x.double().abs().max() / E4M3.largest
    assert relative_error(round_to(x.double() / scale, E4M3) * scale, x.double()) < 0.95 * errors["MXFP8"]


def test_an_outlier_harms_its_block_alone():
    x = normal(16, 256)
    with_outlier = x.clone()
    with_outlier[3, 70] = 1e4
    for fmt in (MXFP8, MXFP4):
        before, after = (round_to_blocks(values, fmt) for values in (x, with_outlier))
        changed = (before != after).flatten().nonzero().flatten()
        first = 3 * 256 + 64
        assert first <= changed.min() and changed.max() < first + 32
    without = torch.ones_like(x, dtype=torch.bool)
    without[3, 64:80] = False
    rounded = round_to_blocks(with_outlier, NVFP4)
    assert relative_error(rounded[without], x.double()[without]) < 0.11  # its tensor scale moved, and little came of it
    scale = 1e4 / 6
    rest = round_to(with_outlier.double() / scale, NVFP4.element)[without]
    assert not rest.any()  # while one scale for the whole tensor leaves nothing


def test_blocks_far_below_the_largest_are_lost_in_nvfp4():
    """Its block scales have E4M3's range: 2^-9 to 448, and from half of 2^-9 down they are 0."""
    x = torch.zeros(4, 16)
    x[0, 0] = 448 * 1024 * 6
    x[1, 3], x[2, 3], x[3, 3] = 6.001, 6.0, 5.9
    assert round_to_blocks(x, NVFP4)[1:, 3].tolist() == [6, 0, 0]
    assert not (encode_blocks(x, NVFP4).elements[2:] & 7).any()  # no bits that a scale of 0 would hide
    assert (round_to_blocks(x, MXFP4)[1:, 3] == 6).all()


@ALL
def test_scaling_by_powers_of_two_scales_the_result_and_rounding_is_done_once(fmt):
    x = normal(8, 128)
    rounded = round_to_blocks(x, fmt)
    for power in (2.0**-30, 2.0**40):
        assert torch.equal(round_to_blocks(x * power, fmt), rounded * power)
    assert torch.equal(round_to_blocks(rounded, fmt), rounded)
    assert torch.equal(round_to_blocks(-x, fmt), -rounded)


# Blocks that are unlike the others.


@ALL
@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_a_nan_or_infinity_takes_its_block_and_no_other(fmt, special):
    """4 bits have no NaN, so the scale says it."""
    x = normal(2, 128)
    clean = round_to_blocks(x, fmt)
    x[1, 37] = special
    rounded = round_to_blocks(x, fmt)
    first = 37 // fmt.block_size * fmt.block_size
    lost = torch.zeros(2, 128, dtype=torch.bool)
    lost[1, first : first + fmt.block_size] = True
    assert torch.equal(rounded.isnan(), lost)
    assert not lost.flatten()[clean.abs().argmax()]  # so that NVFP4's tensor scale is as it was
    assert torch.equal(rounded[~lost], clean[~lost])


@ALL
def test_zeros_stay_and_keep_their_signs(fmt):
    x = torch.cat([torch.zeros(1, 64), -torch.zeros(1, 64), normal(1, 64)])
    rounded = round_to_blocks(x, fmt)
    assert not rounded[:2].any() and torch.equal(rounded[:2].signbit(), x[:2].signbit())
    assert not round_to_blocks(torch.zeros(5, 32), fmt).any()


@ALL
def test_equal_numbers_stay_equal(fmt):
    for value in (1.0, 3.0, -0.7, 1e-30, 1e30, 2.0**-126):
        rounded = round_to_blocks(torch.full((2, 64), value), fmt)
        assert (rounded == rounded[0, 0]).all() and abs(rounded[0, 0] / value - 1) <= 0.25
    for power in (1.0, 2.0**20, -(2.0**-20)):  # in NVFP4 all but the rounding of 1 / 2688
        rounded = round_to_blocks(torch.full((2, 64), power), fmt)
        assert ((rounded / power - 1).abs() < 1e-7).all()


@ALL
def test_the_smallest_and_largest_float32_stay_finite(fmt):
    largest = torch.finfo(torch.float32).max
    x = torch.tensor([[2.0**-149] * 32, [largest] * 32, [-largest] * 32])
    for rows in (x, x[:1], x[1:]):
        rounded = round_to_blocks(rows, fmt)
        assert rounded.isfinite().all()
    assert (round_to_blocks(x[1:], fmt).abs() / largest > 0.74).all()


@ALL
def test_the_last_block_may_be_shorter(fmt):
    x = normal(3, 83)
    padded = torch.nn.functional.pad(x, (0, 96 - 83))
    assert torch.equal(round_to_blocks(x, fmt), round_to_blocks(padded, fmt)[:, :83])
    assert torch.equal(round_to_blocks(x[0], fmt), round_to_blocks(x[:1], fmt)[0]) and x.shape == (3, 83)
    assert round_to_blocks(x[:0], fmt).shape == (0, 83) and round_to_blocks(x[:, :0], fmt).shape == (3, 0)
    codes = encode_blocks(x, fmt)
    assert torch.equal(decode_blocks(codes, fmt, 83), round_to_blocks(x, fmt))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_floating_dtype_is_taken_and_left_alone(dtype):
    x = normal(4, 64).to(dtype).requires_grad_()
    before = x.detach().clone()
    for fmt in BLOCK_FORMATS.values():
        rounded = round_to_blocks(x, fmt)
        assert rounded.dtype == torch.float64 and not rounded.requires_grad
        assert torch.equal(rounded, round_to_blocks(before.double(), fmt))
    assert torch.equal(x, before)


@ALL
def test_what_has_no_blocks_is_refused(fmt):
    with pytest.raises(ValueError, match="floating-point numbers, not torch.int64"):
        round_to_blocks(torch.ones(32, dtype=torch.int64), fmt)
    with pytest.raises(ValueError, match="a scalar tensor has none"):
        round_to_blocks(torch.tensor(1.0), fmt)
    with pytest.raises(ValueError, match="floating-point numbers, not torch.int64"):
        encode_e8m0(torch.ones(2, dtype=torch.int64))
