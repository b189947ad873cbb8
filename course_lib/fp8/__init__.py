"""Matrix products in 8 bits, by scales of tensors, rows or blocks."""

from course_lib.fp8.linear import Fp8Linear
from course_lib.fp8.program import apply_fp8
from course_lib.fp8.quantization import dequantize, quantize
from course_lib.fp8.scaled_matmul import fp8_matmul

__all__ = ["Fp8Linear", "apply_fp8", "quantize", "dequantize", "fp8_matmul"]
