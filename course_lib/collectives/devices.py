"""The device on which the tensors of a group's collectives are."""

from __future__ import annotations

import torch
import torch.distributed as dist


def device_type(group: dist.ProcessGroup | None = None) -> str:
    """Return "cpu" for a group whose backend is gloo, else the accelerator's type ("cuda"); None: the default group.

    Raises RuntimeError without an accelerator.
    """
    return "cpu" if dist.get_backend(group) == "gloo" else current_accelerator().type


def current_accelerator() -> torch.device:
    """Return the accelerator of this process. Raises RuntimeError if there is none."""
    device = torch.accelerator.current_accelerator()
    if device is None:
        raise RuntimeError("this version of PyTorch has no accelerator: use the backend gloo")
    return device
