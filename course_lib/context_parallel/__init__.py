"""Context parallelism: attention over a sequence that is split over ranks."""

from course_lib.context_parallel.attention import all_gather_attention, ring_attention, ulysses_attention
from course_lib.context_parallel.model import apply_context_parallel
from course_lib.sequence_parallel.shards import zigzag_shard, zigzag_unshard

__all__ = [
    "ring_attention",
    "ulysses_attention",
    "all_gather_attention",
    "apply_context_parallel",
    "zigzag_shard",
    "zigzag_unshard",
]
