"""What checks of exercises use: advice in place of a stack, memory with guard bands, kernels that must be kernels."""

from course_kit.checks.advice import CheckFailed
from course_kit.checks.frame import check, reference, setup

__all__ = ["CheckFailed", "check", "reference", "setup"]
