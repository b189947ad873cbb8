"""Check of exercise 04.1: how many micro-batches each GPU works through in a step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def check(accumulation_steps: Callable[[int, int, int, int], int]) -> None:
    """Assert the steps of batches that divide, and a ValueError with the numbers for those that do not."""
    for (batch_tokens, seq, micro_batch, dp), steps in {
        (4 * 2**20, 4096, 2, 128): 4,
        (4 * 2**20, 4096, 2, 512): 1,
        (4 * 2**20, 4096, 1, 8): 128,
        (60 * 2**20, 4096, 4, 256): 15,
        (8192, 2048, 1, 4): 1,
    }.items():
        got = accumulation_steps(batch_tokens, seq, micro_batch, dp)
        assert isinstance(got, (int, np.integer)) and got == steps, (
            f"{batch_tokens:,} tokens, {micro_batch} x {seq}, {dp} GPUs: {steps}, not {got}"
        )
    for wrong in ((4 * 2**20, 4096, 2, 1024), (1000, 300, 1, 1), (36 * 100, 100, 4, 6), (12 * 100, 100, 5, 2)):
        try:
            got = accumulation_steps(*wrong)
        except ValueError as error:
            assert any(map(str.isdigit, str(error))), "the ValueError should have the numbers that do not divide"
        except AssertionError:
            raise AssertionError(f"{wrong}: raise a ValueError; Python may be told to skip assertions") from None
        else:
            raise AssertionError(f"{wrong}: it does not come out, and you return {got}: raise ValueError")
