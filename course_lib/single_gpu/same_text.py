"""Whether all ranks, and a run that continues, have one text."""

from __future__ import annotations

import zlib

import torch
import torch.distributed as dist


def text_sum(tokens: torch.Tensor) -> list[int]:
    """Return the number of `tokens` ([n]) and a checksum of a million of them, enough to know a text by."""
    some = tokens[:: max(1, len(tokens) // 2**20)].contiguous()
    return [len(tokens), zlib.crc32(some.numpy())]


def check_same_text(tokens: torch.Tensor, vocab: int) -> None:
    """Raise ValueError on all ranks where one has another text than rank 0: other files, or another version of Python,
    whose library is the course's text. Collective where there is a default group.
    """
    if not dist.is_initialized():
        return
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, (vocab, *text_sum(tokens)))
    other = next((rank for rank, text in enumerate(found) if text != found[0]), None)
    if other is not None:
        sizes = [f"{length:,} tokens of a vocabulary of {size:,}" for size, length, _ in (found[other], found[0])]
        raise ValueError(
            f"rank {other} has another text than rank 0 ({sizes[0]}; rank 0 has {sizes[1]}): all machines need the "
            "same files, or for the course's text the same version of Python"
        )
