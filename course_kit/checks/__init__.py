"""Tools of the checks of exercises: advice in place of a stack, guard bands around memory, proof that kernels ran."""

from course_kit.checks.advice import CheckFailed
from course_kit.checks.frame import check, reference, setup

__all__ = ["CheckFailed", "check", "reference", "setup"]
