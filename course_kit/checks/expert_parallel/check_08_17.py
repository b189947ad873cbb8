"""Check of exercise 08.17: the ratio against bytes and operations counted by hand."""

from __future__ import annotations

from course_lib.expert_parallel import model as parallel


def check() -> None:
    """Judge dispatch_ratio."""
    tokens, hidden, f, k, across, bandwidth, peak = 4096, 7168, 2048, 8, 3.5, 50e9, 1e15
    moved = tokens * hidden * across * (1 + 2) / bandwidth
    computed = tokens * k * 3 * 2 * hidden * f / peak
    result = parallel.dispatch_ratio(across, k, f, bandwidth, peak, 1, 2)
    assert abs(result / (moved / computed) - 1) < 1e-9, f"{result:.3f}, counted by hand it is {moved / computed:.3f}"
    assert abs(parallel.dispatch_ratio(across, k, f, bandwidth, peak) * 3 / 4 / result - 1) < 1e-9, (
        "4 bytes both ways by default"
    )
