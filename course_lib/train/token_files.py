"""Files of tokens that other programs have written: .npy, and .bin with or without the header of llm.c.

They are mapped as they are. Once, each file is read for the ends of its documents and its largest token.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from course_lib.train.shards import IN_A_SCAN, Manifest, Shard, mapped, shard_files, write_array

SUFFIXES = (".bin", ".npy")
# By the first number of the header, 256 int32: karpathy/llm.c, dev/data/data_common.py.
HEADERS = {20240520: np.uint16, 20240801: np.uint32}
HEADER_BYTES = 1024


def token_files(dataset: str) -> list[Path]:
    """Return the files of tokens that a data set consists of: one, or all of a folder; [] for any other data set."""
    path = Path(dataset)
    if path.is_file():
        return [path] if path.suffix in SUFFIXES else []
    return sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES) if path.is_dir() else []


def tokens_of(file: Path, dtype: str) -> np.ndarray:
    """Return the tokens of a file, [n], mapped. dtype: of a .bin without a header. Raises ValueError."""
    if file.suffix == ".npy":
        try:
            tokens = np.load(file, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise ValueError(f"{file}: this is not an array of numpy ({error})") from None
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(f"{file}: an array of {tokens.dtype} {list(tokens.shape)}; expected integers [n]")
        return tokens
    with open(file, "rb") as opened:
        header = np.frombuffer(opened.read(HEADER_BYTES), np.uint8)
    if len(header) == HEADER_BYTES and (magic := int(header[:4].view(np.int32)[0])) in HEADERS:
        tokens, count = mapped(file, HEADERS[magic], HEADER_BYTES), int(header[8:12].view(np.int32)[0])
        if count != len(tokens):
            raise ValueError(f"{file}: its header says {count:,} tokens, and it has {len(tokens):,}: it is truncated")
        return tokens
    if file.stat().st_size % np.dtype(dtype).itemsize:
        raise ValueError(f"{file}: {file.stat().st_size:,} bytes are no whole number of {dtype} (token_dtype)")
    return mapped(file, dtype)


def index(files: list[Path], folder: Path, dtype: str, end_token: int | None) -> None:
    """Write the ends of the files' documents, and their largest token, to a folder. end_token: the last token of each
    document; None: a file is one document. Raises ValueError, OSError.
    """
    manifest = Manifest()
    for number, file in enumerate(files):
        tokens, ends = tokens_of(file, dtype), []
        for start in range(0, len(tokens), IN_A_SCAN):
            part = tokens[start : start + IN_A_SCAN]
            manifest.largest = max(manifest.largest, int(part.max()))
            if int(part.min()) < 0:
                raise ValueError(f"{file}: a token is {int(part.min())}; expected 0 or more")
            if end_token is not None:
                ends.append(np.flatnonzero(part == end_token).astype(np.int64) + 1 + start)
        last = np.array([len(tokens)] if len(tokens) else [], np.int64)
        ends_of_file = np.union1d(np.concatenate([*ends, last]), last)
        write_array(shard_files(folder, number)[1], ends_of_file)
        manifest.shards.append([len(tokens), len(ends_of_file)])
    manifest.complete = True
    manifest.write(folder)


def indexed(files: list[Path], folder: Path, dtype: str) -> list[Shard]:
    """Return the files as shards, with the ends of their documents that `index` has written."""
    return [
        Shard(tokens_of(file, dtype), mapped(shard_files(folder, number)[1], np.int64))
        for number, file in enumerate(files)
    ]
