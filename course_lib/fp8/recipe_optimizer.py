"""A recipe's state in memory: weights, gradients, gradient sums, master weights and moments in the recipe's dtypes.

    backward     leaves a gradient in the recipe's dtype; with a buffer for sums it is added there, and freed
    a step       sums -> clip -> Adam on the master weights, moments in the recipe's dtypes -> weights, rounded again

A weight in FP8 is 8 bits and a scale: the master is its only copy in more bits. Embedding, norms and head, which no
recipe multiplies in FP8, are in BF16 if the recipe's weights have 8 bits. Without a master, Adam updates the weights
themselves.

Bytes per parameter: as in `recipes`, plus 4 / 128 for each moment in FP8; with a buffer for sums, less the gradients,
of which one layer's exist at a time. In a step, 4 bytes for the parameter that is being updated.

FP16 sums and masters have no scale of their own here, as FP8-LM's have: FP16 sums would lose most of a gradient that is
divided by millions of tokens.
"""

from __future__ import annotations

import torch
from torch import nn

from course_lib.fp8.delayed_scaling import update_scales
from course_lib.fp8.linear import Fp8Linear
from course_lib.fp8.low_precision_adam import LowPrecisionAdamW
from course_lib.fp8.quantization import LARGEST, dequantize, quantize
from course_lib.fp8.recipes import Recipe
from course_lib.single_gpu.clipping import clip_factor
from course_lib.single_gpu.placement import placement_of
from course_lib.single_gpu.training import decay_groups


class StoredWeight:
    """A weight of the model, and `master`, the parameter that the optimizer updates instead.

    They are the same parameter if the recipe has no master weights. total: the sum of its gradients, or None if the
    recipe does not accumulate.
    """

    def __init__(self, owner: nn.Module, name: str, recipe: Recipe):
        weight = getattr(owner, name)
        self.quantizers = owner.quantizers if isinstance(owner, Fp8Linear) and name == "weight" else None
        eight_bits = recipe.weights in LARGEST
        dtype = torch.bfloat16 if eight_bits and self.quantizers is None else recipe.weights
        self.master = nn.Parameter(weight.detach().to(recipe.master or dtype))
        self.weight = weight if recipe.master else self.master
        if eight_bits and self.quantizers is not None:
            self.weight = nn.Parameter(self.quantizers.store_weight(self.master))
            self.weight.grad_dtype = torch.bfloat16
        elif recipe.master:
            self.weight = nn.Parameter(self.master.detach().to(dtype, copy=True))
        self.master.grad_dtype = torch.float32
        self.total = torch.zeros_like(self.master, dtype=recipe.accumulated) if recipe.accumulated else None
        self.summed = False  # since the last step
        setattr(owner, name, self.weight)

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the master to the weight."""
        if self.quantizers is not None and self.weight.dtype in LARGEST:
            self.weight.copy_(self.quantizers.store_weight(self.master))
        elif self.weight is not self.master:
            self.weight.copy_(self.master)


def to_recipe_dtype(gradient: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Return the gradient as it would arrive if it were sent in the recipe's dtype: in 8 bits, with one scale."""
    if recipe.gradients not in LARGEST:
        return gradient.to(recipe.gradients)
    return dequantize(quantize(gradient.reshape(1, -1), recipe.gradients)).view_as(gradient)


def store_weights(model: nn.Module, recipe: Recipe) -> list[StoredWeight]:
    """Replace the model's parameters by parameters in the recipe's dtypes; shared parameters stay shared, and frozen
    ones are left alone. Raises ValueError, and changes nothing, for a model that is split, stored, or of another
    recipe.
    """
    if any(placement_of(p).flat_shard or placement_of(p).tensor_shard for p in model.parameters()):
        raise ValueError("a recipe's storage is for a model on one rank; with ZeRO-3, use Fp8Gather")
    if any(p.itemsize == 1 for p in model.parameters()):
        raise ValueError("the model's weights are stored in 8 bits already")
    layers = [module for module in model.modules() if isinstance(module, Fp8Linear)]
    casts = {layer.quantizers.weight.cast for layer in layers}
    if casts != (set() if recipe.casts is None else {recipe.casts.weight}):
        raise ValueError("the model's layers do not follow this recipe: call apply_fp8(model, recipe) first")
    stored: dict[nn.Parameter, StoredWeight] = {}
    for owner in list(model.modules()):
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if parameter in stored:
                setattr(owner, name, stored[parameter].weight)
            elif parameter.requires_grad:
                stored[parameter] = StoredWeight(owner, name, recipe)
    return list(stored.values())


