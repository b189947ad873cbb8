"""Check of exercise 04.1: how many micro-batches each GPU works through in a step."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np


def numbers_in(message: str) -> set[int]:
    """Return the integers that a message names; 4,194,304 and 4_194_304 are one number."""
    grouped = re.findall(r"\d{1,3}(?:[,_]\d{3})+", message)
    return {int(number.replace(",", "").replace("_", "")) for number in grouped + re.findall(r"\d+", message)}


def check(accumulation_steps: Callable[[int, int, int, int], int]) -> None:
    """Assert the steps of batches that divide, and a ValueError that names the batch for those that do not."""
    for (batch_tokens, seq, micro_batch, dp), steps in {
        (4 * 2**20, 4096, 2, 128): 4,
        (4 * 2**20, 4096, 2, 512): 1,
        (4 * 2**20, 4096, 1, 8): 128,
        (60 * 2**20, 4096, 4, 256): 15,
        (8192, 2048, 1, 4): 1,
    }.items():
        got = accumulation_steps(batch_tokens, seq, micro_batch, dp)
        assert got is not None, "accumulation_steps returns None: return the number of steps"
        assert isinstance(got, (int, np.integer)) and got == steps, (
            f"{batch_tokens:,} tokens, {micro_batch} x {seq}, {dp} GPUs: {steps}, not {got}"
        )
    for wrong in ((4 * 2**20, 4096, 2, 1024), (1000, 300, 1, 1), (36 * 100, 100, 4, 6), (12 * 100, 100, 5, 2)):
        try:
            got = accumulation_steps(*wrong)
        except ValueError as error:
            batch_tokens, seq, *_ = wrong
            assert numbers_in(str(error)) & {batch_tokens, batch_tokens // seq}, (
                f"{wrong}: name what does not divide in the ValueError's message: batch_tokens, {batch_tokens:,}, or "
                "the number of sequences"
            )
        except AssertionError:
            raise AssertionError(f"{wrong}: raise a ValueError; Python may be told to skip assertions") from None
        else:
            raise AssertionError(f"{wrong}: it does not divide evenly, and you return {got}: raise ValueError")
