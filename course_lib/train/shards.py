"""Tokens on disk: shards that are mapped, not read, each with the ends of its documents.

A stream is the tokens of all shards, one behind the other. Documents do not continue from one shard to the next.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

MANIFEST = "manifest.json"
IN_A_SCAN = 2**24  # tokens of a file that are read at a time


@dataclass
class Shard:
    """A file of tokens [n], of any integer dtype, and the ends of its documents [documents], ascending, int64."""

    tokens: np.ndarray
    ends: np.ndarray


class TokenStream:
    """The tokens of all shards of a source. It holds no copy of them."""

    def __init__(self, shards: list[Shard]):
        self.shards = [shard for shard in shards if len(shard.tokens)]
        self.starts = np.cumsum([0, *(len(shard.tokens) for shard in self.shards)])  # of each shard, and the end

    def __len__(self) -> int:
        return int(self.starts[-1])

    def parts(self, start: int, stop: int) -> Iterator[tuple[Shard, int, int, int]]:
        """Yield the shards that have tokens of [start, stop), each with its own range and its start in the stream."""
        first = int(np.searchsorted(self.starts, start, side="right")) - 1
        for shard, begin in zip(self.shards[first:], self.starts[first:], strict=False):
            if begin >= stop:
                return
            yield shard, max(start - int(begin), 0), min(stop - int(begin), len(shard.tokens)), int(begin)

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Return the tokens from start to stop - 1, int64."""
        parts = [shard.tokens[first:last] for shard, first, last, _ in self.parts(start, stop)]
        return np.concatenate([part.astype(np.int64) for part in parts])

    def ends(self, start: int, stop: int) -> np.ndarray:
        """Return the ends e of documents with start < e <= stop, int64, ascending."""
        found = []
        for shard, first, last, begin in self.parts(start, stop):
            low, high = np.searchsorted(shard.ends, [first, last], side="right")
            found.append(shard.ends[low:high] + begin)
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def max_documents(self, seq: int) -> int:
        """Return an upper limit to the number of documents in a window [w seq, (w + 1) seq), padding included."""
        most, carried, last = 0, 0, -1
        for shard, begin in zip(self.shards, self.starts[:-1], strict=True):
            if not len(shard.ends):
                continue
            window = (shard.ends + begin) // seq
            runs = np.diff(np.flatnonzero(np.diff(window, prepend=-1, append=np.iinfo(np.int64).max)))
            first = int(runs[0]) + (carried if window[0] == last else 0)
            most, last = max(most, first, int(runs.max())), int(window[-1])
            carried = first if len(runs) == 1 else int(runs[-1])
        return most + 2

    def checksum(self) -> int:
        """Return a checksum of the length and of 16 pieces of the stream."""
        total = zlib.crc32(str(len(self)).encode())
        for start in np.linspace(0, max(0, len(self) - 4096), 16).astype(int):
            total = zlib.crc32(self.tokens(int(start), min(len(self), int(start) + 4096)).tobytes(), total)
        return total


@dataclass
class Manifest:
    """What a folder of tokens holds. shards: tokens and documents of each; read: documents of the source that they are
    from; notes: lines about what is not among them.
    """

    shards: list[list[int]] = field(default_factory=list)
    read: int = 0
    empty: int = 0
    largest: int = -1  # token
    complete: bool = False
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, folder: Path) -> Manifest:
        """Return the manifest of a folder; an empty one if there is none."""
        file = folder / MANIFEST
        return cls(**json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else cls()

    def write(self, folder: Path) -> None:
        """Write the manifest; a reader sees the old one or the new one."""
        part = folder / f"{MANIFEST}.part"
        part.write_text(json.dumps(vars(self)), encoding="utf-8")
        part.replace(folder / MANIFEST)


def shard_files(folder: Path, number: int) -> tuple[Path, Path]:
    """Return the files of a shard: its tokens, and the ends of its documents."""
    return folder / f"{number:05}.tokens", folder / f"{number:05}.ends"


def write_array(file: Path, array: np.ndarray) -> None:
    """Write an array, complete or not at all. Raises OSError if the disk is full: a mapped file would crash."""
    part = file.with_suffix(f"{file.suffix}.part")
    try:
        with open(part, "wb") as opened:
            opened.write(memoryview(np.ascontiguousarray(array)).cast("B") if array.size else b"")
        part.replace(file)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def mapped(file: Path, dtype: Any, offset: int = 0) -> np.ndarray:
    """Return a mapped file of numbers, [n]; an empty array for an empty file, which cannot be mapped."""
    count = (file.stat().st_size - offset) // np.dtype(dtype).itemsize
    return np.memmap(file, dtype, "r", offset, (count,)) if count else np.empty(0, dtype)


def read_shards(folder: Path, dtype: Any) -> list[Shard]:
    """Return the shards of a folder of tokens, mapped."""
    files = [shard_files(folder, number) for number in range(len(Manifest.of(folder).shards))]
    return [Shard(mapped(tokens, dtype), mapped(ends, np.int64)) for tokens, ends in files]
