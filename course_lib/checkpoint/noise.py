"""Noise on the input that needs no state: what a sample gets depends on the seed and on the sample's number."""

from __future__ import annotations

import zlib

import torch


# exercise 10.17
def drop_tokens(inputs: torch.Tensor, rate: float, vocab: int, seed: int, first: int) -> torch.Tensor:
    """Return `inputs` [b, s], on the host, with a share `rate` of them replaced by random tokens. Row i is sample
    number first + i of the run: what is drawn depends on the seed and on that number alone.
    """
    out = inputs.clone()
    for i, row in enumerate(out):
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} sample {first + i}".encode()))
        dropped = torch.rand(len(row), generator=generator) < rate
        others = torch.randint(vocab, (len(row),), generator=generator)
        row[dropped] = others[dropped]
    return out
