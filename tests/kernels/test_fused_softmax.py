"""course_lib.kernels.fused_softmax: softmax in one pass each way, as precise as PyTorch's, for any row. Interpreted, or
GPU.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from course_kit.checks.guard_bands import GuardBands, guarded
from course_kit.gpu.launches import record_launches
from course_lib.kernels import rows
from course_lib.kernels.fused_softmax import softmax, softmax_backward, softmax_forward

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}  # of the largest element: one rounding
INF = float("inf")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def short_blocks(monkeypatch):
    """Rows of more than 16 elements go by in blocks of 8: the interpreter is slow, and 16,384 elements are many."""
    monkeypatch.setattr(rows, "LONGEST_BLOCK", 16)
    monkeypatch.setattr(rows, "BLOCK_OF_LONG_ROW", 8)


def random(*shape, dtype=torch.float32):
    return (3 * torch.randn(*shape, device=DEVICE)).to(dtype)


def run(function, x, upstream):
    """y and dx."""
    x = x.detach().requires_grad_()
    y = function(x)
    y.backward(upstream.to(y))
    return y.detach(), x.grad


def eager(x):
    return F.softmax(x, -1)


def assert_as_precise_as_eager(x, upstream=None):
    """y and dx as near to float64's as float32 allows, or within twice PyTorch's own error.

    dx = y (dy - sum(y dy)), whose terms may cancel, so its error is relative to them: each y and the sum are within
    16 + log2(columns) roundings, of an exponential, a division and two sums by halves (Higham 2002, section 4.2).
    """
    upstream = random(*x.shape, dtype=x.dtype) if upstream is None else upstream
    exact, ours, theirs = run(eager, x.double(), upstream), run(softmax, x, upstream), run(eager, x, upstream)
    rounding = (16 + math.log2(x.shape[-1])) * 2.0**-24 * exact[0].abs().max() * upstream.abs().max()
    for true, our, their in zip(exact, ours, theirs, strict=True):
        assert our.dtype == their.dtype and our.shape == their.shape
        error, usual = ((result.double() - true).abs().max() for result in (our, their))
        assert error <= max(TOLERANCE[x.dtype] * true.abs().max(), 2 * usual, rounding)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1,), (1, 1), (2, 3, 5), (9, 128), (3, 1, 200), (1, 1025)])
def test_result_and_gradient_are_as_precise_as_eager(shape, dtype):
    assert_as_precise_as_eager(random(*shape, dtype=dtype))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_long_rows_are_as_precise_as_eager(short_blocks, dtype):
    with record_launches() as launches:
        assert_as_precise_as_eager(random(3, 35, dtype=dtype))
    assert [launch.name for launch in launches] == ["softmax_long_forward_kernel", "softmax_long_backward_kernel"]


@pytest.mark.parametrize("columns, names", [
    (16384, ["softmax_forward_kernel", "softmax_backward_kernel"]),
    (16385, ["softmax_long_forward_kernel", "softmax_long_backward_kernel"]),
])  # fmt: skip
def test_rows_in_registers_and_rows_in_blocks(columns, names):
    with record_launches() as launches:
        assert_as_precise_as_eager(random(2, columns))
    assert [launch.name for launch in launches] == names


def test_short_rows_share_a_program():
    with record_launches() as launches:
        assert_as_precise_as_eager(random(100, 31))
    assert [launch.grid for launch in launches] == [(4,), (4,)]  # 32 rows of 32 columns are 1024 elements


ODD_ROWS = [
    [1e4, -1e4, 0.0, 1e4],
    [-3e38, -3e38, -3e38, -3e38],
    [-INF, 1.0, -INF, 2.0],
    [-INF, -INF, -INF, 5.0],
    [-INF, -INF, -INF, -INF],
    [INF, 0.0, 1.0, 2.0],
    [float("nan"), 0.0, 1.0, 2.0],
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter
@pytest.mark.parametrize("width", [1, 9])
def test_large_numbers_infinities_and_nan_are_as_in_eager(short_blocks, width):
    """Of 9 x 4 columns, the row goes by in blocks: some of them have nothing but -inf."""
    x = torch.tensor(ODD_ROWS, device=DEVICE).repeat_interleave(width, dim=1)
    torch.testing.assert_close(softmax(x), eager(x), equal_nan=True)


@pytest.mark.parametrize("view", [
    lambda x: x[:, :, :5],                 # rows one stride apart, that is not their length
    lambda x: x.transpose(0, 1),           # rows at no one stride: a copy
    lambda x: x.transpose(1, 2),           # neighbours not side by side: a copy
    lambda x: x[:1, :1].expand(2, 3, -1),
])  # fmt: skip
def test_any_strides(view):
    x, upstream = view(random(2, 6, 8)), view(random(2, 6, 8))
    assert_as_precise_as_eager(x, upstream)
    assert_as_precise_as_eager(x, torch.ones((), device=DEVICE).expand(x.shape))
    assert softmax(x).is_contiguous()


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0)])
def test_no_elements_launch_nothing(shape):
    with record_launches() as launches:
        y, dx = run(softmax, random(*shape), torch.zeros(shape, device=DEVICE))
    assert launches == [] and y.shape == dx.shape == shape


def check_the_outside(columns):
    """Nothing outside is read or written, no library call does the work, and no tensor is larger than x."""
    x = guarded(random(3, 2 * columns)[:, :columns].requires_grad_())
    upstream = guarded(random(3, columns))
    with GuardBands() as guards:
        y = softmax(x)
        [dx] = torch.autograd.grad(y, x, upstream)
    guards.check()
    assert guards.operations == [] and guards.largest_bytes == y.nbytes
    assert not y.isnan().any() and not dx.isnan().any()


@pytest.mark.parametrize("columns", [1, 5, 70, 1100])
def test_nothing_outside_is_read_or_written_and_no_library_call_helps(columns):
    check_the_outside(columns)


@pytest.mark.parametrize("columns", [5, 27])
def test_nothing_outside_of_long_rows_is_read_or_written(short_blocks, columns):
    check_the_outside(columns)


def test_each_pass_moves_each_tensor_once():
    x = random(6, 32, dtype=torch.bfloat16).requires_grad_()
    kept = []
    with record_launches() as launches:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda kept: kept):
            y = softmax(x)
        y.backward(torch.ones_like(y))
    moved = [sum(arg.nbytes for arg in launch.args if isinstance(arg, torch.Tensor)) for launch in launches]
    assert moved == [2 * x.nbytes, 3 * x.nbytes]
    assert [tensor.data_ptr() for tensor in kept] == [y.data_ptr()]


def test_the_operators_are_proper():
    x = random(3, 8, dtype=torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float32):
        torch.library.opcheck(softmax_forward, (x.requires_grad_(), dtype))
        torch.library.opcheck(softmax_backward, (random(3, 8), random(3, 8).to(dtype), torch.bfloat16))


def test_the_type_under_autocast_is_that_of_eager():
    x = random(3, 8, dtype=torch.bfloat16).requires_grad_()
    with torch.autocast(DEVICE, torch.bfloat16):
        assert softmax(x).dtype == eager(x).dtype


def test_a_wider_result_is_not_rounded_on_the_way():
    """What autocast asks for on a GPU: x in bfloat16, y in float32, dx in bfloat16."""
    x = random(3, 8, dtype=torch.bfloat16).requires_grad_()
    y = softmax_forward(x, torch.float32)
    torch.testing.assert_close(y, eager(x.float()))
    [dx] = torch.autograd.grad(y[:, 0].sum(), x)
    assert dx.dtype == torch.bfloat16


def test_activation_checkpointing():
    x, upstream = random(4, 6), random(4, 6)
    again = run(lambda x: checkpoint(softmax, x, use_reentrant=False), x, upstream)
    assert all(torch.equal(a, b) for a, b in zip(run(softmax, x, upstream), again, strict=True))


@pytest.mark.parametrize("x", [torch.ones(()), torch.ones(3, 4).double(), torch.ones(3, 4).int()])
def test_wrong_input_is_one_clear_line(x):
    with pytest.raises(ValueError, match="expected float32, bfloat16 or float16") as caught:
        softmax(x)
    assert "\n" not in str(caught.value)
