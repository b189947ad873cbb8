"""Check of exercise 04.3: the gigabytes that each of 64 GPUs sends in a step."""

from __future__ import annotations

import numpy as np

from course_lib.single_gpu.memory import param_count
from course_lib.single_gpu.model import PRESETS


def check(gigabytes_sent: float) -> None:
    """Assert the number within 1%."""
    assert isinstance(gigabytes_sent, (int, float, np.number)), "write a number, such as 8"
    truth = 2 * 63 / 64 * 2 * param_count(PRESETS["llama3-8B"]) / 1e9
    assert abs(gigabytes_sent / truth - 1) < 0.01, (
        "more than 1% off: 2 bytes a parameter, sent 2(N-1)/N times, whatever the batch"
    )
