"""course_lib.kernels.fused_norm: RMSNorm in one pass each way, as precise as PyTorch's, and lean. Interpreted, or on a
GPU.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from course_kit.checks.guard_bands import GuardBands, guarded
from course_kit.gpu.launches import record_launches
from course_lib.kernels import fused_norm, rows
from course_lib.kernels.fused_norm import FusedRMSNorm, forward_bytes, rms_norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-5
# One rounding of a result about 1, and for float32 some of the sums: relative to the largest element.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def random(*shape, dtype=torch.float32, requires_grad=True):
    return torch.randn(*shape, device=DEVICE).to(dtype).requires_grad_(requires_grad)


def eager(x, weight, residual=None):
    summed = x if residual is None else x + residual
    y = F.rms_norm(summed, weight.shape, weight, EPS)
    return y if residual is None else (y, summed)


def run(function, inputs, upstream):
    """Outputs of function(x, weight, residual) and the inputs' gradients, for gradients `upstream` of the outputs."""
    x, weight, *residual = (tensor.detach().requires_grad_() for tensor in inputs)
    out = function(x, weight, *residual)
    out = out if isinstance(out, tuple) else (out,)
    torch.autograd.backward(out, [grad.to(tensor) for grad, tensor in zip(upstream, out, strict=False)])
    return [tensor.detach() for tensor in out] + [tensor.grad for tensor in (x, weight, *residual)]


def fused(x, weight, residual=None):
    return rms_norm(x, weight, EPS, residual)


def assert_as_precise_as_eager(inputs, tolerance):
    """Every output and gradient within `tolerance` of float64, or twice as far from it as PyTorch's own. `tolerance` is
    of the largest element, or of 1 where terms of about 1 cancel."""
    upstream = [torch.randn(inputs[0].shape, device=DEVICE).to(inputs[0]) for _ in range(2)]
    exact = run(eager, [tensor.double() for tensor in inputs], upstream)
    ours, theirs = run(fused, inputs, upstream), run(eager, inputs, upstream)
    for true, our, their in zip(exact, ours, theirs, strict=True):
        assert our.dtype == their.dtype and our.shape == their.shape
        scale = true.abs().max().clamp(min=1)
        error, usual = ((result.double() - true).abs().max() for result in (our, their))
        assert error <= max(tolerance * scale, 2 * usual), (error / scale, usual / scale)


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 1), (2, 3, 5), (7, 64), (3, 1, 200), (1, 1025)])
def test_outputs_and_gradients_are_as_precise_as_eager(shape, dtype, with_residual):
    inputs = [random(*shape, dtype=dtype), random(shape[-1], dtype=dtype)]
    inputs += [random(*shape, dtype=dtype)] if with_residual else []
    assert_as_precise_as_eager(inputs, TOLERANCE[dtype])


@pytest.fixture
def short_blocks(monkeypatch):
    """Rows of more than 16 elements go by in blocks of 8: the interpreter is slow, and 16,384 elements are many."""
    monkeypatch.setattr(rows, "LONGEST_BLOCK", 16)
    monkeypatch.setattr(rows, "BLOCK_OF_LONG_ROW", 8)


@pytest.mark.parametrize("hidden, is_long", [(16384, False), (16385, True)])
def test_rows_in_registers_and_rows_in_blocks(hidden, is_long):
    with record_launches() as launches:
        assert_as_precise_as_eager([random(2, hidden), random(hidden), random(2, hidden)], TOLERANCE[torch.float32])
    assert [launch.name.startswith("long") for launch in launches] == [is_long, is_long, False]


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_long_rows_are_as_precise_as_eager(short_blocks, dtype, with_residual):
    inputs = [random(7, 60, dtype=dtype)[:, :27], random(27, dtype=dtype)]
    inputs += [random(7, 27, dtype=dtype)] if with_residual else []
    with record_launches() as launches:
        assert_as_precise_as_eager(inputs, TOLERANCE[dtype])
    assert launches[0].name == "long_norm_forward_kernel" and launches[1].name == "long_norm_backward_kernel"


