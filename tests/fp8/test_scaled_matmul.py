"""course_lib.fp8.scaled_matmul: products of 8-bit matrices are those of what the matrices stand for, on the hardware
where it has them, and a short accumulator loses what it should. CPU, or GPU.
"""

import itertools

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from course_lib.fp8 import scaled_matmul
from course_lib.fp8.casts import quantize_fused
from course_lib.fp8.linear import Fp8Linear
from course_lib.fp8.quantization import ROW, SQUARE, TENSOR, TILE, Quantized, quantize
from course_lib.fp8.recipes import by_blocks
from course_lib.fp8.scaled_matmul import (
    by_block_kernel,
    emulated_matmul,
    float32_matmul,
    fp8_matmul,
    has_scaled_mm,
    padded_to_16,
    row_scaled_matmul,
    short_sum_matmul,
    supports_row_scales,
    truncate_to,
)
from eight_bits import DEVICE, E4M3, E5M2, TENSOR_CORE, Products, any_codes, seeded, stands_for, watched

ROUNDING = 2.0**-24  # of float32, relative
OUT_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MIXES = [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)]
SHAPES = [(1, 1, 1), (3, 5, 7), (17, 33, 20), (16, 32, 48), (40, 300, 130)]  # m, k, n
scaled_here = pytest.mark.skipif(not has_scaled_mm(torch.device(DEVICE)), reason="no FP8 tensor cores here")


def of_a_sum(k: int) -> float:
    """The error bound of a sum of k exact terms and of its two scales, relative to the sum of the terms' magnitudes.

    A library chooses the order of the sum, and k - 1 roundings bound every order (Higham 2002, Accuracy and Stability
    of Numerical Algorithms, section 4.2). Tensor cores add with about 14 bits.
    """
    return (k + 1) * ROUNDING if DEVICE == "cpu" else TENSOR_CORE


def assert_product(found: torch.Tensor, a: Quantized, b: Quantized, out_dtype: torch.dtype) -> None:
    """Of float64's, within float32's rounding of a sum of k terms (by their magnitudes), and one to out_dtype."""
    left, right = stands_for(a), stands_for(b).t()
    exact, terms = left @ right, left.abs() @ right.abs()
    last_bit = torch.finfo(out_dtype).eps / 2 if out_dtype != torch.float32 else 0
    smallest = torch.finfo(out_dtype).smallest_normal * torch.finfo(out_dtype).eps
    bound = of_a_sum(left.shape[1]) * terms + last_bit * exact.abs() + smallest
    assert found.dtype == out_dtype and found.shape == exact.shape and found.is_contiguous()
    assert ((found.double() - exact).abs() <= bound).all(), (a.block, b.block, found.shape)


@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=str)
@pytest.mark.parametrize("mix", MIXES, ids=["e4m3 e4m3", "e5m2 e4m3", "e4m3 e5m2"])
def test_against_float64_for_all_scales_and_odd_shapes(mix, out_dtype):
    for m, k, n in SHAPES:
        for seed, (block_a, block_b) in enumerate(itertools.product([TENSOR, ROW, TILE, SQUARE], repeat=2)):
            a, b = any_codes(m, k, mix[0], block_a, seed), any_codes(n, k, mix[1], block_b, seed + 100)
            if out_dtype == torch.float16:  # whose range these numbers leave
                a, b = a._replace(scale=a.scale / 2**13), b._replace(scale=b.scale / 2**13)
            assert_product(fp8_matmul(a, b, out_dtype), a, b, out_dtype)


def test_of_two_e5m2_matrices():
    a, b = any_codes(17, 40, E5M2, TILE), any_codes(9, 40, E5M2, TILE, seed=1)
    assert_product(fp8_matmul(a, b), a, b, torch.float32)


def test_transposed_operands():
    """As Wgrad has them: turned round, with scales that do not lie row by row."""
    a, b = any_codes(130, 40, E4M3, (128, 1)), any_codes(130, 33, E4M3, SQUARE, seed=1)
    assert_product(fp8_matmul(a.t(), b.t()), a.t(), b.t(), torch.float32)
    c = any_codes(3, 130, E4M3, ROW)
    assert_product(fp8_matmul(c, a.t()), c, a.t(), torch.float32)


