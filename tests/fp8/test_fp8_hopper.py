"""course_lib.fp8.hopper: the product of matrices with scales of blocks, against float64's of what they stand for.
Triton's interpreter, or a GPU with FP8 (there within what tensor cores with some 14 bits make of 128 numbers).
"""

from collections import Counter
from unittest import mock

import numpy as np
import pytest
import torch
import triton
from triton.runtime.interpreter import InterpreterBuilder

from course_kit.checks.guard_bands import GuardBands, guarded
from course_kit.gpu.launches import record_launches
from course_lib.fp8.hopper import (
    HOPPER_BLOCK_CONFIGURATIONS,
    hopper_block_matmul,
    hopper_block_matmul_kernel,
    hopper_block_matmul_op,
)
from course_lib.fp8.quantization import SQUARE, TENSOR, TILE, Quantized, dequantize, quantize
from eight_bits import TENSOR_CORE

interpreted_only = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="counts in Triton's interpreter")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
OF_A_SUM = 2e-7 if DEVICE == "cpu" else TENSOR_CORE  # relative to the sum of magnitudes


def operand(rows: int, k: int, block: tuple[int, int], dtype: torch.dtype = E4M3, seed: int = 0) -> Quantized:
    """Random, with scales that differ a thousandfold from block to block."""
    generator = torch.Generator().manual_seed(1000 * seed + rows + k)
    x = torch.randn(rows, k, generator=generator)
    heights, pieces = torch.arange(rows) // max(block[0], 1), torch.arange(k) // block[1]
    x *= 2.0 ** ((7 * heights[:, None] + 5 * pieces) % 11)
    return quantize(x.to(DEVICE), dtype, block)


def assert_product(a: Quantized, b: Quantized, found: torch.Tensor) -> None:
    """Within float32's rounding of its sums, and one rounding to its own type."""
    left, right = dequantize(a, torch.float64), dequantize(b, torch.float64)
    exact, size = left @ right.t(), left.abs() @ right.abs().t()
    assert found.shape == exact.shape and found.is_contiguous()
    rounding = 0 if found.dtype == torch.float32 else torch.finfo(found.dtype).eps / 2 * exact.abs()
    assert ((found.double() - exact).abs() <= rounding + OF_A_SUM * size).all()


