"""Replicas whose gradients are averaged in buckets while backward runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from course_lib.lazy import lazy_exports

if TYPE_CHECKING:
    from course_lib.data_parallel.replicas import DataParallel
else:
    __getattr__, __dir__ = lazy_exports(__name__, {"data_parallel.replicas": "DataParallel"})

__all__ = ["DataParallel"]
