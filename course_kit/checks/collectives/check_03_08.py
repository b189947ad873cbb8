"""Check of exercise 03.8: `fit_alpha_beta` finds latency and bandwidth, with the least relative errors."""

from __future__ import annotations

import numpy as np

from course_kit.labs.collectives import SIZES
from course_lib.collectives import bandwidth


def relative_error(sizes: list[int], seconds: list[float], alpha: float, beta: float) -> float:
    """Return the sum that the fit should make least."""
    return sum(((alpha + size / beta - t) / t) ** 2 for size, t in zip(sizes, seconds, strict=True))


def check() -> None:
    """Assert alpha and beta without noise, alpha with noise, and that no neighbor has a smaller sum of squares."""
    noise = np.random.default_rng(0)
    few = bandwidth.fit_alpha_beta([1000, 9000], [0.003, 0.011])
    assert abs(few[0] - 2e-3) < 1e-6 and abs(few[1] / 1e6 - 1) < 1e-3, (
        f"1,000 bytes in 3 ms, 9,000 in 11 ms: 2 ms and 1 MB/s, not {few[0]:.3g} s and {few[1]:.3g} B/s: fit `sizes`"
    )
    for alpha, beta in ((10e-6, 50e9), (4e-3, 8e8), (1e-3, 400e9)):
        clean = [alpha + size / beta for size in SIZES]
        result = bandwidth.fit_alpha_beta(SIZES, clean)
        assert abs(result[0] / alpha - 1) < 1e-3, f"without noise, alpha should be {alpha:.3g}; got {result[0]:.3g}"
        assert abs(result[1] / beta - 1) < 1e-3, f"without noise, beta should be {beta:.3g}; got {result[1]:.3g}"
        for _ in range(20):
            noisy = [t * noise.uniform(0.9, 1.1) for t in clean]
            result = bandwidth.fit_alpha_beta(SIZES, noisy)
            assert abs(result[0] / alpha - 1) < 0.2, (
                "with 10 % of noise on each time, alpha is off by more than 20 %: weigh the errors by 1/t"
            )
            least = relative_error(SIZES, noisy, *result)
            for a, b in ((1.01, 1), (0.99, 1), (1, 1.01), (1, 0.99)):
                assert relative_error(SIZES, noisy, a * result[0], b * result[1]) > least, (
                    "an alpha or beta 1 % away has a smaller sum of squared relative errors than yours"
                )
