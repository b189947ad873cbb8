"""The default process group."""

from __future__ import annotations

from typing import cast

import torch.distributed as dist


def group_or_world(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return `group`, or the default process group, which must exist, if it is None."""
    return cast(dist.ProcessGroup, group or dist.group.WORLD)
