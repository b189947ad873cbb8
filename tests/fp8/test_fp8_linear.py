"""course_lib.fp8.linear: three products in 8 bits, each that of the quantized operands, one byte a number kept, scales
of this step or of those before. CPU, or GPU.
"""

import copy
from collections import Counter
from unittest import mock

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from course_kit.gpu.launches import record_launches
from course_lib.fp8 import delayed_scaling as fp8_delayed
from course_lib.fp8 import linear as fp8_linear
from course_lib.fp8 import operands as fp8_operands
from course_lib.fp8 import quantizers as fp8_quantizers
from course_lib.fp8.casts import FUSED_BLOCKS, quantize_both
from course_lib.fp8.delayed_scaling import DelayedQuantizer, update_scales
from course_lib.fp8.linear import (
    Fp8Linear,
    Fp8LinearFunction,
    LayerQuantizers,
    gradient_dtype,
    quantized_once,
)
from course_lib.fp8.operands import Cast, Casts
from course_lib.fp8.quantization import ROW, SQUARE, TENSOR, TILE, Quantized, quantize
from course_lib.fp8.recipes import by_blocks, per_tensor
from eight_bits import DEVICE, E4M3, E5M2, TENSOR_CORE, Products, scale_of_each, seeded, stands_for, uneven

ROWS = Casts(*[Cast(E4M3, ROW, power_of_two=True)] * 3)
CASTS = {
    "tensor": per_tensor(),
    "delayed": per_tensor(history=3, weight_history=2),
    "row": ROWS,
    "blocks": by_blocks(),
    "blocks, powers of two": by_blocks(power_of_two=True),
}
how = pytest.mark.parametrize("casts", CASTS.values(), ids=CASTS)
LEADING, IN, OUT = (2, 75), 140, 130  # no multiple of 16, more than a block
DTYPES = [torch.float32, torch.bfloat16]
OF_A_SUM = 16 * 2**-24 if DEVICE == "cpu" else TENSOR_CORE  # relative to the sum of magnitudes


def a_layer(casts: Casts, bias: bool = False, dtype: torch.dtype = torch.float32) -> Fp8Linear:
    linear = nn.Linear(IN, OUT, bias=bias).to(DEVICE, dtype)
    with torch.no_grad():
        linear.weight.copy_(uneven(OUT, IN, dtype, seed=1) / 100)
    return Fp8Linear(linear, casts)


def an_input(dtype: torch.dtype = torch.float32, seed: int = 2) -> torch.Tensor:
    return uneven(150, IN, dtype, seed).view(*LEADING, IN).requires_grad_()


def a_gradient(dtype: torch.dtype = torch.float32, seed: int = 3) -> torch.Tensor:
    return uneven(150, OUT, dtype, seed).view(*LEADING, OUT) / 1000


def run(layer: nn.Module, x: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """y, dx, dw (and db), anew."""
    out = layer(x)
    return out.detach(), *torch.autograd.grad(out, [x, *layer.parameters()], gradient)


def by_cast(x: torch.Tensor, cast: Cast) -> torch.Tensor:
    """What the 8 bits of x [rows, k] stand for, float64."""
    return stands_for(quantize(x, cast.dtype, cast.block, cast.power_of_two))


def expected(weight, x, gradient, casts: Casts) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """y, dx, dw in float64, each with the sum of its terms' magnitudes. Where a scale is not the same both ways, what
    is quantized along rows is quantized anew along columns: w and dy from what they were, x from its 8 bits.
    """
    x, gradient = x.detach().flatten(0, -2), gradient.flatten(0, -2)
    both_ways = casts.input.block[0] == casts.input.block[1]
    rows, dy, w = by_cast(x, casts.input), by_cast(gradient, casts.gradient), by_cast(weight, casts.weight)
    w_turned = w.t() if casts.weight.block[0] == casts.weight.block[1] else by_cast(weight.t(), casts.weight)
    x_turned = rows.t() if both_ways else by_cast(rows.t().float(), casts.input)
    dy_turned = dy.t() if both_ways else by_cast(gradient.t(), casts.gradient)
    pairs = (rows, w.t()), (dy, w_turned.t()), (dy_turned, x_turned.t())
    return [(left @ right, left.abs() @ right.abs()) for left, right in pairs]


@how
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_out_and_gradients_are_those_of_the_quantized_operands(casts, dtype):
    layer, x, gradient = a_layer(casts, dtype=dtype), an_input(dtype), a_gradient(dtype)
    found = run(layer, x, gradient)
    for name, our, (exact, terms), like in zip(
        ("y", "dx", "dw"),
        found,
        expected(layer.weight.detach(), x, gradient, casts),
        (gradient, x, layer.weight),
        strict=True,
    ):
        assert our.shape == like.shape and our.dtype == dtype, name
        rounded = exact.abs() * (torch.finfo(dtype).eps / 2 if dtype != torch.float32 else 0)
        assert ((our.double().view_as(exact) - exact).abs() <= OF_A_SUM * terms + rounded).all(), name


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found - exact).norm() / exact.norm()).item()


