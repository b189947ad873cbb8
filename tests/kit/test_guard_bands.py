"""course_kit.checks.guard_bands: stray loads, stray stores and a library call in a kernel's place are seen. Needs no
GPU.
"""

import pytest
import torch
import triton
import triton.language as tl

from course_kit.checks import CheckFailed
from course_kit.checks.guard_bands import BAND_BYTES, GuardBands, guarded

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.bool]


@triton.jit
def doubling(x, y, numel, masked_load: tl.constexpr, masked_store: tl.constexpr, first, BLOCK: tl.constexpr):
    offsets = first + tl.arange(0, BLOCK)
    inside = offsets < numel
    values = tl.load(x + offsets, mask=inside | (not masked_load), other=0.0)
    tl.store(y + offsets, 2 * values, mask=inside | (not masked_store))


@triton.jit
def summing(x, y, numel, masked: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(y, tl.sum(tl.load(x + offsets, mask=(offsets < numel) | (not masked), other=0.0), axis=0))


def doubled(x, masked_load=True, masked_store=True, first=0, block=128):
    y = torch.empty_like(x)
    doubling[(1,)](x, y, x.numel(), masked_load, masked_store, first, block)
    return y


@torch.library.custom_op("course_test::double_wild", mutates_args=())
def double_wild(x: torch.Tensor) -> torch.Tensor:
    """2 x, and the rest of the block after it."""
    return doubled(x, masked_store=False)


@torch.library.custom_op("course_test::double_fake", mutates_args=())
def double_fake(x: torch.Tensor) -> torch.Tensor:
    """2 x by a library call."""
    return torch.mul(x, 2)


@torch.library.custom_op("course_test::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return doubled(x)


# A right forward pass with a backward pass that overruns; one whose backward pass is a library call.
for operator, gradient in ((double, double_wild), (double_wild, double_fake)):
    operator.register_autograd(lambda ctx, grad, gradient=gradient: gradient(grad))


@pytest.mark.parametrize("dtype", DTYPES)
def test_guarded_is_the_same_tensor_with_nan_round_it(dtype):
    first = torch.randint(0, 2, (3, 5), device=DEVICE).to(dtype)
    for x in (first, first.t(), first[:, 1:4], first[1:2].expand(4, 5), first[1, 1]):
        y = guarded(x)
        assert torch.equal(x, y) and y.dtype == x.dtype and y.stride() == x.stride() and y.device == x.device
        band = BAND_BYTES // y.element_size()
        after = (
            y.storage_offset() + 1 + sum((size - 1) * stride for size, stride in zip(y.size(), y.stride(), strict=True))
        )
        for outside in (y.as_strided((band,), (1,), y.storage_offset() - band), y.as_strided((band,), (1,), after)):
            assert torch.equal(outside, torch.full_like(outside, -1)) or outside.isnan().all()


def test_guarded_keeps_requires_grad_and_an_empty_tensor():
    x = torch.randn(4, device=DEVICE, requires_grad=True)
    assert guarded(x).requires_grad and guarded(x).is_leaf and not guarded(x.detach()).requires_grad
    assert guarded(x[:0]).shape == (0,)


def test_the_gaps_of_a_strided_tensor_are_guarded():
    y = guarded(torch.ones(4, 8, device=DEVICE)[:, :5])
    assert y.as_strided((3, 3), (8, 1), y.storage_offset() + 5).isnan().all()


def test_a_masked_kernel_passes():
    x = guarded(torch.randn(100, device=DEVICE))
    with GuardBands() as guards:
        y = double(x)
    guards.check()
    assert torch.equal(y, 2 * x) and guards.operations == [] and guards.largest_bytes == 400


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.int32, torch.int8])
def test_an_unmasked_store_is_caught(dtype):
    x = torch.ones(100, device=DEVICE, dtype=dtype)
    with GuardBands() as guards:
        y = doubled(x, masked_store=False)
    assert torch.equal(y, 2 * x)  # the numbers are right all the same
    message = rf"allocation 1, {dtype} \[100\].*28 elements after its end, the first at offset \+0"
    with pytest.raises(CheckFailed, match=message):
        guards.check()