@pytest.mark.parametrize(
    "x_dtype, weight_dtype, residual_dtype",
    [(torch.bfloat16, torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32, torch.float32)],
)
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_mixed_types_promote_as_in_eager(x_dtype, weight_dtype, residual_dtype):
    """What autocast gives: bfloat16 from a linear layer, a float32 weight, a residual stream of either type."""
    x, weight, residual = random(4, 8, dtype=x_dtype), random(8, dtype=weight_dtype), random(4, 8, dtype=residual_dtype)
    assert_as_precise_as_eager([x, weight, residual], 2**-7)
    with torch.autocast(DEVICE, torch.bfloat16):
        for ours, theirs in zip(fused(x, weight, residual), eager(x, weight, residual), strict=False):
            assert ours.dtype == theirs.dtype


def test_large_and_small_numbers():
    """mean(s²) of fp16 numbers would overflow in fp16; a row of zeros has r = 1 / sqrt(eps), not infinity."""
    x = torch.full((2, 64), 6e4, device=DEVICE, dtype=torch.float16)
    weight = torch.ones(64, device=DEVICE, dtype=torch.float16)
    assert torch.equal(fused(x, weight), torch.ones_like(x))
    assert torch.equal(fused(torch.zeros_like(x), weight), torch.zeros_like(x))


@pytest.mark.parametrize("view", [
    lambda x: x[:, :, :5],            # rows one stride apart, that is not their length
    lambda x: x[:, ::2, :],           # the same
    lambda x: x.transpose(0, 1),      # rows at no one stride: a copy
    lambda x: x.transpose(1, 2),      # neighbours not side by side: a copy
    lambda x: x[:1, :1].expand(2, 3, -1),
])  # fmt: skip
def test_any_strides(view):
    x, residual = view(random(2, 6, 8)), random(2, 6, 8)
    residual = view(residual).contiguous()
    assert_as_precise_as_eager([x, random(x.shape[-1]), residual], TOLERANCE[torch.float32])
    assert_as_precise_as_eager([residual, random(2 * x.shape[-1])[::2], x], TOLERANCE[torch.float32])
    assert all(out.is_contiguous() for out in fused(x, random(x.shape[-1]), residual))


def test_gradients_with_any_strides():
    x, weight = random(4, 6), random(6)
    fused(x, weight).sum().backward()  # an expanded gradient: all strides are 0
    ours = x.grad, weight.grad
    x.grad = weight.grad = None
    eager(x, weight).sum().backward()
    torch.testing.assert_close(ours, (x.grad, weight.grad), rtol=1e-5, atol=1e-5)


def test_one_output_alone():
    """Only the sum used, or only y."""
    for used in (0, 1):
        inputs = x, weight, residual = random(4, 6), random(6), random(4, 6)
        ours = torch.autograd.grad(fused(*inputs)[used].square().sum(), inputs, allow_unused=True)
        theirs = torch.autograd.grad(eager(*inputs)[used].square().sum(), inputs, allow_unused=True)
        for our, their in zip(ours, theirs, strict=False):
            assert (our is None) == (their is None)
            if our is not None:
                torch.testing.assert_close(our, their, rtol=1e-5, atol=1e-5)


def test_the_two_gradients_do_not_share_memory():
    x, weight, residual = random(4, 6), random(6), random(4, 6)
    sum(out.sum() for out in fused(x, weight, residual)).backward()
    assert torch.equal(x.grad, residual.grad) and x.grad.data_ptr() != residual.grad.data_ptr()


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8)])
def test_no_rows_launch_nothing(shape):
    inputs = [random(*shape), random(8), random(*shape)]
    with record_launches() as launches:
        y, summed, dx, dweight, dresidual = run(fused, inputs, [torch.zeros(shape, device=DEVICE)] * 2)
    assert launches == [] and y.shape == summed.shape == dx.shape == dresidual.shape == shape
    assert torch.equal(dweight, torch.zeros(8, device=DEVICE))


