"""The fused RoPE turns as apply_rope does, reads x and each token's angles once, and keeps neither x nor y. Triton's
interpreter on the CPU, or a GPU where there is one.
"""

import pytest
import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from course_kit.checks.guard_bands import GuardBands, guarded
from course_kit.gpu.launches import record_launches
from course_kit.gpu.operation_bytes import BytesMoved
from course_lib.kernels.fused_rope import rope, rotate
from course_lib.single_gpu.model import PRESETS, ModelConfig, Transformer, apply_rope, rope_angles
from kernel_traffic import count_accesses

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Two of them have more than 4096 pairs a token, so that the kernel goes through its loop.
SHAPES = [(1, 1, 1, 2), (2, 3, 3, 6), (1, 2, 9, 64), (2, 1, 33, 256), (1, 1, 2, 8194)]  # [b, s, a, d]
interpreted_only = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="counts inside Triton's interpreter")


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def angles(shape: tuple[int, ...], dtype: torch.dtype, batched: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """cos, sin for x of this shape; with `batched`, of other positions in each sequence."""
    batch, positions, _, head_dim = shape
    places = torch.arange(positions, device=DEVICE) + 5
    if batched:
        places = places + 100 * torch.arange(batch, device=DEVICE)[:, None]
    cos, sin = rope_angles(places, ModelConfig(1, head_dim, 1, 1, 1, 1))
    return cos.to(dtype), sin.to(dtype)


def run(function, x, cos, sin, grad) -> list[torch.Tensor]:
    """Output and gradient of x, in float64."""
    x = x.detach().requires_grad_()
    out = function(x, cos, sin)
    out.backward(grad.to(out.dtype))
    return [out.detach().double(), x.grad.double()]


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_error_is_that_of_float32_and_one_rounding(shape, dtype, batched):
    x, grad = numbers(2, *shape, dtype=dtype)
    given = x, *angles(shape, dtype, batched), grad
    exact = run(apply_rope, *(each.double() for each in given))
    rounding = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps / 2  # one, of the result; apply_rope has four
    for found, right in zip(run(rope, *given), exact, strict=True):
        assert ((found - right).abs() <= rounding * right.abs() + 3e-7 * x.abs().max()).all()


@pytest.mark.parametrize("batched", [False, True])
def test_backward_is_the_inverse(batched):
    shape = (2, 3, 5, 8)
    x, (cos, sin) = numbers(*shape), angles(shape, torch.float32, batched)
    y = rope(x, cos, sin)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1), rtol=1e-6, atol=0)
    torch.testing.assert_close(rotate(y, cos, sin, True, x.dtype), x, rtol=1e-5, atol=1e-6)
    assert (y - x).abs().max() > 0.1


def test_gradients_of_gradients():
    shape = (2, 3, 2, 8)
    x, grad = numbers(2, *shape)
    cos, sin = angles(shape, torch.float32, False)
    for function in (rope, apply_rope):
        leaf = x.clone().requires_grad_()
        first = torch.autograd.grad(function(leaf, cos, sin).pow(2).sum(), leaf, create_graph=True)[0]
        torch.testing.assert_close(first, 2 * x, rtol=1e-5, atol=1e-5)  # |R x|^2 is |x|^2
        torch.testing.assert_close(torch.autograd.grad(first, leaf, grad)[0], 2 * grad, rtol=1e-5, atol=1e-5)


