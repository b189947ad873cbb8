"""course_lib.fp8.quantization: each number is rounded to the nearest of its format, each block has its own scale and
uses the range, and nothing is read on the host. CPU, or GPU.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from course_lib.fp8.quantization import (
    FULL,
    LARGEST,
    ROW,
    SMALLEST_SCALE,
    SQUARE,
    TENSOR,
    TILE,
    Quantized,
    block_amax,
    dequantize,
    quantize,
    scale_of,
)
from eight_bits import BLOCKS, DEVICE, E4M3, E5M2, FORMATS, scale_of_each, seeded, stands_for, uneven

formats = pytest.mark.parametrize("dtype", FORMATS, ids=["e4m3", "e5m2"])
blocks = pytest.mark.parametrize("block", BLOCKS, ids=str)
powers = pytest.mark.parametrize("power_of_two", [False, True])
MANTISSA_BITS = {E4M3: 3, E5M2: 2}
SMALLEST = {E4M3: 2.0**-9, E5M2: 2.0**-16}  # subnormal
SHAPES = [(1, 1), (5, 3), (130, 140), (129, 300), (256, 128)]
TINY = [1e-45, 1e-42, 1e-40, 1e-38]


def half_unit(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Half a unit in the last place of x, float64: between 2^e and 2^(e+1) the numbers of a format with m bits are
    2^(e-m) apart, and below its smallest normal number as far as there.
    """
    exponent = torch.frexp(x)[1] - 1
    return torch.ldexp(torch.full_like(x, 0.5), exponent - MANTISSA_BITS[dtype]).clamp(min=SMALLEST[dtype] / 2)


def assert_rounded(x: torch.Tensor, found: Quantized) -> None:
    """Within half a unit; the quotient x / scale is a float32, of 24 bits, and takes a rounding more."""
    scale, x = scale_of_each(found), x.double()
    error = (stands_for(found) - x).abs()
    bound = half_unit(x / scale, found.values.dtype) * scale + 2.0**-24 * x.abs()
    assert (error <= bound).all(), (found.block, (error - bound).max())


@formats
@blocks
@powers
def test_within_half_a_unit_in_the_last_place(dtype, block, power_of_two):
    for seed, shape in enumerate(SHAPES):
        for kind in (torch.float32, torch.bfloat16, torch.float16):
            x = uneven(*shape, dtype=kind, seed=seed)
            found = quantize(x, dtype, block, power_of_two)
            assert found.values.dtype == dtype and found.values.shape == x.shape and found.values.is_contiguous()
            assert found.scale.dtype == torch.float32 and found.block == block
            assert_rounded(x, found)
            torch.testing.assert_close(dequantize(found, torch.float64), stands_for(found), rtol=0, atol=0)
            torch.testing.assert_close(dequantize(found), stands_for(found).float(), rtol=0, atol=0)
            once_more = stands_for(found).float().to(kind)
            torch.testing.assert_close(dequantize(found, kind), once_more, rtol=0, atol=0)


@formats
def test_the_error_is_a_seventeenth_of_a_number_or_a_ninth(dtype):
    """Largest just above a power of two: 1 + 1/16 is halfway between 1 and 1 + 1/8. Without subnormals."""
    x = 1 + 255 * torch.rand(100, 100, generator=seeded()).to(DEVICE)
    error = ((dequantize(quantize(x, dtype)) - x) / x).abs().max()
    at_most = 1 / (2 ** (MANTISSA_BITS[dtype] + 1) + 1)
    assert 0.95 * at_most < error <= at_most * (1 + 1e-6)


