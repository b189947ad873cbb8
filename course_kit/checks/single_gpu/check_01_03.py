"""Check of exercise 01.3: the share of Llama-3 8B's parameters that sits in the MLPs."""

from __future__ import annotations

import numbers

from course_kit.checks.single_gpu.counting import counted_parameters
from course_lib.single_gpu.model import PRESETS


def check(mlp_share_guess: float) -> None:
    """Assert the share within 0.15."""
    assert isinstance(mlp_share_guess, numbers.Real) and 0 < mlp_share_guess < 1, "write a number between 0 and 1"
    counted = counted_parameters(PRESETS["llama3-8B"])
    mlp_share = sum(n for name, n in counted.items() if ".mlp." in name) / sum(counted.values())
    assert abs(mlp_share_guess - mlp_share) < 0.15, (
        "not within 0.15. Per layer: attention has 2h² + 2·h·(kv·d), the MLP 3·h·f with f = 3.5h"
    )