def test_q_and_k_of_one_product_are_read_where_they_lie():
    heads, kv, head_dim = 4, 2, 8
    product = numbers(2, 3, (heads + 2 * kv) * head_dim, dtype=torch.bfloat16)
    q, k, _ = (part.unflatten(-1, (-1, head_dim)) for part in product.split([32, 16, 16], dim=-1))
    cos, sin = angles(q.shape, torch.bfloat16, False)
    for x in (q, k):
        with record_launches() as launches, GuardBands() as guards:
            out = rope(x, cos, sin)
        assert [launch.name for launch in launches] == ["rope_kernel"] and guards.operations == []
        assert [tensor.data_ptr() for tensor in launches[0].args[:3]] == [x.data_ptr(), cos.data_ptr(), sin.data_ptr()]
        assert out.is_contiguous()
        torch.testing.assert_close(out, rope(x.contiguous(), cos, sin), rtol=0, atol=0)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.transpose(0, 1),
        lambda x: x.transpose(1, 2),  # [b, a, s, d] in memory
        lambda x: x.transpose(2, 3),
        lambda x: x[:, ::2, :, 2:],
        lambda x: x[:1].expand(3, -1, -1, -1),
        lambda x: x[..., :1, ::2],
    ],
)
def test_any_strides(view):
    x = view(numbers(2, 4, 4, 8))
    cos, sin = angles(x.shape, torch.float32, True)
    cos = torch.stack([cos, cos], dim=-1)[..., 0]  # neighbours are apart
    sin = torch.cat([sin, sin], dim=-1)[..., : sin.shape[-1]]  # rows are
    grad = view(numbers(2, 4, 4, 8).flip(1))
    for ours, theirs in zip(run(rope, x, cos, sin, grad), run(apply_rope, x, cos, sin, grad), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_only_angles_are_kept():
    shape, kept = (2, 3, 2, 8), []
    x, (cos, sin) = numbers(*shape).requires_grad_(), angles(shape, torch.float32, False)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        rope(x, cos, sin)
    assert kept == [cos.data_ptr(), sin.data_ptr()]


def passes(function, x, cos, sin, grad):
    """Forward and backward as two calls."""
    graph = []
    yield lambda: graph.append(function(x, cos, sin))
    yield lambda: torch.autograd.grad(graph[0], x, grad)


@interpreted_only
@pytest.mark.parametrize("shape", [(2, 3, 9, 12), (1, 2, 70, 128)])
def test_x_is_moved_once_each_way_and_angles_once_a_token(shape):
    x, grad = numbers(2, *shape, dtype=torch.bfloat16)
    for direction in passes(rope, x.requires_grad_(), *angles(shape, torch.bfloat16, False), grad):
        with count_accesses() as moved, record_launches() as launches:
            direction()
        tokens = shape[0] * shape[1]
        assert moved["store"] == 2 * x.numel() and moved["load"] == 2 * (x.numel() + tokens * shape[3])
        assert len(launches) == 1


def test_eager_moves_nine_and_ten():
    shape = (2, 3, 16, 8)
    x, grad = numbers(2, *shape)
    x = x.clone().requires_grad_()
    cos, sin = angles(shape, torch.float32, False)
    for direction, expected in zip(passes(apply_rope, x, cos, sin, grad), [9, 10], strict=True):
        with BytesMoved() as moved:
            direction()
        assert moved.total == expected * x.nbytes + 2 * (cos.nbytes + sin.nbytes)  # once for each half of x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3, 3, 6), (1, 1, 70, 128)])
def test_nothing_outside_is_read_or_written(dtype, shape):
    x, grad = (guarded(part) for part in numbers(2, *shape, dtype=dtype))
    cos, sin = (guarded(part) for part in angles(shape, dtype, True))
    with GuardBands() as guards:
        results = [rotate(x, cos, sin, False, dtype), rotate(grad, cos, sin, True, dtype)]
    guards.check()
    assert guards.operations == [] and guards.largest_bytes == x.nbytes
    assert all(each.isfinite().all() for each in results)  # what surrounds the inputs is NaN


def test_operator_is_well_made():
    shape = (2, 3, 2, 8)
    x, (cos, sin) = numbers(*shape).transpose(1, 2).contiguous().transpose(1, 2), angles(shape, torch.float32, False)
    for backwards in (False, True):
        torch.library.opcheck(rotate, (x.detach().requires_grad_(), cos, sin, backwards, torch.float32))
    torch.library.opcheck(rotate, (x.bfloat16().requires_grad_(), cos, sin, False, torch.float32))


def test_traced_faked_and_recomputed():
    shape = (2, 3, 2, 8)
    x, grad = numbers(2, *shape)
    given = x, *angles(shape, torch.float32, True), grad
    expected = run(rope, *given)
    compiled = torch.compile(rope, backend="aot_eager", fullgraph=True)
    again = lambda *inputs: checkpoint(rope, *inputs, use_reentrant=False)  # noqa: E731
    for function in (compiled, again):
        for ours, theirs in zip(run(function, *given), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    with FakeTensorMode():
        fake = torch.empty(2, 2, 3, 8, dtype=torch.bfloat16, requires_grad=True)
        angle = torch.empty(3, 4, dtype=torch.bfloat16)
        out = rope(fake.transpose(1, 2), angle, angle)
        out.sum().backward()
    assert out.shape == (2, 3, 2, 8) and out.is_contiguous() and fake.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("autocast", [False, True])
def test_in_the_model(autocast):
    tokens = torch.arange(2 * 7, device=DEVICE).view(2, 7)
    gradients = []
    for function in (apply_rope, rope):
        model = Transformer(PRESETS["debug"]).to(DEVICE)
        for block in model.blocks:
            block.attention.rope = function
        with record_launches() as launches, torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            model(tokens).float().pow(2).mean().backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    assert [launch.name for launch in launches] == ["rope_kernel"] * 8  # q and k, two layers, there and back
    # bfloat16: what rounds in another order
    torch.testing.assert_close(*gradients, rtol=0, atol=(1e-2 if autocast else 1e-5) * gradients[0].abs().max().item())


def test_dtype_is_that_of_the_product():
    shape = (1, 2, 2, 8)
    for x_dtype in (torch.bfloat16, torch.float32):
        for angle_dtype in (torch.bfloat16, torch.float32):
            x = numbers(*shape, dtype=x_dtype).requires_grad_()
            cos, sin = angles(shape, angle_dtype, False)
            out = rope(x, cos, sin)
            assert out.dtype == apply_rope(x, cos, sin).dtype
            assert torch.autograd.grad(out.sum(), x)[0].dtype == x_dtype


@pytest.mark.parametrize("shape", [(0, 3, 2, 8), (2, 0, 2, 8), (2, 3, 0, 8), (2, 3, 2, 0)])
def test_empty(shape):
    x, angle = torch.empty(shape, device=DEVICE).requires_grad_(), torch.ones(shape[1], shape[3] // 2, device=DEVICE)
    with record_launches() as launches:
        out = rope(x, angle, angle)
        out.sum().backward()
    assert out.shape == x.grad.shape == shape and not launches


X, ANGLE = torch.ones(2, 3, 2, 8), torch.ones(3, 4)


@pytest.mark.parametrize(
    "x, cos, sin, message",
    [
        (X[0], ANGLE, ANGLE, r"x \[3, 2, 8\]"),
        (X[..., :7], ANGLE, ANGLE, r"x \[2, 3, 2, 7\]: it is \[b, s, a, d\], d even"),
        (X, ANGLE[:2], ANGLE[:2], r"cos \[2, 4\], sin \[2, 4\]"),
        (X, ANGLE, ANGLE[:, :2], r"cos \[3, 4\], sin \[3, 2\]"),
        (X, ANGLE.expand(4, 3, 4), ANGLE.expand(4, 3, 4), r"cos \[4, 3, 4\]"),
        (X.double(), ANGLE.double(), ANGLE.double(), "x is torch.float64"),
        (X, ANGLE, ANGLE.bfloat16(), "sin torch.bfloat16"),
        (X, ANGLE.to("meta"), ANGLE, "cos on meta"),
        (X, ANGLE.clone().requires_grad_(), ANGLE, "requires a gradient"),
    ],
)
def test_bad_input_is_one_line(x, cos, sin, message):
    with pytest.raises(ValueError, match=message) as raised:
        rope(x, cos, sin)
    assert "\n" not in str(raised.value)
