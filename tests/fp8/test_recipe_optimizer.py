"""course_lib.fp8.recipe_optimizer: what a recipe keeps has its dtypes, to the byte, and nothing else. CPU."""

import copy
import dataclasses
import gc

import pytest
import torch
from torch import nn

from course_lib.fp8.program import apply_fp8
from course_lib.fp8.recipe_optimizer import RecipeOptimizer, StoredWeight
from course_lib.fp8.recipes import RECIPES
from course_lib.single_gpu.model import ModelConfig, Transformer, loss
from course_lib.single_gpu.training import adamw

SMALL = ModelConfig(layers=1, hidden=128, heads=4, kv_heads=2, ffn_hidden=256, vocab=64, tied=True)
EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.randint(64, (2, 2, 32), generator=torch.Generator().manual_seed(number)).unbind())


def made(name: str) -> tuple[nn.Module, RecipeOptimizer]:
    model = apply_fp8(Transformer(SMALL), RECIPES[name])
    return model, RecipeOptimizer(model, RECIPES[name], lr=1e-3)


def train(model, optimizer, steps) -> list[float]:
    losses = []
    for number in steps:
        step_loss = loss(model(batch(number)[0]), batch(number)[1])
        step_loss.backward()
        optimizer.step()
        losses.append(step_loss.item())
    return losses


def live_bytes() -> int:
    """Bytes of the storages of all tensors that Python can reach; a FakeTensor of another test's compiler has none."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def retained_bytes(name: str) -> tuple[float, float]:
    """Bytes a parameter that are alive after a step, and those of the table without gradients."""
    before = live_bytes()
    model, optimizer = made(name)
    train(model, optimizer, [0])
    kept, recipe = live_bytes() - before, RECIPES[name]
    numel = sum(stored.master.numel() for stored in optimizer.stored)
    expected = sum(recipe.parameter_bytes().values()) - recipe.gradients.itemsize
    wide = sum(s.weight.numel() for s in optimizer.stored if recipe.weights in EIGHT_BITS and s.weight.itemsize == 2)
    scales = sum(numel * 4 / 128 for dtype in (recipe.first, recipe.second) if dtype in EIGHT_BITS)
    histories = sum(buffer.nbytes for buffer in model.buffers())
    return kept / numel, (numel * expected + wide + scales + histories) / numel


@pytest.mark.parametrize("name", RECIPES)
def test_bytes_alive_are_those_of_the_recipe(name):
    """Weights, masters, sums and moments; of the weights that stay in BF16 a byte more; scales and histories."""
    kept, expected = retained_bytes(name)
    assert expected <= kept < expected + 0.15


def test_a_dequantized_weight_kept_beside_is_noticed(monkeypatch):
    init = StoredWeight.__init__

    def with_a_copy(self, owner, name, recipe):
        self.wide = getattr(owner, name).detach().clone()
        init(self, owner, name, recipe)

    monkeypatch.setattr(StoredWeight, "__init__", with_a_copy)
    kept, expected = retained_bytes("DeepSeek-V3")
    assert kept > expected + 3.5


@pytest.mark.parametrize("name", RECIPES)
def test_dtypes_and_a_tied_embedding(name):
    model, optimizer = made(name)
    train(model, optimizer, [0])
    recipe = RECIPES[name]
    assert model.head.weight is model.embedding.weight
    assert model.blocks[0].mlp.up_proj.weight.dtype == recipe.weights
    for stored in optimizer.stored:
        state = optimizer.optimizer.state[stored.master]
        assert stored.master.dtype == (recipe.master or recipe.weights)
        assert (stored.total is None) == (recipe.accumulated is None)
        assert stored.total is None or stored.total.dtype == recipe.accumulated
        assert state["exp_avg"].dtype == recipe.first and state["exp_avg_sq"].dtype == recipe.second
        assert stored.weight.grad is None and stored.master.grad is None


def test_float32_is_adamw():
    """Transformer Engine's row keeps all in float32: without FP8 products it is torch's AdamW with clipping."""
    recipe = dataclasses.replace(RECIPES["Transformer Engine"], casts=None)
    model, plain = Transformer(SMALL), Transformer(SMALL)
    optimizer = RecipeOptimizer(model, recipe, lr=1e-3)
    theirs = adamw(plain, 1e-3)
    for number in range(3):
        loss(plain(batch(number)[0]), batch(number)[1]).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        theirs.step()
        theirs.zero_grad()
    train(model, optimizer, range(3))
    for mine, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine, wanted, rtol=1e-5, atol=1e-7)


def test_micro_batches_are_summed_in_the_recipes_dtype():
    model, optimizer = made("BF16, FP32 accumulation")
    gradients = []
    for number in range(3):
        loss(model(batch(number)[0]), batch(number)[1]).backward()
        stored = optimizer.stored[-1]
        gradients.append(stored.total.clone())
        assert stored.weight.grad is None
    steps = [gradients[0], gradients[1] - gradients[0], gradients[2] - gradients[1]]
    assert gradients[2].dtype == torch.float32 and all(step.norm() > 0 for step in steps)


@pytest.mark.parametrize("name", RECIPES)
def test_resuming_is_bit_for_bit(name):
    """Where a recipe keeps sums, after a backward whose step comes later."""
    model, optimizer = made(name)
    train(model, optimizer, range(2))
    sums = RECIPES[name].accumulated is not None
    if sums:
        loss(model(batch(5)[0]), batch(5)[1]).backward()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    optimizer.step() if sums else None
    expected = train(model, optimizer, range(2, 5))
    model, optimizer = made(name)
    train(model, optimizer, [7])
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    optimizer.step() if sums else None
    assert train(model, optimizer, range(2, 5)) == expected


def test_a_frozen_or_unused_parameter_stays():
    model = apply_fp8(Transformer(SMALL), RECIPES["DeepSeek-V3"])
    frozen = model.blocks[0].attention_norm.weight.requires_grad_(False)
    model.unused = nn.Parameter(torch.ones(3))
    train(model, RecipeOptimizer(model, RECIPES["DeepSeek-V3"], lr=0.1), [0])
    assert model.blocks[0].attention_norm.weight is frozen and (model.unused == 1).all()


def test_a_copy_can_be_evaluated():
    model, optimizer = made("DeepSeek-V3")
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(model)(batch(0)[0]), model(batch(0)[0]))


def test_what_does_not_fit_is_refused():
    recipe = RECIPES["DeepSeek-V3"]
    for model, message in (
        (made("DeepSeek-V3")[0], "8 bits already"),
        (Transformer(SMALL), "do not follow this recipe"),
        (apply_fp8(Transformer(SMALL), RECIPES["nanotron"]), "do not follow this recipe"),
    ):
        before = list(model.parameters())
        with pytest.raises(ValueError, match=message):
            RecipeOptimizer(model, recipe, lr=1e-3)
        assert all(mine is theirs for mine, theirs in zip(model.parameters(), before, strict=True))
