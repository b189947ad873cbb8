"""Input noise without a state: a sample's noise depends only on the seed and on the sample's number."""

from __future__ import annotations

import zlib

import torch


# exercise 10.17
def drop_tokens(inputs: torch.Tensor, rate: float, vocab: int, seed: int, first: int) -> torch.Tensor:
    """Return a copy of `inputs` [b, s], on the host, with a share `rate` of the tokens replaced by random ones. Row i
    is sample number first + i of the run: the noise depends on the seed and on that number alone.
    """
    out = inputs.clone()
    for i, row in enumerate(out):
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} sample {first + i}".encode()))
        dropped = torch.rand(len(row), generator=generator) < rate
        others = torch.randint(vocab, (len(row),), generator=generator)
        row[dropped] = others[dropped]
    return out
