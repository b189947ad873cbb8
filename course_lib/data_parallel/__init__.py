"""Replicas whose gradients are averaged in buckets while backward runs."""

from course_lib.data_parallel.replicas import DataParallel

__all__ = ["DataParallel"]
