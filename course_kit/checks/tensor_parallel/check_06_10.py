"""Check of exercise 06.10: the gigabytes that tensor parallelism sends, beside a small model's traffic."""

from __future__ import annotations

from course_kit.labs.tensor_parallel.models import MHA, in_groups
from course_kit.labs.tensor_parallel.step import sent_per_step
from course_kit.ranks import shared

LAYERS, HIDDEN, TOKENS, GPUS = 32, 4096, 8192, 8  # Llama-3 8B


def all_reduces(layers: int) -> int:
    """Return all-reduces of [b, s, h] in a forward and backward: four per layer, and one at each end of the model."""
    return 4 * layers + 2


def check(gigabytes_sent: float) -> None:
    """Judge the prediction by the formula; print what a small model sends, scaled up."""
    assert isinstance(gigabytes_sent, (int, float)), "set gigabytes_sent to a number"
    bytes_each = 2 * (GPUS - 1) / GPUS * TOKENS * HIDDEN * 2  # of one all-reduce in BF16
    expected = all_reduces(LAYERS) * bytes_each / 1e9
    assert abs(gigabytes_sent / expected - 1) < 0.05, (
        f"{gigabytes_sent} GB is not what this code sends. An all-reduce sends "
        "twice (N-1)/N of its bytes, a BF16 element has 2, and GB are 10⁹"
    )
    ranks = shared(4)
    with ranks.within(20):
        bytes_sent = ranks(in_groups, 4, sent_per_step, MHA, 2, 64)[0]
    measured = bytes_sent / (2 * 3 / 4 * 4 * 2 * 64 * MHA.hidden)  # in all-reduces of [b, s, h] in float32
    scaled = measured * all_reduces(LAYERS) / all_reduces(MHA.layers) * bytes_each / 1e9
    print(
        f"measured with {MHA.layers} layers, 4 ranks: {measured:.1f} all-reduces of [b, s, h]; "
        f"scaled up: {scaled:.1f} GB"
    )
