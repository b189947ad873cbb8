"""Attention within documents: several documents share a sequence, and none sees another.

A sequence is cut from a stream of documents, so that no token is padding. `Transformer` numbers the documents by their
positions: a new one begins wherever the position is 0. (Llama Team 2024, The Llama 3 Herd of Models, §3.2: the mask
matters for long sequences.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from course_lib.flash_attention.operator import flash_attention_varlen
from course_lib.single_gpu.model import Transformer


def masked_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    """Return causal attention within documents, by PyTorch's kernels: [b, s, a, d].

    q: [b, s, a, d]; k, v: [b, s, kv, d]; documents: [b, s], the number of each token's document in its sequence. The
    mask takes s bytes for each token.
    """
    mask = (documents[:, :, None] == documents[:, None, :]).tril()  # [b, s, s]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [b, heads, s, d]
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, mask[:, None], enable_gqa=grouped).transpose(1, 2)


def document_ends(documents: torch.Tensor, most: int) -> torch.Tensor:
    """Return cu_seqlens for the documents of all sequences, one behind the other: int32 [b * most + 1].

    documents: [b, s], at most `most` per sequence. The sizes do not depend on the values, so the host waits for
    nothing: the entries beyond the last document are all b * s, documents without a token.
    """
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    number = starts.flatten().cumsum(0) - 1  # of each token's document
    ends = torch.full((len(documents) * most + 1,), documents.numel(), dtype=torch.int32, device=documents.device)
    indices = torch.arange(documents.numel(), dtype=torch.int32, device=documents.device)
    return ends.scatter_reduce(0, number, indices, "amin")


def packed_flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: torch.Tensor, most: int
) -> torch.Tensor:
    """Return what masked_attention returns, by the course's kernels: work grows with the documents' lengths squared.

    most: documents per sequence at most.
    """
    b, s = documents.shape
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return flash_attention_varlen(q, k, v, document_ends(documents, most), s).unflatten(0, (b, s))


def mask_documents(model: Transformer, most: int, flash: bool) -> Transformer:
    """Have a `Transformer` attend within documents, in place; return the model. Its positions must restart at each.

    most: documents per sequence at most; flash: by the course's kernels. Not with context parallelism.
    """
    model.document_masks = True
    core: Callable[..., torch.Tensor] = masked_attention
    if flash:
        core = functools.partial(packed_flash_attention, most=most)
    for block in model.blocks:
        attention: Any = block.attention
        attention.core = core
    return model