def test_nan_reaches_its_row_and_nothing_else():
    for block in (TENSOR, ROW, TILE, SQUARE):
        a, b = quantize(torch.ones(5, 40, device=DEVICE), block=block), quantize(torch.ones(4, 40, device=DEVICE))
        a.values.view(torch.uint8)[2, 39] = 0x7F
        found = fp8_matmul(a, b)
        assert found[2].isnan().all() and found.isnan().sum() == 4, block


@pytest.mark.parametrize("shape", [(0, 5, 3), (5, 0, 3), (5, 3, 0), (0, 0, 0)])
@pytest.mark.parametrize("block", [TENSOR, ROW, TILE, SQUARE], ids=str)
def test_empty_matrices(shape, block):
    m, k, n = shape
    a, b = quantize(torch.empty(m, k, device=DEVICE), block=block), quantize(torch.empty(n, k, device=DEVICE))
    found = fp8_matmul(a, b, torch.bfloat16)
    assert found.shape == (m, n) and found.dtype == torch.bfloat16 and (found == 0).all()


# Where it is computed.


@scaled_here
@pytest.mark.parametrize("blocks", list(itertools.product([TENSOR, ROW], repeat=2)), ids=str)
def test_scales_of_rows_take_the_hardwares_product(blocks):
    a, b = any_codes(33, 50, E5M2, blocks[0]), any_codes(20, 50, E4M3, blocks[1], seed=1)
    with watched(torch, "_scaled_mm") as calls, Products() as products:
        fp8_matmul(a, b, torch.bfloat16)
    assert calls.call_count == 1 and products.dtypes == [(E5M2, E4M3)], "8-bit operands, and no other product"
    left, right = calls.call_args.args[:2]
    assert left.shape == (48, 64) and right.shape == (64, 32) and right.t().is_contiguous()
    itself = blocks == (TENSOR, TENSOR) or DEVICE == "cuda"  # it applies the scales
    assert calls.call_args.kwargs["out_dtype"] == (torch.bfloat16 if itself else torch.float32)


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU has a kernel for these")
def test_scales_that_change_along_k_are_emulated_in_float64():
    for blocks in itertools.product([TENSOR, ROW, TILE, SQUARE], repeat=2):
        if not {TILE, SQUARE} & set(blocks):
            continue
        a, b = any_codes(33, 50, E4M3, blocks[0]), any_codes(20, 50, E4M3, blocks[1], seed=1)
        with Products() as products:
            fp8_matmul(a, b)
        assert products.dtypes == [(torch.float64, torch.float64)], blocks


@pytest.mark.parametrize("blocks", list(itertools.product([TENSOR, ROW], repeat=2)), ids=str)
def test_without_8_bit_tensor_cores_the_codes_are_multiplied_in_float32(blocks, monkeypatch):
    """`torch._scaled_mm` is never called on a CPU: there it may be a reference loop, 600 times slower than float32."""
    monkeypatch.setattr(scaled_matmul, "has_scaled_mm", lambda device: has_scaled_mm(torch.device("cpu")))
    a, b = any_codes(33, 50, E5M2, blocks[0]), any_codes(20, 50, E4M3, blocks[1], seed=1)
    for out_dtype in OUT_DTYPES:
        with Products() as products:
            found = fp8_matmul(a, b, out_dtype)
        (left, right), (codes_a, codes_b) = products.operands[0], (a.values.float(), b.values.float())
        assert len(products.operands) == 1 and left.dtype == right.dtype == torch.float32
        assert torch.equal(left, codes_a) and torch.equal(right, codes_b.t())
        if out_dtype != torch.float16:  # whose range these numbers leave
            assert_product(found, a, b, out_dtype)


@pytest.mark.parametrize("block", [TENSOR, ROW, TILE], ids=str)
def test_autocast_changes_no_bit(block):
    """On a CPU the codes are multiplied in float32: autocast would make that bf16."""
    a, b = any_codes(33, 50, E4M3, block), any_codes(20, 50, E4M3, block, seed=1)
    for out_dtype in OUT_DTYPES[:2]:
        plain = fp8_matmul(a, b, out_dtype)
        with torch.autocast(DEVICE, torch.bfloat16):
            assert torch.equal(fp8_matmul(a, b, out_dtype), plain)


