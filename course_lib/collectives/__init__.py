"""Collectives as rings of sends and receives, their bandwidth, and what each rank sends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from course_lib.lazy import lazy_exports

if TYPE_CHECKING:
    from course_lib.collectives.rings import ring_all_gather, ring_all_reduce, ring_reduce_scatter
    from course_lib.collectives.traffic import count_traffic
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "collectives.rings": "ring_all_gather ring_all_reduce ring_reduce_scatter",
            "collectives.traffic": "count_traffic",
        },
    )

__all__ = ["ring_all_reduce", "ring_reduce_scatter", "ring_all_gather", "count_traffic"]