@pytest.mark.parametrize("hidden", [5, 27])
@pytest.mark.parametrize("with_residual", [False, True])
def test_nothing_outside_of_long_rows_is_read_or_written(short_blocks, hidden, with_residual):
    check_the_outside(hidden, with_residual)


@pytest.mark.parametrize("hidden", [5, 70, 1100])
@pytest.mark.parametrize("with_residual", [False, True])
def test_nothing_outside_is_read_or_written_and_no_library_call_helps(hidden, with_residual):
    check_the_outside(hidden, with_residual)


def check_the_outside(hidden, with_residual):
    inputs = [guarded(random(3, 2 * hidden)[:, :hidden]), guarded(random(hidden))]
    inputs += [guarded(random(3, hidden))] if with_residual else []
    upstream = [guarded(random(3, hidden, requires_grad=False)) for _ in range(1 + with_residual)]
    x, weight, *residual = inputs
    with GuardBands() as guards:
        out = fused(*inputs)
        out = out if with_residual else (out,)
        grads = torch.autograd.grad(out, inputs, upstream)
    guards.check()
    assert guards.operations == []
    assert not any(tensor.isnan().any() for tensor in (*out, *grads))
    assert guards.largest_bytes <= max(3, fused_norm.INTERPRETED_PROGRAMS) * hidden * 4


def nbytes(tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))


@pytest.mark.parametrize("residual_dtype, element_bytes", [(None, 4), (torch.bfloat16, 8), (torch.float32, 14)])
def test_forward_moves_each_tensor_once(residual_dtype, element_bytes):
    x, weight = random(6, 32, dtype=torch.bfloat16), random(32)
    residual = None if residual_dtype is None else random(6, 32, dtype=residual_dtype)
    with record_launches() as launches:
        fused(x, weight, residual)
    [launch] = launches
    assert launch.name == "norm_forward_kernel"
    assert nbytes(launch.args) == forward_bytes(x, weight, residual)
    assert forward_bytes(x, weight, residual) == element_bytes * 6 * 32 + 6 * 4 + 32 * 4


def test_backward_moves_each_tensor_once_and_a_part_for_each_program():
    x, weight, residual = (random(*shape, dtype=torch.bfloat16) for shape in ((5000, 4), (4,), (5000, 4)))
    out = fused(x, weight, residual)
    with record_launches() as launches:
        torch.autograd.backward(out, [torch.ones_like(tensor) for tensor in out])
    main, reduction = launches
    assert [main.name, reduction.name] == ["norm_backward_kernel", "add_parts_kernel"]
    programs = main.grid[0]
    tiles = -(-5000 // main.meta["ROWS"])
    assert 1 < programs <= tiles
    if DEVICE == "cpu":
        assert programs == fused_norm.INTERPRETED_PROGRAMS < tiles
    assert nbytes(main.args) == 4 * 5000 * 4 * 2 + 5000 * 4 + 4 * 2 + programs * 4 * 4
    assert nbytes(reduction.args) == programs * 4 * 4 + 4 * 2


@pytest.mark.parametrize("tiles, num_warps, tile_bytes, expected", [
    (10_000, 4, 12_288, (528, 2)),
    (10_000, 8, 24_576, (264, 2)),
    (100, 8, 24_576, (100, 2)),
    (10_000, 16, 196_608, (132, 2)),
    (10_000, 16, 262_144, (132, 1)),
    (10_000, 4, 4096, (528, 4)),  # 1,024 wide: 12 KB of each of four programs
    (10_000, 4, 8192, (528, 3)),
    (10_000, 8, 16_384, (264, 3)),
])  # fmt: skip
def test_backward_on_a_gpu_is_one_wave_of_programs(monkeypatch, tiles, num_warps, tile_bytes, expected):
    h100 = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=227 * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: h100)
    assert fused_norm.backward_resources(torch.device("cuda"), tiles, num_warps, tile_bytes) == expected


