"""Schedules that do not depend on the layout: the learning rate and the batch size of each step.

    learning rate    0 -> peak in `warmup` steps, then half a cosine down to a tenth of the peak
    batch            `start` -> `full` in `ramp` steps, in multiples of `start`

(Loshchilov and Hutter 2016, SGDR, for the cosine; Brown et al. 2020, GPT-3, appendix B, for both.)
"""

from __future__ import annotations

import math


# exercise 10.11
def learning_rate(step: int, peak: float, warmup: int, steps: int, least: float = 0.1) -> float:
    """Return the learning rate of a step, counted from 1. It rises linearly to `peak` at step `warmup`, then falls
    along half a cosine to least · peak at step `steps`, and stays constant.
    """
    if step < warmup:
        return peak * step / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (least + (1 - least) * (1 + math.cos(math.pi * min(1.0, done))) / 2)


# exercise 10.11
def batch_at(step: int, start: int, full: int, ramp: int) -> int:
    """Return the number of sequences in a step, counted from 1: `start` at step 1, growing evenly to `full` after
    `ramp` steps, rounded down to a multiple of `start`. It does not depend on the layout.
    """
    if step > ramp:
        return full
    grown = start + (full - start) * (step - 1) // max(1, ramp)
    return grown // start * start
