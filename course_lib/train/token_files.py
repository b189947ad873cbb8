"""Files of tokens: mapped where they are, and never copied.

    .bin   token after token, as nanoGPT writes them; or behind the header of llm.c, 256 int32: a number that gives the
           type of the tokens, a version, and how many tokens follow
    .npy   an array of integers of one dimension

A file is read once, for the ends of its documents and its largest token, which are left in the cache. A document ends
with the end token, and with its file.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np

from course_lib.train.sources import Source
from course_lib.train.streams import (
    Shard,
    TokenStream,
    complete_file,
    first_documents,
    make_once,
    mapped,
    read_manifest,
    write_manifest,
)

SUFFIXES = (".bin", ".npy")
LLM_C = {20240520: "uint16", 20240801: "uint32"}  # the first number of a header, and the type of the tokens behind it
HEADER_BYTES = 1024
CHUNK = 2**24  # tokens to read at a time
LARGEST = 2**22  # more tokens than any vocabulary has: a file of them was read in the wrong type


def is_token_file(path: Path) -> bool:
    """Return whether a file has tokens, by its name."""
    return path.suffix.lower() in SUFFIXES


def has_tokens(dataset: str | None) -> bool:
    """Return whether a data set is a file of tokens, or a folder with such files."""
    path = Path(dataset or "")
    if dataset is None or not path.is_dir():
        return is_token_file(path)
    return any(is_token_file(file) for file in path.iterdir())


def token_files(source: Source) -> tuple[list[Path], list[str]]:
    """Return the files of a source by name, and a note on files of its folder that are not among them.

    Files whose names have the split in them are the split; if there are none, all files are the split train. Raises
    ValueError if there are none.
    """
    path = Path(source.name)
    if source.subset is not None:
        raise ValueError("it has no subsets; leave subset out")
    if not path.is_dir():
        if not path.is_file():
            raise ValueError("there is no such file or folder")
        return [path], []
    every = sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
    every = [file for file in every if file.suffix != ".md"]
    tokens = [file for file in every if is_token_file(file)]
    files = [file for file in tokens if source.split in file.name]
    if not files and source.split != "train":
        raise ValueError(f"there is no split {source.split}: no name of a file has it")
    files = files or tokens
    unread = [file.name for file in every if file not in files]
    shown = ", ".join(unread[:3] + ["..."] * (len(unread) > 3))
    notes = [f"{len(unread):,} of {len(every):,} files are not read, by name or kind: {shown}"] if unread else []
    return files, notes


def map_tokens(file: Path, dtype: str) -> np.ndarray:
    """Return the tokens of a file, mapped, [n]. dtype: of a .bin file without a header. Raises ValueError."""
    if file.suffix.lower() == ".npy":
        try:
            tokens = np.load(file, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError):
            raise ValueError(f"{file.name}: this is not an array in NumPy's format") from None
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            shape = list(tokens.shape)
            raise ValueError(f"{file.name}: it has {tokens.dtype} of shape {shape}; tokens are integers, [n]")
        tokens = tokens.view(np.ndarray)
    else:
        size, start = file.stat().st_size, 0
        header = np.fromfile(file, np.int32, 256)
        if len(header) == 256 and int(header[0]) in LLM_C and header[1] == 1:
            dtype, start = LLM_C[int(header[0])], HEADER_BYTES
        count, rest = divmod(size - start, np.dtype(dtype).itemsize)
        if rest:
            raise ValueError(f"{file.name}: {size:,} bytes are not a multiple of {dtype}; set token_dtype")
        if start and header[2] != count:
            raise ValueError(f"{file.name}: its header says {header[2]:,} tokens, and it has {count:,}")
        tokens = mapped(file, np.dtype(dtype), count, start)
    if not len(tokens):
        raise ValueError(f"{file.name}: it has no tokens")
    return tokens


def index(folder: Path, files: list[Path], shards: list[np.ndarray], end_token: int | None) -> None:
    """Write the document ends of each file, and a manifest of their numbers and of the tokens' range."""
    counts, ranges, checksum = [], [], 0
    for number, (file, tokens) in enumerate(zip(files, shards, strict=True)):
        smallest, largest, documents = 0, 0, 0
        with complete_file(folder / f"{number:05}.ends") as part, open(part, "wb") as out:
            for start in range(0, len(tokens), CHUNK):
                chunk = tokens[start : start + CHUNK]
                checksum = zlib.crc32(chunk.tobytes(), checksum)
                smallest, largest = min(smallest, int(chunk.min())), max(largest, int(chunk.max()))
                ends = (
                    np.flatnonzero(chunk == end_token) + start + 1 if end_token is not None else np.empty(0, np.int64)
                )
                if start + CHUNK >= len(tokens) and (not len(ends) or ends[-1] < len(tokens)):
                    ends = np.append(ends, len(tokens))
                out.write(ends.astype(np.int64).tobytes())
                documents += len(ends)
        if smallest < 0:
            raise ValueError(f"{file.name}: it has the token {smallest}; tokens are 0 or above")
        counts.append(documents)
        ranges.append(largest)
    write_manifest(folder, {"complete": True, "documents": counts, "largest": ranges, "checksum": checksum})


def token_file_stream(cache: Path, source: Source, end_token: int | None, vocab: int | None) -> tuple[TokenStream, int]:
    """Return the tokens of a source of token files, and the largest of them.

    end_token: that ends each document; None: a file is a document. Raises ValueError for a file that has no tokens, or
    a token outside the vocabulary; vocab: its size, None if all tokens are allowed.
    """
    files, notes = token_files(source)
    tokens = [map_tokens(file, source.token_dtype) for file in files]
    folder = cache / f"index-{source.key(source.token_dtype, end_token)}"
    make_once(folder, lambda: index(folder, files, tokens, end_token))
    manifest = read_manifest(folder)
    for file, largest in zip(files, manifest["largest"], strict=True):
        if vocab is not None and largest >= vocab:
            raise ValueError(f"{file.name}: it has the token {largest}; the tokenizer has {vocab:,}, from 0 on")
        if largest >= LARGEST:
            raise ValueError(f"{file.name}: it has the token {largest}, more than any vocabulary has; set token_dtype")
    shards = []
    for number, (each, documents) in enumerate(zip(tokens, manifest["documents"], strict=True)):
        shards.append(Shard(each, mapped(folder / f"{number:05}.ends", np.int64, documents)))
    total = sum(manifest["documents"])
    if source.documents is not None and source.documents < total:
        shards = first_documents(shards, source.documents)
        notes.append(f"{source.documents:,} of {total:,} documents")
    if end_token is not None and total == len(files):
        notes.append(f"the end token {end_token} ends no document within a file: each file is one document")
    return TokenStream(source.name, shards, manifest["checksum"], notes), max(manifest["largest"])