@how
def test_they_are_close_to_those_of_a_plain_layer_and_not_the_same(casts):
    """Two operands with an error of 2 to 4% each, and sums in which errors cancel as their terms do. And the error is
    there: products of numbers that were never quantized would have none.
    """
    generator = seeded()
    x, weight, gradient = (torch.randn(n, 256, generator=generator).to(DEVICE) for n in (384, 256, 384))
    x, linear = x.requires_grad_(), nn.Linear(256, 256, bias=False).to(DEVICE)
    linear.weight.data.copy_(weight)
    for our, plain in zip(run(Fp8Linear(linear, casts), x, gradient), run(linear, x, gradient), strict=True):
        assert 0.02 < relative(our, plain) < 0.08


def test_random_directions_of_the_gradient():
    """Sums of dx and dw along a direction: within 8 bits' rounding of the change of <y, dy> in float64."""
    layer, x, gradient = a_layer(ROWS), an_input(), a_gradient()
    _, dx, dw = run(layer, x, gradient)
    weight, rows, dy = layer.weight.detach().double(), x.detach().double(), gradient.double()
    exact_dx, exact_dw = dy @ weight, dy.flatten(0, -2).t() @ rows.flatten(0, -2)
    for seed in range(5):
        for found, exact in ((dx, exact_dx), (dw, exact_dw)):
            along = exact + exact.std() * torch.randn(exact.shape, generator=seeded(seed), dtype=torch.float64).to(
                DEVICE
            )
            slope, size = (found * along).sum(), exact.norm() * along.norm()
            assert abs(slope - (exact * along).sum()) < 0.05 * size


@how
def test_three_products_and_one_quantization_of_x(casts):
    """In float64 what is multiplied is emulated; here nothing is: `fp8_matmul` is given codes of 8 bits."""
    layer, x = a_layer(casts), an_input()
    with mock.patch.object(fp8_linear, "fp8_matmul", wraps=fp8_linear.fp8_matmul) as products:
        with mock.patch.object(fp8_quantizers, "cast_matrix", wraps=fp8_quantizers.cast_matrix) as casted:
            out = layer(x)
            assert products.call_count == 1 and casted.call_count == 2
            out.backward(a_gradient())
    assert products.call_count == 3
    for call in products.call_args_list:
        assert all(isinstance(operand, Quantized) and operand.values.itemsize == 1 for operand in call.args[:2])
    dtypes = [call.args[0].values.dtype for call in products.call_args_list]
    assert dtypes == [casts.input.dtype, casts.gradient.dtype, casts.gradient.dtype]


def plain_in_place_of_fp8(a: Quantized, b: Quantized, out_dtype: torch.dtype) -> torch.Tensor:
    return (stands_for(a).float() @ stands_for(b).float().t()).to(out_dtype)


@pytest.mark.parametrize("genuine", [True, False])
def test_what_is_multiplied_has_8_bits(genuine, monkeypatch):
    """And a product of wider numbers in its place does not pass, though its numbers would."""
    if not genuine:
        monkeypatch.setattr(fp8_linear, "fp8_matmul", plain_in_place_of_fp8)
    with Products() as products:
        run(a_layer(per_tensor()), an_input(), a_gradient())
    assert len(products.dtypes) == 3
    assert (products.dtypes == [(E4M3, E4M3), (E5M2, E4M3), (E5M2, E4M3)]) == genuine
    if genuine:
        stored = {torch.float32} if DEVICE == "cpu" else {E4M3, E5M2}
        assert {x.dtype for pair in products.operands for x in pair} == stored


# What is kept for backward.


def kept_by(run_forward, parameters) -> list[torch.Tensor]:
    """What autograd keeps of a forward, once each, parameters (by reference) apart."""
    ours, found = {parameter.untyped_storage().data_ptr() for parameter in parameters}, {}

    def keep(tensor):
        found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = run_forward()
    assert out is not None
    return [tensor for pointer, tensor in found.items() if pointer not in ours]


@how
def test_one_byte_a_number_is_kept_and_the_weight_by_reference(casts):
    layer, x = a_layer(casts, dtype=torch.bfloat16), an_input(torch.bfloat16)
    kept = kept_by(lambda: layer(x), layer.parameters())
    scales = [tensor for tensor in kept if tensor.itemsize == 4]
    values = [tensor for tensor in kept if tensor.itemsize == 1]
    assert len(values) == 1 and values[0].untyped_storage().nbytes() == 150 * IN and len(scales) + 1 == len(kept)
    count = {TENSOR: 1, ROW: 150, TILE: 150 * 2}[casts.input.block]
    of_weight = {TENSOR: 1, ROW: OUT, SQUARE: 2 * 2}[casts.weight.block]
    assert sum(tensor.numel() for tensor in scales) == count + of_weight
    plain = nn.Linear(IN, OUT, bias=False).to(DEVICE, torch.bfloat16)
    assert sum(tensor.nbytes for tensor in kept_by(lambda: plain(x), plain.parameters())) == 2 * 150 * IN


