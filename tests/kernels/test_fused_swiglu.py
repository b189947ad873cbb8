"""The fused SwiGLU gives silu(gate) * up and its gradients, and moves 3 n and 5 n elements. Triton's interpreter on the
CPU, or a GPU where there is one.
"""

import pytest
import torch
import torch.nn.functional as F
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from course_kit.checks.guard_bands import GuardBands, guarded
from course_kit.gpu.launches import record_launches
from course_kit.gpu.operation_bytes import BytesMoved
from course_lib.kernels.fused_swiglu import swiglu, swiglu_backward, swiglu_forward
from course_lib.single_gpu.model import PRESETS, Transformer
from course_lib.single_gpu.model import swiglu as eager
from kernel_traffic import count_accesses

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
interpreted_only = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="counts inside Triton's interpreter")


def numbers(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (scale * torch.randn(shape, generator=generator)).to(DEVICE, dtype)


def run(function, gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """Output, gradient of gate, gradient of up, computed in `dtype`, in float64."""
    gate, up = gate.detach().to(dtype).requires_grad_(), up.detach().to(dtype).requires_grad_()
    out = function(gate, up)
    out.backward(grad.to(dtype))
    return [each.detach().double() for each in (out, gate.grad, up.grad)]


@pytest.mark.parametrize("shape", [(1,), (7,), (1, 1025), (2, 3, 5), (2, 2, 2048)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_error_is_that_of_float32_and_one_rounding(shape, dtype):
    gate, up, grad = (part.contiguous() for part in numbers(3, *shape, dtype=dtype))
    exact = run(eager, gate, up, grad, torch.float64)
    ours, theirs = run(swiglu, gate, up, grad, dtype), run(eager, gate, up, grad, dtype)
    for found, other, right in zip(ours, theirs, exact, strict=True):
        error, other_error = (found - right).abs(), (other - right).abs()
        if dtype == torch.float32:
            assert error.max() <= 2 * other_error.max() + 1e-6 * right.abs().max()
        else:  # float32's own error, and one rounding, to the nearest; PyTorch rounds silu(gate) too
            assert (error <= torch.finfo(dtype).eps / 2 * right.abs() + 1e-6 * (1 + right.abs())).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities
def test_large_and_special_values_are_as_pytorchs():
    special = [0.0, -0.0, 30.0, -30.0, 80.0, -80.0, 1e4, -1e4, float("inf"), float("nan")]
    gate = torch.tensor(special, device=DEVICE)
    found = run(swiglu, gate, torch.ones_like(gate), torch.ones_like(gate), torch.float32)
    expected = run(eager, gate, torch.ones_like(gate), torch.ones_like(gate), torch.float32)
    for ours, theirs in zip(found[::2], expected[::2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-30, equal_nan=True)
    finite = gate.isfinite()
    torch.testing.assert_close(found[1][finite], expected[1][finite], rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("columns", [40, 1030])
def test_halves_of_one_product_are_read_where_they_lie(columns):
    product = numbers(2, 3, 2 * columns, dtype=torch.bfloat16)
    gate, up = product.chunk(2, dim=-1)
    with record_launches() as launches, GuardBands() as guards:
        out = swiglu_forward(gate, up)
    assert guards.operations == []  # no copy
    assert [launch.name for launch in launches] == ["swiglu_forward_kernel"]
    given = launches[0].args
    assert given[0].data_ptr() == product.data_ptr() and given[1].data_ptr() == up.data_ptr()
    assert given[3:5] == (2 * columns, 2 * columns)  # rows apart
    torch.testing.assert_close(out, swiglu_forward(gate.contiguous(), up.contiguous()), rtol=0, atol=0)
    assert out.is_contiguous()


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.transpose(0, 1),
        lambda x: x.transpose(0, 2),
        lambda x: x[:, ::2],
        lambda x: x[..., ::2],
        lambda x: x[:1].expand(4, -1, -1),
        lambda x: x.flatten()[3:17],
    ],
)
def test_any_strides(view):
    gate, up = view(numbers(3, 4, 6)), view(numbers(4, 4, 6)[:3])
    grad = torch.ones((), device=DEVICE).expand(gate.shape)  # as sum() sends it: all strides 0
    found, expected = run(swiglu, gate, up, grad, torch.float32), run(eager, gate, up, grad, torch.float32)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_backward_takes_a_strided_gradient():
    gate, up = numbers(3, 8), numbers(4, 8)[:3]
    wide = numbers(3, 20)
    for grad in (wide[:, 4:12], wide[:, 2:18:2], wide[:1, :8].expand(3, 8)):
        found, expected = swiglu_backward(grad, gate, up), swiglu_backward(grad.contiguous(), gate, up)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_only_gate_and_up_are_kept():
    kept = []
    gate, up = numbers(2, 3, 8).requires_grad_(), numbers(2, 4, 8)[:, :3].requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.data_ptr()) or x, lambda x: x):
        swiglu(gate, up)
    assert sorted(kept) == sorted([gate.data_ptr(), up.data_ptr()])


def passes(function, gate, up, grad):
    """Forward and backward as two calls."""
    graph = []
    yield lambda: graph.append(function(gate, up))
    yield lambda: torch.autograd.grad(graph[0], (gate, up), grad)


@interpreted_only
def test_three_elements_move_forward_and_five_backward():
    n = 3 * 1100
    gate, up, grad = numbers(3, 3, 1100, dtype=torch.bfloat16)
    for direction, expected in zip(
        passes(swiglu, gate.requires_grad_(), up.requires_grad_(), grad), [(2, 1), (3, 2)], strict=True
    ):
        with count_accesses() as moved, record_launches() as launches:
            direction()
        assert (moved["load"], moved["store"]) == (2 * n * expected[0], 2 * n * expected[1]) and len(launches) == 1


def test_eager_moves_five_and_nine():
    gate, up, grad = numbers(3, 3, 100)
    gate, up = gate.clone().requires_grad_(), up.clone().requires_grad_()
    for direction, expected in zip(passes(eager, gate, up, grad), [5, 9], strict=True):
        with BytesMoved() as moved:
            direction()
        assert moved.total == expected * gate.nbytes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [5, 1025])
def test_nothing_outside_is_read_or_written(dtype, columns):
    gate, up, grad = (guarded(part) for part in numbers(3, 2, columns, dtype=dtype))
    with GuardBands() as guards:
        out = swiglu_forward(gate, up)
        gradients = swiglu_backward(grad, gate, up)
    guards.check()
    assert guards.operations == [] and guards.largest_bytes == gate.nbytes
    for each in (out, *gradients):
        assert each.isfinite().all()  # what surrounds the inputs is NaN


def test_operators_are_well_made():
    gate, up = numbers(2, 3, 8).requires_grad_(), numbers(2, 4, 8)[:, :3].detach().requires_grad_()
    torch.library.opcheck(swiglu_forward, (gate, up))
    torch.library.opcheck(swiglu_backward, (numbers(2, 3, 8), gate.detach(), up.detach()))


def test_traced_faked_and_recomputed():
    gate, up = numbers(2, 3, 8).requires_grad_(), numbers(4, 3, 8)[:2].detach().requires_grad_()
    grad = numbers(2, 5, 8)[:, :3]
    expected = run(swiglu, gate, up, grad, torch.float32)
    compiled = torch.compile(swiglu, backend="aot_eager", fullgraph=True)
    again = lambda gate, up: checkpoint(swiglu, gate, up, use_reentrant=False)  # noqa: E731
    for function in (compiled, again):
        for ours, theirs in zip(run(function, gate, up, grad, torch.float32), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    with FakeTensorMode():
        fake = torch.empty(2, 3, 16, dtype=torch.bfloat16, requires_grad=True)
        out = swiglu(*fake.chunk(2, dim=-1))
        out.sum().backward()
    assert out.shape == (2, 3, 8) and out.dtype == torch.bfloat16 and fake.grad.shape == fake.shape


@pytest.mark.parametrize("autocast", [False, True])
def test_in_the_model(autocast):
    tokens, gradients = torch.arange(2 * 7, device=DEVICE).view(2, 7), []
    for function in (eager, swiglu):
        model = Transformer(PRESETS["debug"]).to(DEVICE)
        for block in model.blocks:
            block.mlp.activation = function
        with record_launches() as launches, torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            model(tokens).float().pow(2).mean().backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    names = ["swiglu_forward_kernel"] * 2 + ["swiglu_backward_kernel"] * 2
    assert [launch.name for launch in launches] == names
    # bfloat16: eager rounds silu(gate) besides
    torch.testing.assert_close(*gradients, rtol=0, atol=(2e-2 if autocast else 1e-5) * gradients[0].abs().max().item())


def test_under_autocast_the_dtype_is_that_of_the_layers():
    x, weight = numbers(3, 8), numbers(32, 8)
    with torch.autocast(DEVICE, torch.bfloat16):
        gate, up = F.linear(x, weight).chunk(2, dim=-1)
        assert swiglu(gate, up).dtype == eager(gate, up).dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(0,), (0, 8), (3, 0)])
def test_empty(shape):
    gate, up = torch.empty(shape, device=DEVICE).requires_grad_(), torch.empty(shape, device=DEVICE).requires_grad_()
    with record_launches() as launches:
        out = swiglu(gate, up)
        out.sum().backward()
    assert out.shape == gate.grad.shape == up.grad.shape == shape and not launches


@pytest.mark.parametrize(
    "gate, up, message",
    [
        (torch.ones(3, 4), torch.ones(4), r"gate \[3, 4\] and up \[4\]"),
        (torch.ones(()), torch.ones(()), r"gate \[\] and up \[\]"),
        (torch.ones(4), torch.ones(4).bfloat16(), "gate is torch.float32, up torch.bfloat16"),
        (torch.ones(4).double(), torch.ones(4).double(), "gate is torch.float64"),
        (torch.ones(4), torch.ones(4, device="meta"), "gate is on cpu, up on meta"),
    ],
)
def test_bad_input_is_one_line(gate, up, message):
    with pytest.raises(ValueError, match=message) as raised:
        swiglu(gate, up)
    assert "\n" not in str(raised.value)
