"""8-bit floats in a kernel, correct in Triton's interpreter too: `cast_fp8`, `widen_fp8`, `dot_fp8`.

Triton's interpreter gets 8-bit floats wrong, silently. It rounds the mantissa but drops the carry: 15.9 becomes 8, not
16. It reads e4m3's NaN as 480, e5m2's infinity as 65,536, and in a matmul the smallest numbers of e5m2 as half of their
value, or as 0. So this module computes the bits itself if a kernel is interpreted. On a GPU the three functions are
`x.to(dtype)`, `x.to(tl.float32)` and `tl.dot`. (On Ada, sm_89, Triton 3.7 truncates to float16 first: a value less than
a float16's last bit beyond a tie is rounded as the tie. Hopper has one instruction.)

A format with m bits of mantissa and exponents biased by b, as bits of a float32 (23 bits, biased by 127):

    normal       add half of the last bit that is kept, less one if that bit is 0: ties round to even; cut 23 - m bits
                 off, and subtract (127 - b) 2^m from the exponent. A carry goes into the exponent, as it should
    subnormal    |x| + 2^(24 - b - m), a number whose last bit weighs as much as the format's: the addition rounds widen
    e5m2 is the upper half of a float16; e4m3's bits in a float32's positions are x 2^-120: one exact product

`tl.float8e4nv` is torch.float8_e4m3fn: no infinity, one NaN, 448 at most. `tl.float8e5` is torch.float8_e5m2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from course_lib.kernels.rounding import interpreted, widen


@triton.constexpr_function
def mantissa_bits(dtype) -> int:
    """Return the mantissa bits of e4m3 or e5m2."""
    return 3 if dtype == tl.float8e4nv else 2


@triton.constexpr_function
def exponent_bias(dtype) -> int:
    """Return the exponent bias of e4m3 or e5m2."""
    return 7 if dtype == tl.float8e4nv else 15


@triton.constexpr_function
def largest_code(dtype) -> int:
    """Return the code of e4m3's 448, or of e5m2's 57,344."""
    return 0x7E if dtype == tl.float8e4nv else 0x7B


@triton.jit
def widen_first(x):
    """Return x as float32, by an instruction that Triton cannot see into. Otherwise, for a tile that is transposed,
    Triton would transpose the 16-bit numbers before it widens them, and all that follows would be computed twice, once
    per layout, with twice the registers.
    """
    if interpreted() or x.dtype == tl.float32:
        return widen(x)
    if x.dtype == tl.float16:
        return tl.inline_asm_elementwise("cvt.f32.f16 $0, $1;", "=f,h", [x], dtype=tl.float32, is_pure=True, pack=1)
    zeros_below: tl.constexpr = "{ .reg .b16 none; mov.b16 none, 0; mov.b32 $0, {none, $1}; }"
    return tl.inline_asm_elementwise(zeros_below, "=f,h", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def packed_by_four(codes):
    """Return codes of 8 bits, unchanged, packed four to a register of 32 bits. Triton 3.6 would keep two in half a
    register, and store the halves both as a word and byte by byte; its assembler (ptxas 12.8) then reads a byte before
    the half is written.
    """
    packed = codes.to(tl.uint8, bitcast=True)
    packed = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [packed], dtype=tl.uint8, is_pure=True, pack=4)
    return packed.to(codes.dtype, bitcast=True)


@triton.jit
def cast_fp8(x, dtype: tl.constexpr):
    """Return float32 x as `dtype`, e4m3 or e5m2: rounded to nearest, ties to even; values beyond the largest number,
    infinities included, saturate; NaN stays NaN.
    """
    if interpreted():
        m: tl.constexpr = mantissa_bits(dtype)
        b: tl.constexpr = exponent_bias(dtype)
        bits = x.to(tl.uint32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        half = (1 << (22 - m)) - 1 + ((magnitude >> (23 - m)) & 1)
        normal = ((magnitude + half) >> (23 - m)).to(tl.int32) - ((127 - b) << m)
        same_last_bit: tl.constexpr = 2.0 ** (24 - b - m)
        shifted = magnitude.to(tl.float32, bitcast=True) + same_last_bit
        subnormal = shifted.to(tl.int32, bitcast=True) - ((24 - b - m + 127) << 23)
        code = tl.where(magnitude < ((128 - b) << 23), subnormal, tl.minimum(normal, largest_code(dtype)))
        code = tl.where(x == x, code, 0x7F) | (bits >> 31 << 7).to(tl.int32)
        return code.to(tl.uint8).to(dtype, bitcast=True)
    return packed_by_four(x.to(dtype))


@triton.jit
def widen_fp8(x):
    """Return x, e4m3 or e5m2, as float32: exact."""
    if interpreted():
        code = x.to(tl.uint8, bitcast=True).to(tl.uint32)
        if x.dtype == tl.float8e5:  # the upper half of a float16
            return (code << 8).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        small = ((code & 0x80) << 24 | (code & 0x7F) << 20).to(tl.float32, bitcast=True)
        return tl.where(code & 0x7F == 0x7F, float("nan"), small * 2.0**120)
    return x.to(tl.float32)


@triton.jit
def dot_fp8(a, b, total):
    """Return total + a @ b on FP8 tensor cores, e4m3 and e5m2 in any mix. a: [m, k]; b: [k, n]; total: float32."""
    if interpreted():
        return tl.dot(widen_fp8(a), widen_fp8(b), total)
    return tl.dot(a, b, total)
