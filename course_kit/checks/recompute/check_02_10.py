"""Check of exercise 02.10: `symptoms`, three numbers from a profile, on steps whose symptoms are known."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch.profiler import record_function

from course_lib.recompute import profiling


def known_step(reads: int, operations: int, data_s: float, shares: list[tuple[float, float]]) -> Callable[[], None]:
    """Return a step whose symptoms are known; the seconds of its data and of all of it go to `shares`."""
    x = torch.ones(3)

    def step() -> None:
        start = time.perf_counter()
        with record_function("data"):
            time.sleep(data_s)
        data_ended = time.perf_counter()
        time.sleep(0.02)  # in no phase
        with record_function("forward"):
            time.sleep(0.02)
            for _ in range(reads):
                x.sum().item()
        with record_function("optimizer"):
            for _ in range(operations):
                x.add_(1)
        shares.append((data_ended - start, time.perf_counter() - start))

    return step


def check() -> None:
    """Assert the three numbers of two kinds of steps, profiled for 2 and for 3 of them."""
    for reads, operations in ((3, 5), (0, 12)):
        for active in (3, 2):
            shares: list = []
            data_s = 0.02 if reads else 0.05
            step = known_step(reads, operations, data_s, shares)
            got = profiling.symptoms(profiling.profile_step(step, active=active))
            in_data, in_all = (sum(times) for times in zip(*shares[-active:], strict=True))
            assert set(got) == {"data_share", "host_reads", "optimizer_ops"}, "return a dictionary with the three names"
            assert abs(got["host_reads"] - reads) < 0.01, (
                f"{reads} reads per step, you count {got['host_reads']:.2f}: of each step?"
            )
            assert abs(got["optimizer_ops"] - operations) < 0.01, (
                f"{operations} operators in the optimizer, you count {got['optimizer_ops']:.2f}: outermost, of one step"
            )
            assert abs(got["data_share"] - in_data / in_all) < 0.06, (
                f"data takes {in_data / in_all:.2f} of this step, you say {got['data_share']:.2f}: of the whole step?"
            )
