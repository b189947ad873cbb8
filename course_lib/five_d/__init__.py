"""All techniques at once: a layout is data, and `parallelize` applies the transforms in order."""

from course_lib.five_d.layouts import Layout
from course_lib.five_d.meshes import build_mesh
from course_lib.five_d.model import parallelize

__all__ = ["Layout", "build_mesh", "parallelize"]
