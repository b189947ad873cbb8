"""Check of exercise 10.17: the noise of a sample depends on the seed and on its number alone, in every process."""

from __future__ import annotations

import torch

from course_kit.ranks import shared
from course_lib.checkpoint import noise


def check() -> None:
    """Assert how much is replaced and by what, and that samples, seeds, halves of a batch and processes agree."""
    drop = noise.drop_tokens
    full = torch.arange(400).view(8, 50) + 1000
    saved = full.clone()
    noisy = drop(full, 0.2, 97, 3, 40)
    assert torch.equal(full, saved), "the batch that it was given has changed"
    same = torch.full((64, 50), 5000)
    positions, others = drop(same, 0.2, 97, 3, 0) != same, drop(same, 1.0, 97, 3, 0)
    assert len({tuple(row) for row in positions.tolist()}) == 64, "each sample should have places of its own"
    differing = (noisy != full).float().mean().item()
    assert 0.1 < differing < 0.3, f"a share of 0.2 should be replaced, and {differing:.2f} is"
    tokens = drop(full, 1.0, 2, 3, 40).unique().tolist()
    assert tokens == [0, 1], f"rate 1 and a vocabulary of 2: all are replaced, by 0 or 1, and not by {tokens}"
    assert len({tuple(row) for row in others.tolist()}) == 64, "each sample should have replacements of its own"
    count = len(noisy[noisy != full].unique())
    assert count > 30, f"each replacement should be drawn: some 80 of them are only {count} different tokens"
    torch.rand(7)  # another draw
    state = torch.get_rng_state()
    assert torch.equal(drop(full, 0.2, 97, 3, 40), noisy), "the same samples again should get the same noise"
    assert torch.equal(torch.get_rng_state(), state), "the rank's own generator should not be touched"
    halves = torch.cat([drop(full[4 * i : 4 * i + 4], 0.2, 97, 3, 40 + 4 * i) for i in (0, 1)])
    assert torch.equal(halves, noisy), "two ranks with half of the samples each should draw what one draws"
    for seed, number in ((4, 40), (3, 41), (4, 39), (34, 0)):  # a sum is the same for 4, 39; digits in a row for 34, 0
        assert not torch.equal(drop(full[:1], 0.2, 97, seed, number), noisy[:1]), (
            f"sample {number} of seed {seed} has the noise of sample 40 of seed 3"
        )
    with shared(8).within(40):
        of_ranks = shared(8)(noise.drop_tokens, full, 0.2, 97, 3, 40)
    assert all(torch.equal(each, noisy) for each in of_ranks), (
        "other processes draw other noise (Python's hash of a text differs from process to process)"
    )
    assert torch.equal(drop(full, 0.0, 97, 3, 40), full), "no rate, no noise"
