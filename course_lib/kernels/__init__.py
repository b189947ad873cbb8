"""Triton kernels for what stands between the matrix products."""

from course_lib.kernels.fused_adamw import adamw_step
from course_lib.kernels.fused_loss import linear_cross_entropy
from course_lib.kernels.fused_norm import rms_norm
from course_lib.kernels.fused_rope import rope
from course_lib.kernels.fused_softmax import softmax
from course_lib.kernels.fused_swiglu import swiglu
from course_lib.kernels.program import use_kernels

__all__ = ["adamw_step", "linear_cross_entropy", "rms_norm", "rope", "softmax", "swiglu", "use_kernels"]
