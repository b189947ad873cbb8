"""Weights in a narrower dtype for one step: cast once, for all micro-batches and all layers that use them."""

from __future__ import annotations

import functools

import torch
from torch import nn

from course_lib.zero.parameters import parameter_slots, swap_parameters


def accumulate_into_master(weight: nn.Parameter, copy: torch.Tensor) -> None:
    """Add a copy's gradient to its weight's, in the weight's dtype, and fire the weight's hooks."""
    gradient, copy.grad = copy.grad, None
    assert gradient is not None
    torch.autograd.backward([weight], [gradient.to(weight.dtype)])


class CastWeights:
    """Between cast() and restore() the modules of `stages` compute with copies of their weights in `dtype`.

    A copy is a leaf, whose gradient goes to the weight as soon as backward has made it. (If it were an operation on the
    weight, autograd would run that last: all gradients in `dtype` would wait for the end.) Autocast works for some
    layers only: it makes a copy per thread, and none for layers that are not matmuls of PyTorch's.
    """

    def __init__(self, stages: nn.Module, dtype: torch.dtype):
        self.slots, self.dtype = parameter_slots(stages), dtype

    def cast(self) -> None:
        """Make the modules use the copies, before a step."""
        swap_parameters(self.slots.values(), map(self.copy_of, self.slots))

    def copy_of(self, weight: nn.Parameter) -> torch.Tensor:
        """Return a copy in `dtype`, or the weight itself if it has that dtype or is no floating-point tensor."""
        if not weight.is_floating_point() or weight.dtype == self.dtype:
            return weight
        copy = weight.detach().to(self.dtype).requires_grad_(weight.requires_grad)
        if weight.requires_grad:
            copy.register_post_accumulate_grad_hook(functools.partial(accumulate_into_master, weight))
        return copy

    def restore(self) -> None:
        """Make the modules use their weights again, after a step: the copies are freed."""
        swap_parameters(self.slots.values(), self.slots)