def test_layers_with_one_input_quantize_and_keep_it_once():
    """q, k and v: one of x, three of weights; in backward three of gradients."""
    quantizers = [LayerQuantizers(per_tensor()).to(DEVICE) for _ in range(3)]
    weights = [(uneven(n, IN, seed=n) / 100).requires_grad_() for n in (40, 24, 24)]
    x = an_input()
    with mock.patch.object(fp8_quantizers, "cast_matrix", wraps=fp8_quantizers.cast_matrix) as casted:
        outs = Fp8LinearFunction.apply(x, None, quantizers, *weights)
        assert casted.call_count == 1 + 3
    kept = kept_by(lambda: Fp8LinearFunction.apply(x, None, quantizers, *weights), weights)
    assert [tensor.nbytes for tensor in kept if tensor.itemsize == 1] == [150 * IN]
    gradients = [uneven(150, n, seed=5).view(*LEADING, n) for n in (40, 24, 24)]
    found = torch.autograd.grad(outs, [x, *weights], gradients)
    together = torch.zeros_like(x)
    for i, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
        alone = Fp8LinearFunction.apply(x, None, [quantizers[i]], weight)[0]
        dx, dw = torch.autograd.grad(alone, [x, weight], gradient)
        together += dx
        assert torch.equal(alone, outs[i]) and torch.equal(dw, found[1 + i])
    torch.testing.assert_close(found[0], together, rtol=1e-5, atol=1e-5 * together.abs().max().item())


@how
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_the_same_bits(casts, reentrant):
    for _step in range(2):
        layer, x, gradient = a_layer(casts), an_input(), a_gradient()
        again = copy.deepcopy(layer)
        plain = run(layer, x, gradient)
        x.grad = None
        checkpoint(again, x, use_reentrant=reentrant).backward(gradient)
        for name, one, other in zip(("dx", "dw"), plain[1:], (x.grad, again.weight.grad), strict=True):
            assert torch.equal(one, other), name
        assert_same_state(layer, again)
        update_scales(layer)


def assert_same_state(one: nn.Module, other: nn.Module) -> None:
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


# Shapes, dtypes, and what needs no gradient.


@how
def test_shapes_of_x(casts):
    """As nn.Linear: one token, no token, and any number of dimensions."""
    layer = a_layer(casts, bias=True)
    for leading in ((), (3,), (2, 3), (1, 2, 3), (0,), (0, 5)):
        x = torch.randn(*leading, IN, device=DEVICE, requires_grad=True)
        out = layer(x)
        assert out.shape == (*leading, OUT)
        out.sum().backward()
        assert x.grad.shape == x.shape and layer.weight.grad.isfinite().all()


