"""course_lib.fp8.program: the linear layers of a Transformer's blocks multiply in 8 bits, and nothing else is changed;
losses, gradients and steps stay close to those without. CPU, or GPU.
"""

import copy
import dataclasses
from unittest import mock

import pytest
import torch
from torch import nn

from course_lib.expert_parallel.mixture import apply_moe
from course_lib.fp8 import linear as fp8_linear
from course_lib.fp8 import quantizers as fp8_quantizers
from course_lib.fp8.delayed_scaling import DelayedQuantizer, update_scales
from course_lib.fp8.linear import Fp8Linear
from course_lib.fp8.program import apply_fp8
from course_lib.fp8.recipes import RECIPES, per_tensor
from course_lib.recompute.modes import apply_recompute
from course_lib.single_gpu.model import ModelConfig, Transformer, loss
from eight_bits import DEVICE, E4M3, E5M2, Products, stands_for

SMALL = ModelConfig(layers=2, hidden=64, heads=4, kv_heads=2, ffn_hidden=88, vocab=97, tied=True)
OF_A_BLOCK = [f"attention.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
IN_8_BITS = [name for name, recipe in RECIPES.items() if recipe.casts]
recipes = pytest.mark.parametrize("name", IN_8_BITS)


def a_model(config: ModelConfig = SMALL, dtype: torch.dtype = torch.float32) -> Transformer:
    """Its weights are larger than at the start of a training: the blocks have their say in the loss."""
    model = Transformer(config)
    with torch.no_grad():
        for parameter in model.blocks.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
    return model.to(DEVICE, dtype)


def a_batch(seed: int = 0, config: ModelConfig = SMALL) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(config.vocab, (2, 33), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    return tokens[:, :-1], tokens[:, 1:]


def gradients(model: nn.Module, seed: int = 0) -> tuple[float, dict[str, torch.Tensor]]:
    inputs, targets = a_batch(seed)
    model.zero_grad()
    found = loss(model(inputs), targets)
    found.backward()
    return found.item(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


# What is changed.


@recipes
def test_the_linear_layers_of_the_blocks_and_no_others(name):
    model = a_model()
    before = dict(model.named_modules())
    assert apply_fp8(model, RECIPES[name]) is model
    layers = {name for name, module in model.named_modules() if isinstance(module, Fp8Linear)}
    assert layers == {f"blocks.{i}.{each}" for i in range(SMALL.layers) for each in OF_A_BLOCK}
    for module_name, module in model.named_modules():
        if module_name not in layers and "quantizers" not in module_name:
            assert module is before[module_name], module_name
    assert type(model.head) is nn.Linear and model.head.weight is model.embedding.weight


@recipes
def test_parameters_are_the_same_objects_by_the_same_names(name):
    model = a_model()
    before = dict(model.named_parameters())
    apply_fp8(model, RECIPES[name])
    after = dict(model.named_parameters())
    assert list(before) == list(after) and all(after[each] is before[each] for each in before)


@recipes
def test_a_state_has_no_more_than_the_histories(name):
    model = a_model()
    before = set(model.state_dict())
    apply_fp8(model, RECIPES[name])
    added = set(model.state_dict()) - before
    assert before <= set(model.state_dict())
    assert all(each.rsplit(".", 1)[1] in ("amax", "history") and ".quantizers." in each for each in added)
    histories = [cast for cast in RECIPES[name].casts if cast.history]
    assert len(added) == 2 * len(histories) * len(OF_A_BLOCK) * SMALL.layers


def test_states_go_from_and_to_a_plain_model():
    plain, fp8 = a_model(), apply_fp8(Transformer(SMALL, seed=1), RECIPES["DeepSeek-V3"])
    fp8.load_state_dict(plain.state_dict())
    back = Transformer(SMALL, seed=2).to(DEVICE)
    back.load_state_dict(fp8.state_dict())
    for one, other in zip(plain.parameters(), back.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["BF16", "BF16, FP32 accumulation"])
def test_a_recipe_without_8_bits_changes_nothing(name):
    model = a_model()
    before, projects = dict(model.named_modules()), [block.attention.project_layers for block in model.blocks]
    apply_fp8(model, RECIPES[name])
    assert dict(model.named_modules()) == before
    assert [block.attention.project_layers for block in model.blocks] == projects


def test_experts_and_routers_stay_as_they_are():
    """A shared expert is an MLP, and is changed."""
    model = apply_moe(a_model(), experts=4, top_k=2, shared=1)
    before = dict(model.named_modules())
    apply_fp8(model, RECIPES["DeepSeek-V3"])
    changed = {name for name, module in model.named_modules() if isinstance(module, Fp8Linear)}
    each = OF_A_BLOCK[:4] + [f"mlp.shared.{name}_proj" for name in ("gate", "up", "down")]
    assert changed == {f"blocks.{i}.{name}" for i in range(SMALL.layers) for name in each}
    for name, module in model.named_modules():
        if ".router" in name or ".experts" in name:
            assert module is before[name], name
    found, grads = gradients(model)
    assert found == pytest.approx(gradients(apply_moe(a_model(), experts=4, top_k=2, shared=1))[0], rel=0.02)
    assert all(gradient.isfinite().all() for gradient in grads.values())


def test_a_stage_without_embedding_and_head():
    model = a_model()
    model.embedding = model.head = None
    apply_fp8(model, RECIPES["DeepSeek-V3"])
    assert model(torch.randn(2, 5, SMALL.hidden, device=DEVICE)).shape == (2, 5, SMALL.hidden)


@recipes
def test_on_the_meta_device(name):
    with torch.device("meta"):
        model = apply_fp8(Transformer(SMALL), RECIPES[name])
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    found = model(torch.zeros(2, 5, dtype=torch.int64, device="meta"))
    found.sum().backward()
    assert found.shape == (2, 5, SMALL.vocab) and all(parameter.grad.is_meta for parameter in model.parameters())
    update_scales(model)


def unchanged(model: nn.Module, change) -> bool:
    """Whether `change` raises ValueError and leaves the modules as they were."""
    before = dict(model.named_modules())
    with pytest.raises(ValueError) as raised:
        change()
    assert "\n" not in str(raised.value)
    return dict(model.named_modules()) == before


def test_a_second_time_is_an_error():
    model = apply_fp8(a_model(), RECIPES["FP8-LM"])
    with pytest.raises(ValueError, match="blocks.0.attention.q_proj is FP8 already"):
        apply_fp8(model, RECIPES["FP8-LM"])
    assert unchanged(model, lambda: apply_fp8(model, RECIPES["DeepSeek-V3"]))


def test_one_layer_that_is_fp8_already_stops_all():
    model = a_model()
    model.blocks[1].mlp.down_proj = Fp8Linear(model.blocks[1].mlp.down_proj, per_tensor())
    assert unchanged(model, lambda: apply_fp8(model, RECIPES["DeepSeek-V3"]))
    assert type(model.blocks[0].attention.q_proj) is nn.Linear


# What is computed.


def products_of(model: nn.Module) -> list[tuple[torch.dtype, torch.dtype]]:
    with Products() as products:
        gradients(model)
    return products.dtypes


def test_three_products_a_layer_have_8_bit_operands():
    """Seven layers a block. What is left in 16 or 32 bits are the head's three."""
    dtypes = products_of(apply_fp8(a_model(dtype=torch.bfloat16), RECIPES["nanotron"]))
    layers = len(OF_A_BLOCK) * SMALL.layers
    assert dtypes.count((E4M3, E4M3)) == layers and dtypes.count((E5M2, E4M3)) == 2 * layers
    assert len(dtypes) == 3 * layers + 3


def test_products_of_wider_numbers_in_their_place_are_seen(monkeypatch):
    """A fake: the right numbers, and float32 products."""

    def fake(a, b, out_dtype=torch.float32):
        return (stands_for(a).float() @ stands_for(b).float().t()).to(out_dtype)

    monkeypatch.setattr(fp8_linear, "fp8_matmul", fake)
    dtypes = products_of(apply_fp8(a_model(dtype=torch.bfloat16), RECIPES["nanotron"]))
    assert not any(E4M3 in pair for pair in dtypes)


def test_x_of_q_k_v_and_of_gate_and_up_is_quantized_once():
    """A block quantizes four inputs and seven weights forward."""
    model = apply_fp8(a_model(), RECIPES["DeepSeek-V3"])
    with mock.patch.object(fp8_quantizers, "cast_matrix", wraps=fp8_quantizers.cast_matrix) as casted, torch.no_grad():
        model(a_batch()[0])
    assert casted.call_count == (4 + 7) * SMALL.layers


def bytes_kept(model: nn.Module, dtype: torch.dtype) -> dict[torch.dtype, int]:
    """What autograd keeps of a block, parameters apart, by dtype."""
    x = torch.randn(2, 64, SMALL.hidden, device=DEVICE, dtype=dtype, requires_grad=True)
    cos, sin = (torch.randn(64, SMALL.head_dim // 2, device=DEVICE, dtype=dtype) for _ in range(2))
    ours, found = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}, {}

    def keep(tensor):
        found[tensor.untyped_storage().data_ptr()] = tensor.dtype, tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = model.blocks[0](x, cos, sin)
    assert out.dtype == dtype
    by_dtype: dict[torch.dtype, int] = {}
    for pointer, (kind, nbytes) in found.items():
        if pointer not in ours:
            by_dtype[kind] = by_dtype.get(kind, 0) + nbytes
    return by_dtype


def test_a_block_keeps_its_linear_layers_inputs_in_one_byte_a_number():
    """Three of hidden (of q, k and v; of o; of gate and up) and one of ffn_hidden. But what attention gives stays in 16
    bits beside its 8, since attention's own backward reads it.
    """
    tokens, h, f = 2 * 64, SMALL.hidden, SMALL.ffn_hidden
    model = a_model(dtype=torch.bfloat16)
    plain = bytes_kept(model, torch.bfloat16)
    fp8 = bytes_kept(apply_fp8(model, RECIPES["nanotron"]), torch.bfloat16)
    assert fp8[E4M3] == tokens * (3 * h + f)
    saved = plain[torch.bfloat16] - fp8[torch.bfloat16]
    assert saved == 2 * tokens * (2 * h + f), "o's input is not among what is no longer kept"
    assert sum(fp8.values()) < sum(plain.values())


# How close it is.


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.float() - exact.float()).norm() / exact.float().norm()).item()


@recipes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_loss_and_gradients_are_close_to_a_plain_models(name, dtype):
    """And not the same: 8 bits change every gradient by some 15%, where products in bf16 change it by 1%."""
    plain, exact = gradients(a_model())
    model = apply_fp8(a_model(dtype=dtype), RECIPES[name])
    found, grads = gradients(model)
    assert found == pytest.approx(plain, rel=0.01) and found != plain
    for each, gradient in grads.items():
        assert gradient.dtype == dtype and 0.05 < relative(gradient, exact[each]) < 0.3, each
    norms = [torch.stack([g.float().norm() for g in of.values()]).norm().item() for of in (grads, exact)]
    assert norms[0] == pytest.approx(norms[1], rel=0.05)


def test_autocast_has_bf16_between_the_layers():
    model = apply_fp8(a_model(), RECIPES["nanotron"])
    plain, _ = gradients(a_model())
    with torch.autocast(DEVICE, torch.bfloat16):
        out = model(a_batch()[0])
    assert out.dtype == torch.bfloat16
    loss(out, a_batch()[1]).backward()
    assert loss(out, a_batch()[1]).item() == pytest.approx(plain, rel=0.01)
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())


def train(model: nn.Module, steps: int = 3) -> list[float]:
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for step in range(steps):
        found.append(gradients(model, seed=step % 2)[0])
        optimizer.step()
        update_scales(model)
    return found + [gradients(model)[0]]


@recipes
def test_three_steps(name):
    plain, found = train(a_model()), train(apply_fp8(a_model(), RECIPES[name]))
    assert plain[-1] < plain[0] - 0.3
    assert found == pytest.approx(plain, rel=0.03)


def test_delayed_scales_take_part_in_training():
    """All of x, w and dy of all layers: after three steps their histories have three entries each."""
    model = apply_fp8(a_model(), RECIPES["Transformer Engine"])
    train(model)
    quantizers = [module for module in model.modules() if isinstance(module, DelayedQuantizer)]
    assert len(quantizers) == SMALL.layers * (4 + 7 + 7), "x of q, k and v is one, and of gate and up"
    for quantizer in quantizers:
        assert (quantizer.history[:3] > 0).all() and not quantizer.history[3:].any() and quantizer.amax > 0


@recipes
@pytest.mark.parametrize("what", ["full", "selective"])
def test_recomputed_the_same_bits(name, what):
    plain, exact = gradients(apply_fp8(a_model(), RECIPES[name]))
    model = apply_recompute(apply_fp8(a_model(), RECIPES[name]), what)
    found, grads = gradients(model)
    assert found == plain
    for one, other in zip(grads.values(), exact.values(), strict=True):
        assert torch.equal(one, other)


@recipes
def test_a_copy_is_of_its_own(name):
    """Its attention multiplies by the copy's weights: q, k and v are used without calling their layers."""
    model = apply_fp8(a_model(), RECIPES[name])
    again = copy.deepcopy(model)
    train(model, 1)
    expected, found = gradients(apply_fp8(a_model(), RECIPES[name])), gradients(again)
    assert found[0] == expected[0]
    for one, other in zip(found[1].values(), expected[1].values(), strict=True):
        assert torch.equal(one, other)


def test_a_recipe_of_ones_own():
    """Any casts do: a recipe is data."""
    recipe = dataclasses.replace(RECIPES["DeepSeek-V3"], casts=per_tensor(power_of_two=True, history=4))
    assert train(apply_fp8(a_model(), recipe)) == pytest.approx(train(a_model()), rel=0.03)
