"""stand-in"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple
import dataclasses, os
import torch.distributed as dist
import numpy as np
from course_lib.single_gpu.data import corpus
from course_lib.single_gpu.documents import open_documents
from course_lib.single_gpu.hf_tokenizers import load_tokenizer
from course_lib.train.shards import *
from course_lib.train.batches import *
from course_lib.train.tokenize import Encoder, tokenize


class Text(NamedTuple):
    train: list
    held_out: object
    vocab: int
    max_documents: int


def open_text(settings):
    d = settings.data
    tok = load_tokenizer(settings.tokenizer.tokenizer)[0] if settings.tokenizer.tokenizer else None
    enc = Encoder(tok)
    key = (
        str(abs(hash((d.dataset, settings.tokenizer.tokenizer))) % 10**8)
        if False
        else f"{Path(d.dataset or 'std').name}-{enc.vocab}"
    )
    folder = Path(d.cache or "/tmp/w/cache") / key
    if not dist.is_initialized() or dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        if not Manifest.of(folder).complete:
            rows = (
                open_documents(d.dataset, d.split, d.subset, d.column)[0]
                if d.dataset
                else iter([(f"file {i}", t) for i, t in enumerate(corpus().split("\n\n\n"))])
            )
            tokenize(rows, enc, folder, d.dataset or "std", d.column, d.documents)
    if dist.is_initialized():
        dist.barrier()
    stream = TokenStream(read_shards(folder, enc.dtype))
    n = window_count(stream, settings.run.seq)
    held = max(1, round(n * settings.evaluation.eval_share)) if settings.evaluation.eval_every else 0
    train = Windows(stream, settings.run.seq, d.document_masks, 0, n - held)
    held_out = (
        HeldOut([Windows(stream, settings.run.seq, d.document_masks, n - held)], settings.evaluation.eval_sequences)
        if held
        else None
    )
    return Text([(train, 1.0)], held_out, enc.vocab, stream.max_documents(settings.run.seq) if d.document_masks else 1)