def test_the_weight_gradient_does_not_vary():
    inputs = [random(50, 8, dtype=torch.bfloat16), random(8, dtype=torch.bfloat16)]
    upstream = [random(50, 8, dtype=torch.bfloat16, requires_grad=False)]
    first = run(fused, inputs, upstream)
    assert all(torch.equal(a, b) for a, b in zip(first, run(fused, inputs, upstream), strict=False))


@pytest.mark.parametrize("with_residual", [False, True])
def test_backward_keeps_the_sum_and_one_number_a_row(with_residual):
    x, weight = random(6, 32), random(32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        out = fused(x, weight, random(6, 32) if with_residual else None)
    summed = out[1] if with_residual else x
    assert {tensor.data_ptr() for tensor in kept} >= {summed.data_ptr(), weight.data_ptr()}
    assert nbytes(kept) == 6 * 32 * 4 + 32 * 4 + 6 * 4


def test_the_operators_are_proper():
    x, weight, residual = random(3, 8), random(8), random(3, 8, dtype=torch.bfloat16)
    torch.library.opcheck(fused_norm.normalize, (x, weight, EPS))
    torch.library.opcheck(fused_norm.add_and_normalize, (x, residual, weight, EPS))
    rstd = torch.ones(3, device=DEVICE)
    for dsum in (None, x.detach()):
        torch.library.opcheck(fused_norm.norm_backward, (x.detach(), dsum, x.detach(), weight.detach(), rstd))


def test_activation_checkpointing():
    inputs = [random(4, 6), random(6), random(4, 6)]
    upstream = [random(4, 6, requires_grad=False) for _ in range(2)]
    plain = run(fused, inputs, upstream)
    again = run(lambda *args: checkpoint(fused, *args, use_reentrant=False), inputs, upstream)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=False))


@pytest.mark.parametrize("eps", [1e-5, None])
def test_the_module_is_nn_rms_norm_with_a_residual(eps):
    ours, theirs = FusedRMSNorm(8, eps, device=DEVICE), nn.RMSNorm(8, eps, device=DEVICE)
    nn.init.normal_(ours.weight)
    theirs.load_state_dict(ours.state_dict())
    x, residual = random(2, 3, 8) * 1e-3, random(2, 3, 8) * 1e-3  # small, so that eps counts
    torch.testing.assert_close(ours(x), theirs(x))
    y, summed = ours(x, residual)
    torch.testing.assert_close(y, theirs(x + residual))
    torch.testing.assert_close(summed, x + residual)
    x, ours, theirs = x.bfloat16(), ours.bfloat16(), theirs.bfloat16()
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("inputs, message", [
    ((torch.ones(2, 4), torch.ones(5)), r"x \[2, 4\] and weight \[5\]"),
    ((torch.ones(()), torch.ones(())), r"x \[\] and weight \[\]"),
    ((torch.ones(2, 0), torch.ones(0)), r"h at least 1"),
    ((torch.ones(2, 4), torch.ones(4), torch.ones(4)), r"residual \[4\] has not the shape of x \[2, 4\]"),
    ((torch.ones(2, 4).double(), torch.ones(4)), "x is torch.float64, weight is torch.float32: each must be"),
    ((torch.ones(2, 4), torch.ones(4), torch.ones(2, 4).int()), "residual is torch.int32"),
    ((torch.ones(2, 4), torch.ones(4, device="meta")), "x is on cpu, weight is on meta: expected one device"),
])  # fmt: skip
def test_wrong_input_is_one_clear_line(inputs, message):
    with pytest.raises(ValueError, match=message) as caught:
        fused(*inputs)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("shape, has_weight", [((2, 4), True), (4, False)])
def test_the_module_refuses_what_it_cannot_do(shape, has_weight):
    with pytest.raises(ValueError, match="FusedRMSNorm normalizes one dimension and has a weight"):
        FusedRMSNorm(shape, elementwise_affine=has_weight)
