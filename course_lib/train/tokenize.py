"""Text to tokens on disk, once per machine: in parallel, in bounded memory, and from where a killed run stopped.

Documents are encoded in batches, which the tokenizers of Hugging Face spread over all cores. A shard is written when it
is full, and then the manifest names the documents that it is from: a run that is killed loses one shard of work.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from course_lib.single_gpu.data import text_parts
from course_lib.single_gpu.hf_tokenizers import lost_characters, special_tokens
from course_lib.train.shards import Manifest, shard_files, write_array

SHARD_TOKENS = 2**26
BATCH_CHARACTERS = 2**21  # a tokenizer takes 190 bytes of memory per character


class Encoder:
    """Encodes documents. tokenizer: of transformers, or None for one token per byte of UTF-8."""

    def __init__(self, tokenizer: Any = None):
        self.tokenizer = tokenizer
        self.vocab = 256 if tokenizer is None else 1 + max(tokenizer.get_vocab().values())
        self.dtype = np.uint16 if self.vocab <= 2**16 else np.int32
        self.before, self.after = ([], []) if tokenizer is None else special_tokens(tokenizer)
        if tokenizer is not None:
            self.read = functools.partial(tokenizer, add_special_tokens=False, verbose=False)
            self.newline = self.read("\n")["input_ids"]

    def encode(self, texts: list[str]) -> list[array]:
        """Return the tokens of each document, with the tokens that begin and end it."""
        if self.tokenizer is None:
            return [array("i", list(text.encode(errors="replace"))) for text in texts]
        # A part that continues a document is read behind a newline, as single_gpu.data.text_tokens explains.
        parts = [(n, number, part) for n, text in enumerate(texts) for number, part in enumerate(text_parts(text))]
        valid = [part.encode(errors="replace").decode() for _, _, part in parts]
        behind = [f"\n{part}" if number else part for (_, number, _), part in zip(parts, valid, strict=True)]
        documents = [array("i", self.before) for _ in texts]
        for (n, number, _), part, ids in zip(parts, valid, self.read(behind)["input_ids"], strict=True):
            if number:
                ends = ids[: len(self.newline)] == self.newline
                ids = ids[len(self.newline) :] if ends else self.read(part)["input_ids"]
            documents[n].extend(ids)
        for document in documents:
            document.extend(self.after)
        return documents


def batches_of(rows: Iterator[tuple[str, object]], column: str) -> Iterator[tuple[int, list[str]]]:
    """Yield (number of rows, texts) of successive rows; rows without text are left out. Raises ValueError for a value
    that is no string.
    """
    texts: list[str] = []
    count, characters = 0, 0
    for position, text in rows:
        count += 1
        if not isinstance(text, str) and text is not None:
            raise ValueError(f"{position}: column {column} is of type {type(text).__name__}; it must be a string")
        if text:
            texts.append(text)
            characters += len(text)
        if characters >= BATCH_CHARACTERS or count >= 10_000:
            yield count, texts
            texts, count, characters = [], 0, 0
    if count:
        yield count, texts


def tokenize(
    rows: Iterator[tuple[str, object]],
    encoder: Encoder,
    folder: Path,
    name: str,
    column: str = "text",
    limit: int | None = None,
    notes: list[str] | None = None,
    shard_tokens: int = SHARD_TOKENS,
) -> None:
    """Write the tokens of documents to a folder, or the rest of them if the folder has some already.

    rows: positions and texts, see open_documents; name: for the progress bar, which only a terminal shows; limit: the
    largest number of documents; notes: lines about the source. Raises ValueError and OSError; complete shards stay.
    """
    from tqdm import tqdm

    manifest, characters = Manifest.of(folder), set[str]()
    rest = islice(rows, manifest.read, limit)
    ids, ends, read, empty = array("i"), array("q"), 0, 0

    def write() -> None:
        """Write a shard. The manifest names it afterward."""
        nonlocal ids, ends, read, empty
        tokens = np.frombuffer(ids, np.int32) if ids else np.empty(0, np.int32)
        files = shard_files(folder, len(manifest.shards))
        for file, values in zip(files, (tokens.astype(encoder.dtype), np.array(ends, np.int64)), strict=True):
            write_array(file, values)
        manifest.shards.append([len(ids), len(ends)])
        manifest.read += read
        manifest.empty += empty
        manifest.write(folder)
        ids, ends, read, empty = array("i"), array("q"), 0, 0

    with tqdm(desc=f"tokenizing {name}", unit=" tokens", unit_scale=True, disable=None) as bar:
        for count, texts in batches_of(rest, column):
            characters.update(*texts)
            for document in encoder.encode(texts):
                if document:
                    ids.extend(document)
                    ends.append(len(ids))
                bar.update(len(document))
            read, empty = read + count, empty + count - len(texts)
            if len(ids) >= shard_tokens:
                write()
    if ids or read:
        write()
    manifest.notes = list(notes or [])
    if limit is not None and next(rows, None) is not None:
        manifest.notes.append(f"the first {limit:,} documents; it has more")
    if manifest.empty:
        manifest.notes.append(f"{manifest.empty:,} of {manifest.read:,} documents have no text and are left out")
    if encoder.tokenizer is not None:
        manifest.notes += lost_characters(encoder.tokenizer, characters)
    manifest.complete = True
    manifest.write(folder)
