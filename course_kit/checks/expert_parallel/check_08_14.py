"""Check of exercise 08.14: to how many other ranks 40,000 random tokens go."""

from __future__ import annotations

import torch

from course_kit.labs.expert_parallel.traffic import rows_sent

CASES = ((8, 2, 4), (8, 2, 8), (256, 8, 8))  # experts, k, ranks


def check(copies: dict[tuple[int, int, int], float | None]) -> None:
    """Judge the prediction; print what random choices give."""
    for experts, k, n in CASES:
        message = copies.get((experts, k, n))
        matrix = rows_sent(torch.randn(40_000, experts, generator=torch.Generator().manual_seed(3)), n, k)
        truth = (matrix.sum() - matrix.trace()).item() / 40_000
        case = f"{experts} experts, k = {k}, {n} ranks"
        assert message, f"{case}: copies is {message}, set it to a number"
        many = "many" if message > truth else "few"
        assert abs(message / truth - 1) < 0.03, (
            f"{case}: {message:.3f} copies are too {many}, as 40,000 random tokens show"
        )
        print(f"{case}: {truth:.2f} copies, all-gather {n - 1}")
