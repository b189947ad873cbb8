"""Check of exercise 06.15: the ratio of all-reduces to matmuls, for six layers."""

from __future__ import annotations

from course_lib.tensor_parallel import model as program

RATIOS = (
    ((4096, 8, 450e9, 989.5e12), 1.2526),
    ((4096, 8, 50e9, 989.5e12), 11.2735),
    ((8192, 8, 450e9, 989.5e12), 0.6263),
    ((4096, 8, 450e9, 312e12), 0.39497),
    ((4096, 1, 450e9, 989.5e12), 0.0),
    ((4096, 2, 450e9, 989.5e12, 218_103_808), 0.1652),
    ((4096, 8, 450e9, 989.5e12, None, 4), 2.5052),
)


def check() -> None:
    """Judge all_reduce_ratio."""
    for arguments, expected in RATIOS:
        got = program.all_reduce_ratio(*arguments)
        assert got is not None and abs(got - expected) < 2e-3 * expected + 1e-9, (
            f"all_reduce_ratio{arguments}: {expected}, not {got}. Two all-reduces of e·h bytes per token, 2(N-1)/N "
            "each; 2 operations per weight and token, shared by N GPUs"
        )
