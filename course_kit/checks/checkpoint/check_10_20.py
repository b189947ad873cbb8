"""Check of exercise 10.20: `commit` crashes before each of its operations on files, and waits for the disk."""

from __future__ import annotations

import functools
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from course_lib.checkpoint import files
from course_lib.checkpoint.files import ABOUT, begin, complete, sealed

MOST = 60  # operations on files
CASES = ((10, 20), 2), ((10, 20), 1), ((), 1), ((10, 20), 5), ((40, 50), 2), ((40, 50), 1)  # steps there, keep
NEW = 30


class Crash(BaseException):
    """Stands in for a kill: nothing catches it."""


class Crashes:
    """Watches operations on files; crashes before number `at`."""

    def __init__(self):
        self.at, self.seen, self.on = None, [], False
        sys.addaudithook(self.event)

    def event(self, name: str, args: tuple) -> None:
        """Note an operation that changes files, or crash before it."""
        writes = name == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        if not self.on or not (writes or name in ("os.rename", "os.remove", "os.rmdir", "os.mkdir")):
            return
        if len(self.seen) == self.at:
            self.on = False
            raise Crash
        self.seen.append(f"{name} {Path(str(args[0])).name}")

    def run(self, at: int, work: Callable[[], object]) -> bool:
        """Return whether `work` reached operation number `at` and crashed before it."""
        self.at, self.seen, self.on = at, [], True
        try:
            work()
            return False
        except Crash:
            return True
        except OSError as error:
            raise AssertionError(f"no kill, and commit fails: {error}") from None
        finally:
            self.on = False


@functools.cache
def crashes() -> Crashes:
    """Return this process's only watcher: an audit hook cannot be removed."""
    return Crashes()


def root_with(below: str, *steps: int) -> tuple[Path, Path]:
    """Make a new folder with complete checkpoints of these steps, and one more that is ready to be committed."""
    root = Path(tempfile.mkdtemp(dir=below))
    for step in steps:
        folder = begin(root, step)
        (folder / "__0_0.distcp").write_text(f"old {step}")
        (folder / ABOUT).write_text(json.dumps({"step": step}))
        folder.rename(folder.with_suffix(""))
    folder = begin(root, NEW)
    (folder / "__0_0.distcp").write_text("new")
    return root, folder


def is_complete(folder: Path) -> bool:
    """Return whether a folder has all its data and names its step."""
    try:
        return (folder / "__0_0.distcp").stat().st_size > 0 and "step" in json.loads((folder / ABOUT).read_text())
    except (OSError, ValueError):
        return False


def check_crashes(below: str, steps: tuple[int, ...], keep: int) -> None:
    """Assert the folders' contents after a crash before each operation, and after no crash."""
    present = max((step for step in steps if step < NEW), default=0)
    for at in itertools.count():
        root, folder = root_with(below, *steps)
        crashed = crashes().run(at, functools.partial(files.commit, folder, {"step": NEW}, keep))
        operations = crashes().seen
        good = {step: is_complete(path) for step, path in complete(root).items()}
        after = f"after {operations[-1] if operations else 'nothing'}, with {steps} and keep {keep}"
        assert all(good.values()), f"killed {after}: a folder has a good name and is not complete: {good}"
        assert good or not steps, f"killed {after}: no checkpoint at all is left"
        assert not crashed or max(good, default=0) >= present, (
            f"killed {after}: step {present} is gone before step 30 is complete: {good}"
        )
        if not crashed:
            break
        assert at < MOST, f"more than {MOST} operations on files"
    left = sorted(path.name for path in root.iterdir())
    wanted = sorted([NEW, *steps[max(0, len(steps) - keep + 1) :]])
    assert left == [f"step-{step:09d}" for step in wanted], f"{steps}, keep {keep}: {left} are left, not {wanted}"
    message = json.loads((root / f"step-{NEW:09d}" / ABOUT).read_text())
    assert message == json.loads(sealed({"step": NEW})), f"{ABOUT} should say what sealed(about) says: {message}"


def check_flushes(below: str) -> None:
    """Assert the contents of the disk when the folder got its name, and when the old one was removed."""
    root, folder = root_with(below, 10)
    order, plain = [], os.fsync

    def noted(opened) -> None:
        result = os.fstat(opened if isinstance(opened, int) else opened.fileno())
        order.append((result.st_ino, result.st_size, {str(path.relative_to(root)) for path in root.glob("*/*")}))
        plain(opened)

    with mock.patch.object(os, "fsync", noted):
        final = files.commit(folder, {"step": NEW}, 1)
    assert final == root / f"step-{NEW:09d}", f"commit returns the checkpoint, and not {final}"
    new, file = f"{final.name}/{ABOUT}", (final / ABOUT).stat()
    assert (file.st_ino, file.st_size) in [flushed[:2] for flushed in order if new not in flushed[2]], (
        f"{ABOUT} was not on the disk, or not all of it, when the folder got its name"
    )
    listed = [inode for inode, _, names in order if f"{folder.name}/{ABOUT}" in names]
    assert final.stat().st_ino in listed, "the names in the folder were not on the disk when it got its name"
    named = [names for inode, _, names in order if inode == root.stat().st_ino and new in names]
    assert named, "the new name itself is not on the disk at the end"
    assert any("0010" in name for name in named[0]), "the old one was gone before the new name was on the disk"


def check() -> None:
    """Assert what crashes leave behind and when it waits for the disk, in some hundred folders."""
    with tempfile.TemporaryDirectory(prefix="commits-") as below:
        for steps, keep in CASES:
            check_crashes(below, steps, keep)
        check_flushes(below)
