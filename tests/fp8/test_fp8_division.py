"""The division of casts to 8 bits, in C with a correctly rounded fmaf, against IEEE's. (The interpreter's fma rounds
twice, so there the kernel divides.)
"""

import ctypes
import inspect
import shutil
import subprocess

import pytest

from course_lib.fp8.cast_kernels import divide

DIVIDE = r"""
#include <math.h>
#include <stdint.h>
#include <string.h>
/* As the kernel's `divide`, with the machine's correctly rounded fmaf. */
static float divide(float x, float scale, int bounded) {
    float move = scale < 0x1p-64f ? 0x1p64f : scale > 0x1p64f ? 0x1p-64f : 1.0f;
    scale *= move;
    x *= move;
    float inverse = 1.0f / scale, q = x * inverse;
    if (!bounded) q = fminf(fmaxf(q, -0x1p17f), 0x1p17f);
    return fmaf(fmaf(q, scale, 0.0f - x), 0.0f - inverse, q); /* 0 - x is how Triton makes -x */
}
static uint64_t state = 88172645463325252ull;
static uint64_t draw(void) { state ^= state << 13; state ^= state >> 7; state ^= state << 17; return state; }
static int alike(float x, float ours, float exact, int bounded) {
    if (!isfinite(x)) return !bounded || isnan(ours);
    if (fabsf(exact) < 0x1p-18f) return fabsf(ours) < 0x1p-18f && signbit(ours) == signbit(exact);
    if (fabsf(exact) > 0x1p17f) return bounded || (fabsf(ours) >= 0x1p17f && signbit(ours) == signbit(exact));
    return ours == exact;
}
/* How many of n quotients an 8-bit format could tell from IEEE's. Scales are from 2^-126 to 2^127; x is beside a number
   whose quotient is a tie of two 8-bit numbers, or anything. */
long differing(long n, int bounded, float* where) {
    long found = 0;
    for (long i = 0; i < n; i++) {
        float scale = ldexpf(1.0f + (draw() >> 40) * 0x1p-24f, (int)(draw() % 253) - 126);
        float tie = ldexpf(16 + draw() % 16, (int)(draw() % 37) - 22), x = tie * scale;
        int32_t bits;
        memcpy(&bits, &x, 4);
        bits += (int)(draw() % 5) - 2;
        if (draw() % 4 == 0) bits = (int32_t)draw();
        memcpy(&x, &bits, 4);
        if (draw() % 2) x = -x;
        float exact = x / scale, ours = divide(x, scale, bounded);
        if (alike(x, ours, exact, bounded)) continue;
        found++;
        where[0] = x; where[1] = scale; where[2] = ours; where[3] = exact;
    }
    return found;
}
"""
WRONG = {
    "no correction": ("return fmaf(fmaf(q, scale, 0.0f - x), 0.0f - inverse, q)", "return q"),
    "a remainder that underflows": ("scale < 0x1p-64f ? 0x1p64f : scale > 0x1p64f ? 0x1p-64f : 1.0f", "1.0f"),
    "no sign of zero": ("fmaf(q, scale, 0.0f - x), 0.0f - inverse", "fmaf(0.0f - q, scale, x), inverse"),
    "minus the inner sum": ("fmaf(q, scale, 0.0f - x), 0.0f - inverse", "0.0f - fmaf(q, scale, 0.0f - x), inverse"),
}
pytestmark = pytest.mark.skipif(not shutil.which("gcc"), reason="needs a C compiler")


def differing(source: str, folder, bounded: bool) -> tuple[int, list[float]]:
    """How many of two million quotients differ, and the last of these: x, scale, ours, IEEE's."""
    (folder / "divide.c").write_text(source)
    command = ["gcc", "-O2", "-ffp-contract=off", "-shared", "-fPIC", "divide.c", "-o", "divide.so", "-lm"]
    subprocess.run(command, cwd=folder, check=True)
    library, last = ctypes.CDLL(str(folder / "divide.so")), (ctypes.c_float * 4)()
    library.differing.restype = ctypes.c_long
    return library.differing(ctypes.c_long(2_000_000), bounded, last), list(last)


@pytest.mark.parametrize("bounded", [False, True])
def test_no_8_bits_tell_it_from_ieees(tmp_path, bounded):
    assert differing(DIVIDE, tmp_path, bounded)[0] == 0


@pytest.mark.parametrize("name", WRONG)
def test_what_is_left_out_is_seen(tmp_path, name):
    right, wrong = WRONG[name]
    assert right in DIVIDE and differing(DIVIDE.replace(right, wrong), tmp_path, True)[0] > 1000


def test_the_kernels_is_the_same():
    text = inspect.getsource(divide.fn)
    for line in (
        "move = tl.where(scale < 2.0**-64, 2.0**64, tl.where(scale > 2.0**64, 2.0**-64, 1.0))",
        "q = tl.minimum(tl.maximum(q, -(2.0**17)), 2.0**17)",
        "return tl.fma(tl.fma(q, scale, -x), -inverse, q)",
    ):
        assert line in text
