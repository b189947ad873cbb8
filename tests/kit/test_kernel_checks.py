"""course_kit.checks.kernels: a kernel that strays, is missing or leaves the work to PyTorch is found. Triton's
interpreter, or a GPU where there is one.
"""

import re

import pytest
import torch
import triton
import triton.language as tl

from course_kit.checks import CheckFailed
from course_kit.checks.guard_bands import guarded
from course_kit.checks.kernels import assert_near, loads, run_guarded, stray_loads
from course_kit.checks.kernels.compiled import assert_16_bit_matmuls, assert_compiles, compiled_first
from course_kit.checks.kernels.offsets import wide_offsets
from course_kit.gpu.launches import record_launches
from course_lib.kernels.matmul import tunable
from course_lib.kernels.rounding import cast, dot, widen

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
interpreted_only = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="looks inside Triton's interpreter")


@triton.jit
def double_kernel(x, y, numel, loaded, stored, BLOCK: tl.constexpr):
    """y = 2 x. Loads and stores as many as it is told."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = widen(tl.load(x + i, mask=i < loaded, other=0.0))
    tl.store(y + i, cast(2 * values, y.dtype.element_ty), mask=i < stored)


@triton.jit
def blank_kernel(x, y, numel, loaded, stored, BLOCK: tl.constexpr):
    raise NotImplementedError()


@triton.jit
def narrow_kernel(x, y, numel, loaded, stored, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + i, mask=i < loaded, other=0.0)
    tl.store(y + i, values + values, mask=i < stored)


tuned_kernel = triton.autotune(tunable([triton.Config({"BLOCK": 32})]), key=[])(double_kernel)


def double(x: torch.Tensor, kernel=double_kernel, loaded: int = 0, stored: int = 0) -> torch.Tensor:
    """2 x, with so many lanes more loaded and stored than there are."""
    y, n = torch.empty_like(x), x.numel()
    kernel[(triton.cdiv(n, 64),)](x, y, n, n + loaded, n + stored, BLOCK=64)
    return y


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [64, 100])
def test_a_right_kernel_passes_and_its_result_comes_back(numel, dtype):
    x = torch.randn(numel).to(dtype)
    found = run_guarded(double_kernel, double, x)
    assert found.device.type == "cpu" and found.equal(2 * x)
    assert_near(found, 2 * x.double(), "2 x")
    both = run_guarded(double_kernel, lambda x, times: {"y": double(double(x)), "times": times}, x, 4)
    assert both["y"].equal(4 * x) and both["times"] == 4


def test_a_tuned_kernel_is_known_by_the_one_inside():
    def run(x):
        y = torch.empty_like(x)
        tuned_kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, x.numel(), x.numel(), x.numel())
        return y

    assert run_guarded(tuned_kernel, run, torch.ones(50)).eq(2).all()


@interpreted_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_stray_loads_are_counted_where_they_reach_no_result(dtype):
    with pytest.raises(AssertionError, match="20 lanes loaded memory outside of the tensors"):
        run_guarded(double_kernel, lambda x: double(x, loaded=20), torch.randn(100).to(dtype))
    with stray_loads() as strays:
        double(guarded(torch.ones(100)), loaded=20)
        double(guarded(torch.full((100,), torch.nan)))  # a NaN that somebody put there is none
    assert strays == [0, 20, 0, 0]
    double(guarded(torch.ones(100)), loaded=20)
    assert len(strays) == 4  # nothing is watched any more


@interpreted_only
def test_a_load_of_what_was_never_written_is_a_stray_one():
    def twice(x):
        y = double(x)
        return double(torch.empty_like(y))

    with pytest.raises(AssertionError, match="50 lanes loaded"):
        run_guarded(double_kernel, twice, torch.ones(50))


def test_a_stray_store_is_found():
    with pytest.raises(CheckFailed, match="3 elements after its end"):
        run_guarded(double_kernel, lambda x: double(x, stored=3), torch.ones(50))


@pytest.mark.parametrize("run", [torch.empty_like, lambda x: 2 * x, lambda x: double(x, narrow_kernel)])
def test_a_kernel_that_is_not_launched_is_found(run):
    with pytest.raises(AssertionError, match="no kernel of yours was launched"):
        run_guarded(double_kernel, run, torch.ones(50))


def test_work_that_pytorch_did_is_found():
    def pretend(x):
        double(x)
        return 2 * x

    with pytest.raises(AssertionError, match=re.escape("PyTorch did some of the work: aten.mul; the kernel has to")):
        run_guarded(double_kernel, pretend, torch.ones(50))


@interpreted_only
def test_a_blank_kernel_says_that_it_is_blank():
    with pytest.raises(NotImplementedError):
        run_guarded(blank_kernel, lambda x: double(x, blank_kernel), torch.ones(50))


@interpreted_only
def test_arithmetic_in_bfloat16_is_found():
    """Triton's interpreter gets it silently wrong, or fails for a reason that nobody can read."""
    with pytest.raises(AssertionError):
        found = run_guarded(narrow_kernel, lambda x: double(x, narrow_kernel), torch.full((50,), 1.5).bfloat16())
        assert_near(found, torch.full((50,), 3.0).double(), "x + x")


