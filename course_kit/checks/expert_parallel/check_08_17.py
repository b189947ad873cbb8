"""Check of exercise 08.17: the ratio against bytes and operations counted by hand."""

from __future__ import annotations

from course_lib.expert_parallel import model as parallel

CASES = (  # copies, top_k, ffn_hidden, bandwidth, peak, bytes on the way out, and back
    (3.5, 8, 2048, 50e9, 1e15, 1, 2),
    (1.75, 2, 14336, 450e9, 312e12, 2, 4),
)


def check() -> None:
    """Judge dispatch_ratio."""
    for copies, top_k, f, bandwidth, peak, out, back in CASES:  # per token and element of h: the rest cancels
        wanted = (copies * (out + back) / bandwidth) / (top_k * 3 * 2 * f / peak)
        result = parallel.dispatch_ratio(copies, top_k, f, bandwidth, peak, out, back)
        assert abs(result / wanted - 1) < 1e-9, (
            f"{copies} copies, top_k {top_k}, f {f}, {bandwidth / 1e9:g} GB/s, {peak / 1e12:g} TFLOP/s, {out} + {back} "
            f"bytes: {result:.3f}, counted by hand it is {wanted:.3f}"
        )
    copies, top_k, f, bandwidth, peak, _, _ = CASES[0]
    result = parallel.dispatch_ratio(copies, top_k, f, bandwidth, peak)
    assert abs(result * 3 / 4 / parallel.dispatch_ratio(*CASES[0]) - 1) < 1e-9, "2 bytes each way by default"
