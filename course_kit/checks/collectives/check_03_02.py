"""Check of exercise 03.2: the bytes that rank 0 of a star sends, predicted for 4 ranks and for 512."""

from __future__ import annotations

import numpy as np
import torch

from course_kit.checks.collectives.watched import RANKS, SECONDS
from course_kit.labs.collectives import MB, among, star_all_reduce
from course_kit.ranks import shared


def check(star_mb_4: float, star_mb_512: float) -> None:
    """Assert that both are within 10 %: of what rank 0 sends on four ranks, counted, and of 511 times 4 MB."""
    assert all(isinstance(guess, (int, float, np.number)) for guess in (star_mb_4, star_mb_512)), "set both to MB"
    ranks = shared(RANKS)
    with ranks.within(SECONDS):
        _, bytes_sent = ranks(among, 4, star_all_reduce, torch.ones(1_000_000))[0]
    sent_mb = bytes_sent.bytes / MB
    assert abs(star_mb_4 - sent_mb) <= 0.1 * sent_mb, (
        f"{star_mb_4:,} MB? 4 ranks: rank 0 sends its 4 MB to each of the others"
    )
    assert abs(star_mb_512 - 4 * 511) <= 0.1 * 4 * 511, (
        f"{star_mb_512:,} MB? 512 ranks: to how many others does rank 0 send its 4 MB?"
    )
