"""Matmuls in 8 bits, with a scale for each tensor, row or block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from course_lib.lazy import lazy_exports

if TYPE_CHECKING:
    from course_lib.fp8.linear import Fp8Linear
    from course_lib.fp8.program import apply_fp8
    from course_lib.fp8.quantization import dequantize, quantize
    from course_lib.fp8.scaled_matmul import fp8_matmul
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "fp8.linear": "Fp8Linear",
            "fp8.program": "apply_fp8",
            "fp8.quantization": "dequantize quantize",
            "fp8.scaled_matmul": "fp8_matmul",
        },
    )

__all__ = ["Fp8Linear", "apply_fp8", "quantize", "dequantize", "fp8_matmul"]
