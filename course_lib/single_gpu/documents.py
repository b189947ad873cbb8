"""Documents of a data set: a file, a folder of files, a folder of `Dataset.save_to_disk`, or a name at Hugging Face.

Local files are read here, row by row, so that a message can name the file and the line. Hugging Face's `datasets` says
which files of a folder are in a split, and reads the other two sources.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from course_lib.single_gpu.errors import one_line_message

HUB_NAME = r"\w[\w.-]*(/\w[\w.-]*)?"  # such as HuggingFaceFW/fineweb-edu
OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


def open_text(file: Path, newline: str | None = None) -> TextIO:
    """Open a UTF-8 file, compressed or not, with or without a byte order mark."""
    return OPENERS.get(file.suffix.lower(), open)(file, "rt", encoding="utf-8-sig", newline=newline)


def text_rows(file: Path, column: str) -> Iterator[tuple[str, dict]]:
    """Yield the text of a file as one row."""
    with open_text(file) as text:
        yield "", {"text": text.read()}


def json_rows(file: Path, column: str) -> Iterator[tuple[str, dict]]:
    """Yield the objects of JSON Lines, or of a file that is one list of objects."""
    with open_text(file) as lines:
        for number, line in enumerate(lines, 1):
            one_list = line.lstrip().startswith("[")
            try:
                if one_list:
                    yield from ((f"entry {n}", row) for n, row in enumerate(json.loads(line + lines.read()), 1))
                elif line.strip():
                    yield f"line {number}", json.loads(line.rstrip())
            except json.JSONDecodeError as error:
                position = f"line {number + error.lineno - 1}, column {error.colno}: {error.msg}"
                raise ValueError(
                    f"{position}; a JSON file has one object per line, or is one list of objects"
                ) from None


def csv_rows(file: Path, column: str) -> Iterator[tuple[str, dict]]:
    """Yield the rows below the header."""
    csv.field_size_limit(sys.maxsize)  # 131,072 characters by default
    delimiter = "\t" if ".tsv" in file.name.lower() else ","
    with open_text(file, newline="") as lines:
        for number, row in enumerate(csv.DictReader(lines, delimiter=delimiter, strict=True), 1):
            yield f"row {number}", row


def parquet_rows(file: Path, column: str) -> Iterator[tuple[str, dict]]:
    """Yield the rows, with only this column if the file has it."""
    import pyarrow.parquet

    parquet, number = pyarrow.parquet.ParquetFile(file), 0
    columns = [column] if column in parquet.schema_arrow.names else None
    for batch in parquet.iter_batches(batch_size=1_000, columns=columns):
        for row in batch.to_pylist():
            number += 1
            yield f"row {number}", row


READERS = {
    ".jsonl": json_rows,
    ".json": json_rows,
    ".txt": text_rows,
    ".csv": csv_rows,
    ".tsv": csv_rows,
    ".parquet": parquet_rows,
}
SOURCES = (
    f"a data set is a file ({', '.join(READERS)}; {', '.join(OPENERS)} of a text), a folder of such files, "
    "a folder of Dataset.save_to_disk, or a name at Hugging Face"
)


def reader_of(file: Path):
    """Return the reader of a file by its name, or None."""
    packed = file.suffix.lower() in OPENERS
    return READERS.get(Path(file.stem if packed else file.name).suffix.lower())


def loading_error(error: Exception) -> str:
    """Return the message of an error of a library that reads files, on one line of about 200 characters at most."""
    text = re.sub(" Example of usage:.*", " (--subset)", one_line_message(error))  # of datasets: a long list of names
    return f"{text[:200]} ..." if len(text) > 200 else text


def check_column(columns: list[str], column: str) -> None:
    """Raise ValueError for a column that is not there."""
    if column not in columns:
        raise ValueError(f"there is no column {column}; it has {', '.join(map(str, columns))} (--column)")


def file_rows(files: list[Path], column: str, folder: Path | None = None) -> Iterator[tuple[str, object]]:
    """Yield the place and the value of each row; a position names its file if the rows are from a folder."""
    for file in files:
        name, position = f"{os.path.relpath(file, folder)}: " if folder else "", ""
        try:
            for number, (position, row) in enumerate(reader_of(file)(file, column)):
                if not isinstance(row, dict):
                    raise ValueError(f"{position} is of type {type(row).__name__}; it must be an object with columns")
                if number == 0:
                    check_column(list(row), column)
                yield name + position, row.get(column)
        except UnicodeDecodeError:
            raise ValueError(f"{name}{position and f'after {position}: '}this is not UTF-8 text; convert it") from None
        except Exception as error:  # of csv, zlib, lzma, pyarrow, the system
            raise ValueError(name + loading_error(error)) from None


def unread_files(folder: Path, splits: dict[str, list[Path]]) -> list[str]:
    """Return a note for the files that `datasets` gives to no split. It takes the most frequent kind of file alone,
    and, where a file's name has "train" or "test" in it, only files with such names; it follows no link to a folder.
    Data cards and hidden files do not count.
    """
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() or file.is_symlink()]
    names = {file.resolve(): file.relative_to(folder) for file in files}
    cards = {file for file, name in names.items() if name.match("*.md") or name.match("dataset_*.json")}
    cards |= {file for file, name in names.items() if not name.suffix and file.is_file()}
    cards |= {file for file, name in names.items() if any(part.startswith(".") for part in name.parts)}
    read = {file.resolve() for files in splits.values() for file in files}
    unread = [str(name) for file, name in names.items() if file not in cards | read]
    if not unread:
        return []
    shown = ", ".join(unread[:3] + ["..."] * (len(unread) > 3))
    return [f"{len(unread):,} of {len(names.keys() - cards):,} files are in no split, by name or kind: {shown}"]


def split_files(folder: Path, split: str, subset: str | None) -> tuple[list[Path], list[str]]:
    """Return the files of a split by Hugging Face's rules, and a note for those in no split."""
    from datasets import load_dataset_builder

    if not any(reader_of(file) for file in folder.rglob("*")):
        raise ValueError(f"no file in this folder can be read; {SOURCES}")
    try:
        data_files = load_dataset_builder(str(folder.absolute()), subset).config.data_files or {}
    except Exception as error:
        patterns = set("*?[") & set(str(folder.absolute()))
        hint = f"; rename the folder: {min(patterns)} is part of a pattern there" if patterns else ""
        raise ValueError(f"{loading_error(error)}{hint}") from None
    splits = {str(name): [Path(file) for file in files] for name, files in data_files.items()}
    if split not in splits:
        raise ValueError(f"there is no split {split}; it has {', '.join(splits)} (--split)")
    for file in splits[split]:
        if reader_of(file) is None:
            raise ValueError(f"{os.path.relpath(file, folder)} cannot be read; {SOURCES}")
    return splits[split], unread_files(folder, splits)


