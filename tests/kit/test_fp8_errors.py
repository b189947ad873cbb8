"""course_kit.gpu.fp8_errors: operands that make the model's own gradients, errors as one rounds by hand, outliers that
only quantization sees. CPU.
"""

import copy
import math

import pytest
import torch
from torch import nn

from course_kit.gpu.fp8_errors import MATMULS, OPERANDS, layer_errors, matmul_errors, operands_of, plant_outliers
from course_lib.fp8.operands import Cast, Casts
from course_lib.fp8.program import RECIPES, apply_fp8
from course_lib.fp8.quantization import TENSOR, TILE
from course_lib.fp8.recipes import by_blocks, per_tensor
from course_lib.single_gpu.model import ModelConfig, Transformer, loss

torch.set_num_threads(1)
CONFIG = ModelConfig(layers=2, hidden=256, heads=4, kv_heads=2, ffn_hidden=160, vocab=64)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TILES_OF_32 = Casts(*[Cast(block=(1, 32))] * 3)


@pytest.fixture(scope="module")
def model() -> Transformer:
    model = Transformer(CONFIG)
    for _name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            parameter.data *= 3  # so that layers differ from one another, as trained ones do
    return model


@pytest.fixture(scope="module")
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = torch.randint(64, (2, 4, 16), generator=torch.Generator().manual_seed(0)).unbind()
    return inputs, targets


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: layer for name, layer in model.blocks.named_modules() if isinstance(layer, nn.Linear)}


def test_operands_make_the_gradients_and_outputs_of_the_model(model, batch):
    outputs = {}
    handles = [
        layer.register_forward_hook(lambda layer, x, y, name=name: outputs.update({name: y.detach().flatten(0, 1)}))
        for name, layer in linear_layers(model).items()
    ]
    operands = operands_of(model, *batch)
    for handle in handles:
        handle.remove()
    assert operands.keys() == linear_layers(model).keys() and len(operands) == 14
    for name, layer in linear_layers(model).items():
        x, w, dy = operands[name]
        assert x.shape == (64, layer.in_features) and dy.shape == (64, layer.out_features)
        torch.testing.assert_close(x @ w.t(), outputs[name], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(dy.t() @ x, layer.weight.grad, rtol=1e-4, atol=1e-6)


def test_measuring_leaves_the_model_as_it_was(model, batch):
    before, logits = copy.deepcopy(model.state_dict()), model(batch[0])
    matmul_errors(model, by_blocks(), *batch)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(model(batch[0]), logits)
    assert not any(layer._forward_hooks for layer in model.modules())


def rounded_by_hand(x: torch.Tensor, dtype: torch.dtype, width: int | None = None) -> torch.Tensor:
    """x in 8 bits and back, float64: one scale for all of it, or for each `width` numbers of a row."""
    pieces = [x] if width is None else list(x.split(width, 1))
    scales = [piece.abs().amax(None if width is None else 1, keepdim=True) / torch.finfo(dtype).max for piece in pieces]
    parts = [(piece / scale).to(dtype).double() * scale for piece, scale in zip(pieces, scales, strict=True)]
    return torch.cat(parts, 1)


def off(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found - exact).norm() / exact.norm()).item()


