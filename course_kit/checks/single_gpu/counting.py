"""Parameters and saved bytes, counted without the functions of the exercises."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn

from course_lib.single_gpu.model import ModelConfig, Transformer


@functools.cache
def counted_parameters(config: ModelConfig) -> dict[str, int]:
    """Return the elements of each parameter of the real model, built on the meta device."""
    with torch.device("meta"):
        return {name: parameter.numel() for name, parameter in Transformer(config).named_parameters()}


def retained_bytes(module: nn.Module, forward: Callable[[], object]) -> int:
    """Return the bytes that autograd keeps for backward after `forward()`, outside of the parameters of `module`."""
    saved = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.detach())  # as long as it is here, no other tensor gets its address
        return saved[-1]

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in saved}
    for parameter in module.parameters():
        sizes.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(sizes.values())
