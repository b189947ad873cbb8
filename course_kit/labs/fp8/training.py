"""Training of notebook 14b: bytes per parameter of recipes, loss curves, jumps and spikes of activations."""

from __future__ import annotations

import copy
import dataclasses
from typing import cast

import torch
from torch import nn

from course_kit.labs.fp8.errors import Storage
from course_kit.labs.fp8.models import MEDIUM, Batch, tokens, trained_model
from course_kit.typed import override, transformer_blocks
from course_lib.fp8.delayed_scaling import update_scales
from course_lib.fp8.operands import Casts
from course_lib.fp8.program import apply_fp8
from course_lib.fp8.recipe_optimizer import RecipeOptimizer
from course_lib.fp8.recipes import RECIPES, Recipe
from course_lib.single_gpu import model as plain_model
from course_lib.single_gpu.data import TokenBatches
from course_lib.single_gpu.model import MLP, PRESETS, Transformer, swiglu
from course_lib.single_gpu.training import adamw, train_step

IN_BF16, SPIKE_AT = 40, 4  # steps before the switch to FP8; the step of the spike after it


def print_recipes() -> None:
    """Print the bytes per parameter of each recipe, and its total relative to the first recipe's."""
    names = list(next(iter(RECIPES.values())).parameter_bytes())
    print(f"{'':24s}" + "".join(f"{name.replace(' ', chr(10)).split(chr(10))[0]:>13s}" for name in names) + "   total")
    first = sum(next(iter(RECIPES.values())).parameter_bytes().values())
    for name, recipe in RECIPES.items():
        sizes = recipe.parameter_bytes()
        row = "".join(f"{sizes[key] or '-':>13}" for key in names)
        print(f"{name:24s}{row}{sum(sizes.values()):8d}  {sum(sizes.values()) / first - 1:+.0%}")


def recipe_step(
    model: nn.Module, optimizer: RecipeOptimizer, inputs: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """Take one step with a RecipeOptimizer. Returns the loss."""
    step_loss = plain_model.loss(model(inputs), targets)
    step_loss.backward()
    optimizer.step()
    return step_loss.detach()


def bytes_per_parameter(recipe: Recipe) -> list[float]:
    """Train one step, and return the bytes per parameter that are then in memory: weights, masters, sums, moments."""
    model = apply_fp8(Transformer(MEDIUM), recipe)
    optimizer = RecipeOptimizer(model, recipe, lr=1e-3)
    recipe_step(model, optimizer, *next(TokenBatches(tokens(), batch=2, seq=32)))
    numel = sum(parameter.numel() for parameter in model.parameters())
    weights = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    masters = sum(stored.master.nbytes for stored in optimizer.stored if stored.master is not stored.weight)
    sums = sum(stored.total.nbytes for stored in optimizer.stored if stored.total is not None)
    return [each / numel for each in (weights, masters, sums, optimizer.optimizer.stored_bytes())]


def recipe_curve(recipe: Recipe, rate: float = 1e-3, steps: int = 10, seed: int = 0) -> list[float]:
    """Return the loss of each step, with everything in the recipe's dtypes, as benchmarks/fp8_training.py trains."""
    model = apply_fp8(Transformer(MEDIUM, seed), recipe)
    optimizer, batches = RecipeOptimizer(model, recipe, rate), TokenBatches(tokens(2_000_000), 8, 64, seed=seed)
    return [recipe_step(model, optimizer, *next(batches)).item() for _ in range(steps)]


def trap_curve(storage: Storage, rate: float, steps: int = 64) -> list[float]:
    """Return the losses of AdamW in float32 whose second moment is stored by `storage` after each step."""
    model, batches = Transformer(PRESETS["debug"]), TokenBatches(tokens(1_000_000), batch=4, seq=32)
    optimizer, losses = adamw(model, rate), []
    for _ in range(steps):
        losses.append(train_step(model, optimizer, *next(batches)).item())
        for state in optimizer.state.values():
            v = state["exp_avg_sq"]
            v.copy_(storage(v.view(1, -1)).view_as(v))
    return losses


@torch.no_grad()
def jump(model: nn.Module, channels: int, factor: float = 2.0**10) -> None:
    """Make channels between up and down larger from now on; the model's function stays."""
    for block in transformer_blocks(model):
        mlp = cast(MLP, block.mlp)
        mlp.up_proj.weight[:channels] *= factor
        mlp.down_proj.weight[:, :channels] /= factor


@torch.no_grad()
def losses_at_a_jump(casts: Casts, channels: int) -> list[float]:
    """Return the loss of one batch before a jump, in the step of the jump, and in the next step."""
    trained, (inputs, targets) = trained_model()
    model = apply_fp8(copy.deepcopy(trained), dataclasses.replace(RECIPES["DeepSeek-V3"], casts=casts))
    losses = []
    for step in range(3):
        if step == 1:
            jump(model, channels)
        losses.append(plain_model.loss(model(inputs), targets).item())
        update_scales(model)
    return losses


class SpikingSwiglu:
    """SwiGLU in which gate and up of one token and one channel are `growth` times as large."""

    growth = 1.0

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        added = torch.zeros_like(gate)  # [b, s, f]
        channel = (gate[0, 0].clamp(min=0) * up[0, 0].abs()).argmax()
        added[0, 0, channel] = self.growth - 1
        return swiglu(gate + added * gate.detach(), up + added * up.detach())


def spike_curve(
    model: nn.Module, optimizer: torch.optim.Optimizer, casts: Casts | None, batches: list[Batch]
) -> list[float]:
    """Return the losses of a copy of model and optimizer, with a spike in one step."""
    model, optimizer = copy.deepcopy((model, optimizer))
    apply_fp8(model, dataclasses.replace(RECIPES["DeepSeek-V3"], casts=casts))
    losses = []
    for number, (inputs, targets) in enumerate(batches):
        for block in transformer_blocks(model):
            cast(SpikingSwiglu, block.mlp.activation).growth = 1000.0 if number == SPIKE_AT else 1.0
        losses.append(train_step(model, optimizer, inputs, targets, torch.bfloat16).item())
        update_scales(model)
    return losses


def spike_gaps(ways: dict[str, Casts]) -> dict[str, list[float]]:
    """Train in BF16, then continue in FP8 with a spike in one step; return the losses minus BF16's, by `ways`."""
    model, text = Transformer(PRESETS["debug"]), TokenBatches(tokens(), batch=8, seq=32)
    for block in transformer_blocks(model):
        override(block.mlp, activation=SpikingSwiglu())
    optimizer, batches = adamw(model, 3e-3), [next(text) for _ in range(64)]
    for inputs, targets in batches[:IN_BF16]:
        train_step(model, optimizer, inputs, targets, torch.bfloat16)
    base = spike_curve(model, optimizer, None, batches[IN_BF16:])
    curves = {name: spike_curve(model, optimizer, casts, batches[IN_BF16:]) for name, casts in ways.items()}
    return {name: [mine - theirs for mine, theirs in zip(curve, base, strict=True)] for name, curve in curves.items()}
