"""Check of exercise 07.16: the ratio of the exchange's time to the attention's, for five settings."""

from __future__ import annotations

from course_lib.context_parallel import model as context

RATIOS = (
    ((16384, 32, 8, 50e9, 989.5e12), 0.603943),
    ((16384, 32, 8, 450e9, 989.5e12), 0.067105),
    ((2048, 32, 32, 50e9, 989.5e12), 19.32617),
    ((16384, 32, 8, 50e9, 989.5e12, 4), 1.207886),
    ((16384, 64, 8, 50e9, 312e12), 0.0952151),
    ((16384, 32, 8, 50e9, 989.5e12, 2, False), 0.301971),
)


def check() -> None:
    """Judge exchange_ratio."""
    for arguments, expected in RATIOS:
        got = context.exchange_ratio(*arguments)
        assert got is not None and abs(got - expected) < 2e-3 * expected, (
            f"exchange_ratio{arguments}: {expected}, not {got}"
        )
