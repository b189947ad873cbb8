"""course_kit.gpu.launches: every launch of a kernel is seen, with its arguments, and none that did not happen. Triton's
interpreter, or a GPU where there is one.
"""

import pytest
import torch
import triton
import triton.language as tl

from course_kit.gpu.launches import first_configuration, record_launches
from course_lib.kernels.matmul import CONFIGURATIONS, matmul, matmul_kernel, tunable

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def add_one(x):
    return x + 1


@triton.jit
def shift_kernel(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, add_one(tl.load(x + i, mask=i < n)), mask=i < n)


def zeros(n: int) -> torch.Tensor:
    return torch.zeros(n, device=DEVICE)


def test_launches_come_in_order_with_what_they_were_given():
    """A called function is no launch; a grid that depends on constants is worked out; arguments by name stay so."""
    x, out = zeros(20), zeros(20)
    with record_launches() as launches:
        shift_kernel[(2,)](x, out, 20, BLOCK=16)
        assert len(launches) == 1
        shift_kernel[lambda meta: (triton.cdiv(meta["n"], meta["BLOCK"]), 1)](out, x, n=20, BLOCK=8, num_warps=2)
    assert (x == 2).all() and [launch.name for launch in launches] == ["shift_kernel"] * 2
    first, second = launches
    assert first.grid == (2,) and second.grid == (3, 1)
    assert first.args[0] is x and first.args[1] is out and first.args[2:] == (20,)
    assert {"BLOCK": 16}.items() <= first.meta.items()
    assert {"n": 20, "BLOCK": 8, "num_warps": 2}.items() <= second.meta.items()


def test_a_recorded_launch_can_be_made_again():
    x, out = zeros(20), zeros(20)
    with record_launches() as launches:
        shift_kernel[(2,)](x, out, 20, BLOCK=16)
    out.zero_()
    (launch,) = launches
    launch.kernel[launch.grid](*launch.args, **launch.meta)
    assert (out == 1).all() and len(launches) == 1


def test_nothing_is_seen_outside_or_after_an_error():
    x, out = zeros(4), zeros(4)
    with pytest.raises(ZeroDivisionError), record_launches() as launches:
        raise ZeroDivisionError
    shift_kernel[(1,)](x, out, 4, BLOCK=4)
    assert not launches
    with record_launches() as outer:
        with record_launches() as inner:
            shift_kernel[(1,)](x, out, 4, BLOCK=4)
        shift_kernel[(1,)](x, out, 4, BLOCK=4)
    assert (len(outer), len(inner)) == (2, 1)


def test_a_library_call_is_no_launch():
    with record_launches() as launches:
        torch.softmax(torch.randn(3, 5, device=DEVICE), dim=-1)
    assert not launches


def test_an_autotuned_kernel_runs_one_of_its_configurations():
    with record_launches() as launches:
        matmul(torch.randn(70, 10, device=DEVICE), torch.randn(10, 65, device=DEVICE))
    launch = launches[-1]
    assert launch.name == "matmul_kernel" and launch.grid == (
        triton.cdiv(70, launch.meta["block_m"]) * triton.cdiv(65, launch.meta["block_n"]),
    )


def test_first_configuration():
    """Of an autotuned kernel; what is given goes before it. A plain kernel keeps what it is given."""
    kernel, meta = first_configuration(matmul_kernel, {"num_warps": 2})
    first = tunable(CONFIGURATIONS)[0].all_kwargs()
    assert kernel is matmul_kernel.fn and meta == {**first, "num_warps": 2}
    given = {"BLOCK": 4}
    kernel, meta = first_configuration(shift_kernel, given)
    assert kernel is shift_kernel and meta == given and meta is not given