def test_gradients_that_are_one_number_or_lie_otherwise():
    layer, x = a_layer(per_tensor()), an_input()
    for gradient in (torch.ones((), device=DEVICE).expand(*LEADING, OUT), a_gradient().transpose(0, 1)):
        out = layer(x if gradient.shape == (*LEADING, OUT) else x.transpose(0, 1))
        one = torch.autograd.grad(out, layer.weight, gradient, retain_graph=True)[0]
        assert torch.equal(one, torch.autograd.grad(out, layer.weight, gradient.contiguous())[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bias(dtype):
    layer, x, gradient = a_layer(per_tensor(), bias=True, dtype=dtype), an_input(dtype), a_gradient(dtype)
    with torch.no_grad():
        layer.bias.copy_(torch.randn(OUT, generator=seeded()))
    out, dx, dw, db = run(layer, x, gradient)
    assert torch.equal(out, layer.matmul(x) + layer.bias) and out.dtype == dtype
    torch.testing.assert_close(db, gradient.flatten(0, -2).sum(0))
    layer.bias = None
    without = run(layer, x, gradient)
    assert torch.equal(dx, without[1]) and torch.equal(dw, without[2])


def test_autocast():
    """x comes in bf16, and goes; the weight is quantized from float32, and so is its gradient's sum."""
    layer, x = a_layer(per_tensor(), bias=True), an_input()
    with torch.autocast(DEVICE, torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    expected_out = layer(x.detach().bfloat16())
    assert torch.equal(out, expected_out)
    out.backward(a_gradient(torch.bfloat16))
    assert x.grad.dtype == layer.weight.grad.dtype == layer.bias.grad.dtype == torch.float32
    narrow = layer.weight.detach().bfloat16()
    assert not torch.equal(quantize(narrow).values.float(), quantize(layer.weight).values.float())


@how
def test_frozen_weights_and_inputs_cost_no_product(casts):
    for frozen, count in (("weight", 2), ("x", 2)):
        layer, x = a_layer(casts), an_input()
        whole = run(layer, x, a_gradient())
        {"weight": layer.weight, "x": x}[frozen].requires_grad_(False)
        with mock.patch.object(fp8_linear, "fp8_matmul", wraps=fp8_linear.fp8_matmul) as products:
            layer(x).backward(a_gradient())
        assert products.call_count == count
        assert torch.equal(x.grad, whole[1]) if frozen == "weight" else torch.equal(layer.weight.grad, whole[2])
    with torch.no_grad():
        assert not layer(x).requires_grad


def test_of_three_weights_only_those_that_want_one_get_a_gradient():
    quantizers = [LayerQuantizers(per_tensor()).to(DEVICE) for _ in range(3)]
    weights = [torch.randn(8, IN, device=DEVICE, requires_grad=i == 1) for i in range(3)]
    with mock.patch.object(fp8_linear, "fp8_matmul", wraps=fp8_linear.fp8_matmul) as products:
        outs = Fp8LinearFunction.apply(an_input().detach(), None, quantizers, *weights)
        sum(out.sum() for out in outs).backward()
    assert products.call_count == 3 + 1
    assert [weight.grad is None for weight in weights] == [True, False, True]


def test_a_weight_that_is_computed():
    """As under tensor parallelism with autocast: no leaf, whose `grad_dtype` PyTorch does not tell."""
    weight = torch.randn(OUT, IN, device=DEVICE, requires_grad=True)
    quantizers = LayerQuantizers(per_tensor()).to(DEVICE)
    Fp8LinearFunction.apply(an_input(), None, [quantizers], weight.bfloat16())[0].sum().backward()
    assert weight.grad.dtype == torch.float32 and weight.grad.abs().sum() > 0


def test_a_wrong_size_gets_one_clear_line():
    with pytest.raises(ValueError, match=r"k is last in both and must agree: \[3, 7\] and \[130, 140\]"):
        a_layer(per_tensor())(torch.randn(3, 7, device=DEVICE))


@how
def test_on_fake_tensors_nothing_is_read_on_the_host(casts):
    with FakeTensorMode():
        layer = Fp8Linear(nn.Linear(IN, OUT), casts)
        x = torch.randn(3, IN, requires_grad=True)
        for _ in range(2):
            layer(x).sum().backward()
            update_scales(layer)
    assert x.grad.shape == x.shape and layer.weight.grad.shape == (OUT, IN)


@how
def test_copies_are_of_their_own(casts):
    layer, x, gradient = a_layer(casts), an_input(), a_gradient()
    again = copy.deepcopy(layer)
    run(layer, 100 * x, gradient)
    update_scales(layer)
    for one, other in zip(run(a_layer(casts), x, gradient), run(again, x, gradient), strict=True):
        assert torch.equal(one, other)


# Delayed scales.


def delayed(history: int = 3, power_of_two: bool = False) -> DelayedQuantizer:
    return DelayedQuantizer(Cast(E4M3, history=history, power_of_two=power_of_two)).to(DEVICE)


def ones(size: float) -> torch.Tensor:
    return torch.full((4, 8), float(size), device=DEVICE)


def test_the_scale_is_that_of_the_largest_of_the_last_steps():
    """By hand. A step is three matrices, the second one the largest."""
    quantizer = delayed(history=3)
    for size in (4, 9):
        assert quantizer(ones(size)).scale.item() == pytest.approx(size / 448), "no history: its own"
    assert quantizer.amax.item() == 9
    quantizer.update()
    for size, known in [(7, 9), (1, 9), (2, 9), (1, 7), (1, 2)]:  # 9 is in the history for three steps, and so is 7
        quantizer(ones(size / 2))
        found = quantizer(ones(size))
        quantizer(ones(size / 4))
        assert found.scale.shape == (1, 1) and found.scale.item() == pytest.approx(known / 448, rel=1e-6)
        assert quantizer.amax.item() == size
        quantizer.update()
        assert quantizer.amax.item() == 0 and quantizer.history[0].item() == size
        if size == 2 and known == 9:
            assert quantizer.history.tolist() == [2, 1, 7]


def test_what_grows_in_a_step_is_cut_off_until_the_next_one():
    quantizer = delayed()
    quantizer(ones(1))
    quantizer.update()
    found = quantizer(ones(10))
    assert (stands_for(found) == found.scale.double() * 448).all(), "at the largest that the old scale has"
    quantizer.update()
    torch.testing.assert_close(stands_for(quantizer(ones(10))).float(), ones(10))


def test_a_replay_changes_nothing():
    quantizer = delayed()
    first, state = quantizer(ones(3)), copy.deepcopy(quantizer.state_dict())
    second = quantizer(ones(3))
    assert torch.equal(first.scale, second.scale) and torch.equal(quantizer.amax, state["amax"])


def test_an_update_without_a_forward():
    """A layer that was not used: zeros join the history; where there are only zeros a matrix has its own scale."""
    quantizer = delayed(history=2)
    quantizer.update()
    assert quantizer(ones(5)).scale.item() == pytest.approx(5 / 448)
    for _ in range(2):
        quantizer.update()
        assert quantizer(ones(1).zero_()).scale.item() == pytest.approx(5 / 448)
    quantizer.update()
    assert quantizer.history.tolist() == [0, 0] and quantizer(ones(1e-6)).scale.item() == pytest.approx(1e-6 / 448)


def test_evaluation_leaves_the_history_alone():
    layer, x = a_layer(CASTS["delayed"]), an_input()
    run(layer, x, a_gradient())
    update_scales(layer)
    before = copy.deepcopy(layer)
    layer.eval()
    with torch.no_grad():
        layer(100 * x)
    assert_same_state(before, layer)


def test_nan_and_infinity_do_not_enter_the_history():
    quantizer, x = delayed(), ones(2)
    x[0, 0], x[1, 1] = torch.nan, torch.inf
    quantizer(x)
    assert quantizer.amax.item() == 2


def test_powers_of_two_from_a_history():
    quantizer = delayed(power_of_two=True)
    quantizer(ones(5))
    quantizer.update()
    assert quantizer(ones(3)).scale.item() == 2.0**-6  # 5 / 448 = 0.0112


def test_the_state_goes_through_a_checkpoint():
    layer, x, gradient = a_layer(CASTS["delayed"]), an_input(), a_gradient()
    run(layer, x, gradient)
    update_scales(layer)
    run(layer, x / 3, gradient)
    names = set(layer.state_dict()) - {"weight"}
    assert names == {f"quantizers.{role}.{name}" for role in Casts._fields for name in ("amax", "history")}
    fresh = a_layer(CASTS["delayed"])
    fresh.load_state_dict(copy.deepcopy(layer.state_dict()))
    for each in (layer, fresh):
        update_scales(each)
    for one, other in zip(run(layer, x / 9, gradient), run(fresh, x / 9, gradient), strict=True):
        assert torch.equal(one, other)
    assert_same_state(layer, fresh)


def test_current_scales_have_no_state():
    for casts in (per_tensor(), ROWS, by_blocks()):
        assert set(a_layer(casts, bias=True).state_dict()) == {"weight", "bias"}


def test_scales_stay_float32_where_a_model_is_cast():
    layer, x = a_layer(CASTS["delayed"]), an_input()
    run(layer, x, a_gradient())
    update_scales(layer)
    before = copy.deepcopy(layer.quantizers.state_dict())
    layer.bfloat16()
    for name, tensor in layer.quantizers.state_dict().items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, before[name]), name
    assert layer.weight.dtype == torch.bfloat16 and layer(an_input(torch.bfloat16)).dtype == torch.bfloat16


def test_update_scales_reaches_all_of_a_model():
    layers = nn.Sequential(
        a_layer(CASTS["delayed"]), nn.Sequential(Fp8Linear(nn.Linear(OUT, 5), per_tensor(history=2)))
    )
    layers.to(DEVICE)(an_input()).sum().backward()
    update_scales(layers)
    quantizers = [module for module in layers.modules() if isinstance(module, DelayedQuantizer)]
    assert len(quantizers) == 3 + 2 and all(
        quantizer.updated and quantizer.amax.item() == 0 for quantizer in quantizers
    )
    assert all(quantizer.history[0].item() > 0 for quantizer in quantizers)


def test_a_history_is_for_whole_matrices():
    with pytest.raises(ValueError, match=r"delayed scaling works per tensor, not with blocks of \(1, -1\)"):
        LayerQuantizers(Casts(*[Cast(E4M3, ROW, history=2)] * 3))


# A weight that is kept in 8 bits.


def store(layer: Fp8Linear, grad_dtype: torch.dtype | None = torch.float32) -> Fp8Linear:
    """The layer with its weight in 8 bits."""
    layer.weight = nn.Parameter(layer.quantizers.store_weight(layer.weight.detach()))
    layer.weight.grad_dtype = grad_dtype
    return layer


@how
def test_a_stored_weight_is_the_one_that_would_have_been_quantized(casts):
    """Bit for bit; but what a row's scale gives across is quantized from 8 bits then, and not from the weight."""
    if casts is ROWS:
        casts = casts._replace(weight=casts.weight._replace(block=SQUARE))
    layer, x, gradient = a_layer(casts), an_input(), a_gradient()
    plain, stored = run(layer, x, gradient), store(copy.deepcopy(layer))
    assert stored.weight.dtype == casts.weight.dtype and stored.weight.nbytes == OUT * IN
    for name, one, other in zip(("y", "dx", "dw"), plain, run(stored, x, gradient), strict=True):
        assert torch.equal(one, other), name
    assert "quantizers.weight.stored_scale" in stored.state_dict()


def test_a_stored_weight_by_rows_is_turned_with_its_scale():
    layer, x, gradient = a_layer(ROWS), an_input(), a_gradient()
    stands = stands_for(quantize(layer.weight, E4M3, ROW, power_of_two=True)).float()
    _, dx, _ = run(store(layer), x, gradient)
    dy = by_cast(gradient.flatten(0, -2), ROWS.gradient)
    exact = dy @ by_cast(stands.t(), ROWS.weight).t()
    torch.testing.assert_close(dx.flatten(0, -2).double(), exact, rtol=1e-4, atol=OF_A_SUM * exact.abs().max().item())


def test_the_gradient_of_a_stored_weight_has_more_bits():
    layer, x = store(a_layer(per_tensor()), torch.bfloat16), an_input()
    layer(x).backward(a_gradient())
    assert layer.weight.grad.dtype == torch.bfloat16
    for missing in (None, E4M3):
        with pytest.raises(ValueError, match="torch.float8_e4m3fn has no scale; for a weight's gradient"):
            store(a_layer(per_tensor()), missing)(x).backward(a_gradient())
    frozen = store(a_layer(per_tensor()), None)
    frozen.weight.requires_grad_(False)
    frozen(x).backward(a_gradient())
    assert gradient_dtype(nn.Linear(2, 2).weight) == torch.float32


def test_8_bits_and_their_scale_belong_together():
    layer = a_layer(per_tensor())
    layer.weight = nn.Parameter(layer.weight.detach().to(E4M3), requires_grad=False)
    with pytest.raises(
        ValueError, match="torch.float8_e4m3fn and no stored scale: `LayerQuantizers.store_weight` makes both"
    ):
        layer(an_input())
    layer = store(a_layer(per_tensor()))
    layer.weight = nn.Parameter(layer.weight.detach().bfloat16())  # what autocast would make of it
    with pytest.raises(ValueError, match="torch.bfloat16 and a stored scale"):
        layer(an_input())


# On a GPU the operands are quantized by kernels; here these are interpreted.


@how
def test_kernels_quantize_as_pytorchs_operators_do(casts, monkeypatch):
    """To the bit, over three steps of a history; each operand is looked at as seldom as can be."""
    x, gradient, results = an_input(torch.bfloat16), a_gradient(torch.bfloat16), []
    for by_kernels in (False, True):
        fused = (lambda x, block: block in FUSED_BLOCKS) if by_kernels else fp8_operands.has_kernels
        for module in (fp8_delayed, fp8_operands):
            monkeypatch.setattr(module, "has_kernels", fused)
        layer, found = a_layer(casts, dtype=torch.bfloat16), []
        with record_launches() as launches:
            for _ in range(3):
                found += run(layer, x, gradient)
                update_scales(layer)
        results.append(found)
    assert all(map(torch.equal, *results))
    looks = Counter((launch.name, tuple(launch.args[0].shape)) for launch in launches)
    x_shape, w_shape, dy_shape = (150, IN), (OUT, IN), (150, OUT)
    if casts.input.block == TENSOR:  # an amax, then 8 bits: x once, dy both ways from one look, w again in backward
        amaxes, quantizations = ({shape: looks[name, shape] for shape in (x_shape, w_shape, dy_shape)}
                                 for name in ("amax_kernel", "quantize_kernel"))  # fmt: skip
        looked = 1 if casts.input.history and DEVICE == "cuda" else 3  # then scales are known after the first step
        assert amaxes == dict.fromkeys((x_shape, w_shape, dy_shape), looked)
        assert quantizations == {x_shape: 3, w_shape: 6, dy_shape: 3}
    if casts.gradient.block == TILE:  # both ways from one look
        assert looks["quantize_kernel", dy_shape] == 3 and looks["quantize_kernel", w_shape] == 6


def test_a_historys_scale_is_worked_out_once_a_step_and_is_never_stale(monkeypatch):
    """Not from one step to the next, not after a load in place, and not by tensors of an inference mode."""
    for module in (fp8_delayed, fp8_operands):
        monkeypatch.setattr(module, "has_kernels", lambda x, block: block in FUSED_BLOCKS)
    layer, x = a_layer(per_tensor(history=3), dtype=torch.bfloat16), an_input(torch.bfloat16)
    quantizer = layer.quantizers.input
    with mock.patch.object(
        DelayedQuantizer, "next_scale", autospec=True, side_effect=DelayedQuantizer.next_scale
    ) as asked:
        for step in range(4):
            quantizer.history_known = step > 0  # as `check_histories` says on a GPU
            run(layer, x, a_gradient(torch.bfloat16))
            asked.reset_mock()
            layer(x), layer(x)
            assert sum(call.args[0] is quantizer for call in asked.call_args_list) == (0 if step else 2)
            update_scales(layer)

    def scale() -> float:
        return quantizer(x.detach().view(-1, IN)).scale.item()

    largest = x.abs().max().item()
    assert scale() == pytest.approx(largest / 448)
    with torch.no_grad():
        quantizer.history.fill_(1000.0)
    assert scale() == pytest.approx(1000 / 448)
    quantizer.history.data.fill_(1e6)  # as a learner's `update` might
    update_scales(layer)
    assert scale() == pytest.approx(1e6 / 448)
    with torch.inference_mode():
        layer.eval()(x)
    run(layer.train(), x, a_gradient(torch.bfloat16))


def test_both_ways_by_a_scale_that_is_there():
    x = uneven(150, IN, torch.bfloat16, 4)
    for block in (TENSOR, SQUARE):
        scale = quantize(x, block=block).scale
        straight, turned = quantize_both(x, block=block, scale=scale)
        for found, wanted in ((straight, quantize(x, block=block)), (turned, quantize(x.t(), block=block))):
            assert torch.equal(found.values.view(torch.uint8), wanted.values.view(torch.uint8))
            assert torch.equal(found.scale, wanted.scale) and found.block == block
    with pytest.raises(ValueError, match="have other scales in the transpose: give none"):
        quantize_both(x, block=TILE, scale=quantize(x, block=TILE).scale)


# Against torchao.


@pytest.mark.skipif(torch.__version__ < "2.13", reason="this torchao wants a newer PyTorch")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("tensorwise", torch.float32), ("tensorwise", torch.bfloat16), ("rowwise", torch.bfloat16)],
    ids=str,
)
def test_torchaos_layer(name, dtype):
    """The same codes, where scales are powers of two, so the results differ by the rounding of the sums: torchao's are
    `torch._scaled_mm`'s, on a CPU ours are float32's. torchao's rows give bfloat16 alone, so float32 isn't tried. For
    dw it quantizes x again, which it keeps in 16 bits; from 8 bits that is the same but for the smallest numbers.
    """
    pytest.importorskip("torchao.float8")
    import dataclasses

    from torchao.float8.config import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(name), round_scales_to_power_of_2=True)
    linear = nn.Linear(64, 48, bias=False).to(DEVICE, dtype)
    x, gradient = (torch.randn(32, n, generator=seeded(n)).to(DEVICE, dtype) for n in (64, 48))
    x.requires_grad_()
    theirs = Float8Linear.from_float(copy.deepcopy(linear), config)
    casts = {"tensorwise": per_tensor(power_of_two=True), "rowwise": ROWS}[name]
    ours = Fp8Linear(linear, casts)
    x_size, dy_size, w_size = (2 * each.detach().double().abs() for each in (x, gradient, linear.weight))
    # The terms' magnitudes, at most: a code stands for less than twice its number.
    sizes = x_size @ w_size.t(), dy_size @ w_size, dy_size.t() @ x_size
    results = run(ours, x, gradient), run(theirs, x, gradient)
    for what, our, their, terms, k in zip(("y", "dx", "dw"), *results, sizes, (64, 48, 32), strict=True):
        of_sums = 2 * k * 2.0**-24 if DEVICE == "cpu" else TENSOR_CORE
        bound = of_sums * terms + torch.finfo(dtype).eps * their.double().abs()
        assert ((our.double() - their.double()).abs() <= bound).all(), what