def test_a_store_before_the_start_is_caught():
    with GuardBands() as guards:
        doubled(torch.ones(100, device=DEVICE), masked_load=True, first=-3)
    with pytest.raises(CheckFailed, match="3 elements before its start, the nearest at offset -1"):
        guards.check()


def test_a_store_of_the_nan_that_a_stray_load_read_is_caught():
    """Load and store both unmasked: the bits of one band are copied into another."""
    x = guarded(torch.ones(100, device=DEVICE))
    with GuardBands() as guards:
        middle = torch.ones(100, device=DEVICE)
        doubled(x, masked_load=False, masked_store=False)
        doubled(middle, masked_load=False, masked_store=False)
    with pytest.raises(CheckFailed, match="allocation 2"):
        guards.check()
    del guards.bands["allocation 2, torch.float32 [100]"]
    with pytest.raises(CheckFailed, match="allocation 3"):
        guards.check()


def test_a_store_into_the_gaps_between_rows_is_caught():
    ones = torch.ones(4, 8, device=DEVICE)
    with GuardBands() as guards:
        x = guards.guarded(ones[:, :5])
        doubling[(1,)](x, x, 5, True, False, 0, 8)
        with pytest.raises(CheckFailed, match="input 1.*3 elements in the gaps between its rows.* offset 5"):
            guards.check()
    assert guards.operations == []


def test_an_unmasked_load_poisons_the_result():
    x = torch.ones(100, device=DEVICE)
    total = torch.zeros((), device=DEVICE)
    summing[(1,)](guarded(x), total, 100, True, 128)
    assert total == 100
    summing[(1,)](guarded(x), total, 100, False, 128)
    assert total.isnan()


def test_an_element_that_no_program_wrote_is_nan():
    with GuardBands() as guards:
        y = doubled(torch.ones(100, device=DEVICE), block=64)
    guards.check()
    assert not y[:64].isnan().any() and y[64:].isnan().all()


@pytest.mark.parametrize("allocate, value", [(torch.zeros_like, 0), (torch.ones_like, 1)])
def test_filled_memory_keeps_its_values(allocate, value):
    x = torch.randn(3, 4, device=DEVICE).t()
    with GuardBands() as guards:
        for y in (allocate(x), x.new_full(x.shape, value), torch.full_like(x, value)):
            assert (y == value).all() and y.device == x.device
            assert y.untyped_storage().nbytes() > 2 * BAND_BYTES
    assert len(guards.bands) == 3


def test_it_sees_inside_custom_operators_and_in_backward():
    x = torch.randn(100, device=DEVICE, requires_grad=True)
    with GuardBands() as guards:
        double(x).backward(torch.ones_like(x))
    with pytest.raises(CheckFailed, match="allocation 3"):  # 1: forward; 2: ones_like; 3: backward
        guards.check()
    assert torch.equal(x.grad, torch.full_like(x, 2))


def test_a_library_call_that_poses_as_a_kernel_is_seen():
    x = torch.randn(100, device=DEVICE, requires_grad=True)
    with GuardBands() as guards:
        double_fake(x)
    assert guards.operations == ["aten.mul"]
    with GuardBands() as guards:
        double_wild(x).backward(torch.ones_like(x))
    assert guards.operations == ["aten.mul"]


def test_views_are_no_operations_and_copies_are():
    x = torch.randn(4, 6, device=DEVICE)
    with GuardBands() as guards:
        torch.promote_types(x.dtype, torch.bfloat16)
        x.view(-1).reshape(4, 6)[1:].t().detach().expand(2, 6, 3)
        x.contiguous()
    assert guards.operations == [] and guards.largest_bytes == 0
    with GuardBands() as guards:
        x.t().contiguous()
        x.t().reshape(-1)
        x.add_(1)
        x.sum().item()
    assert guards.operations == ["aten.clone", "aten.clone", "aten.add_", "aten.sum", "aten._local_scalar_dense"]


def test_the_largest_tensor_counts_what_operations_make():
    hidden, weight = torch.randn(8, 4, device=DEVICE), torch.randn(32, 4, device=DEVICE)
    with GuardBands() as guards:
        torch.empty(10, device=DEVICE)
        hidden.mul_(2)
    assert guards.largest_bytes == 40
    with GuardBands() as guards:
        hidden @ weight.t()
    assert guards.largest_bytes == 8 * 32 * 4
