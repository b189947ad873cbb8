"""Sequence parallelism: the activations that tensor parallelism replicates, split along the sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from course_lib.lazy import lazy_exports

if TYPE_CHECKING:
    from course_lib.sequence_parallel.model import apply_sequence_parallel
else:
    __getattr__, __dir__ = lazy_exports(__name__, {"sequence_parallel.model": "apply_sequence_parallel"})

__all__ = ["apply_sequence_parallel"]
