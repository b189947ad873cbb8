"""One training program, from raw text to generated words, in any layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from course_lib.lazy import lazy_exports

if TYPE_CHECKING:
    from course_lib.train.sampling import generate_tokens
else:
    __getattr__, __dir__ = lazy_exports(__name__, {"train.sampling": "generate_tokens"})

__all__ = ["generate_tokens"]
