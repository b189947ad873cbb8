"""The ELU kernel is F.elu, with its gradient and its precision near zero, in one launch each way. In Triton's
interpreter on the CPU, or on a GPU where there is one; what the compiler makes of it needs neither.
"""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from compiled_once import compile_launches
from course_kit.checks.guard_bands import GuardBands, guarded
from course_kit.gpu.launches import record_launches
from course_lib.kernels.elu import BLOCK, DTYPES, elu, elu_backward, elu_forward

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPECIAL = [0.0, -0.0, 1e-30, -1e-30, 90.0, -90.0, 1e30, -1e30, float("inf"), -float("inf"), float("nan")]


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (3 * torch.randn(shape, generator=generator)).to(DEVICE, dtype)


def both_ways(function, x: torch.Tensor, grad: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """Output and gradient of x with alpha 0.7, computed in `dtype`, in float64."""
    x = x.detach().to(dtype).requires_grad_()
    out = function(x, 0.7)
    out.backward(grad.to(dtype))
    return [out.detach().double(), x.grad.double()]


@pytest.mark.parametrize("shape", [(1,), (7,), (BLOCK,), (3, 5, 70), (2, BLOCK + 1)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_error_is_hardly_larger_than_pytorchs(shape, dtype):
    x, grad = numbers(2, *shape, dtype=dtype)
    exact = both_ways(F.elu, x, grad, torch.float64)
    ours, theirs = both_ways(elu, x, grad, dtype), both_ways(F.elu, x, grad, dtype)
    off = 2**-21 + (2**-23 * x.double().abs() if DEVICE == "cuda" else 0)  # its exp rounds x log2(e) first
    for found, other, right in zip(ours, theirs, exact, strict=True):
        error, other_error = (found - right).abs(), (other - right).abs()
        if dtype == torch.float32:
            assert (error <= off * right.abs()).all()
        else:  # rounded once, from float32: no number of this dtype is nearer
            assert (error <= other_error + off * right.abs()).all()


def test_near_zero_no_digit_is_lost():
    """From -1e-38 to -87, 60 of each power of ten: within 2 units of the last place everywhere, as F.elu is."""
    x = -torch.logspace(-37, 1.9, 2300, device=DEVICE)
    exact = torch.expm1(x.double())
    error = ((elu(x).double() - exact) / exact).abs()
    assert error.max() <= 2**-22
    assert ((torch.exp(x) - 1).double() / exact - 1).abs().max() > 0.9  # what the subtraction makes of the same numbers


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("alpha", [1.0, 0.3, -2.0, 0.0])
def test_special_numbers_are_as_pytorchs(dtype, alpha):
    x = torch.tensor(SPECIAL, device=DEVICE, dtype=dtype)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    found, expected = elu(ours, alpha), F.elu(theirs, alpha)
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert found.isnan().equal(expected.isnan())
    if alpha >= 0 or DEVICE == "cpu":  # CUDA's F.elu multiplies 0 by alpha
        assert found.signbit()[:2].equal(expected.signbit()[:2])
    found.backward(torch.ones_like(found))
    expected.backward(torch.ones_like(expected))
    torch.testing.assert_close(ours.grad, theirs.grad, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 7, BLOCK - 1, BLOCK, BLOCK + 1])
def test_nothing_outside_is_read_or_written_and_only_kernels_compute(n, dtype):
    x, grad = (guarded(numbers(n, dtype=dtype)) for _ in range(2))
    with GuardBands() as bands, record_launches() as launches:
        out = elu_forward(x, 1.0)
        grad_x = elu_backward(grad, x, 1.0)
    bands.check()
    assert bands.operations == []
    assert [(launch.name, launch.grid) for launch in launches] == [
        ("elu_kernel", (-(-n // BLOCK),)),
        ("elu_backward_kernel", (-(-n // BLOCK),)),
    ]
    assert out.isfinite().all() and grad_x.isfinite().all()


@pytest.mark.parametrize(
    "view", [lambda x: x.t(), lambda x: x[:, ::2], lambda x: x[1:], lambda x: x[:, :1].expand(-1, 9)]
)
def test_strides(view):
    x = view(numbers(6, 10)).detach().requires_grad_()
    grad = torch.ones((), device=DEVICE).expand(x.shape)  # what sum() sends back: every stride is 0
    elu(x).backward(grad)
    torch.testing.assert_close(elu(x), F.elu(x))
    torch.testing.assert_close(x.grad, torch.where(x > 0, 1.0, x.exp()).detach())


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_nothing_is_launched_for_nothing(shape):
    x = torch.empty(shape, device=DEVICE, requires_grad=True)
    with record_launches() as launches:
        out = elu(x)
        out.backward(torch.empty_like(out))
    assert not launches and out.shape == x.grad.shape == x.shape


def test_operators_keep_pytorchs_rules():
    x = numbers(2, 5).requires_grad_()
    torch.library.opcheck(elu_forward, (x, 0.7))
    torch.library.opcheck(elu_forward, (numbers(5, 2, dtype=torch.bfloat16).t(), 1.0))
    torch.library.opcheck(elu_backward, (numbers(2, 5), x.detach(), 0.7))


def test_on_fake_tensors_under_autocast_checkpointing_and_compile():
    with FakeTensorMode():
        assert elu(torch.empty(4, 3, dtype=torch.float16, device=DEVICE)).dtype == torch.float16
    x = numbers(4, 3).requires_grad_()
    with torch.autocast(DEVICE, torch.bfloat16):
        assert elu(x).dtype == F.elu(x).dtype == torch.float32
        assert elu(x.bfloat16()).dtype == torch.bfloat16
    (plain,) = torch.autograd.grad(elu(x).sum(), x)
    (recomputed,) = torch.autograd.grad(checkpoint(elu, x, use_reentrant=False).sum(), x)
    compiled = torch.compile(elu, backend="aot_eager", fullgraph=True)
    (traced,) = torch.autograd.grad(compiled(x).sum(), x)
    assert recomputed.equal(plain) and traced.equal(plain)


def test_wrong_dtype_is_named():
    with pytest.raises(ValueError, match="not torch.float64"):
        elu(torch.ones(2, dtype=torch.float64))
    with pytest.raises(ValueError, match="not torch.int64"):
        elu(torch.ones(2, dtype=torch.int64))


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_compiled_for_a_gpu_loads_are_wide_and_nothing_spills(capability):
    launches = []
    for dtype in (torch.float32, torch.bfloat16):
        with record_launches() as found:
            x = numbers(BLOCK, dtype=dtype)
            elu_backward(x, elu_forward(x, 1.0), 1.0)
        launches += found
    compiled = compile_launches(launches, capability)
    for made, loads in zip(compiled, [2, 4, 1, 2], strict=True):  # 16 bytes each: 8 elements a thread
        assert made.spilled_bytes == made.shared_bytes == 0
        assert 2048 * made.registers <= 65_536  # all threads that a multiprocessor can hold have room
        assert made.ptx.count("ld.global.v4.b32") == loads
        assert made.ptx.count("ld.global.") == loads