def gradients_by_weight(weights: list[StoredWeight], recipe: Recipe) -> list[tuple[StoredWeight, torch.Tensor]]:
    """Return each weight that has a gradient since the last step, with the gradient: the sum, or a backward's."""
    gradients = []
    for stored in weights:
        if stored.total is not None and stored.summed:
            gradients.append((stored, stored.total))
        elif stored.total is None and stored.weight.grad is not None:
            stored.weight.grad = to_recipe_dtype(stored.weight.grad, recipe)
            gradients.append((stored, stored.weight.grad))
    return gradients


class RecipeOptimizer:
    """AdamW for a model whose weights, gradients, sums, masters and moments have the dtypes of a recipe.

    Create it after `apply_fp8(model, recipe)`. `store_weights` replaces the model's parameters, and raises for models
    that are not supported.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, lr: float, **options):
        self.model, self.recipe, self.stored = model, recipe, store_weights(model, recipe)
        for stored in self.stored:
            if stored.total is not None:
                stored.weight.register_post_accumulate_grad_hook(lambda weight, stored=stored: self.accumulate(stored))
        masters = decay_groups(stored.master for stored in self.stored)
        self.optimizer = LowPrecisionAdamW(masters, lr, first=recipe.first, second=recipe.second, **options)
        self.param_groups = self.optimizer.param_groups

    @torch.no_grad()
    def accumulate(self, stored: StoredWeight) -> None:
        """Add the gradient of a backward pass, in the recipe's dtype, to the sum, and free it."""
        assert stored.total is not None and stored.weight.grad is not None
        stored.total.add_(to_recipe_dtype(stored.weight.grad, self.recipe))
        stored.weight.grad, stored.summed = None, True

    @torch.no_grad()
    def step(self, max_norm: float = 1.0) -> None:
        """Clip the gradients' norm, update the masters that have a gradient, and round them to the weights."""
        gradients = gradients_by_weight(self.stored, self.recipe)
        norm = nn.utils.get_total_norm([gradient.float() for _, gradient in gradients])
        factor = clip_factor(norm, max_norm)
        for stored, gradient in gradients:
            stored.master.grad = gradient.float() * factor
        self.optimizer.step()
        for stored, _ in gradients:
            stored.refresh()
        update_scales(self.model)
        self.zero_grad()

    def zero_grad(self) -> None:
        for stored in self.stored:
            stored.weight.grad, stored.master.grad, stored.summed = None, None, False
            if stored.total is not None:
                stored.total.zero_()

    def state_dict(self) -> dict:
        """Return the optimizer's state, masters and sums, which rounded weights do not determine. Scales are in the
        model's state.
        """
        masters = [stored.master.detach() for stored in self.stored]
        sums = [(stored.total, stored.summed) for stored in self.stored]
        return {"optimizer": self.optimizer.state_dict(), "masters": masters, "sums": sums}

    @torch.no_grad()
    def load_state_dict(self, state: dict) -> None:
        """Load a state; histories are in the model's. Raises ValueError for the state of another model."""
        if [master.shape for master in state["masters"]] != [stored.master.shape for stored in self.stored]:
            raise ValueError("the state's master weights have other shapes than this model's parameters")
        self.optimizer.load_state_dict(state["optimizer"])
        for stored, master, (total, summed) in zip(self.stored, state["masters"], state["sums"], strict=True):
            stored.master.copy_(master)
            stored.summed = summed
            stored.refresh()
            if stored.total is not None:
                stored.total.copy_(total)
