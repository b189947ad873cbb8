"""Slots of a module's parameters, and the one function that puts other tensors there.

A module looks its parameters up in `_parameters` at each forward. ZeRO stage 3 puts local shards or unsharded tensors
there, mixed precision copies in another dtype, and a split backward proxies that collect gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast

import torch
from torch import nn


class Slot(NamedTuple):
    """A position of a parameter: its full name, the module that holds it, and the name of the attribute there."""

    path: str
    owner: nn.Module
    attribute: str


def parameter_slots(module: nn.Module) -> dict[nn.Parameter, list[Slot]]:
    """Return the slots of each parameter of a module: more than one if the parameter is shared."""
    slots: dict[nn.Parameter, list[Slot]] = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):  # a module in two positions has two names
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            slots.setdefault(parameter, []).append(Slot(f"{prefix}.{name}" if prefix else name, owner, name))
    return slots


def swap_parameters(slots: Iterable[Sequence[Slot]], tensors: Iterable[torch.Tensor]) -> None:
    """Put a tensor into each list of slots, in order: the modules compute with these tensors from now on.

    A tensor need not be a Parameter: `_parameters` takes any leaf, without a hook or a copy.
    """
    for of_one, tensor in zip(slots, tensors, strict=True):
        for _, owner, attribute in of_one:
            owner._parameters[attribute] = cast(nn.Parameter, tensor)
