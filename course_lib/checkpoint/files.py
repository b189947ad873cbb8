"""The files of a checkpoint: a folder that is complete or not there, what is written about it, whom to trust.

    step-000000040.deleting/   an older one on its way out: no name that a complete one may have
    step-000000050/            complete: renamed from .saving when all of it was on the disk
      __0_0.distcp …           the boxes, a file a rank
      .metadata                which box is where: a pickle of torch.distributed.checkpoint's
      checkpoint.json          what this module writes: step, position, sizes and SHA-256 of the files
    step-000000060.saving/     not complete; whoever saves next removes it

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
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

FORMAT, VERSION, ABOUT = "course_lib checkpoint", 1, "checkpoint.json"
SAVING, DELETING = ".saving", ".deleting"


class CheckpointError(ValueError):
    """A checkpoint that can't be saved or loaded; its message is one line for the user."""


class DamagedError(CheckpointError):
    """The files are not those that were written: the checkpoint before it may do."""


def complete(root: Path) -> dict[int, Path]:
    """The complete checkpoints of a folder, by step, the oldest first."""
    folders = [folder for folder in Path(root).glob("step-*") if folder.suffix == "" and folder.is_dir()]
    steps = {folder.name.removeprefix("step-"): folder for folder in folders}
    return {int(step): steps[step] for step in sorted(filter(str.isdecimal, steps), key=int)}


def latest(root: Path) -> Path | None:
    """The last complete checkpoint of a folder, or None."""
    return next(reversed(complete(root).values()), None)


def flush(path: Path) -> None:
    """Wait until the disk has a file, or the names in a folder."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems do not know it of folders
            raise
    finally:
        os.close(opened)


def begin(root: Path, step: int) -> Path:
    """Make an empty folder to save in, and remove what killed jobs have left behind.

    Raises CheckpointError if `root` does not exist, check_root refuses it, or it has a checkpoint of this step.
    """
    root, name = Path(root).absolute(), f"step-{step:09d}"
    if not root.is_dir():
        raise CheckpointError(f"there is no folder {root} to save checkpoints in: make it first")
    for left in (folder for end in (SAVING, DELETING) for folder in root.glob(f"step-*{end}")):
        if left.is_symlink():  # a checkpoint that the user keeps on another disk
            left.unlink()
        else:
            shutil.rmtree(left, ignore_errors=True)
    check_root(root)
    if (root / name).exists():
        raise CheckpointError(f"{root / name} exists already")
    folder = root / f"{name}{SAVING}"
    folder.mkdir(mode=0o750)  # not for everybody, whatever the umask
    return folder


def sealed(about: dict) -> str:
    """The text of checkpoint.json: what it says, format and version, and a checksum of all that."""
    about = about | {"format": FORMAT, "version": VERSION}
    text = json.dumps(about, sort_keys=True)
    return json.dumps(about | {"sum": hashlib.sha256(text.encode()).hexdigest()}, indent=1)


def check_there(saving: Path, files: dict[str, list]) -> None:
    """Raise CheckpointError where a file that a rank has written is not here: it was in another folder."""
    for name, (size, _) in files.items():
        if not (saving / name).is_file() or (saving / name).stat().st_size != size:
            lacks = f"{saving.parent} lacks {name}, which another rank wrote"
            raise CheckpointError(f"{lacks}: all ranks must share one folder")


# exercise 10.20
def commit(saving: Path, about: dict, keep: int) -> Path:
    """Make a folder whose files are on the disk a complete checkpoint, then remove all but the last `keep`.

    about: for checkpoint.json. Returns the checkpoint, which stays in any case.
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
    """Raise CheckpointError where others than this user (or root, or a group that may write) could have written it."""
    folder = Path(folder).resolve()
    closed = not folder.stat().st_mode & stat.S_IXOTH  # whoever can't enter it can't write to what is in it
    for path in (folder.parent, folder, *folder.iterdir()):
        found = path.stat()
        for_all = open_to_all(found.st_mode) and not (closed and path.parent == folder)
        if for_all or path != folder.parent and found.st_uid not in (os.getuid(), 0):
            whose = "anyone may write to it" if for_all else f"it belongs to user {found.st_uid}"
            raise CheckpointError(
                f"{path}: {whose}, and it may run code: copy it to a folder of your own if you trust it"
            )


