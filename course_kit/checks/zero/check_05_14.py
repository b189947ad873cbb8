"""Check of exercise 05.14: the ratio of a unit's all-gather time to its forward time."""

from __future__ import annotations

from course_lib.zero import full_sharding


def check() -> None:
    """Assert the ratio for seven settings, one of them on one GPU."""
    for tokens, dp, bandwidth, peak, param_bytes, expected in (
        (4096, 8, 450e9, 989.5e12, 2, 0.4697),
        (4096, 8, 50e9, 989.5e12, 2, 4.2275),
        (4096, 8, 50e9, 989.5e12, 1, 2.1138),
        (8192, 512, 50e9, 989.5e12, 2, 2.4107),
        (4096, 8, 450e9, 312e12, 2, 0.14812),
        (4096, 1, 50e9, 989.5e12, 2, 0.0),
        (65536, 64, 25e9, 989.5e12, 2, 0.59451),
    ):
        got = full_sharding.gather_ratio(tokens, dp, bandwidth, peak, param_bytes)
        assert got is not None and abs(got - expected) < 2e-3 * expected + 1e-9, (
            f"{tokens} tokens, {dp} GPUs, {bandwidth / 1e9:.0f} GB/s, {peak / 1e12:g} TFLOP/s, {param_bytes} bytes: "
            f"{expected}, not {got}. For each parameter: (N-1)/N of its bytes over bandwidth, and 2 operations per "
            "token over peak"
        )
