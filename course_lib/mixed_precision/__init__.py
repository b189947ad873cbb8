"""Formats of 16 and 8 bits, master weights, and the scale of a loss."""

from course_lib.mixed_precision.masters import LossScaler, MasterWeights

__all__ = ["LossScaler", "MasterWeights"]
