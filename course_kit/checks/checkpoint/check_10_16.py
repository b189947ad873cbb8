"""Check of exercise 10.16: Young's interval, and the lost share against simulated failures."""

from __future__ import annotations

import random

from course_lib.checkpoint import save_interval

CASES = (600, 30, 6000, 0), (600, 30, 6000, 300), (3000, 30, 6000, 300), (100, 60, 1000, 1000)


def simulated_share(
    interval_s: float, save_s: float, mtbf_s: float, restart_s: float, seed: int = 0, intervals: int = 4000
) -> float:
    """Return the lost share by simulating failures: an interval is repeated until none occurs in it."""
    draw, took = random.Random(seed), 0.0
    for _ in range(intervals):
        needed, warmup = interval_s + save_s, 0.0
        while (until := draw.expovariate(1 / mtbf_s)) < warmup + needed:
            took += until
            warmup = restart_s
        took += warmup + needed
    return 1 - intervals * interval_s / took


def check() -> None:
    """Assert the interval at three points, and the share against a quiet machine and four simulations."""
    interval, share = save_interval.save_interval, save_interval.lost_share
    assert abs(interval(30, 6000) - 600) < 1e-6, (
        f"30 s per save, a failure in 6,000 s: 600 s, and not {interval(30, 6000)}"
    )
    assert abs(interval(120, 6000) - 1200) < 1e-6, "four times the cost, twice the interval"
    assert abs(interval(30, 24000) - 1200) < 1e-6, "a quarter of the failures, twice the interval"
    quiet = share(600, 30, 1e12, 100)
    assert abs(quiet - 30 / 630) < 1e-6, (
        f"nothing ever fails: 30 of 630 s are for saves, {30 / 630:.4f}, and not {quiet:.4f}"
    )
    for case in CASES:
        played, result = simulated_share(*case), share(*case)
        assert abs(played - result) < 0.02, (
            f"interval, save, MTBF, restart {case}: simulated, {played:.3f} is lost, and you say {result:.3f}"
        )
    shares = {tau: share(tau, 30, 6000, 300) for tau in (200, 400, 600, 900, 1800)}
    assert min(shares, key=lambda seconds: shares[seconds]) == 600, f"the least is near Young's 600 s: {shares}"