class MetadataUnpickler(pickle.Unpickler):
    """Reads .metadata, and nothing that a stranger's pickle might name beside what belongs there."""

    KNOWN = {
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
        """What the pickle names. Raises UnpicklingError for what has no business in metadata."""
        module = "pathlib" if module == "pathlib._local" else module  # where Python 3.13 has it
        if (module, name) == ("builtins", "getattr"):
            return EnumMeta.__getitem__  # up to Python 3.11.3, a member of an enum is pickled as getattr(enum, name)
        if name not in self.KNOWN.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


class ChunkWriter(FileSystemWriter):
    """torch.distributed.checkpoint's writer of a new folder, of what is on the host; it says what the disk says.

    places: of this rank's boxes in its file, once they are written; index: on rank 0 the bytes of .metadata, likewise.
    """

    def __init__(self, folder: Path):
        super().__init__(folder, overwrite=False, per_thread_copy_ahead=0)  # 0: no stream of the GPU in this thread
        self.places, self.index = [], b""

    def storage_meta(self) -> StorageMeta:
        """Names no folder, so that the index of one checkpoint serves for the next."""
        return StorageMeta()

    def write_data(self, plan, planner):
        """Raises OSError where the disk is full; torch.save makes a RuntimeError of it that tells nobody."""
        try:
            written = super().write_data(plan, planner)
        except RuntimeError as error:
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None
        self.places = written.value()
        return written

    def finish(self, metadata: Metadata, results: list) -> None:
        """Write the index, on rank 0. dcp.save sends all ranks what is left of it: nothing, they do not need it."""
        super().finish(metadata, results)
        self.index = (self.path / ".metadata").read_bytes()
        metadata.state_dict_metadata.clear()
        metadata.storage_data = None  # of PyTorch 2.11 it is None already: what its writer fills is a copy

    def write_index(self, index: bytes) -> None:
        """Write an index that is known already."""
        (self.path / ".metadata").write_bytes(index)
        flush(self.path / ".metadata")


class ChunkReader(FileSystemReader):
    """torch.distributed.checkpoint's reader of a folder; its index can't run code.

    metadata: what another rank has read of .metadata; None: read it, once.
    """

    def __init__(self, folder: Path, metadata: Metadata | None = None):
        super().__init__(folder)
        self.metadata = metadata

    def read_metadata(self, *args, **kwargs) -> Metadata:
        """Which box is where. Raises CheckpointError where .metadata is damaged or names what it should not."""
        if self.metadata is not None:
            return self.metadata
        try:
            with open(self.path / ".metadata", "rb") as file:
                metadata = MetadataUnpickler(file).load()
            if not isinstance(metadata, Metadata):
                raise ValueError("it does not say where tensors are")
            metadata.storage_meta.load_id = self.load_id
        except Exception as error:  # a damaged pickle raises anything
            raise CheckpointError(f"{self.path / '.metadata'} can't be read: {error}") from None
        self.metadata = metadata
        return metadata


def digest(file: Path) -> list:
    """[bytes, SHA-256] of a file."""
    with open(file, "rb") as opened:
        return [os.fstat(opened.fileno()).st_size, hashlib.file_digest(opened, "sha256").hexdigest()]


def describe(folder: Path | None) -> dict:
    """Return what checkpoint.json says, once it is clear who can write to the folder. Raises CheckpointError, for None
    too, which `latest` returns for a folder without checkpoints.
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
        more = f"; the last one in it is {last}" if (last := latest(folder)) else ""
        raise CheckpointError(f"{folder} is not a checkpoint of this course: it has no {ABOUT}{more}") from None
    except OSError as error:
        raise CheckpointError(f"{folder}: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DamagedError(f"{folder / ABOUT} is damaged: {error}") from None
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise CheckpointError(f"{folder} is not a checkpoint of this course: {ABOUT} has no {FORMAT!r}")
    if about.get("version") != VERSION:
        raise CheckpointError(f"{folder} has format {about.get('version')}, this program reads {VERSION}")
    told = about.pop("sum", None)
    if json.loads(sealed(about))["sum"] != told:
        raise DamagedError(f"{folder / ABOUT} is damaged: its checksum does not match")
    return about


def damaged(folder: Path, files: dict[str, list]) -> str | None:
    """What is wrong with the first of these files that is not as it was written; None: nothing."""
    for name, (size, sha) in files.items():
        try:
            found = digest(Path(folder) / name)
        except OSError as error:
            return f"{name}: {error.strerror}"
        if found != [size, sha]:
            return (
                f"{name}: {found[0]:,} of {size:,} bytes" if found[0] != size else f"{name}: other bytes than written"
            )
    return None
