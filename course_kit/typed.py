"""Access to models, gradients and groups with the types that they have in the kit, where PyTorch's are too loose."""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from torch import nn

from course_lib.single_gpu.model import Block


def transformer_blocks(model: nn.Module) -> list[Block]:
    """Return the blocks of a Transformer or of one of its stages."""
    return cast(list[Block], model.blocks)


def grad_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a tensor that has one."""
    return cast(torch.Tensor, tensor.grad)


def world() -> dist.ProcessGroup:
    """Return the default process group, which exists on every rank."""
    return cast(dist.ProcessGroup, dist.group.WORLD)


def override(owner: object, **attributes: object) -> None:
    """Replace methods or attributes of an object, such as one module."""
    for name, value in attributes.items():
        setattr(owner, name, value)
