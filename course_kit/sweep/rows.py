"""The CSV of a sweep: a row is on the disk as soon as its run has ended, and a sweep that starts again reads it back.

Rows are only ever appended. If a run has two rows, because it failed and was tried again, the later row counts.
"""

from __future__ import annotations

import csv
import errno
import fcntl
import io
import os
from pathlib import Path
from typing import Any

from course_kit.sweep.runs import COLUMNS, Run

TEXTS = ("model", "layout", "options", "why", "date", "machine")  # columns of text
COUNTS = "nodes dp tp pp cp ep zero_stage micro_batch grad_accum global_batch_seqs ok seq steps".split()
KEY = ("model", "nodes", "layout", "global_batch_seqs", "seq", "steps", "options")


def typed(row: dict[str, str]) -> dict:
    """Return a row of a CSV with its numbers converted; a blank number is nan."""
    values: dict[str, Any] = {}
    for name, text in row.items():
        if name in TEXTS:
            values[name] = text
        else:
            values[name] = (int if name in COUNTS else float)(text) if text else float("nan")
    return values


def line_of(cells: list) -> bytes:
    """Return one line of a CSV. No cell contains a line break, so that half a line is recognizable."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow([" ".join(c.split()) if isinstance(c, str) else c for c in cells])
    return out.getvalue().encode()


def open_locked(path: Path) -> io.FileIO:
    """Open a file to read and append to, which no other process has open like this. Raises ValueError if it fails."""
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}")
    try:
        file = open(path, "a+b", buffering=0)  # noqa: SIM115  Rows closes it
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ValueError(f"{path}: another sweep is writing to it") from None
    except OSError as error:  # a file system without locks
        file.close()
        raise ValueError(f"{path}: {error.strerror}") from None
    return file


class Rows:
    """A CSV to add rows to, locked while it is open, with the rows that it has, by run.

    Drops half a line that a kill has left at the end. Raises ValueError, and changes nothing, if the file is not a
    sweep's, or another sweep is writing to it.
    """

    def __init__(self, path: Path):
        self.path, self.file = path, open_locked(path)
        try:
            self.file.seek(0)
            self.by_run = self.read(self.file.read(), line_of(COLUMNS))
        except ValueError:
            self.file.close()
            raise

    def read(self, data: bytes, header: bytes) -> dict[tuple, dict[str, Any]]:
        """Return the rows by run, and reduce the file to its complete lines, the first of which has the columns."""
        complete = data[: data.rfind(b"\n") + 1]
        if not complete.startswith(header) and not header.startswith(data):
            raise ValueError(f"{self.path} has other columns than a sweep's: name another file")
        by_run = {}
        for number, cells in enumerate(csv.reader(io.StringIO(complete.decode(errors="replace"))), 1):
            try:
                row = typed(dict(zip(COLUMNS, cells, strict=True))) if number > 1 else {}
            except ValueError as error:
                raise ValueError(f"{self.path}, line {number}: {error}") from None
            if row:
                by_run[tuple(row[name] for name in KEY)] = row
        if len(complete) < len(data):
            self.file.truncate(len(complete))
        if not complete:
            self.write(header)
        return by_run

    def write(self, line: bytes) -> None:
        """Write a line to the disk, completely or not at all. Raises OSError if the disk is full."""
        start = os.fstat(self.file.fileno()).st_size
        if self.file.write(line) != len(line):
            self.file.truncate(start)
            raise OSError(errno.ENOSPC, "a row could not be written completely", str(self.path))
        os.fsync(self.file.fileno())

    def add(self, row: dict[str, Any]) -> dict[str, Any]:
        """Add a row to the disk; return it as it reads back."""
        self.write(line_of([row[name] for name in COLUMNS]))
        row = typed({name: str(row[name]) for name in COLUMNS})
        self.by_run[tuple(row[name] for name in KEY)] = row
        return row

    def of(self, run: Run) -> dict[str, Any] | None:
        """Return the row of a run, or None."""
        return self.by_run.get(run.key)

    def __enter__(self) -> Rows:
        return self

    def __exit__(self, *_) -> None:
        self.file.close()
