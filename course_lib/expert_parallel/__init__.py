"""Mixtures of experts (MoE), and experts sharded over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from course_lib.lazy import lazy_exports

if TYPE_CHECKING:
    from course_lib.expert_parallel.mixture import MoE, apply_moe
    from course_lib.expert_parallel.model import apply_expert_parallel
    from course_lib.expert_parallel.router import Router
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "expert_parallel.mixture": "MoE apply_moe",
            "expert_parallel.model": "apply_expert_parallel",
            "expert_parallel.router": "Router",
        },
    )

__all__ = ["MoE", "apply_moe", "apply_expert_parallel", "Router"]