@pytest.mark.parametrize(("capability", "able"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)])
def test_which_gpus_have_it(capability, able, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert has_scaled_mm(torch.device("cuda")) == able
    assert not has_scaled_mm(torch.device("cpu")) and not has_scaled_mm(torch.device("meta"))


GPUS_AND_KERNELS = [
    ((8, 9), "13.0", "block_matmul"), ((9, 0), "13.0", "block_scaled_matmul"), ((9, 0), "12.8", "hopper_block_matmul"),
    ((12, 0), "13.0", "block_matmul"),
]  # fmt: skip


@pytest.mark.parametrize(("capability", "cuda", "kernel"), GPUS_AND_KERNELS)
@pytest.mark.parametrize("out_dtype", [*OUT_DTYPES, torch.float64], ids=str)
def test_blocks_go_to_the_kernel_that_is_made_for_the_gpu(capability, cuda, kernel, out_dtype, monkeypatch):
    """Here tensors that only say that they are on one; scales of rows are `torch._scaled_mm`'s, float64 is emulated."""
    found = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    for name in ("block_matmul", "hopper_block_matmul", "emulated_matmul", "row_scaled_matmul", "block_scaled_matmul"):
        monkeypatch.setattr(scaled_matmul, name, lambda *given, name=name: found.append((name, given[2])))
    with FakeTensorMode():
        values, tiles, rows = (torch.ones(n, device="cuda") for n in ((256, 256), (256, 2), (256, 1)))
        for scale, block in ((tiles, TILE), (rows, ROW)):
            operand = Quantized(values.to(E4M3), scale, block)
            fp8_matmul(operand, operand, out_dtype)
    emulated = [("emulated_matmul", out_dtype)] * 2
    expected = [(kernel, out_dtype), ("row_scaled_matmul", out_dtype)]
    assert found == (emulated if out_dtype == torch.float64 else expected)


def test_by_block_kernel_sends_all_three_products_of_a_layer_through_the_kernel(monkeypatch):
    """Before it, no layer on a CPU ever ran the kernel of exercise 14.6."""
    ran, kernel = [], scaled_matmul.block_matmul
    monkeypatch.setattr(scaled_matmul, "block_matmul", lambda *given: ran.append(given) or kernel(*given))
    layer = Fp8Linear(nn.Linear(130, 40, bias=False), by_blocks()).to(DEVICE)
    x, dy = torch.randn(20, 130, device=DEVICE, requires_grad=True), torch.randn(20, 40, device=DEVICE)

    def results() -> list[torch.Tensor]:
        y = layer(x)
        return [y, *torch.autograd.grad(y, [x, layer.weight], dy)]

    usual = results()
    chosen = len(ran)  # 0 on a CPU
    with pytest.raises(ZeroDivisionError), by_block_kernel():
        found = results()
        assert len(ran) == chosen + 3
        1 / 0
    bound = 1e-5 if DEVICE == "cpu" else 100 * TENSOR_CORE
    assert all((a - b).norm() <= bound * b.norm() for a, b in zip(found, usual, strict=True))
    results()
    assert len(ran) == 2 * chosen + 3, "the choice ends with the block"


@pytest.mark.parametrize(("rows", "k"), [(16, 128), (48, 448), (272, 1024)])
def test_scales_lie_as_cublas_reads_them(rows, k):
    """Strides as PyTorch checks them: of tiles (1, rows), of squares (1, pieces of k up to a multiple of 4)."""
    x, pieces = torch.randn(rows, k, device=DEVICE), -(-k // 128)
    for cast in (quantize, quantize_fused):
        tiles, _ = scaled_matmul.scales_for_cublas(cast(x, block=TILE))
        squares, _ = scaled_matmul.scales_for_cublas(cast(x, block=SQUARE))
        assert tiles.shape == (rows, pieces) and tiles.t().is_contiguous()
        assert squares.shape == (-(-pieces // 4) * 4, -(-rows // 128)) and squares.t().is_contiguous()
        assert torch.equal(squares[:pieces].t(), quantize(x, block=SQUARE).scale) and not squares[pieces:].any()
    turned = quantize(torch.randn(k, rows, device=DEVICE), block=SQUARE)  # its transpose: a view of its scales
    squares, _ = scaled_matmul.scales_for_cublas(Quantized(turned.values.t(), turned.scale.t(), SQUARE))
    assert squares.t().is_contiguous()


@pytest.mark.skipif(DEVICE == "cpu", reason="wants Hopper")
@pytest.mark.parametrize("blocks", [(TILE, SQUARE), (SQUARE, TILE), (TILE, TILE)])
@pytest.mark.parametrize(("m", "n", "k", "out_dtype"), [
    (16, 16, 128, torch.bfloat16), (48, 272, 448, torch.float32), (272, 48, 1040, torch.float16),
])  # fmt: skip
def test_cublas_multiplies_blocks(blocks, m, n, k, out_dtype):
    a, b = (any_codes(rows, k, E4M3, block, seed=rows) for rows, block in zip((m, n), blocks, strict=True))
    assert scaled_matmul.supports_block_scales(a, b, out_dtype)
    assert not scaled_matmul.supports_block_scales(a._replace(values=a.values.to(E5M2)), b, out_dtype)
    exact, size = stands_for(a) @ stands_for(b).t(), stands_for(a).abs() @ stands_for(b).abs().t()
    found = scaled_matmul.block_scaled_matmul(a, b, out_dtype).double()
    assert ((found - exact).abs() <= torch.finfo(out_dtype).eps * exact.abs() + TENSOR_CORE * size).all()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_padding_adds_zeros_and_copies_only_where_it_must(dtype):
    values = any_codes(17, 30, dtype, TENSOR).values
    padded = padded_to_16(values)
    assert padded.shape == (32, 32) and padded.dtype == dtype
    assert torch.equal(padded[:17, :30].view(torch.uint8), values.view(torch.uint8))
    assert padded.double().abs().sum() == values.double().abs().sum() and not padded[17:].view(torch.uint8).any()
    whole = any_codes(32, 48, dtype, TENSOR).values
    assert padded_to_16(whole) is whole


def test_emulated_and_summed_in_float32_differ_by_the_rounding_of_the_sum():
    """Relative to the sum of the terms' magnitudes: both are exact but for the sum's rounding."""
    a, b = any_codes(64, 512, E4M3, TENSOR), any_codes(64, 512, E4M3, TENSOR, seed=1)
    terms = stands_for(a).abs() @ stands_for(b).abs().t()
    multiply = row_scaled_matmul if has_scaled_mm(torch.device(DEVICE)) else float32_matmul
    apart = ((multiply(a, b, torch.float32) - emulated_matmul(a, b, torch.float32)).double().abs() / terms).max()
    assert 0 < apart <= of_a_sum(512) + ROUNDING
    exact = stands_for(a) @ stands_for(b).t()
    assert torch.equal(emulated_matmul(a, b, torch.float32), exact.float()), "the emulation is rounded once"


@pytest.mark.parametrize("blocks", [(ROW, ROW), (ROW, TENSOR), (TENSOR, ROW)])
def test_rows_are_scaled_by_the_product_itself_where_it_can(blocks, monkeypatch):
    """As on a GPU, by a stand-in for `torch._scaled_mm` that takes what cuBLAS does; odd sizes, which are padded, and
    scales that are the same for all rows.
    """

    def scaled_mm(left, right, of_rows, of_columns, out_dtype):
        (m, k), n = left.shape, right.shape[1]
        assert right.shape[0] == k and not (m % 16 or n % 16 or k % 16) and right.t().is_contiguous()
        assert of_rows.shape == (m, 1) and of_columns.shape == (1, n)
        products.append(out_dtype)
        return (left.double() @ right.double() * of_rows * of_columns).to(out_dtype)

    a, b = (
        quantize(torch.randn(rows, 75) * torch.rand(rows, 1), block=each)
        for rows, each in zip((37, 50), blocks, strict=True)
    )
    expected, products = emulated_matmul(a, b, torch.float64), []
    monkeypatch.setattr(scaled_matmul, "supports_row_scales", lambda device, dtype: dtype == torch.bfloat16)
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    found = row_scaled_matmul(a, b, torch.bfloat16)
    assert products == [torch.bfloat16], "no float32 product, no scales afterwards"
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-4)
    assert supports_row_scales(torch.device("cuda"), torch.bfloat16) and not supports_row_scales(
        torch.device("cuda"), torch.float32
    )


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ((3, 5), (4, 6), r"k is last in both and must agree: \[3, 5\] and \[4, 6\]"),
        ((3, 5), (5, 4), r"k is last in both"),
    ],
)
def test_bad_operands_get_one_clear_line(a, b, message):
    operands = [quantize(torch.ones(shape)) for shape in (a, b)]
    for product in (fp8_matmul, short_sum_matmul):
        with pytest.raises(ValueError, match=message):
            product(*operands)


def test_operands_on_two_devices():
    with pytest.raises(ValueError, match="operands on cpu and meta"):
        fp8_matmul(quantize(torch.ones(2, 3)), quantize(torch.ones(2, 3, device="meta")))


# The accumulator of few bits.


def a_row(*numbers: float) -> Quantized:
    """One row of e4m3 numbers and the scale 1."""
    return Quantized(torch.tensor([numbers], device=DEVICE).to(E4M3), torch.ones(1, 1, device=DEVICE), TENSOR)


def test_an_example_by_hand():
    """4 bits, two products at a time. The numbers are 16, 1, 1 and 3, each times 1.

    16 and 1: the largest is 1.0 x 2^4, so its 4 bits weigh 16, 8, 4 and 2. The 1 is cut: the sum is 16.
    16 (so far), 1 and 3: bits 16 to 2 again. 1 becomes 0, 3 becomes 2: the sum is 18. Right would be 21.
    With 5 bits there is a 1: 17, then 17 + 1 + 3 = 21. Promoted after two: 16, and 1 + 3 = 4 (4 bits: 2 to 1/4), 20.
    Towards zero: -3 becomes -2, not -4.
    """
    a, ones = a_row(16, 1, 1, 3), a_row(1, 1, 1, 1)
    assert short_sum_matmul(a, ones, bits=4, per_instruction=2).item() == 18
    assert short_sum_matmul(a, ones, bits=5, per_instruction=2).item() == 21
    assert short_sum_matmul(a, ones, bits=4, per_instruction=2, promote=2).item() == 20
    assert short_sum_matmul(a_row(16, 1, -1, -3), ones, bits=4, per_instruction=2).item() == 14
    assert short_sum_matmul(a_row(0, 0), a_row(1, 1), bits=4, per_instruction=2).item() == 0


def test_cut():
    values = torch.tensor([7.9, -7.9, 2.0, 1.9, 0.0], dtype=torch.float64)
    assert truncate_to(values, torch.tensor(2.0)).tolist() == [6, -6, 2, 0, 0]


def squares(k: int, rows: int = 24) -> tuple[Quantized, Quantized, torch.Tensor]:
    """Positive numbers from 0 to 1, so that sums grow, and their exact product."""
    generator = seeded(k)
    a, b = (quantize(torch.rand(rows, k, generator=generator).to(DEVICE)) for _ in range(2))
    return a, b, stands_for(a) @ stands_for(b).t()


def largest_error(k: int, **how) -> float:
    a, b, exact = squares(k)
    return ((short_sum_matmul(a, b, **how).double() - exact).abs() / exact).max().item()


def test_more_bits_are_better_and_24_are_as_good_as_float32():
    errors = [largest_error(1024, bits=bits) for bits in (10, 14, 18, 24)]
    assert errors == sorted(errors, reverse=True) and errors[0] > 100 * errors[2]
    assert errors[-1] <= 64 * ROUNDING
    assert largest_error(1024, bits=40) <= 2 * ROUNDING


def test_14_bits_lose_more_the_longer_the_sum_and_promotion_bounds_it():
    """DeepSeek-V3 (2024, §3.3.2) names some 2% at k = 4096, and promotion every 128 numbers."""
    short, long = largest_error(256), largest_error(4096)
    assert long > 4 * short and 0.02 < long < 0.2, "all terms are positive here, and all are cut downwards"
    promoted = [largest_error(k, promote=128) for k in (256, 4096)]
    assert max(promoted) < 1.5 * largest_error(128) and promoted[1] < long / 8


def test_short_sums_with_scales_of_rows_and_ragged_k():
    a, b = any_codes(5, 70, E4M3, ROW), any_codes(3, 70, E4M3, TENSOR, seed=1)
    found, exact = short_sum_matmul(a, b, bits=40), stands_for(a) @ stands_for(b).t()
    assert found.dtype == torch.float32 and found.shape == (5, 3)
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-6)


def test_short_sums_take_no_scales_that_change_along_k():
    for block in (TILE, SQUARE):
        a, b = any_codes(3, 256, E4M3, block), any_codes(2, 256, E4M3, TENSOR)
        with pytest.raises(ValueError, match=r"short sums are for scales that hold for all of k, not for blocks of"):
            short_sum_matmul(a, b)
    with pytest.raises(ValueError, match="promote after 48 elements: an instruction adds 32 of them"):
        short_sum_matmul(a_row(1, 2), a_row(1, 2), promote=48)
