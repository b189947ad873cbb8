"""Test that all ranks, and a run that continues, train on one text."""

from __future__ import annotations

import zlib

import torch
import torch.distributed as dist


def text_sum(tokens: torch.Tensor) -> list[int]:
    """Return the number of `tokens` ([n]) and a checksum of about a million of them, which identify a text."""
    sample = tokens[:: max(1, len(tokens) // 2**20)].contiguous()
    return [len(tokens), zlib.crc32(sample.numpy().tobytes())]


def check_same_text(tokens: torch.Tensor, vocab: int) -> None:
    """Raise ValueError on all ranks if one has another text than rank 0: other files, or another version of Python,
    whose library is the text of the course. Collective if there is a default group.
    """
    if not dist.is_initialized():
        return
    texts: list = [None] * dist.get_world_size()
    dist.all_gather_object(texts, (vocab, *text_sum(tokens)))
    other = next((rank for rank, text in enumerate(texts) if text != texts[0]), None)
    if other is not None:
        sizes = [f"{length:,} tokens of a vocabulary of {size:,}" for size, length, _ in (texts[other], texts[0])]
        raise ValueError(
            f"rank {other} has another text than rank 0 ({sizes[0]}; rank 0 has {sizes[1]}): all machines need the "
            "same files, or for the course's text the same version of Python"
        )
