"""The files of a checkpoint: a folder that is complete or not there at all, its description, and whom to trust.

    step-000000040.deleting/   an older checkpoint that is being removed: a complete one never has this name
    step-000000050/            complete: renamed from .saving when all of it was on the disk
      __0_0.distcp …           the chunks, one file per rank
      .metadata                the location of each chunk: a pickle of torch.distributed.checkpoint
      checkpoint.json          written by this module: step, position, sizes and SHA-256 of the files
    step-000000060.saving/     incomplete; the next save removes it

A rename within a file system happens or does not; nothing between can be seen. The rest follows from the order.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import shutil
import stat
from enum import EnumMeta
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

FORMAT, VERSION, ABOUT = "course_lib checkpoint", 1, "checkpoint.json"
SAVING, DELETING = ".saving", ".deleting"
RENAMED = {"balance": "aux_loss_coeff", "z": "z_loss_coeff"}  # in "moe" and "routing" of earlier versions


class CheckpointError(ValueError):
    """A checkpoint cannot be saved or loaded. The message is one line for the user."""


class DamagedError(CheckpointError):
    """A checkpoint's files are not as they were written. The previous checkpoint may be usable."""


def complete(root: Path) -> dict[int, Path]:
    """Return the complete checkpoints of a folder, by step, the oldest first."""
    folders = [folder for folder in Path(root).glob("step-*") if folder.suffix == "" and folder.is_dir()]
    steps = {folder.name.removeprefix("step-"): folder for folder in folders}
    return {int(step): steps[step] for step in sorted(filter(str.isdecimal, steps), key=int)}


def latest(root: Path) -> Path | None:
    """Return the last complete checkpoint of a folder, or None."""
    return next(reversed(complete(root).values()), None)


