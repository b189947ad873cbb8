"""Checkpoints that any layout writes and any other reads, and the program that survives a failure."""

from course_lib.checkpoint.checkpoints import Checkpoints, load, save
from course_lib.checkpoint.files import latest

__all__ = ["Checkpoints", "save", "load", "latest"]