def saved_rows(folder: Path, split: str, column: str) -> Iterator[tuple[str, object]]:
    """Yield the place and the value of each row of what `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote."""
    from datasets import load_from_disk

    saved = load_from_disk(str(folder))
    if not isinstance(saved, dict):
        saved = {str(saved.split or "train"): saved}
        split = next(iter(saved)) if split == "train" else split
    if split not in saved:
        raise ValueError(f"there is no split {split}; it has {', '.join(saved)} (--split)")
    check_column(saved[split].column_names, column)
    for number, row in enumerate(saved[split].with_format(None).select_columns([column]), 1):
        yield f"row {number}", row[column]


def named_rows(name: str, split: str, subset: str | None, column: str) -> Iterator[tuple[str, object]]:
    """Yield the place and the value of each row of a data set at Hugging Face, which is downloaded as it is read."""
    from datasets import load_dataset

    rows = load_dataset(name, subset, split=split, streaming=True)
    if rows.info.builder_name == "text":  # by itself each line would be a document, without its newline
        rows = load_dataset(name, subset, split=split, streaming=True, sample_by="document")
    for number, row in enumerate(rows, 1):
        if number == 1:
            check_column(list(row), column)
        yield f"row {number}", row[column]


def downloaded(name: str) -> Path | None:
    """Return the folder of a data set that `hf download` has left in Hugging Face's cache, where HF_HUB_OFFLINE is set:
    `datasets` itself asks the network for a name. None if there is no such folder.
    """
    from datasets import config
    from huggingface_hub import snapshot_download

    if not config.HF_HUB_OFFLINE:
        return None
    try:
        return Path(snapshot_download(name, repo_type="dataset", local_files_only=True))
    except (OSError, ValueError):  # the latter of a name that cannot be
        return None


def guarded(rows: Iterator) -> Iterator:
    """Yield the items of `rows`. Errors of the library that reads them become a ValueError with a one-line message."""
    try:
        yield from rows
    except OSError as error:
        line = f"there is no such file or folder, and at Hugging Face: {loading_error(error)}"
        offline = "OfflineModeIsEnabled" in line
        raise ValueError(line + "; call hf download --repo-type dataset before" * offline) from None
    except Exception as error:
        raise ValueError(loading_error(error)) from None


def open_documents(
    dataset: str, split: str, subset: str | None, column: str
) -> tuple[Iterator[tuple[str, object]], list[str]]:
    """Return an iterator over (position, value) of all rows, and notes on what is not among them.

    position: where the row is, for messages; value: what the column holds. Raises ValueError, also while rows are read,
    with one line that says what is wrong and what works.
    """
    path = Path(dataset)
    if not path.exists() and re.fullmatch(HUB_NAME, dataset):
        path = downloaded(dataset) or path
    saved = any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))
    if subset is not None and (path.is_file() or saved):
        raise ValueError("it has no subsets; leave --subset out")
    if path.is_file():
        if split != "train":
            raise ValueError(f"one file is the split train; there is no split {split}")
        if reader_of(path) is None:
            raise ValueError(f"this file cannot be read; {SOURCES}")
        return file_rows([path], column), []
    if saved:
        return guarded(saved_rows(path, split, column)), []
    if path.is_dir():
        files, notes = split_files(path, split, subset)
        return file_rows(files, column, path), notes
    if reader_of(path) or not re.fullmatch(HUB_NAME, dataset):
        raise ValueError("there is no such file or folder")
    return guarded(named_rows(dataset, split, subset, column)), []
