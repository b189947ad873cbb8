"""Text to tokens, once per machine, in shards that are complete one by one.

    folder/manifest.json   how many rows of the data set the shards hold, and what was left out
    folder/00000.tokens    uint16 if the vocabulary fits, else int32
    folder/00000.ends      int64, the exclusive end of each document in the shard

A process that is killed loses the shard that it was writing: the next one reads over the rows that the manifest counts,
and tokenizes the others. The tokenizer gets many parts of documents at a time, and encodes them on all cores.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from course_lib.single_gpu.data import ByteTokenizer, text_parts
from course_lib.single_gpu.hf_tokenizers import lost_characters, may_lose_characters, special_tokens
from course_lib.train.sources import Source
from course_lib.train.streams import (
    Shard,
    TokenStream,
    complete_file,
    make_once,
    mapped,
    read_manifest,
    write_bytes,
    write_manifest,
)

SHARD_TOKENS = 64_000_000  # a shard is complete with the document that reaches them
BATCH_CHARACTERS = 2_000_000  # encoded at a time; a tokenizer takes about 190 bytes of memory per character
PART_CHARACTERS = 50_000  # a batch has parts for many cores
ROW_CHARACTERS = 200  # memory of a part of a batch, however short, in characters


class ByteEncoder:
    """One token per byte of UTF-8, and none between documents."""

    key, vocab, loses_characters = "bytes", ByteTokenizer.vocab_size, False
    before: list[int] = []
    after: list[int] = []

    def encode(self, parts: list[tuple[str, bool]]) -> list[np.ndarray]:
        """Return the tokens of each part."""
        return [np.frombuffer(text.encode(errors="replace"), np.uint8) for text, _ in parts]

    def notes(self, characters: set[str]) -> list[str]:
        """Return no note: all characters have tokens."""
        return []


class TokenizerEncoder:
    """A tokenizer of transformers. before, after: the tokens around each document; key: changes with the tokenizer."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.vocab = 1 + max(tokenizer.get_vocab().values())
        self.before, self.after = special_tokens(tokenizer)
        self.loses_characters = may_lose_characters(tokenizer)
        self.rust = getattr(tokenizer, "backend_tokenizer", None)  # not of a tokenizer in Python
        if self.rust:
            self.rust.no_truncation()
            self.rust.no_padding()
        self.newline = self.ids(["\n"])[0]
        contents = self.rust.to_str() if self.rust else repr(sorted(tokenizer.get_vocab().items()))
        self.key = hashlib.sha256(contents.encode()).hexdigest()[:16]

    def ids(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of each text, without special tokens; the `tokenizers` library uses all cores."""
        if self.rust:
            return [each.ids for each in self.rust.encode_batch_fast(texts, add_special_tokens=False)]
        return [self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in texts]

    def encode(self, parts: list[tuple[str, bool]]) -> list[np.ndarray]:
        """Return the tokens of each part. A part that continues a document, (text, True), is read behind a newline,
        whose tokens are left out again: see text_tokens in single_gpu.data.
        """
        texts = [text.encode(errors="replace").decode() for text, _ in parts]  # JSON can hold half a surrogate pair
        encoded = self.ids(
            [f"\n{text}" if continues else text for text, (_, continues) in zip(texts, parts, strict=True)]
        )
        size = len(self.newline)
        for number, (_, continues) in enumerate(parts):
            if continues and encoded[number][:size] == self.newline:
                encoded[number] = encoded[number][size:]
            elif continues:
                encoded[number] = self.ids([texts[number]])[0]
        return [np.array(ids, np.int32) for ids in encoded]

    def notes(self, characters: set[str]) -> list[str]:
        """Return a note on the characters that have no token."""
        return lost_characters(self.tokenizer, characters)


Encoder = ByteEncoder | TokenizerEncoder


def dtype_of(vocab: int) -> type[np.uint16] | type[np.int32]:
    """Return the type of tokens on disk."""
    return np.uint16 if vocab <= 2**16 else np.int32


class ShardWriter:
    """The shard that is being written. Documents arrive in parts, which are encoded together."""

    def __init__(self, encoder: Encoder, out: Any, checksum: int, bar: Any):
        self.encoder, self.out, self.checksum, self.bar = encoder, out, checksum, bar
        self.waiting: list[tuple[str, bool]] = []  # parts, and which of them continue a document
        self.last: list[bool] = []  # of these, which are a document's last
        self.characters = self.tokens = 0  # characters that wait; tokens written
        self.ends = array("q")

    def add(self, document: str) -> None:
        """Append a document."""
        parts = list(text_parts(document, PART_CHARACTERS))
        for number, part in enumerate(parts, 1):
            self.waiting.append((part, number > 1))
            self.last.append(number == len(parts))
            self.characters += len(part) + ROW_CHARACTERS
            if self.characters >= BATCH_CHARACTERS:
                self.encode_waiting()

    def encode_waiting(self) -> None:
        """Write the tokens of the parts that wait."""
        encoder, dtype, written = self.encoder, dtype_of(self.encoder.vocab), self.tokens
        for (_, continues), last, ids in zip(self.waiting, self.last, encoder.encode(self.waiting), strict=True):
            full = np.concatenate(
                [encoder.before * (not continues), ids, encoder.after * last], dtype=dtype, casting="unsafe"
            )
            stored = full.tobytes()
            self.out.write(stored)
            self.checksum = zlib.crc32(stored, self.checksum)
            self.tokens += len(full)
            if last and self.tokens > (self.ends[-1] if self.ends else 0):  # else the document has no tokens
                self.ends.append(self.tokens)
        self.waiting, self.last, self.characters = [], [], 0
        self.bar.update(self.tokens - written)


def unread_texts(source: Source, rows: Iterator[tuple[str, object]], manifest: dict) -> Iterator[str]:
    """Yield the documents behind the rows that `manifest` counts, and count these rows in it as well.

    Raises ValueError for a row that is not text.
    """
    done = manifest["rows"]
    for row, (position, text) in enumerate(rows, 1):
        if row <= done:
            continue
        manifest["rows"] = row
        if source.documents is not None and row > source.documents:
            if not source.is_local:
                return
            continue  # read on, to count the documents
        if text is None or text == "":
            manifest["empty"] += 1
        elif not isinstance(text, str):
            kind = type(text).__name__
            raise ValueError(f"{position}: column {source.column} is of type {kind}; it must be a string")
        else:
            yield text


def tokenize(folder: Path, source: Source, encoder: Encoder) -> None:
    """Write the shards of a source of text, from the first document that the manifest in `folder` does not count."""
    from tqdm import tqdm  # transformers and datasets need it; token files and the library do not

    empty: dict = {"complete": False, "rows": 0, "empty": 0, "checksum": 0, "characters": "", "notes": [], "shards": []}
    manifest = empty | read_manifest(folder)
    rows, notes = source.rows()
    documents, characters = unread_texts(source, rows, manifest), set(manifest["characters"])
    done = sum(tokens for tokens, _ in manifest["shards"])
    with tqdm(desc=f"tokens of {source.name}", unit="token", unit_scale=True, initial=done, disable=None) as bar:
        while not manifest["complete"]:
            shard = folder / f"{len(manifest['shards']):05}"
            with complete_file(shard.with_suffix(".tokens")) as part, open(part, "wb") as out:
                writer = ShardWriter(encoder, out, manifest["checksum"], bar)
                for text in documents:
                    if encoder.loses_characters:
                        characters.update(text)
                    writer.add(text)
                    if writer.tokens >= SHARD_TOKENS:
                        break
                else:
                    manifest["complete"] = True
                writer.encode_waiting()
                out.flush()
                os.fsync(out.fileno())
            write_bytes(shard.with_suffix(".ends"), writer.ends.tobytes())
            manifest |= {"checksum": writer.checksum, "characters": "".join(sorted(characters))}
            manifest["shards"].append([writer.tokens, len(writer.ends)])
            if manifest["complete"]:
                manifest["notes"] = left_out(source, manifest) + notes + encoder.notes(characters)
            write_manifest(folder, manifest)


def left_out(source: Source, manifest: dict) -> list[str]:
    """Return notes on the rows of a source that are not among its tokens."""
    rows, empty, notes = manifest["rows"], manifest["empty"], []
    used = min(source.documents or rows, rows)
    if used < rows:
        beyond = f"{used:,} of {rows:,} documents" if source.is_local else f"the first {used:,} documents; it has more"
        notes.append(beyond)
    if empty:
        notes.append(f"{empty:,} of {used:,} documents have no text and are left out")
    return notes


def text_stream(folder: Path, source: Source, encoder: Encoder) -> TokenStream:
    """Return the tokens of a source of text from its folder in the cache, where one process of the machine leaves
    them.
    """
    make_once(folder, lambda: tokenize(folder, source, encoder))
    manifest, dtype, shards = read_manifest(folder), dtype_of(encoder.vocab), []
    for number, (tokens, documents) in enumerate(manifest["shards"]):
        file = folder / f"{number:05}"
        stored = mapped(file.with_suffix(".tokens"), dtype, tokens)
        shards.append(Shard(stored, mapped(file.with_suffix(".ends"), np.int64, documents)))
    return TokenStream(source.name, shards, manifest["checksum"], manifest["notes"])
