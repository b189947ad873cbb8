"""Defaults of a process: its default process group, and the device type of that group's collectives."""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist


def group_or_world(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return `group`, or the default process group, which must exist, if it is None."""
    return cast(dist.ProcessGroup, group or dist.group.WORLD)


def device_type() -> str:
    """Return the device type of this process's collectives: "cpu" with gloo, otherwise the accelerator's."""
    accelerator = torch.accelerator.current_accelerator()
    return "cpu" if accelerator is None or dist.get_backend() == "gloo" else accelerator.type
