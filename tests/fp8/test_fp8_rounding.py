"""course_lib.fp8.rounding: casts to and from 8 bits, and their product, are right in Triton's interpreter, to the bit.
Triton's interpreter and its compiler, on the CPU, or a GPU with FP8.
"""

import pytest
import torch
import triton
import triton.language as tl

from compiled_once import compile_launches
from course_kit.gpu.launches import Launch
from course_lib.fp8.rounding import cast_fp8, dot_fp8, widen_fp8

interpreted_only = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="what the interpreter does")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ADA = DEVICE == "cuda" and torch.cuda.get_device_capability() == (8, 9)
FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2]
BLOCK = 1024


@triton.jit
def widen_fp8_kernel(x, out, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, widen_fp8(tl.load(x + i)))


@triton.jit
def plain_cast_kernel(x, out, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i).to(out.dtype.element_ty))


@triton.jit
def cast_fp8_kernel(x, out, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, cast_fp8(tl.load(x + i), out.dtype.element_ty))


@triton.jit
def product_kernel(a, b, out, OURS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    row, column, inner = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, K)
    left, right = tl.load(a + row * K + inner[None, :]), tl.load(b + inner[:, None] * N + column)
    total = tl.load(out + row * N + column)
    total = dot_fp8(left, right, total) if OURS else tl.dot(left, right, total)
    tl.store(out + row * N + column, total)