def test_scales_by_tile_follow_the_tokens():
    """One token's gradient a thousand times larger: with tiles the others keep their precision, in squares they lose
    it (DeepSeek-V3 2024, appendix B.2), in a tensor too.
    """
    generator = seeded()
    gradient = torch.randn(256, 256, generator=generator).to(DEVICE)
    gradient[7] *= 1e5
    errors = {}
    for block in (TILE, SQUARE, TENSOR):
        found = quantize(gradient, E4M3, block)
        errors[block] = relative(stands_for(found)[:7], gradient[:7].double())
        assert scale_of_each(found).shape == gradient.shape
    assert errors[TILE] < 0.03 and errors[SQUARE] > 10 * errors[TILE] and errors[TENSOR] > 10 * errors[TILE]


# As on a GPU: through the kernels, here interpreted.


@pytest.fixture
def by_kernels(monkeypatch):
    for module in (fp8_delayed, fp8_operands):
        monkeypatch.setattr(module, "has_kernels", lambda x, block: block in FUSED_BLOCKS)
    monkeypatch.setattr(fp8_quantizers, "has_transpose_kernel", lambda values: True)


@how
def test_kernels_give_the_layer_the_same_bits(casts, by_kernels):
    """Over three steps: of delayed scales the first is the matrix's own, the others those of the history."""
    layer, plain = (a_layer(casts) for _ in range(2))
    for step in range(3):
        x, gradient = an_input(seed=step), a_gradient(seed=step)
        found = run(layer, x, gradient)
        with (
            mock.patch.object(fp8_delayed, "has_kernels", lambda x, block: False),
            mock.patch.object(fp8_operands, "has_kernels", lambda x, block: False),
            mock.patch.object(fp8_quantizers, "has_transpose_kernel", lambda values: False),
        ):
            expected = run(plain, x, gradient)
        assert all(map(torch.equal, found, expected)), step
        for each in (layer, plain):
            update_scales(each)
        assert_same_state(layer, plain)
        for quantizer in layer.modules():
            quantizer.history_known = isinstance(quantizer, DelayedQuantizer)  # what update_scales finds out on a GPU


