"""Context parallelism: attention over a sequence that is split over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from course_lib.lazy import lazy_exports

if TYPE_CHECKING:
    from course_lib.context_parallel.attention import all_gather_attention, ring_attention, ulysses_attention
    from course_lib.context_parallel.model import apply_context_parallel
    from course_lib.sequence_parallel.shards import zigzag_shard, zigzag_unshard
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "context_parallel.attention": "all_gather_attention ring_attention ulysses_attention",
            "context_parallel.model": "apply_context_parallel",
            "sequence_parallel.shards": "zigzag_shard zigzag_unshard",
        },
    )

__all__ = [
    "ring_attention",
    "ulysses_attention",
    "all_gather_attention",
    "apply_context_parallel",
    "zigzag_shard",
    "zigzag_unshard",
]
