"""Checkpoints that any layout can write and any other can read, and the training program that survives failures."""

from course_lib.checkpoint.checkpoints import Checkpoints, load, save
from course_lib.checkpoint.files import latest
from course_lib.checkpoint.hugging_face import from_hf, to_hf

__all__ = ["Checkpoints", "save", "load", "latest", "from_hf", "to_hf"]
