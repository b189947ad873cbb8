"""Mixed precision: floating-point formats, master weights, and loss scaling."""

from course_lib.mixed_precision.masters import LossScaler, MasterWeights

__all__ = ["LossScaler", "MasterWeights"]