def products_of(x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """y, dx and dw."""
    return [x @ w.t(), dy @ w, dy.t() @ x]


def test_errors_of_a_layer_are_those_of_operands_rounded_by_hand():
    torch.manual_seed(0)
    x, w, dy = torch.randn(96, 256), torch.randn(160, 256), torch.randn(96, 160) * 1e-5
    errors = layer_errors(x, w, dy, per_tensor())
    near = [rounded_by_hand(x, E4M3), rounded_by_hand(w, E4M3), rounded_by_hand(dy, E5M2)]
    exact = [x.double(), w.double(), dy.double()]
    pairs = [*zip(near, exact, strict=True), *zip(products_of(*near), products_of(*exact), strict=True)]
    expected = [off(found, right) for found, right in pairs]
    assert [errors[name] for name in OPERANDS + MATMULS] == pytest.approx(expected, rel=1e-3)
    assert errors["dy lost"] == ((near[2] == 0) & (dy != 0)).double().mean()


def test_tiles_are_cut_along_the_sum_of_each_product():
    torch.manual_seed(0)
    x, w, dy = torch.randn(96, 256), torch.randn(160, 256), torch.randn(96, 160)
    errors = layer_errors(x, w, dy, TILES_OF_32)
    rows = [rounded_by_hand(each, E4M3, 32) for each in (x, w, dy)]
    columns = [
        rounded_by_hand(rows[0].t().float(), E4M3, 32).t(),  # x, from the 8 bits that forward has kept
        rounded_by_hand(w.t(), E4M3, 32).t(),
        rounded_by_hand(dy.t(), E4M3, 32).t(),
    ]
    x64, w64, dy64 = (each.double() for each in (x, w, dy))
    assert errors["y"] == pytest.approx(off(rows[0] @ rows[1].t(), x64 @ w64.t()), rel=1e-3)
    assert errors["dx"] == pytest.approx(off(rows[2] @ columns[1], dy64 @ w64), rel=1e-3)
    assert errors["dw"] == pytest.approx(off(columns[2].t() @ columns[0], dy64.t() @ x64), rel=1e-3)


def test_a_format_has_its_error_and_products_the_root_of_two_squares():
    torch.manual_seed(0)
    e4m3, e5m2 = 0.0265, 0.053  # root mean square of a rounded number's relative error
    for k in (64, 1024):  # how long the sum is doesn't matter
        errors = layer_errors(torch.randn(128, k), torch.randn(128, k), torch.randn(128, 128), per_tensor())
        assert [errors[name] for name in OPERANDS] == pytest.approx([e4m3, e4m3, e5m2], rel=0.05)
        expected = [math.hypot(e4m3, e4m3), math.hypot(e5m2, e4m3), math.hypot(e5m2, e4m3)]
        assert [errors[name] for name in MATMULS] == pytest.approx(expected, rel=0.05)


def test_an_error_is_the_layers_own(model, batch):
    """A first layer that is far off doesn't show in those after it."""
    errors = matmul_errors(model, per_tensor(), *batch)
    assert max(errors["1.mlp.down_proj"].values()) < 0.1
    worse = matmul_errors(model, per_tensor()._replace(input=Cast(E5M2)), *batch)
    for name, row in errors.items():
        assert worse[name]["x"] > 1.5 * row["x"] and worse[name]["w"] == row["w"] and worse[name]["dx"] == row["dx"]


@pytest.mark.parametrize("block", [TENSOR, TILE])
def test_gradients_that_fall_out_of_the_format_are_counted(block):
    torch.manual_seed(0)
    dy = torch.randn(32, 256)
    dy[:, 128:] *= 2.0**-30  # zero by one scale for all, but not by their own
    casts = Casts(Cast(), Cast(), Cast(block=block))
    lost = layer_errors(torch.randn(32, 64), torch.randn(256, 64), dy, casts)["dy lost"]
    assert lost == pytest.approx(0.5, abs=0.01) if block == TENSOR else lost < 0.01


def test_outliers_leave_every_bit_of_what_the_model_computes(model, batch):
    for factor, channel in ((2.0**17, 3), (0.25, 0)):
        planted = plant_outliers(copy.deepcopy(model), factor, channel)
        assert torch.equal(planted(batch[0]), model(batch[0]))
        x, own = (operands_of(each, *batch)["0.mlp.up_proj"][0] for each in (planted, model))
        assert torch.equal(x[:, channel], own[:, channel] * factor)
        others = torch.arange(CONFIG.hidden) != channel
        assert torch.equal(x[:, others], own[:, others])


def forward_errors(model: nn.Module, casts: Casts, batch) -> list[float]:
    errors = matmul_errors(model, casts, *batch)
    return [row["y"] for name, row in errors.items() if name.endswith(("q_proj", "gate_proj"))]


def test_one_scale_breaks_by_an_outlier_and_tiles_confine_it(model, batch):
    calm, wild = (plant_outliers(copy.deepcopy(model), factor) for factor in (2.0**10, 2.0**24))
    for casts in (per_tensor(), TILES_OF_32):
        assert max(forward_errors(calm, casts, batch)) < 0.1
    assert min(forward_errors(wild, per_tensor(), batch)) > 0.9  # nothing is left
    confined = forward_errors(wild, TILES_OF_32, batch)
    assert max(confined) < 0.5  # 32 of 256 channels: the root of an eighth is 0.35


def test_outliers_that_would_change_the_model_are_refused(model, batch):
    before = copy.deepcopy(model.state_dict())
    for factor in (3.0, 0.0, -2.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="not a power of two"):
            plant_outliers(model, factor)
    for channel in (-1, 256):
        with pytest.raises(ValueError, match="channel"):
            plant_outliers(model, 2.0, channel)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_model_in_fp8_has_no_errors_to_show(model, batch):
    converted = apply_fp8(copy.deepcopy(model), RECIPES["DeepSeek-V3"])
    with pytest.raises(ValueError, match="before apply_fp8"):
        matmul_errors(converted, per_tensor(), *batch)


def test_hooks_are_gone_after_a_forward_that_failed(model):
    inputs = torch.full((1, 4), CONFIG.vocab)  # no such token
    with pytest.raises(IndexError):
        operands_of(model, inputs, inputs)
    assert not any(layer._forward_hooks for layer in model.modules())
    assert loss(model(inputs - 1), inputs - 1).isfinite()
