"""Checkpoints that any layout can write and any other can read, and the training program that survives failures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from course_lib.lazy import lazy_exports

if TYPE_CHECKING:
    from course_lib.checkpoint.checkpoints import Checkpoints, load, save
    from course_lib.checkpoint.files import latest
    from course_lib.checkpoint.hugging_face import from_hf, to_hf
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "checkpoint.checkpoints": "Checkpoints load save",
            "checkpoint.files": "latest",
            "checkpoint.hugging_face": "from_hf to_hf",
        },
    )

__all__ = ["Checkpoints", "save", "load", "latest", "from_hf", "to_hf"]
