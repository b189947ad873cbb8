"""Tensor parallelism: weight matrices split over ranks, by columns and by rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from course_lib.lazy import lazy_exports

if TYPE_CHECKING:
    from course_lib.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
    from course_lib.tensor_parallel.model import apply_tensor_parallel
    from course_lib.tensor_parallel.vocabulary import VocabParallelEmbedding, vocab_parallel_cross_entropy
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "tensor_parallel.linear": "ColumnParallelLinear RowParallelLinear",
            "tensor_parallel.model": "apply_tensor_parallel",
            "tensor_parallel.vocabulary": "VocabParallelEmbedding vocab_parallel_cross_entropy",
        },
    )

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "apply_tensor_parallel",
    "VocabParallelEmbedding",
    "vocab_parallel_cross_entropy",
]