def flush(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, is on the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot sync folders
            raise
    finally:
        os.close(opened)


def begin(root: Path, step: int) -> Path:
    """Make an empty folder to save in, and remove the leftovers of killed jobs.

    Raises CheckpointError if `root` does not exist, check_root refuses it, or it has a checkpoint of this step.
    """
    root, name = Path(root).absolute(), f"step-{step:09d}"
    if not root.is_dir():
        raise CheckpointError(f"there is no folder {root} to save checkpoints in: make it first")
    for leftover in (folder for end in (SAVING, DELETING) for folder in root.glob(f"step-*{end}")):
        if leftover.is_symlink():  # a checkpoint that the user keeps on another disk
            leftover.unlink()
        else:
            shutil.rmtree(leftover, ignore_errors=True)
    check_root(root)
    if (root / name).exists():
        raise CheckpointError(f"{root / name} exists already")
    folder = root / f"{name}{SAVING}"
    folder.mkdir(mode=0o750)  # no access for other users, whatever the umask
    return folder


def sealed(about: dict) -> str:
    """Return the text of checkpoint.json: `about`, format and version, and a checksum of them."""
    about = about | {"format": FORMAT, "version": VERSION}
    text = json.dumps(about, sort_keys=True)
    return json.dumps(about | {"sum": hashlib.sha256(text.encode()).hexdigest()}, indent=1)


def check_written(saving: Path, files: dict[str, list]) -> None:
    """Raise CheckpointError if a file that a rank wrote is missing here: the rank's folder is another one."""
    for name, (size, _) in files.items():
        if not (saving / name).is_file() or (saving / name).stat().st_size != size:
            lacks = f"{saving.parent} lacks {name}, which another rank wrote"
            raise CheckpointError(f"{lacks}: all ranks must share one folder")


# exercise 10.20
def commit(saving: Path, about: dict, keep: int) -> Path:
    """Make a folder whose files are on the disk a complete checkpoint, then remove all but the last `keep`.

    about: for checkpoint.json. Returns the checkpoint, which is never removed.
    """
    file, final = saving / ABOUT, saving.with_suffix("")
    file.write_text(sealed(about))
    flush(file)
    flush(saving)
    saving.rename(final)
    flush(final.parent)
    others = [folder for folder in complete(final.parent).values() if folder != final]
    for old in others[: max(0, len(others) - keep + 1)]:
        old.rename(old.with_suffix(DELETING))
    for leaving in final.parent.glob(f"step-*{DELETING}"):
        shutil.rmtree(leaving, ignore_errors=True)
    return final


def open_to_all(mode: int) -> bool:
    """Return whether anyone may write to a file or folder of this mode; the sticky bit protects files of others."""
    return bool(mode & stat.S_IWOTH and not mode & stat.S_ISVTX)


def check_root(root: Path) -> None:
    """Raise CheckpointError if anyone may write to a folder of checkpoints: check_trusted would refuse them all."""
    if open_to_all(root.stat().st_mode):
        raise CheckpointError(
            f"{root}: anyone may write to it, so no checkpoint in it could be loaded: chmod o-w, or use another folder"
        )


def check_trusted(folder: Path) -> None:
    """Raise CheckpointError if users other than this one, root and members of the group could have written it."""
    folder = Path(folder).resolve()
    closed = not folder.stat().st_mode & stat.S_IXOTH  # users who cannot enter a folder cannot write to its files
    for path in (folder.parent, folder, *folder.iterdir()):
        status = path.stat()
        for_all = open_to_all(status.st_mode) and not (closed and path.parent == folder)
        if for_all or path != folder.parent and status.st_uid not in (os.getuid(), 0):
            reason = "anyone may write to it" if for_all else f"it belongs to user {status.st_uid}"
            raise CheckpointError(
                f"{path}: {reason}, and it may run code: copy it to a folder of your own if you trust it"
            )


class MetadataUnpickler(pickle.Unpickler):
    """Reads .metadata, and refuses every name in the pickle that does not belong there."""

    KNOWN: dict[str, set[str]] = {
        "torch.distributed.checkpoint.metadata": {
            *("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex"),
            *("StorageMeta", "_MEM_FORMAT_ENCODING"),
        },
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        "torch.serialization": {"_get_layout"},
        "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
        "pathlib": {"PosixPath"},
    }

    def find_class(self, module: str, name: str):
        """Return the class that the pickle names. Raises UnpicklingError if it does not belong in metadata."""
        module = "pathlib" if module == "pathlib._local" else module  # where Python 3.13 has it
        if (module, name) == ("builtins", "getattr"):
            return EnumMeta.__getitem__  # up to Python 3.11.3, a member of an enum is pickled as getattr(enum, name)
        if name not in self.KNOWN.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


class ChunkReader(FileSystemReader):
    """Reads a folder as torch.distributed.checkpoint's reader does, except that the index cannot run code.

    metadata: the index, if another rank has read it; None: read .metadata, once.
    """

    def __init__(self, folder: Path, metadata: Metadata | None = None):
        super().__init__(folder)
        self.metadata = metadata

    def read_metadata(self, *args, **kwargs) -> Metadata:
        """Return the index. Raises CheckpointError if .metadata is damaged or names what does not belong there."""
        if self.metadata is not None:
            return self.metadata
        file = Path(self.path) / ".metadata"
        try:
            with open(file, "rb") as opened:
                metadata = MetadataUnpickler(opened).load()
            if not isinstance(metadata, Metadata) or metadata.storage_meta is None:
                raise ValueError("it does not say where tensors are")
            metadata.storage_meta.load_id = self.load_id
        except Exception as error:  # a damaged pickle may raise any exception
            raise CheckpointError(f"{file} can't be read: {error}") from None
        self.metadata = metadata
        return metadata


def digest(file: Path) -> list:
    """Return [bytes, SHA-256] of a file."""
    with open(file, "rb") as opened:
        return [os.fstat(opened.fileno()).st_size, hashlib.file_digest(opened, "sha256").hexdigest()]


def describe(folder: Path | None) -> dict:
    """Return the contents of checkpoint.json, after check_trusted. folder: None, as from `latest`, is an error as well.

    Raises CheckpointError.
    """
    if folder is None:
        raise CheckpointError("there is no checkpoint: latest found no complete one")
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    try:
        check_trusted(folder)
        about = json.loads((folder / ABOUT).read_text())
    except FileNotFoundError:
        hint = f"; the last one in it is {last}" if (last := latest(folder)) else ""
        raise CheckpointError(f"{folder} is not a checkpoint of this course: it has no {ABOUT}{hint}") from None
    except OSError as error:
        raise CheckpointError(f"{folder}: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DamagedError(f"{folder / ABOUT} is damaged: {error}") from None
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise CheckpointError(f"{folder} is not a checkpoint of this course: {ABOUT} has no {FORMAT!r}")
    if about.get("version") != VERSION:
        raise CheckpointError(f"{folder} has format {about.get('version')}, this program reads {VERSION}")
    checksum = about.pop("sum", None)
    if json.loads(sealed(about))["sum"] != checksum:
        raise DamagedError(f"{folder / ABOUT} is damaged: its checksum does not match")
    for name in ("moe", "routing"):
        if isinstance(saved := about.get(name), dict):
            about[name] = {RENAMED.get(key, key): value for key, value in saved.items()}
    return about


def damaged(folder: Path, files: dict[str, list]) -> str | None:
    """Return the error in the first of these files that differs from what was written, or None."""
    for name, (size, sha) in files.items():
        try:
            actual_size, actual_sha = digest(Path(folder) / name)
        except OSError as error:
            return f"{name}: {error.strerror}"
        if actual_size != size:
            return f"{name}: {actual_size:,} of {size:,} bytes"
        if actual_sha != sha:
            return f"{name}: other bytes than written"
    return None
