"""course_lib.kernels.rounding: `widen`, `cast` and `dot` are right in Triton's interpreter, to the bit, which alone is
wrong. Triton's interpreter and its compiler, on the CPU.
"""

import pytest
import torch
import triton
import triton.language as tl

from compiled_once import compile_launches
from course_kit.gpu.launches import Launch
from course_lib.kernels.rounding import cast, dot, widen

interpreted_only = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="what the interpreter does")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CODES = torch.arange(2**16, dtype=torch.int32).to(torch.int16)  # every pattern of 16 bits
BLOCK = 2**13


@triton.jit
def widen_kernel(x, out, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, widen(tl.load(x + i)))


@triton.jit
def cast_kernel(x, out, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, cast(tl.load(x + i), out.dtype.element_ty))


@triton.jit
def plain_cast_kernel(x, out, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i).to(out.dtype.element_ty))


@triton.jit
def dot_kernel(a, b, total, OURS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    row, column, inner = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, K)
    left, right = tl.load(a + row * K + inner[None, :]), tl.load(b + inner[:, None] * N + column)
    ours = tl.load(total + row * N + column)
    if OURS:
        ours = dot(left, right, ours)
    else:
        ours = tl.dot(left, right, ours)
    tl.store(total + row * N + column, ours)


def run(kernel, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(x.numel(), dtype=dtype, device=DEVICE)
    kernel[(x.numel() // BLOCK,)](x.to(DEVICE), out, BLOCK=BLOCK)
    return out.cpu()


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Of one dtype, bit by bit; NaNs count as one, for they have many codes."""
    integer = {2: torch.int16, 4: torch.int32}[found.element_size()]
    return (found.view(integer) == expected.view(integer)) | (found.isnan() & expected.isnan())


def float32_round_every_boundary() -> torch.Tensor:
    """Every upper half of a float32's bits (every bfloat16) with lower halves below, at and above the middle."""
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    bits = (CODES.to(torch.int32) << 16) | lower[:, None]
    return bits.reshape(-1).view(torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_widen_is_exact_for_every_code(dtype):
    x = CODES.view(dtype)
    assert same_bits(run(widen_kernel, x, torch.float32), x.float()).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # NumPy's, of float16
def test_cast_rounds_as_pytorch_round_every_boundary(dtype):
    """Ties to even, to infinity, among subnormals; a NaN with any bits stays one."""
    x = float32_round_every_boundary()
    found, expected = run(cast_kernel, x, dtype), x.to(dtype)
    assert torch.equal(found.isnan(), x.isnan())
    right = same_bits(found, expected)
    assert right.all(), (x[~right][:5], found[~right][:5])


@interpreted_only
def test_the_interpreters_own_cast_is_still_wrong():
    """The day that this fails, Triton rounds by itself, and the detour by bits may go."""
    x = float32_round_every_boundary()
    right = same_bits(run(plain_cast_kernel, x, torch.bfloat16), x.bfloat16())
    normal = x.isfinite() & (x.abs() >= torch.finfo(torch.float32).tiny)
    assert not right[normal].all() and not right[x != 0].all()
    codes = CODES.view(torch.bfloat16)
    subnormal = (codes != 0) & (codes.abs() < torch.finfo(torch.bfloat16).tiny)
    assert not same_bits(run(plain_cast_kernel, codes, torch.float32), codes.float())[subnormal].all()


def product(ours: bool, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """1 + a @ b by a kernel, and in float64."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in ((32, 64), (64, 16)))
    total = torch.ones(32, 16, device=DEVICE)
    dot_kernel[(1,)](a, b, total, OURS=ours, M=32, N=16, K=64)
    return total.cpu().double(), 1 + a.cpu().double() @ b.cpu().double()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dot_sums_in_float32(dtype):
    found, exact = product(True, dtype)
    assert (found - exact).abs().max() < 1e-5 * exact.abs().max()


@interpreted_only
def test_the_interpreters_own_dot_of_bfloat16_is_still_wrong():
    """As above: it multiplies the integers that the bits are."""
    found, exact = product(False, torch.bfloat16)
    assert not (found - exact).abs().max() < exact.abs().max()


@interpreted_only
def test_a_gpu_never_sees_the_detour():
    """Compiled, they are one conversion and one product; float32 is not cut to TF32, which a plain tl.dot does."""
    half, single = torch.zeros(BLOCK, dtype=torch.bfloat16), torch.zeros(BLOCK)
    sizes = {"M": 64, "N": 64, "K": 32}
    cast_made, widen_made, half_dot, single_dot, plain_dot = compile_launches(
        [
            Launch(cast_kernel, (1,), (single, half), {"BLOCK": 1024}),
            Launch(widen_kernel, (1,), (half, single), {"BLOCK": 1024}),
            Launch(dot_kernel, (1,), (half, half, single), {"OURS": True, **sizes}),
            Launch(dot_kernel, (1,), (single, single, single), {"OURS": True, **sizes}),
            Launch(dot_kernel, (1,), (single, single, single), {"OURS": False, **sizes}),
        ]
    )
    assert "cvt.rn.bf16" in cast_made.ptx and "32767" not in cast_made.ptx
    assert "where" not in cast_made.ttgir and "arith.shli" not in widen_made.ttgir
    assert "mma" in half_dot.ptx and "arith.extf" not in half_dot.ttgir
    assert "tf32" not in single_dot.ptx and "tf32" in plain_dot.ptx
