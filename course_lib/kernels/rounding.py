"""Numbers in a kernel, right in Triton's interpreter too.

The interpreter keeps a bfloat16 as 16 plain bits. Arithmetic on it is integer arithmetic on those bits, a product of
matrices too; a cast from float32 cuts the low bits off instead of rounding; the smallest numbers (subnormals) come
out wrong both ways. It says nothing of it. So the kernels of this course compute in float32: `widen` after each load,
`cast` before each store, `dot` for a product. On a GPU the three are `x.to(tl.float32)`, `x.to(dtype)` and `tl.dot`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def interpreted() -> bool:
    """Return whether this kernel runs in the interpreter; decided at compile time, so a GPU never branches on it."""
    return triton.knobs.runtime.interpret


@triton.jit
def widen(x):
    """x, of any floating type, as float32: exact."""
    if interpreted() and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def cast(x, dtype: tl.constexpr):
    """float32 x as `dtype`, rounded to the nearest, ties to even; NaN stays NaN.

    For bfloat16 in the interpreter by its bits: add half of the last bit that stays, less one where that bit is 0 (so
    that a tie falls to even), and cut.
    """
    if interpreted() and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        not_a_number = (bits >> 16) | 0x40
        return tl.where(x == x, rounded, not_a_number).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def dot(a, b, total):
    """total + a @ b, total in float32; float32 inputs are not cut to TF32. a: [m, k]; b: [k, n]; total: [m, n]."""
    if interpreted():
        return tl.dot(widen(a), widen(b), total)
    return tl.dot(a, b, total, input_precision="ieee")
