"""Tokens on disk: the documents of one source, one after another, in files that all processes map.

A shard is an array of tokens with the ends of its documents. A document never continues in the next shard, so the last
end is the length of the shard.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np


class Shard(NamedTuple):
    """tokens: [n], of any integer type; ends: [documents], int64, the exclusive end of each document in `tokens`."""

    tokens: np.ndarray
    ends: np.ndarray


class TokenStream:
    """The documents of one source. `tokens` and `documents` count them; `checksum` identifies the tokens."""

    def __init__(self, name: str, shards: list[Shard], checksum: int, notes: list[str]):
        self.name, self.checksum, self.notes = name, checksum, notes
        self.shards = [shard for shard in shards if len(shard.tokens)]
        self.starts = np.cumsum([0] + [len(shard.tokens) for shard in self.shards])  # [shards + 1]
        self.tokens = int(self.starts[-1])
        self.documents = sum(len(shard.ends) for shard in self.shards)

    def overlapping(self, start: int, stop: int) -> Iterator[tuple[Shard, int]]:
        """Yield each shard that has some of the tokens start … stop - 1, and the position of its first token."""
        first = int(np.searchsorted(self.starts, start, "right")) - 1
        for number in range(first, len(self.shards)):
            if self.starts[number] >= stop:
                return
            yield self.shards[number], int(self.starts[number])

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return the tokens start … stop - 1, int64; fewer at the end of the stream."""
        parts = [shard.tokens[max(start - at, 0) : stop - at] for shard, at in self.overlapping(start, stop)]
        return np.concatenate(parts, dtype=np.int64) if parts else np.empty(0, np.int64)

    def ends_in(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """Yield the document ends above `start`, up to and including `stop`, ascending, by shard."""
        for shard, at in self.overlapping(start, stop):
            first, last = np.searchsorted(shard.ends, [start - at, stop - at], "right")
            yield shard.ends[first:last] + at

    def count_ends(self, start: int, stop: int) -> int:
        """Return the number of document ends above `start`, up to and including `stop`."""
        bounds = (
            np.searchsorted(shard.ends, [start - at, stop - at], "right") for shard, at in self.overlapping(start, stop)
        )
        return sum(int(last - first) for first, last in bounds)


def first_documents(shards: list[Shard], limit: int) -> list[Shard]:
    """Return the shards with the first `limit` documents alone."""
    first = []
    for shard in shards:
        ends = shard.ends[:limit]
        limit -= len(ends)
        if len(ends):
            first.append(Shard(shard.tokens[: int(ends[-1])], ends))
    return first


# The folder of a source in the cache.


def cache_folder(folder: str | None) -> Path:
    """Return the folder for tokens: this one, or the user's cache."""
    top = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(folder).expanduser() if folder else top / "llm_training_at_scale"


def make_once(folder: Path, make: Callable[[], None]) -> None:
    """Call `make`, which leaves a complete manifest in `folder`, unless there is one. One process of the machine does,
    and the others wait.

    Raises ValueError for an OSError in `make`, such as a full disk.
    """
    if read_manifest(folder).get("complete"):
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # ends with the process, however that ends
            if not read_manifest(folder).get("complete"):
                make()
    except OSError as error:
        raise ValueError(
            f"the folder for tokens, {folder}: {error.strerror or error}; complete shards in it stay, and the next "
            "run continues with them"
        ) from None


@contextlib.contextmanager
def complete_file(file: Path) -> Iterator[Path]:
    """Yield the name under which to write `file`, which appears only if the body succeeds."""
    part = file.with_name(f"{file.name}.part")
    try:
        yield part
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def write_bytes(file: Path, contents: bytes) -> None:
    """Write a file that appears complete, on the disk."""
    with complete_file(file) as part, open(part, "wb") as out:
        out.write(contents)
        out.flush()
        os.fsync(out.fileno())


def read_manifest(folder: Path) -> dict:
    """Return the manifest of a folder of the cache; of a new one, an empty dictionary. Raises ValueError if it is
    damaged.
    """
    file = folder / "manifest.json"
    try:
        manifest = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        if not isinstance(manifest, dict) or manifest and not manifest.keys() & {"shards", "documents"}:
            raise ValueError
    except ValueError:
        raise ValueError(f"{file} is damaged; delete its folder, and it is written again") from None
    return manifest


def write_manifest(folder: Path, manifest: dict) -> None:
    """Replace the manifest of a folder of the cache."""
    write_bytes(folder / "manifest.json", json.dumps(manifest).encode())


def mapped(file: Path, dtype: np.dtype | type, count: int, offset: int = 0) -> np.ndarray:
    """Return `count` elements of a file, mapped, from byte `offset` on. Raises ValueError if the file has fewer."""
    if count == 0:
        return np.empty(0, dtype)
    try:
        return np.memmap(file, dtype, "r", offset, (count,)).view(np.ndarray)
    except (FileNotFoundError, ValueError):
        raise ValueError(f"{file} is gone or damaged; delete its folder, and it is written again") from None
