"""Floating-point numbers in a kernel, correct in Triton's interpreter too.

The interpreter keeps a bfloat16 as 16 plain bits. Arithmetic on it is integer arithmetic on these bits, also in a
matmul; a cast from float32 truncates instead of rounding; the smallest numbers (subnormals) are wrong both ways. It
reports no error. So the kernels of this course compute in float32: `widen` after each load, `cast` before each store,
`dot` for a matmul. On a GPU the three are `x.to(tl.float32)`, `x.to(dtype)` and `tl.dot`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def interpreted() -> bool:
    """True if this kernel runs in the interpreter; decided at compile time, so a GPU never branches on it."""
    return triton.knobs.runtime.interpret


@triton.jit
def widen(x):
    """Return x, of any floating-point dtype, as float32: exact."""
    if interpreted() and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def cast(x, dtype: tl.constexpr):
    """Return float32 x as `dtype`, rounded to the nearest, ties to even; NaN stays NaN.

    In the interpreter, bfloat16 is rounded by its bits: add half of the last bit that is kept, less one if that bit is
    0 (so that a tie rounds to even), and truncate.
    """
    if interpreted() and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        not_a_number = (bits >> 16) | 0x40
        return tl.where(x == x, rounded, not_a_number).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def dot(a, b, total):
    """Return total + a @ b, total in float32; float32 inputs do not use TF32. a: [m, k]; b: [k, n]; total: [m, n]."""
    if interpreted():
        return tl.dot(widen(a), widen(b), total)
    return tl.dot(a, b, total, input_precision="ieee")
