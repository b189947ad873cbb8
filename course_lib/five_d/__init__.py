"""All techniques at once: a layout is data, and `parallelize` applies the transforms in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from course_lib.lazy import lazy_exports

if TYPE_CHECKING:
    from course_lib.five_d.layouts import Layout
    from course_lib.five_d.meshes import build_mesh
    from course_lib.five_d.model import parallelize
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "five_d.layouts": "Layout",
            "five_d.meshes": "build_mesh",
            "five_d.model": "parallelize",
        },
    )

__all__ = ["Layout", "build_mesh", "parallelize"]
