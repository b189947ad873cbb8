"""All that a recipe keeps, really kept so: weights, gradients, sums, master weights and moments in its dtypes.

    a backward   leaves a gradient in the recipe's dtype; with a buffer for sums it is added there, and dropped
    a step       sums -> clip -> Adam on the master weights, moments in the recipe's dtypes -> weights, rounded again

A weight in FP8 is 8 bits and a scale, nothing else: no copy in more bits stands beside it but the master. Embedding,
norms and head, which no recipe multiplies in FP8, are in BF16 where the recipe's weights have 8 bits. Without a master
the weights themselves are what Adam changes.

Bytes a parameter: as in `recipes`, plus 4 / 128 for each moment in FP8, less the gradients, of which one layer's
lives at a time where there is a buffer for sums. In a step, 4 bytes for the parameter that it is at.

FP16 sums and masters have no scale of their own here, as FP8-LM's have: of a gradient that is divided by millions of
tokens, FP16 sums would lose most.
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
    """A weight as the model has it, and what the optimizer changes in place of it: `master`, a parameter.

    Both are one where the recipe has no master weights. total: the sum of its gradients; None: the recipe has none.
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
        """The weight from its master."""
        if self.quantizers is not None and self.weight.dtype in LARGEST:
            self.weight.copy_(self.quantizers.store_weight(self.master))
        elif self.weight is not self.master:
            self.weight.copy_(self.master)


def in_recipe_dtype(gradient: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """The gradient as it is once it has been sent in the recipe's dtype: in 8 bits with one scale."""
    if recipe.gradients not in LARGEST:
        return gradient.to(recipe.gradients)
    return dequantize(quantize(gradient.reshape(1, -1), recipe.gradients)).view_as(gradient)


def store_weights(model: nn.Module, recipe: Recipe) -> list[StoredWeight]:
    """Replace the model's parameters by ones of the recipe's dtypes; what modules share stays shared, and what is not
    trained stays. Raises ValueError, and changes nothing, for a model that is split, stored, or of another recipe.
    """
    if any(placement_of(p).flat_shard or placement_of(p).tensor_shard for p in model.parameters()):
        raise ValueError("a recipe's storage is for a model on one rank; ZeRO-3 gathers FP8 by fp8_gather")
    if any(p.itemsize == 1 for p in model.parameters()):
        raise ValueError("the model's weights are stored in 8 bits already")
    layers = [module for module in model.modules() if isinstance(module, Fp8Linear)]
    if (recipe.casts is None) != (not layers) or any(x.quantizers.weight.cast != recipe.casts.weight for x in layers):
        raise ValueError("the model's layers are not of this recipe: apply_fp8(model, recipe) comes first")
    made: dict[nn.Parameter, StoredWeight] = {}
    for owner in list(model.modules()):
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if parameter in made:
                setattr(owner, name, made[parameter].weight)
            elif parameter.requires_grad:
                made[parameter] = StoredWeight(owner, name, recipe)
    return list(made.values())


def gradients_by_weight(weights: list[StoredWeight], recipe: Recipe) -> list[tuple[StoredWeight, torch.Tensor]]:
    """Of each weight that has one, its gradient since the last step: the sum, or what the one backward left."""
    found = []
    for stored in weights:
        if stored.total is not None and stored.summed:
            found.append((stored, stored.total))
        elif stored.total is None and stored.weight.grad is not None:
            stored.weight.grad = in_recipe_dtype(stored.weight.grad, recipe)
            found.append((stored, stored.weight.grad))
    return found


class RecipeOptimizer:
    """AdamW for a model whose weights, gradients, sums, masters and moments have the dtypes of a recipe.

    After `apply_fp8(model, recipe)`; see `store_weights` for what becomes of the parameters and what is refused.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, lr: float, **options):
        self.model, self.recipe, self.stored = model, recipe, store_weights(model, recipe)
        for stored in self.stored:
            if stored.total is not None:
                stored.weight.register_post_accumulate_grad_hook(lambda weight, stored=stored: self.take(stored))
        masters = decay_groups(stored.master for stored in self.stored)
        self.optimizer = LowPrecisionAdamW(masters, lr, first=recipe.first, second=recipe.second, **options)
        self.param_groups = self.optimizer.param_groups

    @torch.no_grad()
    def take(self, stored: StoredWeight) -> None:
        """Add a backward's gradient to the sum, as the recipe's dtype has it, and drop it."""
        stored.total.add_(in_recipe_dtype(stored.weight.grad, self.recipe))
        stored.weight.grad, stored.summed = None, True

    @torch.no_grad()
    def step(self, max_norm: float = 1.0) -> None:
        """Clip the gradients' norm, update the masters that have one, and round them to the weights."""
        found = gradients_by_weight(self.stored, self.recipe)
        norm = nn.utils.get_total_norm([gradient.float() for _, gradient in found])
        factor = clip_factor(norm, max_norm)
        for stored, gradient in found:
            stored.master.grad = gradient.float() * factor
        self.optimizer.step()
        for stored, _ in found:
            stored.refresh()
        update_scales(self.model)
        self.zero_grad()

    def zero_grad(self) -> None:
        for stored in self.stored:
            stored.weight.grad, stored.master.grad, stored.summed = None, None, False
            if stored.total is not None:
                stored.total.zero_()

    def state_dict(self) -> dict:
        """The optimizer's state, masters and sums: rounded weights don't bring them back. Scales are in the model's."""
        masters = [stored.master.detach() for stored in self.stored]
        sums = [(stored.total, stored.summed) for stored in self.stored]
        return {"optimizer": self.optimizer.state_dict(), "masters": masters, "sums": sums}

    @torch.no_grad()
    def load_state_dict(self, state: dict) -> None:
        """Go on where `state` was taken; histories come by the model's. Raises ValueError for another model."""
        if [master.shape for master in state["masters"]] != [stored.master.shape for stored in self.stored]:
            raise ValueError("the state's master weights have other shapes than this model's parameters")
        self.optimizer.load_state_dict(state["optimizer"])
        for stored, master, (total, summed) in zip(self.stored, state["masters"], state["sums"], strict=True):
            stored.master.copy_(master)
            stored.summed = summed
            stored.refresh()
            if stored.total is not None:
                stored.total.copy_(total)
