"""Optimizer states, gradients and parameters sharded over the ranks of data parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING

from course_lib.lazy import lazy_exports

if TYPE_CHECKING:
    from course_lib.zero.optimizer import ZeroOptimizer
    from course_lib.zero.sharded_models import full_state_dict, fully_shard, load_full_state_dict
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "zero.optimizer": "ZeroOptimizer",
            "zero.sharded_models": "full_state_dict fully_shard load_full_state_dict",
        },
    )

__all__ = ["fully_shard", "full_state_dict", "load_full_state_dict", "ZeroOptimizer"]
