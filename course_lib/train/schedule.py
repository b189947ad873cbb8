"""The learning rate of each step: a warmup, then one of several schedules.

cosine      half a cosine from lr down to min_lr · lr                (Loshchilov and Hutter 2016, SGDR)
linear      a line from lr down to min_lr · lr
constant    lr
wsd         lr, and in the last `decay` steps a line down to min_lr · lr    (Hu et al. 2024, MiniCPM, §4)
"""

from __future__ import annotations

from course_lib.five_d.plan import learning_rate
from course_lib.train.sections import Optimizer


def decay_steps(optimizer: Optimizer, steps: int) -> int:
    """Return the number of steps in which the learning rate of wsd falls: a tenth of all by default, at least one."""
    return max(1, steps // 10) if optimizer.decay is None else optimizer.decay


def rate_at(step: int, optimizer: Optimizer, steps: int) -> float:
    """Return the learning rate of a step, counted from 1 to `steps`; after warmup it falls, and ends at min_lr · lr."""
    lr, warmup, least = optimizer.lr, optimizer.warmup, optimizer.min_lr
    if step < warmup:
        return lr * step / warmup
    if optimizer.schedule == "cosine":
        return learning_rate(step, lr, warmup, steps, least)
    if optimizer.schedule == "constant":
        return lr
    first = warmup if optimizer.schedule == "linear" else max(warmup, steps - decay_steps(optimizer, steps))
    done = min(1.0, max(0, step - first) / max(1, steps - first))
    return lr * (1 - (1 - least) * done)