@formats
@blocks
def test_the_largest_of_each_block_uses_the_range(dtype, block):
    """Of each block, by itself: the largest value is the format's largest; with powers of two, above half of it."""
    x = uneven(130, 260)
    found = quantize(x, dtype, block)
    ones = Quantized(found.values, torch.ones_like(found.scale), block)
    largest = block_amax(dequantize(ones), block)
    assert (largest == LARGEST[dtype]).all()
    coarse = quantize(x, dtype, block, power_of_two=True)
    largest = block_amax(coarse.values.float(), block)
    assert (largest <= LARGEST[dtype]).all() and (largest >= LARGEST[dtype] / 2).all()
    rows, columns = (whole if size == FULL else size for size, whole in zip(block, x.shape, strict=True))
    for i in range(found.scale.shape[0]):
        for j in range(0, found.scale.shape[1], 17):
            of_block = x[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            torch.testing.assert_close(found.scale[i, j], of_block.abs().max() / LARGEST[dtype], rtol=1e-6, atol=0)


def test_smaller_blocks_suffer_less_from_an_outlier():
    x = torch.randn(256, 256, generator=seeded()).to(DEVICE)
    x[3, 5] = 1e6
    far = torch.ones_like(x, dtype=torch.bool)
    far[:128, :128] = False
    errors = {
        block: ((dequantize(quantize(x, block=block)) - x)[far] / x[far]).abs().median().item() for block in BLOCKS
    }
    assert errors[TENSOR] == 1, "all others become 0"
    assert errors[SQUARE] < 0.05 and errors[TILE] < 0.05
    per_row = quantize(x, block=ROW)
    assert (per_row.values[3] == 0).sum() > 200 and (per_row.values[4] == 0).sum() == 0


# Scales that are powers of two.


@formats
def test_the_power_is_the_next_one_above_for_every_exponent(dtype):
    exponents = torch.arange(-149, 128, dtype=torch.float64)
    factors = torch.tensor([1, 1 + 2**-23, 1.25, 1.75, 1.75 + 2**-23, 2 - 2**-23], dtype=torch.float64)
    amax = (2 ** exponents[:, None] * factors).float().to(DEVICE)
    amax = torch.where(amax.isfinite() & (amax > 0), amax, 1.0)
    scale = scale_of(amax, dtype, power_of_two=True)
    mantissa, exponent = torch.frexp(scale)
    assert (mantissa == 0.5).all() and scale.min() == SMALLEST_SCALE
    exact = amax.double() / LARGEST[dtype]
    assert (scale.double() >= exact).all()
    free = scale > SMALLEST_SCALE
    assert (scale.double() / 2 < exact)[free].all(), "half of it would be too small"


@formats
@blocks
def test_with_powers_of_two_quantizing_again_changes_nothing(dtype, block):
    for seed, shape in enumerate(SHAPES):
        once = dequantize(quantize(uneven(*shape, seed=seed), dtype, block, power_of_two=True))
        twice = dequantize(quantize(once, dtype, block, power_of_two=True))
        torch.testing.assert_close(once, twice, rtol=0, atol=0)


def test_blocks_turned_round_cost_nothing_but_the_smallest_numbers():
    """Tiles along rows quantized again along columns (DeepSeek-V3 2024, §3.3.3): exact but for subnormals, with powers
    of two; with other scales each number is rounded again.
    """
    x = uneven(256, 256)
    for power_of_two in (True, False):
        along = dequantize(quantize(x, E4M3, TILE, power_of_two))
        across = quantize(along, E4M3, (128, 1), power_of_two)
        normal = along.abs() >= 2.0**-6 * scale_of_each(across)
        changed = (dequantize(across) != along)[normal].float().mean()
        assert normal.float().mean() > 0.5
        assert changed == 0 if power_of_two else changed > 0.5


# Numbers at the edge.


@formats
@powers
def test_zeros_have_the_scale_1(dtype, power_of_two):
    x = uneven(130, 260)
    x[:128, :128] = 0
    found = quantize(x, dtype, SQUARE, power_of_two)
    assert found.scale[0, 0] == 1 and (found.values[:128, :128].float() == 0).all()
    assert (found.scale.flatten()[1:] != 1).any()
    signs = torch.tensor([[0.0, -0.0]], device=DEVICE)
    assert torch.equal(torch.signbit(dequantize(quantize(signs, dtype))), torch.signbit(signs))


@formats
@blocks
def test_numbers_that_are_all_equal_are_exact_to_float32(dtype, block):
    for value in (1e-30, 0.1, -3.0, 1e30):
        found = quantize(torch.full((5, 9), value, device=DEVICE), dtype, block)
        torch.testing.assert_close(dequantize(found), torch.full((5, 9), value, device=DEVICE), rtol=2e-7, atol=0)
        assert (found.values.float().abs() == LARGEST[dtype]).all()


@formats
@powers
@pytest.mark.parametrize("size", TINY)
def test_tiny_blocks_stay_finite(size, dtype, power_of_two):
    """Their scale is the smallest normal number: float32's subnormals have no reciprocal."""
    x = size * torch.linspace(-1, 1, 9, device=DEVICE).view(3, 3)
    found = quantize(x, dtype, TENSOR, power_of_two)
    assert found.scale.item() == SMALLEST_SCALE and (1 / found.scale).isfinite()
    assert_rounded(x, found)


@formats
@powers
@blocks
@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_infinity_become_nan_and_harm_no_neighbour(odd, block, dtype, power_of_two):
    x = uneven(9, 11)
    x[4, 6] = 0.0
    plain = quantize(x, dtype, block, power_of_two)
    x[4, 6] = odd
    found = quantize(x, dtype, block, power_of_two)
    assert torch.equal(found.scale, plain.scale)
    others = torch.ones_like(x, dtype=torch.bool)
    others[4, 6] = False
    assert found.values.float()[4, 6].isnan() and torch.equal(
        found.values.float()[others], plain.values.float()[others]
    )
    alone = quantize(torch.full((1, 1), odd, device=DEVICE), dtype, block, power_of_two)
    assert alone.scale.item() == 1 and alone.values.float().isnan().all()


@formats
def test_what_a_given_scale_takes_past_the_range_becomes_the_largest(dtype):
    """Also where the quotient is past float32's own range."""
    most = LARGEST[dtype]
    x = torch.tensor([[most / 2, most, 1.06 * most, 2 * most, 3e38, -3e38, torch.inf]], device=DEVICE)
    expected = torch.tensor([[most / 2, most, most, most, most, -most, torch.nan]], device=DEVICE)
    for scale in (1.0, 2.0**-100, SMALLEST_SCALE):
        given = torch.full((1, 1), scale, device=DEVICE)
        scaled = torch.where(x.abs() < 1e6, x * scale, x)
        found = quantize(scaled, dtype, scale=given)
        torch.testing.assert_close(found.values.float(), expected, rtol=0, atol=0, equal_nan=True)
        assert found.scale is given


def test_a_given_scale_is_used_block_by_block():
    x = uneven(130, 260)
    own = quantize(x, E4M3, SQUARE)
    given = quantize(x, E4M3, SQUARE, scale=8 * own.scale)
    assert torch.equal(given.scale, 8 * own.scale)
    assert_rounded(x, given)


# Shapes and layouts.


@blocks
def test_how_x_lies_in_memory_changes_no_bit(block):
    x = uneven(70, 150)
    plain = quantize(x, E4M3, block)
    layouts = [x.t().contiguous().t(), torch.cat([x, x], 1)[:, 150:], x.repeat_interleave(2, 1)[:, ::2]]
    for moved in layouts:
        assert not moved.is_contiguous()
        found = quantize(moved, E4M3, block)
        assert torch.equal(found.values.view(torch.uint8), plain.values.view(torch.uint8))
        assert torch.equal(found.scale, plain.scale) and found.values.is_contiguous()


@formats
@blocks
def test_empty_matrices(dtype, block):
    """A block of the whole matrix has a scale also where the matrix is empty: delayed scaling has one to give."""
    for shape in ((0, 5), (5, 0), (0, 0)):
        found = quantize(torch.empty(shape, device=DEVICE), dtype, block)
        assert found.values.shape == shape and (found.scale == 1).all()
        counts = [1 if size == FULL else -(-whole // size) for size, whole in zip(block, shape, strict=True)]
        assert list(found.scale.shape) == counts
        assert dequantize(found).shape == shape and found.t().values.shape == shape[::-1]


@formats
@blocks
def test_transposed_it_stands_for_the_transpose(dtype, block):
    for shape in ((5, 3), (130, 260)):
        found = quantize(uneven(*shape), dtype, block)
        turned = found.t()
        assert turned.values.is_contiguous() and turned.block == block[::-1]
        assert torch.equal(dequantize(turned), dequantize(found).t())
        assert torch.equal(stands_for(turned), stands_for(found).t())
        back = turned.t()
        assert torch.equal(back.scale, found.scale) and back.block == block
        assert torch.equal(back.values.view(torch.uint8), found.values.view(torch.uint8))


def test_bytes():
    """One a number, and 4 a scale: 3% for 128 numbers."""
    x = uneven(256, 384)
    scales = {TENSOR: 1, ROW: 256, TILE: 256 * 3, SQUARE: 2 * 3}
    for block, count in scales.items():
        found = quantize(x, E4M3, block)
        assert found.nbytes == found.t().nbytes == 256 * 384 + 4 * count
        assert found.values.untyped_storage().nbytes() == 256 * 384
    assert quantize(x, E4M3, TILE).nbytes / (256 * 384) == 1 + 4 / 128


def test_x_is_left_alone_and_nothing_is_recorded_for_backward():
    x = uneven(5, 7).requires_grad_()
    before = x.detach().clone()
    found = quantize(x)
    assert not found.values.requires_grad and not found.scale.requires_grad and torch.equal(x, before)


def test_groups_take_the_largest_amax_of_each():
    """Every group is asked once, in order, about the amax of all blocks together."""
    asked = []

    def doubled(amax, operation, group):
        asked.append((tuple(amax.shape), operation, group))
        amax.mul_(2)

    x = uneven(130, 260)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "all_reduce", doubled)
        found = quantize(x, E4M3, SQUARE, groups=("rows", "columns"))
    most = torch.distributed.ReduceOp.MAX
    assert asked == [((2, 3), most, "rows"), ((2, 3), most, "columns")]
    torch.testing.assert_close(found.scale, 4 * quantize(x, E4M3, SQUARE).scale, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda x: quantize(x[0]), r"takes a matrix of floating-point numbers, not \[3\] torch.float32"),
        (lambda x: quantize(x[None]), r"not \[1, 2, 3\]"),
        (lambda x: quantize(x.int()), "not .* torch.int32"),
        (lambda x: quantize(x, torch.bfloat16), "torch.bfloat16: the 8-bit formats are torch.float8_e4m3fn, "),
        (lambda x: quantize(x, block=(0, 4)), r"block \(0, 4\): .* 1 or more, or FULL"),
        (lambda x: quantize(x, block=(1, -2)), r"block \(1, -2\)"),
        (lambda x: quantize(x, scale=torch.ones(())), r"have \(1, 1\) scales, not \[\]"),
        (lambda x: quantize(x, block=ROW, scale=torch.ones(1, 2)), r"have \(2, 1\) scales, not \[1, 2\]"),
    ],
)
def test_bad_input_gets_one_clear_line(wrong, message):
    with pytest.raises(ValueError, match=message) as raised:
        wrong(torch.ones(2, 3))
    assert "\n" not in str(raised.value)