def run(kernel, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    padded = torch.nn.functional.pad(x.view(torch.uint8) if x.itemsize == 1 else x, (0, -x.numel() % BLOCK))
    out = torch.empty(padded.numel(), dtype=dtype, device=DEVICE)
    kernel[(padded.numel() // BLOCK,)](padded.view(x.dtype).to(DEVICE), out, BLOCK=BLOCK)
    return out[: x.numel()].cpu()


def codes(dtype: torch.dtype) -> torch.Tensor:
    """All 256 of them."""
    return torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)


def boundaries(dtype: torch.dtype) -> torch.Tensor:
    """Every number of the format, every number in the middle of two, the first beyond the largest that the format
    would have, infinities and NaN: each with the float32 below and above it.
    """
    numbers = codes(dtype).float()
    numbers = numbers[numbers.isfinite()].sort().values
    beyond = torch.finfo(dtype).max * torch.tensor([1.03, 1.0625, 1.07, 1.125, 1.2, 2, 1e30, float("inf")])
    exact = torch.cat([numbers, (numbers[1:] + numbers[:-1]) / 2, beyond, -beyond, torch.tensor([float("nan"), 1e-45])])
    infinity = torch.tensor(float("inf"))
    return torch.cat([exact, exact.nextafter(infinity), exact.nextafter(-infinity)])


def saturated(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What the hardware makes of it, by PyTorch."""
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)


def same_code(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Code by code; NaNs count as one."""
    both_nan = found.float().isnan() & expected.float().isnan()
    return (found.view(torch.uint8) == expected.view(torch.uint8)) | both_nan


@pytest.mark.parametrize("dtype", FORMATS)
def test_widen_is_exact_for_every_code(dtype):
    found, expected = run(widen_fp8_kernel, codes(dtype), torch.float32), codes(dtype).float()
    assert ((found.view(torch.int32) == expected.view(torch.int32)) | (found.isnan() & expected.isnan())).all()


@pytest.mark.skipif(ADA, reason="Triton casts by way of float16 there")
@pytest.mark.parametrize("dtype", FORMATS)
def test_cast_rounds_as_pytorch_at_every_boundary(dtype):
    """Ties to even, among subnormals too; the largest for what is larger; NaN stays NaN."""
    x = boundaries(dtype)
    found, expected = run(cast_fp8_kernel, x, dtype), saturated(x, dtype)
    right = same_code(found, expected)
    assert right.all(), (x[~right][:5], found[~right][:5], expected[~right][:5])
    assert torch.equal(found.float().isnan(), x.isnan())


@pytest.mark.skipif(ADA, reason="Triton casts by way of float16 there")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy's, of NaN
@pytest.mark.parametrize("dtype", FORMATS)
def test_cast_of_many_numbers(dtype):
    """Of all exponents, with random mantissas."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-(2**31), 2**31, (2**16,), generator=generator).to(torch.int32).view(torch.float32)
    assert same_code(run(cast_fp8_kernel, x, dtype), saturated(x, dtype)).all()


def product(ours: bool, left: torch.dtype, right: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """1 + a @ b of finite codes, by a kernel, and in float64."""
    a, b = (codes(dtype).reshape(8, 32).repeat(2, 1) for dtype in (left, right))
    a, b = (torch.where(x.float().isfinite(), x.float(), 1.0) for x in (a, b))
    a, b = a.to(left), b.t().contiguous().to(right)
    out = torch.ones(16, 16, device=DEVICE)
    product_kernel[(1,)](a.to(DEVICE), b.to(DEVICE), out, OURS=ours, M=16, N=16, K=32)
    return out.cpu().double(), 1 + a.double() @ b.double()


@pytest.mark.parametrize("left", FORMATS)
@pytest.mark.parametrize("right", FORMATS)
def test_the_product_of_any_mix_of_formats(left, right):
    """The H100's own accumulator has some 14 bits."""
    found, exact = product(True, left, right)
    assert (found - exact).abs().max() < (1e-6 if DEVICE == "cpu" else 1e-3) * exact.abs().max()


@interpreted_only
@pytest.mark.parametrize("dtype", FORMATS)
def test_the_interpreters_own_casts_are_still_wrong(dtype):
    """The day that this fails, Triton rounds by itself, and the detour by bits may go."""
    x = boundaries(dtype)
    inside = x.abs() < torch.finfo(dtype).max
    assert not same_code(run(plain_cast_kernel, x, dtype), saturated(x, dtype))[inside].all()
    found, expected = run(plain_cast_kernel, codes(dtype), torch.float32), codes(dtype).float()
    assert not torch.equal(found.isfinite(), expected.isfinite())


@interpreted_only
def test_the_interpreters_own_product_is_still_wrong():
    """It makes float16 of e5m2, and loses the smallest of them."""
    small = torch.full((16, 32), 2.0**-16).to(torch.float8_e5m2)
    large = torch.full((32, 16), 2.0**14).to(torch.float8_e5m2)
    out = torch.zeros(2, 16, 16)
    for ours in (False, True):
        product_kernel[(1,)](small, large, out[int(ours)], OURS=ours, M=16, N=16, K=32)
    assert (out[0] == 0).all() and (out[1] == 8).all()


def compiled(capability: int):
    """Casts to e4m3 and e5m2, from e4m3 and e5m2, and a product of both."""
    single = torch.zeros(BLOCK)
    eight = {dtype: torch.zeros(BLOCK, dtype=dtype) for dtype in FORMATS}
    launches = [Launch(cast_fp8_kernel, (1,), (single, eight[dtype]), {"BLOCK": BLOCK}) for dtype in FORMATS]
    launches += [Launch(widen_fp8_kernel, (1,), (eight[dtype], single), {"BLOCK": BLOCK}) for dtype in FORMATS]
    sizes = {"OURS": True, "M": 64, "N": 64, "K": 32}
    launches.append(Launch(product_kernel, (1,), (*eight.values(), single), sizes))
    return compile_launches(launches, capability)


@interpreted_only
def test_a_gpu_never_sees_the_detour():
    """Compiled for Hopper, they are one instruction for two numbers, which saturates, and a product on tensor cores."""
    *casts, dot = compiled(90)
    words = ("cvt.rn.satfinite.e4m3x2.f32", "cvt.rn.satfinite.e5m2x2.f32", "f16x2.e4m3x2", "f16x2.e5m2x2")
    for made, word in zip(casts, words, strict=True):
        assert word in made.ptx, word
        assert "arith.cmp" not in made.ttgir and "arith.select" not in made.ttgir
    assert "wgmma" in dot.ptx and "e4m3.e5m2" in dot.ptx


@interpreted_only
def test_ada_casts_by_way_of_a_float16_that_is_cut_off():
    """So there what lies less than a float16's last bit beyond a tie falls as the tie: the one known difference."""
    *casts, dot = compiled(89)
    assert all("cvt.rz.f16.f32" in made.ptx and "cvt.rn.satfinite" in made.ptx for made in casts[:2])
    assert "mma.sync" in dot.ptx and "e4m3.e5m2" in dot.ptx
