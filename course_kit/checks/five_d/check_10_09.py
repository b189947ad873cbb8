"""Check of exercise 10.9: the ratio of ZeRO-3's traffic to a pipeline's, against bytes counted on eight ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable

from course_kit.checks.five_d.references import reference_models
from course_kit.labs.five_d.counts import FLAT, sent_per_step
from course_kit.ranks import shared
from course_lib.single_gpu.memory import param_count


@functools.cache
def counted_ratio() -> float:
    """Return the ratio of ZeRO-3's bytes to a pipeline's, for eight micro-batches on eight ranks, by the reference."""
    with reference_models(), shared(8).within(40):
        sharded, piped = (
            sum(each[0] for each in shared(8)(sent_per_step, text, [m])) for text, m in (("dp8,zero3", 1), ("pp8", 8))
        )
    return sharded / piped


def check(weights_over_activations: Callable[[float, float, float, int], float]) -> None:
    """Judge weights_over_activations(params, hidden, tokens, ranks)."""
    predicted = weights_over_activations(param_count(FLAT), FLAT.hidden, 32, 8)
    ratio = counted_ratio()
    assert 0.75 < predicted / ratio < 1.33, f"counted on eight ranks: {ratio:.2f}; your formula says {predicted:.2f}"
    big = weights_over_activations(8e9, 4096, 4096, 8)
    assert abs(big - 89.4) < 1, f"8B, h 4096, 4096 tokens, 8 ranks should give 89.4, not {big:.1f}"
