"""Attention without a matrix of scores, forward and backward."""

from course_lib.flash_attention.operator import flash_attention
from course_lib.flash_attention.reference import flash_attention_reference

__all__ = ["flash_attention", "flash_attention_reference"]
