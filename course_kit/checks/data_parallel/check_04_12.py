"""Check of exercise 04.12: a first recipe, of data-parallel size, micro-batch and accumulation steps."""

from __future__ import annotations

from collections.abc import Callable


def check(recipe: Callable[[int, int, int], tuple[int, int, int]]) -> None:
    """Assert that the batch divides evenly, with most GPUs, then with the largest micro-batch."""
    for (sequences, gpus, largest), expected in {
        (1024, 128, 2): (128, 2, 4),
        (1024, 512, 2): (512, 2, 1),
        (1024, 512, 8): (512, 2, 1),
        (1024, 128, 8): (128, 8, 1),
        (1024, 96, 8): (64, 8, 2),
        (1024, 4096, 4): (1024, 1, 1),
        (960, 64, 4): (64, 3, 5),
        (960, 100, 4): (96, 2, 5),
        (7, 4, 2): (1, 1, 7),
        (4096, 8, 2): (8, 2, 256),
    }.items():
        got = recipe(sequences, gpus, largest)
        case = f"{sequences} sequences, {gpus} GPUs, at most {largest} at a time"
        assert isinstance(got, (tuple, list)) and len(got) == 3 and None not in got, (
            f"{case}: you return {got!r}: return a tuple (dp, micro_batch, accumulation steps)"
        )
        dp, micro_batch, steps = got
        assert dp * micro_batch * steps == sequences, f"{case}: {dp} · {micro_batch} · {steps} is not {sequences}"
        assert micro_batch <= largest and dp <= gpus, f"{case}: {got} is more than there is"
        assert dp == expected[0], f"{case}: {expected[0]} GPUs can be used, you use {dp}"
        assert micro_batch == expected[1], (
            f"{case}: a micro-batch of {expected[1]} fits and divides evenly, you take {micro_batch}"
        )