def looks_of(layer: nn.Module) -> Counter:
    """The kernels of a step, forward and backward."""
    with record_launches() as launches:
        run(layer, an_input(torch.bfloat16), a_gradient(torch.bfloat16))
    return Counter(launch.name for launch in launches)


@pytest.mark.parametrize("name, looks", [("tensor", (4, 3)), ("delayed", (4, 0)), ("blocks", (5, 0))])
def test_each_operand_is_looked_at_as_seldom_as_can_be(name, looks, by_kernels):
    """Casts, and amaxes apart from them: x, w and dy once each, w again in backward (its transpose is not kept), and x
    in tiles turned. With a history nobody asks for an amax.
    """
    layer = a_layer(CASTS[name], dtype=torch.bfloat16)
    run(layer, an_input(torch.bfloat16), a_gradient(torch.bfloat16))
    update_scales(layer)
    for quantizer in layer.modules():
        quantizer.history_known = isinstance(quantizer, DelayedQuantizer)
    found = looks_of(layer)
    assert (found["quantize_kernel"], found["amax_kernel"]) == looks and len(found) <= 2


def test_the_host_asks_seldom_who_has_a_history():
    """In the first step, then once in history - 1 steps, before the number that it saw leaves. Of a history of one it
    would have to ask in each; of a state that is loaded it knows nothing.
    """
    sizes = [0.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 3.0]
    four, one = DelayedQuantizer(Cast(history=4)), DelayedQuantizer(Cast(history=1))
    known = []
    for size in sizes:
        for quantizer in (four, one):
            quantizer.amax.fill_(size)
        with mock.patch.object(torch, "cat", wraps=torch.cat) as asked:
            fp8_delayed.check_histories([four, one])
        known.append((four.history_known, asked.call_count))
        for quantizer in (four, one):
            quantizer.update()
        assert not four.history_known or four.history.max() > 0, "known: there is one"
    assert known == [(False, 1), (False, 0), (False, 0), (False, 1), (False, 0), (False, 0), (False, 1), (False, 0)]
    fp8_delayed.check_histories([])
    four.amax.fill_(1.0)
    for _ in range(3):
        fp8_delayed.check_histories([four])
    assert four.history_known and not one.history_known
    four.load_state_dict(DelayedQuantizer(Cast(history=4)).state_dict())
    assert not four.history_known and four.steps_until_check == 0