@blocks
@powers
def test_on_fake_tensors_nothing_is_read_on_the_host(block, power_of_two):
    def run(x):
        found = quantize(x, E5M2, block, power_of_two)
        given = quantize(x, E5M2, block, scale=found.scale)
        return [*found[:2], given.values, dequantize(found, torch.bfloat16), found.t().values]

    real = run(uneven(130, 260).cpu())
    with FakeTensorMode():
        fakes = run(torch.empty(130, 260))
    metas = run(torch.empty(130, 260, device="meta"))
    for one, fake, meta in zip(real, fakes, metas, strict=True):
        assert one.shape == fake.shape == meta.shape and one.dtype == fake.dtype == meta.dtype
        assert one.stride() == fake.stride() == meta.stride()


# Against torchao.


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@formats
@powers
def test_torchaos_cast(dtype, kind, power_of_two):
    """With powers of two bit for bit. Otherwise torchao multiplies by 448 / amax, where this divides by amax / 448: as
    good, and what lies within float32's rounding of a tie may fall the other way.
    """
    pytest.importorskip("torchao.float8")
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated

    granularity = {TENSOR: ScalingGranularity.TENSORWISE, ROW: ScalingGranularity.AXISWISE}
    for block in (TENSOR, ROW):
        x = uneven(130, 260, kind)
        factor = tensor_to_scale(
            x, dtype, scaling_granularity=granularity[block], axiswise_dim=-1, round_scales_to_power_of_2=power_of_two
        )
        theirs, ours = to_fp8_saturated(x.float() * factor, dtype), quantize(x, dtype, block, power_of_two)
        torch.testing.assert_close(ours.scale.flatten(), 1 / factor.flatten(), rtol=0 if power_of_two else 2e-7, atol=0)
        differ = theirs.view(torch.uint8) != ours.values.view(torch.uint8)
        if power_of_two:
            assert not differ.any()
        exact = (x.double() / scale_of_each(ours))[differ]
        middle = (theirs.double() + ours.values.double())[differ] / 2
        torch.testing.assert_close(exact, middle, rtol=3e-7, atol=0)
