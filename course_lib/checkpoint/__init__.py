"""Checkpoints that any layout writes and any other reads, and the program that survives a failure."""

from course_lib.checkpoint.checkpoints import Checkpoints, load, save
from course_lib.checkpoint.files import latest
from course_lib.checkpoint.hugging_face import from_hf, to_hf

__all__ = ["Checkpoints", "save", "load", "latest", "from_hf", "to_hf"]