@pytest.mark.parametrize("name", ["tensor", "delayed"])
def test_x_is_kept_as_backward_reads_it(name, by_kernels):
    """Its bytes lie as those of its transpose, made by the look that quantized it: no copy is made of them. Still one
    byte a number, and not where the model is evaluated.
    """
    layer = a_layer(CASTS[name], dtype=torch.bfloat16)
    for training in (True, False):
        out = layer.train(training)(an_input(torch.bfloat16))
        (values,) = [each for each in out.grad_fn.saved_tensors if each.itemsize == 1]
        assert values.shape == (150, IN) and values.untyped_storage().nbytes() == 150 * IN
        assert values.t().is_contiguous() == training


@how
@pytest.mark.parametrize("kernels", [False, True])
def test_weights_are_quantized_once_for_all_micro_batches(casts, kernels, monkeypatch):
    """And give the same bits, with delayed scales too: a micro-batch more leaves the weight's amax what it is."""
    for module in (fp8_delayed, fp8_operands):
        monkeypatch.setattr(module, "has_kernels", lambda x, block: kernels and block in FUSED_BLOCKS)
    model = nn.Sequential(a_layer(casts), nn.Tanh(), Fp8Linear(nn.Linear(OUT, 20, bias=False).to(DEVICE), casts))
    twin = copy.deepcopy(model)
    weights = [layer.weight for layer in model if hasattr(layer, "weight")]
    seen = Counter()

    def few_rows(micro_batch):
        return an_input(seed=micro_batch)[:, :3]

    quantize_of = fp8_quantizers.Quantizer.quantize

    def counted(quantizer, x, *more):
        seen.update(i for i, weight in enumerate(weights) if x.is_set_to(weight))
        return quantize_of(quantizer, x, *more)

    monkeypatch.setattr(fp8_quantizers.Quantizer, "quantize", counted)
    for _step in range(2):
        for micro_batch in range(2):
            twin(few_rows(micro_batch)).square().sum().backward()
        with quantized_once(model):
            for micro_batch in range(2):
                model(few_rows(micro_batch)).square().sum().backward()
            assert seen == Counter({0: 1, 1: 1})
        seen.clear()
        for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(mine.grad, other.grad)
            with torch.no_grad():
                for each in (mine, other):
                    each.sub_(each.grad, alpha=1e-3)
        for each in (model, twin):
            update_scales(each)
        assert_same_state(model, twin)
    assert all(
        quantizer.cached is None for quantizer in model.modules() if isinstance(quantizer, fp8_quantizers.Quantizer)
    )


