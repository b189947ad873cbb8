"""Check of exercise 04.3: the gigabytes that each of 64 GPUs sends in a step."""

from __future__ import annotations

import numpy as np

from course_lib.single_gpu.memory import param_count
from course_lib.single_gpu.model import PRESETS


def check(gigabytes_sent: float) -> None:
    """Assert the number within 1%."""
    assert isinstance(gigabytes_sent, (int, float, np.number)), "write a number, such as 8"
    truth = 2 * 63 / 64 * 2 * param_count(PRESETS["llama3-8B"]) / 1e9
    ratio = gigabytes_sent / truth
    for unit, name in ((1, "bytes"), (10**3, "kB"), (10**6, "MB"), (2**30, "GiB (2**30 bytes)")):
        assert abs(ratio * unit / 1e9 - 1) >= 0.01, f"that is right in {name}: give it in gigabytes, 10**9 bytes each"
    assert abs(ratio - 1) < 0.01, (
        "more than 1% off: how many bytes are all gradients, and how often does each rank send them in an all-reduce?"
    )
