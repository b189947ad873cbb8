"""Weights in a narrower dtype for one step: cast once, whatever the number of micro-batches, and whoever uses them."""

from __future__ import annotations

import functools

import torch
from torch import nn

from course_lib.zero.sharded_models import parameter_slots


def accumulate_into_master(weight: nn.Parameter, copy: torch.Tensor) -> None:
    """Add a copy's gradient to its weight's, in the weight's own dtype, and fire the weight's hooks."""
    gradient, copy.grad = copy.grad, None
    torch.autograd.backward([weight], [gradient.to(weight.dtype)])


class CastWeights:
    """Between cast() and restore() the modules of `stages` compute with copies of their weights in `dtype`.

    A copy is a leaf, whose gradient goes to the weight as soon as backward has made it. (Were it an operation on the
    weight, autograd would run that last: all gradients in `dtype` would wait for the end.) Autocast would do for some
    layers: it makes a copy in each thread, and none for layers that are no products of PyTorch's.
    """

    def __init__(self, stages: nn.Module, dtype: torch.dtype):
        self.places, self.dtype = parameter_slots(stages), dtype

    def cast(self) -> None:
        """Before a step."""
        for weight, places in self.places.items():
            copy = weight
            if weight.is_floating_point() and weight.dtype != self.dtype:
                copy = weight.detach().to(self.dtype).requires_grad_(weight.requires_grad)
                if weight.requires_grad:
                    copy.register_post_accumulate_grad_hook(functools.partial(accumulate_into_master, weight))
            for _, module, name in places:
                module._parameters[name] = copy

    def restore(self) -> None:
        """After it: nobody has the copies any more."""
        for weight, places in self.places.items():
            for _, module, name in places:
                module._parameters[name] = weight