FORMS = {
    "forward": (TILE, SQUARE),
    "weight gradient": (TILE, TILE),
    "turned": (SQUARE, TILE),
    "squares": (SQUARE, SQUARE),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("m, n, k", [(1, 1, 1), (130, 70, 300), (64, 200, 128)])
def test_products_of_any_size(m, n, k, form):
    a, b = operand(m, k, FORMS[form][0]), operand(n, k, FORMS[form][1], seed=1)
    found = hopper_block_matmul(a, b)
    assert found.dtype == torch.float32
    assert_product(a, b, found)


@pytest.mark.parametrize(
    "blocks", [((1, 32), (1, 32)), ((32, 32), (-1, 32)), ((64, 64), (1, 64)), ((256, 128), (96, 128))]
)
def test_other_blocks(blocks):
    """Pieces of 32 and 64; scales for fewer rows than a tile has, for more, and for all."""
    a, b = operand(140, 200, blocks[0]), operand(150, 200, blocks[1], seed=1)
    assert_product(a, b, hopper_block_matmul(a, b))


@pytest.mark.parametrize("left", [E4M3, E5M2])
@pytest.mark.parametrize("right", [E4M3, E5M2])
@pytest.mark.parametrize("out", [torch.bfloat16, torch.float16])
def test_any_mix_of_formats(left, right, out):
    a, b = operand(33, 160, TILE, left), operand(40, 160, SQUARE, right, seed=1)
    a = a._replace(scale=a.scale / 1000)  # float16 has no more than 65,504
    found = hopper_block_matmul(a, b, out)
    assert found.dtype == out
    assert_product(a, b, found)


@pytest.mark.parametrize("number", range(len(HOPPER_BLOCK_CONFIGURATIONS)))
def test_each_configuration_by_itself(number):
    """An autotuner takes the fastest: on a GPU this is where one that is wrong would show."""
    meta = HOPPER_BLOCK_CONFIGURATIONS[number].all_kwargs()
    for block_a, block_b in ((TILE, SQUARE), (TILE, TILE)):
        a, b, out = operand(200, 272, block_a), operand(136, 272, block_b, seed=1), torch.empty(200, 136, device=DEVICE)
        if DEVICE == "cuda":
            hopper_block_matmul(a, b)  # sets the allocator
        grid = (triton.cdiv(200, meta["block_m"]) * triton.cdiv(136, meta["block_n"]),)
        hopper_block_matmul_kernel[grid](
            a.values, b.values, out, a.scale, b.scale, 200, 136, 272, 272, 272, *a.scale.stride(), *b.scale.stride(),
            block_a[0], block_b[0], 128, **meta,
        )  # fmt: skip
        assert_product(a, b, out)


def test_small_integers_are_exact():
    """Also in 14 bits: sums of 128 products stay below 2^13, and the scales are powers of two."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-4, 5, (rows, 384), generator=generator).float().to(DEVICE) for rows in (70, 130))
    scales = {rows: 2.0 ** torch.arange(3 * rows, device=DEVICE).reshape(rows, 3).remainder(3) for rows in (70, 2)}
    left = Quantized(a.to(E4M3), scales[70], TILE)
    right = Quantized(b.to(E5M2), scales[2], SQUARE)
    exact = dequantize(left, torch.float64) @ dequantize(right, torch.float64).t()
    assert torch.equal(hopper_block_matmul(left, right).double(), exact)


def test_one_number_that_is_none_spoils_its_row_or_column_and_no_more():
    a, b = torch.randn(2, 150, 200, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    a[3, 5], b[130, 199] = float("nan"), float("inf")
    spoilt = hopper_block_matmul(quantize(a, E4M3, TILE), quantize(b, E4M3, SQUARE)).isnan()
    expected = torch.zeros(150, 150, dtype=torch.bool, device=DEVICE)
    expected[3], expected[:, 130] = True, True
    assert torch.equal(spoilt, expected)


def test_rows_that_tma_cannot_read_are_copied_first():
    """k that 16 doesn't divide, gaps of such lengths, columns side by side, an address in between."""
    full, b = operand(40, 272, TILE), operand(24, 256, SQUARE, seed=1)
    cut = full.values[:, :256]
    shifted = torch.empty(40 * 256 + 1, dtype=torch.uint8, device=DEVICE)[1:].view(E4M3).view(40, 256)
    shifted.copy_(cut)
    for values in (cut, full.values[:, 1:257], shifted, cut.t().contiguous().t(), cut[:1].expand(40, 256)):
        a = Quantized(values, full.scale[:, :2], TILE)
        assert_product(a, b, hopper_block_matmul(a, b))
    a, b = operand(5, 131, TILE), operand(6, 131, SQUARE, seed=1)
    assert_product(a, b, hopper_block_matmul(a, b))


@pytest.mark.parametrize("block", [TILE, SQUARE])
def test_nothing_outside_is_read_or_written(block):
    """What a stray load would bring is NaN. PyTorch does none of the work, and no float32 copy of 8 bits is made."""
    a, b = operand(67, 144, TILE), operand(70, 144, block, seed=1)
    bands = [Quantized(guarded(x.values), guarded(x.scale), x.block) for x in (a, b)]
    with GuardBands() as guards, record_launches() as launches:
        found = hopper_block_matmul(*bands)
    guards.check()
    assert guards.operations == [] and [launch.name for launch in launches] == ["hopper_block_matmul_kernel"]
    assert guards.largest_bytes == found.nbytes
    assert_product(a, b, found)


@interpreted_only
def test_bytes_loaded():
    """Every tile of out loads its rows of a and of b, 1 byte a number, and the scales of each piece of k."""
    m, n, k = 200, 300, 272
    a, b = operand(m, k, TILE), operand(n, k, SQUARE, seed=1)
    load, moved = InterpreterBuilder.create_masked_load, Counter()

    def counted(self, pointers, mask, *rest, **options):
        element = pointers.get_element_ty()
        moved[str(element)] += int(np.sum(mask.data)) * element.primitive_bitwidth // 8
        return load(self, pointers, mask, *rest, **options)

    with mock.patch.object(InterpreterBuilder, "create_masked_load", counted):
        hopper_block_matmul(a, b)
    tiles_m, tiles_n, pieces = 2, 3, 3
    scales = pieces * (tiles_n * m + tiles_m * tiles_n)  # one a row; one a tile of out for a square
    assert moved == {"fp8e4nv": tiles_n * m * k + tiles_m * n * k, "fp32": 4 * scales}


def test_no_elements():
    """An empty result launches nothing; a sum of no terms is 0."""
    with record_launches() as launches:
        for m, n, k in ((0, 4, 5), (4, 0, 5), (3, 2, 0)):
            a, b = (quantize(torch.zeros(rows, k, device=DEVICE), E4M3, TILE) for rows in (m, n))
            assert torch.equal(hopper_block_matmul(a, b), torch.zeros(m, n, device=DEVICE))
    assert not launches


def ones(k: int, block: tuple[int, int]) -> Quantized:
    return quantize(torch.ones(2, k), block=block)


@pytest.mark.parametrize(
    "a, b, out, words",
    [
        (ones(3, TILE), ones(4, TILE), torch.float32, "not .2, 3. cpu"),
        (ones(3, TENSOR), ones(3, TILE), torch.float32, "scales of .-1, -1. and .1, 128.: both must change"),
        (ones(3, TILE), ones(3, (1, 64)), torch.float32, "scales of .1, 128. and .1, 64.: both must change"),
        (ones(3, TILE), ones(3, TILE), E4M3, "for torch.float8_e4m3fn"),
        (Quantized(torch.ones(2, 3), torch.ones(2, 1), TILE), ones(3, TILE), torch.float32, "values are torch.float32"),
        (ones(3, TILE)._replace(scale=torch.ones(1, 1)), ones(3, TILE), torch.float32, "have .2, 1. scales"),
    ],
)
def test_bad_input_is_one_line(a, b, out, words):
    with pytest.raises(ValueError, match=words) as raised:
        hopper_block_matmul(a, b, out)
    assert "\n" not in str(raised.value)


def test_fake_results_have_the_real_ones_shape_and_type():
    """Not all of opcheck: it adds 8-bit floats up, which PyTorch can't."""
    a, b = operand(5, 144, TILE), operand(6, 144, SQUARE, seed=1)
    args = a.values, b.values, a.scale, b.scale, 1, 128, 128, torch.bfloat16, True
    torch.library.opcheck(hopper_block_matmul_op, args, test_utils=("test_faketensor", "test_autograd_registration"))


def test_without_groups_of_warps_the_same_product():
    """As fp8_matmul asks for it: only configurations in which all warps do the same are tried."""
    a, b = operand(40, 300, TILE), operand(50, 300, SQUARE, seed=1)
    with record_launches() as launches:
        found = hopper_block_matmul(a, b, specialized=False)
    assert [launch.meta["specialized"] for launch in launches] == [False]
    torch.testing.assert_close(found, hopper_block_matmul(a, b), rtol=1e-5, atol=1e-4)
    assert {each.kwargs["specialized"] for each in HOPPER_BLOCK_CONFIGURATIONS} == {True, False}
