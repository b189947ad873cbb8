"""The CSV of a sweep: a row is on the disk as soon as its run has ended, and a sweep that starts again reads it back.

Rows are only ever appended. Of a run that is there twice, because it failed and was tried again, the later row counts.
"""

import csv
import errno
import fcntl
import io
import os
from pathlib import Path

from course_kit.sweep.runs import COLUMNS, Run

WORDS = ("model", "layout", "options", "why", "date", "machine")  # the columns that are no numbers
COUNTS = "nodes dp tp pp cp ep zero_stage micro_batch grad_accum global_batch_seqs ok seq steps".split()
KEY = ("model", "nodes", "layout", "global_batch_seqs", "seq", "steps", "options")


def typed(row: dict[str, str]) -> dict:
    """A row of a CSV with numbers for numbers; a number that is blank is nan."""
    found = {}
    for name, text in row.items():
        if name in WORDS:
            found[name] = text
        else:
            found[name] = (int if name in COUNTS else float)(text) if text else float("nan")
    return found


def line_of(cells: list) -> bytes:
    """One line of a CSV. No cell has a line break of its own, so half a line can be told from a whole one."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow([" ".join(c.split()) if isinstance(c, str) else c for c in cells])
    return out.getvalue().encode()


def open_locked(path: Path) -> io.FileIO:
    """A file to read and append to, which no other process has open like this. Raises ValueError where it can't be."""
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}")
    try:
        file = open(path, "a+b", buffering=0)
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
    """A CSV that rows are added to, locked for as long as this is open; by run, what it has so far.

    Drops half a line that a kill has left at the end. Raises ValueError, and changes nothing, where the file is no
    sweep's, or another sweep is writing to it.
    """

    def __init__(self, path: Path):
        self.path, self.file = path, open_locked(path)
        try:
            self.file.seek(0)
            self.found = self.read(self.file.read(), line_of(COLUMNS))
        except ValueError:
            self.file.close()
            raise

    def read(self, data: bytes, header: bytes) -> dict[tuple, dict]:
        """The rows by run; the file is left with whole lines alone, the columns in the first."""
        whole = data[: data.rfind(b"\n") + 1]
        if not whole.startswith(header) and not header.startswith(data):
            raise ValueError(f"{self.path} has other columns than a sweep's: name another file")
        found = {}
        for number, cells in enumerate(csv.reader(io.StringIO(whole.decode(errors="replace"))), 1):
            try:
                row = typed(dict(zip(COLUMNS, cells, strict=True))) if number > 1 else {}
            except ValueError as error:
                raise ValueError(f"{self.path}, line {number}: {error}") from None
            if row:
                found[tuple(row[name] for name in KEY)] = row
        if len(whole) < len(data):
            self.file.truncate(len(whole))
        if not whole:
            self.write(header)
        return found

    def write(self, line: bytes) -> None:
        """A line, to the disk, whole or not at all. Raises OSError where the disk is full."""
        start = os.fstat(self.file.fileno()).st_size
        if self.file.write(line) != len(line):
            self.file.truncate(start)
            raise OSError(errno.ENOSPC, "a row could not be written whole", str(self.path))
        os.fsync(self.file.fileno())

    def add(self, row: dict) -> dict:
        """One more row, to the disk; what it reads like when it is read back."""
        self.write(line_of([row[name] for name in COLUMNS]))
        row = typed({name: str(row[name]) for name in COLUMNS})
        self.found[tuple(row[name] for name in KEY)] = row
        return row

    def of(self, run: Run) -> dict | None:
        """The row of a run, if it has one."""
        return self.found.get(run.key)

    def __enter__(self) -> "Rows":
        return self

    def __exit__(self, *_) -> None:
        self.file.close()