def test_a_weight_that_changes_meanwhile_is_quantized_anew():
    layer = a_layer(per_tensor())
    x = an_input()
    with quantized_once(layer):
        before = layer(x)
        assert torch.equal(layer(x), before)
        with torch.no_grad():
            layer.weight.mul_(2)
        assert torch.equal(layer(x), 2 * before)
    with pytest.raises(ZeroDivisionError), quantized_once(layer):
        layer(x)
        raise ZeroDivisionError
    assert layer.quantizers.weight.cached is None and not layer.quantizers.weight.caching


def test_after_a_step_weights_are_quantized_anew_though_autograd_saw_no_change():
    """As with ZeRO: the optimizer has other tensors, and what it does to them is copied into the weight's memory."""
    layer = a_layer(per_tensor())
    x, shard = an_input(), nn.Parameter(layer.weight.detach().clone())
    optimizer = torch.optim.SGD([shard], lr=1.0)
    shard.grad = torch.ones_like(shard)
    with quantized_once(layer):
        before = layer(x)
        optimizer.step()
        version = layer.weight._version
        layer.weight.data.copy_(shard)
        assert layer.weight._version == version, "autograd sees it"
        after = layer(x)
    assert torch.equal(after, layer(x)) and not torch.equal(after, before)
    optimizer.step()  # outside nothing is left that hears of it
