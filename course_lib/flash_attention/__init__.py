"""Attention without a matrix of scores, forward and backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from course_lib.lazy import lazy_exports

if TYPE_CHECKING:
    from course_lib.flash_attention.operator import flash_attention
    from course_lib.flash_attention.reference import flash_attention_reference
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "flash_attention.operator": "flash_attention",
            "flash_attention.reference": "flash_attention_reference",
        },
    )

__all__ = ["flash_attention", "flash_attention_reference"]