def test_near_is_one_rounding_away_and_no_more():
    generator = torch.Generator().manual_seed(0)
    wanted = torch.randn(1000, generator=generator, dtype=torch.float64)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert_near(wanted.float().to(dtype), wanted, "x")
        found = wanted.float().to(dtype)
        found[7] *= 1 + (8 if dtype == torch.float32 else 2) * torch.finfo(dtype).eps
        with pytest.raises(AssertionError, match=r"x: 1 of 1000 elements are wrong, the first at \[7\]") as error:
            assert_near(found, wanted, "x")
        assert ("widen" in str(error.value)) == (dtype != torch.float32)
    assert_near(torch.full((1,), 4e-10), torch.zeros(1).double(), "x")  # of a number near 0, as of one of 1e-3
    with pytest.raises(AssertionError, match="1 elements are wrong"):
        assert_near(torch.full((1,), 6e-10), torch.zeros(1).double(), "x")
    assert_near(torch.full((1,), 6e-10), torch.zeros(1).double(), "x", least=2e-3)
    assert_near(torch.full((1,), 6e-10), torch.zeros(1).double(), "x", factor=6)


def test_elements_that_were_never_written_are_told_as_such():
    with pytest.raises(AssertionError, match="y: 2 of 3 elements are NaN. Never written?"):
        assert_near(torch.tensor([1.0, torch.nan, torch.nan]), torch.ones(3).double(), "y")
    found = run_guarded(double_kernel, lambda x: double(x, stored=-10), torch.ones(50))
    assert found[:40].eq(2).all() and found[40:].isnan().all()


@triton.jit
def far_kernel(x, y, stride, WIDE: tl.constexpr, LATE: tl.constexpr):
    """Copy row `program` of x, stride elements from one row to the next."""
    row = tl.program_id(0).to(tl.int64) if WIDE else tl.program_id(0)
    offset = (row * stride).to(tl.int64) if LATE else row * stride
    tl.store(y + row, tl.load(x + offset))


@interpreted_only
@pytest.mark.parametrize("wide, late, is_right", [(True, False, True), (False, False, False), (False, True, False)])
def test_offsets_in_32_bits_are_found_by_their_type(wide, late, is_right):
    def run():
        x, y = torch.randn(90), torch.empty(3)
        with wide_offsets(60):
            far_kernel[(3,)](x, y, 30, WIDE=wide, LATE=late)
        assert y.equal(x[::30])

    if is_right:
        run()
    else:
        with pytest.raises(AssertionError, match="an offset of 60 elements was computed in 32 bits"):
            run()


@triton.jit
def sum_kernel(x, y, numel, OTHER: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    values = tl.load(x + i, mask=i < numel, other=0.0) if OTHER else tl.load(x + i, mask=i < numel)
    tl.store(y, tl.sum(widen(values)))


@interpreted_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_lanes_without_other_are_undefined(dtype):
    def run(x, has_other):
        y = torch.empty(1, device=x.device)
        sum_kernel[(1,)](x, y, x.numel(), OTHER=has_other, BLOCK=64)
        return y

    assert run_guarded(sum_kernel, run, torch.ones(50).to(dtype), True).item() == 50
    assert run_guarded(sum_kernel, run, torch.ones(50).to(dtype), False).isnan()
    assert run_guarded(sum_kernel, run, torch.ones(64).to(dtype), False).item() == 64  # no lane is off


@triton.jit
def number_kernel(x, y, exists):
    tl.store(y, tl.load(x, mask=exists != 0, other=0.0))


@interpreted_only
def test_a_single_number_has_its_other():
    def run(x):
        y = torch.empty(1)
        number_kernel[(1,)](x, y, 0)
        return y

    assert run_guarded(number_kernel, run, torch.ones(1)).item() == 0


@interpreted_only
def test_loads_count_elements_and_not_lanes():
    with loads() as counts:
        double(torch.ones(100))
    assert counts == [64, 36]


@triton.jit
def branching_kernel(x, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    values = tl.load(x + i)
    if values > 0:
        values = 2 * values
    tl.store(y + i, values)


@interpreted_only
def test_a_kernel_that_no_gpu_runs_is_compiled_before_its_numbers_are_judged():
    def check(kernel, is_wrong):
        x, y = torch.randn(64), torch.empty(64)
        kernel[(1,)](x, y, BLOCK=64)
        assert not is_wrong, "wrong numbers"

    with pytest.raises(AssertionError, match="for a GPU it does not compile"):
        compiled_first(lambda: check(branching_kernel, True))()
    compiled_first(lambda: check(branching_kernel, False))()  # right numbers are not its business
    with pytest.raises(AssertionError, match="wrong numbers"):
        compiled_first(lambda: double(torch.ones(64)) is None or check(copy_kernel, True))()
    with pytest.raises(AssertionError, match="nothing launched"):
        compiled_first(nothing_launched)()


@triton.jit
def copy_kernel(x, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i))


def nothing_launched() -> None:
    raise AssertionError("nothing launched")


@triton.jit
def square_kernel(x, y, WIDEN: tl.constexpr, SIDE: tl.constexpr):
    i = tl.arange(0, SIDE)[:, None] * SIDE + tl.arange(0, SIDE)
    a = tl.load(x + i)
    product = (
        dot(widen(a), widen(a), tl.zeros((SIDE, SIDE), tl.float32))
        if WIDEN
        else dot(a, a, tl.zeros((SIDE, SIDE), tl.float32))
    )
    tl.store(y + i, product)


@pytest.mark.parametrize("widened", [False, True])
def test_matmuls_of_widened_tiles_are_found(widened):
    x, y = torch.randn(64, 64, device=DEVICE).bfloat16(), torch.empty(64, 64, device=DEVICE)
    with record_launches() as launches:
        square_kernel[(1,)](x, y, WIDEN=widened, SIDE=64)
    compiled = assert_compiles(launches)
    if widened:
        with pytest.raises(AssertionError, match="1 of 1 matmuls multiply float32"):
            assert_16_bit_matmuls(compiled)
    else:
        assert_16_bit_matmuls(compiled)
