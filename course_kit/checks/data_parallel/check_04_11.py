"""Check of exercise 04.11: the ratio of the all-reduce's time to the overlapped backward's."""

from __future__ import annotations

import numpy as np

from course_lib.data_parallel import replicas


def ratio_of(*args, **options) -> float:
    """Return the result of an answer. Assert that it is a number."""
    got = replicas.overlap_ratio(*args, **options)
    assert isinstance(got, (int, float, np.number)), f"overlap_ratio returns {got!r}: return a number, the ratio"
    return got


def check() -> None:
    """Assert the ratio for two bandwidths, three sizes of a gradient, twice the tokens and a single GPU."""
    for bandwidth, expected in ((450e9, 0.235), (50e9, 2.11)):
        got = ratio_of(4096, 8, bandwidth, 989.5e12, gradient_bytes=1)
        assert abs(got / expected - 1) < 0.01, (
            f"4,096 tokens, 8 GPUs, {bandwidth / 1e9:.0f} GB/s, 1 byte: {expected}, not {got:.3f}"
        )
    bf16 = ratio_of(4096, 8, 450e9, 989.5e12)
    fp32 = ratio_of(4096, 8, 450e9, 989.5e12, 4)
    assert abs(fp32 / bf16 - 2) < 1e-9, "4 bytes per gradient take twice as long as 2"
    assert abs(bf16 / 0.4699 - 1) < 0.01, f"in BF16 it is 0.470, not {bf16:.3f}: two bytes by default"
    assert ratio_of(8192, 8, 450e9, 989.5e12) == bf16 / 2, "twice the tokens halve it"
    slow = ratio_of(4096, 8, 450e9, 312e12)
    assert abs(slow / bf16 * 989.5 / 312 - 1) < 1e-9, f"a GPU of 312 TFLOP/s computes for longer: not {slow:.3f}"
    assert ratio_of(4096, 1, 450e9, 989.5e12) == 0, "one GPU sends nothing"
