"""Kernels for the operations between a transformer's matmuls."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton

from course_lib.kernels import interpreter
from course_lib.lazy import lazy_exports

if TYPE_CHECKING:
    from course_lib.kernels.fused_adamw import adamw_step
    from course_lib.kernels.fused_loss import linear_cross_entropy
    from course_lib.kernels.fused_norm import rms_norm
    from course_lib.kernels.fused_rope import rope
    from course_lib.kernels.fused_softmax import softmax
    from course_lib.kernels.fused_swiglu import swiglu
    from course_lib.kernels.program import use_kernels
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "kernels.fused_adamw": "adamw_step",
            "kernels.fused_loss": "linear_cross_entropy",
            "kernels.fused_norm": "rms_norm",
            "kernels.fused_rope": "rope",
            "kernels.fused_softmax": "softmax",
            "kernels.fused_swiglu": "swiglu",
            "kernels.program": "use_kernels",
        },
    )

if triton.knobs.runtime.interpret:
    interpreter.install()

__all__ = ["adamw_step", "linear_cross_entropy", "rms_norm", "rope", "softmax", "swiglu", "use_kernels"]
