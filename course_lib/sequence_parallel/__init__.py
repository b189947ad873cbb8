"""Sequence parallelism: the activations that tensor parallelism replicates, split along the sequence."""

from course_lib.sequence_parallel.model import apply_sequence_parallel

__all__ = ["apply_sequence_parallel"]
