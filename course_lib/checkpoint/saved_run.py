"""A run that continues from its last checkpoint, at the right step and sample, and saves at intervals."""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from course_lib.checkpoint.checkpoints import CheckpointError, Checkpoints, DamagedError, latest, load
from course_lib.checkpoint.files import check_root, complete, describe
from course_lib.checkpoint.groups import first_or_raise
from course_lib.checkpoint.lock import FolderLock
from course_lib.five_d.model import ParallelModel
from course_lib.single_gpu.training import out_file

UNPROVEN = ".unproven"  # suffix of a checkpoint that no finite step has followed


class Batches(Protocol):
    """The batches of a run: their state is stored with each checkpoint."""

    seq: int

    @property
    def position(self) -> int:
        """Number of samples that all ranks together have consumed."""

    @property
    def fingerprint(self) -> Any:
        """A value that identifies the text and how it is cut, as JSON can hold it."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as JSON can hold it, the same on all ranks."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state."""


def readable(name: str, value: Any) -> Any:
    """Format a setting of a run for a message: the setting "text" as its number of tokens and its checksum."""
    return f"{value[0]:,} tokens (checksum {value[1]})" if name == "text" and value else value


class SavedRun:
    """A run with checkpoints. The constructor loads the last checkpoint of a folder, if there is one, and the position
    of the data; then after(step, loss, norm) saves every `every` steps. step: number of steps done. Collective.

    root: None for a run that saves nothing. same: settings that must equal the checkpoint's; plan: settings that
    may differ, which is printed; bad_steps: the number in a row that stops the run. Raises CheckpointError, on all
    ranks, if `same` differs, the checkpoint cannot be loaded, a running job holds the folder (see FolderLock), anyone
    may write to the folder, or it cannot be made. The folder is locked until finish() or release().
    """

    def __init__(
        self, parallel: ParallelModel, batches: Batches, root: Path | None, every: int, keep: int,
        same: dict, plan: dict, bad_steps: int = 3,
    ):  # fmt: skip
        self.parallel, self.batches, self.every, self.bad_steps = parallel, batches, every, bad_steps
        self.same, self.plan = {"seq": batches.seq, "text": batches.fingerprint} | same, plan
        self.step, self.bad_in_a_row, self.skipped, self.last_finite_step, self.save_due = 0, 0, 0, 0, False
        self.checkpoints: Checkpoints | None = None
        self.lock: FolderLock | None = None
        if root is None:
            self.say_restarted("no --checkpoints folder")
            return
        self.root = root.absolute()
        try:
            first_or_raise(None, self.lock_folder)
            self.resume()
            self.checkpoints = Checkpoints(parallel, self.root, keep, self.say)
        except BaseException:
            self.release()
            raise

    def say(self, line: str) -> None:
        """Print a line on rank 0."""
        if dist.get_rank() == 0:
            print(line, flush=True)

    def say_restarted(self, reason: str) -> None:
        """After a restart by torchrun, print that all steps are lost, and why."""
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
            self.say(f"starts at step 1 again: {reason}")

    def lock_folder(self) -> None:
        """Make the folder if it is missing, and lock it. On rank 0."""
        try:
            self.root.mkdir(mode=0o750, parents=True, exist_ok=True)
            check_root(self.root)
            self.lock = FolderLock(self.root)
        except OSError as error:
            raise CheckpointError(f"--checkpoints {self.root}: {error.strerror}") from None

    def release(self) -> None:
        """Release the folder to other jobs."""
        if self.lock is not None:
            self.lock.release()

    def resume(self) -> None:
        """Load the last checkpoint of the folder that is not damaged, or print that there is none. Collective."""
        while folder := first_or_raise(None, lambda: latest(self.root)):
            if self.loads(folder):
                return
        unproven = first_or_raise(None, lambda: sorted(self.root.glob(f"step-*{UNPROVEN}")))
        if unproven:
            last = unproven[-1]
            advice = f"rename it {last.stem} to continue from it"
            self.say(f"starts at step 1: no finite step followed {last.name}; {advice}")
        else:
            self.say_restarted(f"no checkpoint in {self.root}")

    def loads(self, folder: Path) -> bool:
        """Load a checkpoint, and return True; rename it if it is damaged, and return False. Collective."""
        try:
            about = first_or_raise(None, lambda: describe(folder))
            for name, value in self.same.items():
                if (saved := about.get(name)) != value:
                    theirs, ours = readable(name, saved), readable(name, value)
                    line = f"{folder} belongs to another run: its {name} is {theirs}, here it is {ours}"
                    if name == "text" and saved and saved[0] == value[0]:
                        line = f"{folder} belongs to another run: it trains on other sequences of the same text"
                    raise CheckpointError(line + (self.differing(about) if name == "text" else ""))
            try:
                load(self.parallel, folder)
            except CheckpointError as error:
                if not str(error).startswith("another model"):
                    raise
                raise CheckpointError(f"{error}{self.differing(about)}") from None
        except DamagedError as error:
            self.say(f"{error}; it is renamed {folder.name}.damaged")
            first_or_raise(None, lambda: folder.rename(folder.with_suffix(".damaged")) and None)
            return False
        self.step = about["step"]
        self.batches.load_state_dict(self.batches.state_dict() | about.get("data", {"position": about["position"]}))
        self.last_finite_step = self.step
        self.say(f"continues after step {self.step}, from {folder}, written in {about['layout']}")
        for name, saved in about.get("plan", {}).items():
            if name in self.plan and self.plan[name] != saved:
                now, before = ("not set" if value is None else value for value in (self.plan[name], saved))
                self.say(f"continues with {name} {now} instead of {before}")
        return True

    def differing(self, about: dict) -> str:
        """Return the settings that differ from the checkpoint's plan, for the message of a run that cannot continue."""
        saved = about.get("plan")
        names = [name for name, value in self.plan.items() if isinstance(saved, dict) and saved.get(name) != value]
        return f"; settings that differ: {', '.join(names)}" if names else ""

    def after(self, step: int, loss: float, norm: float, last: bool = False, may_save: bool = True) -> None:
        """Begin to save if it is time. A step whose loss or norm is not finite has changed nothing: it is counted and
        reported, and a save that is due waits for the next finite step. may_save: False for a step that others have
        followed already. Collective. Raises CheckpointError after
        `bad_steps` such steps in a row, and if a run that saves ends in one, or with weights that are not finite.

        A finite loss does not prove that the weights after the update are finite; the next step does. So a run that
        ends in bad steps saves none of them, and sets aside the save of the weights that they began with.
        """
        finite, self.save_due = math.isfinite(loss) and math.isfinite(norm), self.save_due or step % self.every == 0
        if finite:
            self.bad_in_a_row, self.last_finite_step = 0, step
            if self.checkpoints is not None and may_save and (last or self.save_due):
                self.save(self.checkpoints, step, last)
            return
        self.bad_in_a_row += 1
        self.skipped += 1
        self.say(f"step {step} skipped: loss {loss}, norm {norm} ({self.skipped} skipped in this run)")
        stops = self.bad_in_a_row == self.bad_steps
        if stops or last and self.checkpoints is not None:
            message = f"{'stopped' if stops else 'ended'}: {self.bad_in_a_row} steps in a row skipped; "
            message += f"the weights come from step {self.last_finite_step}"
            if self.checkpoints is not None:
                self.checkpoints.close()
                message += f"; {first_or_raise(None, self.set_aside) or ''}{self.last_good()}"
            self.release()
            raise CheckpointError(message)

    def save(self, checkpoints: Checkpoints, step: int, last: bool) -> None:
        """Begin to save. Raises CheckpointError if the run ends and the save cannot begin. Collective."""
        state = {"position": self.batches.position, "data": self.batches.state_dict()}
        begun = checkpoints.save(step, self.same | {"plan": self.plan} | state)
        self.save_due = False
        if last and not begun:
            failure = checkpoints.failure
            checkpoints.close()
            message = f"ended without a checkpoint of its last step: {failure}; {self.last_good()}"
            self.release()
            raise CheckpointError(message)

    def set_aside(self) -> str | None:
        """Rename the last checkpoint if no finite step has followed it, and return a message. On rank 0.

        If a later checkpoint is beside it, or set aside, a finite step has followed it. So a device that turns good
        weights into NaN cannot make every restart lose a checkpoint.
        """
        checkpoints = complete(self.root)
        last = max(checkpoints, default=-1)
        aside = [int(each.stem[5:]) for each in self.root.glob(f"step-*{UNPROVEN}") if each.stem[5:].isdecimal()]
        if last != self.last_finite_step or last < max(aside, default=-1) or last < 0:
            return None
        target = checkpoints[last].with_suffix(UNPROVEN)
        shutil.rmtree(target, ignore_errors=True)
        checkpoints[last].rename(target)
        return f"no finite step has followed {checkpoints[last].name}: it is renamed {target.name}; "

    def last_good(self) -> str:
        """Return a message that names the checkpoint from which a later run continues. Collective."""
        folder = first_or_raise(None, lambda: latest(self.root))
        return f"the last good checkpoint is {folder.name}" if folder else "there is no good checkpoint"

    def finish(self) -> None:
        """Wait until the last save is on the disk, or has failed, then release the folder. Collective."""
        if self.checkpoints is not None:
            self.checkpoints.close()
        self.release()


RECORD = b'{"step": '  # the beginning of each line of a Log


def log_file(path: str) -> Path:
    """Return the path of a Log, as the type of an option. Raises ArgumentTypeError if it cannot be written, or the file
    is not a Log, which a Log would overwrite.
    """
    file = out_file(path)
    try:
        with open(file, "rb") if file.is_file() else io.BytesIO() as opened:
            beginning = opened.read(len(RECORD))
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{file}: {error.strerror}") from None
    if not RECORD.startswith(beginning):
        raise argparse.ArgumentTypeError(f"{file} is not a log of this program: name another file, or remove it")
    return file


def records_up_to(data: bytes, step: int) -> tuple[bytes, int]:
    """Return the lines of a Log up to this step, the last one of each step, and the number of unreadable lines."""
    lines: dict[int, bytes] = {}
    unreadable = 0
    for line in data[: data.rfind(b"\n") + 1].splitlines(keepends=True):  # without the half line of a killed job
        try:
            lines[int(json.loads(line)["step"])] = line
        except (ValueError, TypeError, KeyError):
            unreadable += 1
    return b"".join(line for number, line in lines.items() if number <= step), unreadable


class Log:
    """A file of JSON lines, one per step; path None: no file. The first line that cannot be written is reported, and
    the run continues without a log.

    step: after which the run continues. Removes the records of later steps and unreadable lines, so that no step is in
    the file twice. For 0, a log that is there is renamed, with .old at the end; after a restart it is removed.
    """

    def __init__(self, path: Path | None, step: int):
        self.path = path
        self.file: io.FileIO | None = None
        if path is None:
            return
        if step and path.is_file():
            records, unreadable = records_up_to(data := path.read_bytes(), step)
            if unreadable:
                print(f"--out {path}: removed {unreadable} lines that are not records", flush=True)
            if records != data:
                file = path.resolve()  # a link may point to another disk
                rewritten = file.with_name(f"{file.name}.part")
                rewritten.write_bytes(records)
                rewritten.replace(file)
        elif path.is_file() and path.stat().st_size and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            earlier = path.resolve().with_name(f"{path.name}.old")
            path.resolve().replace(earlier)
            print(f"--out {path}: the log of an earlier run is now {earlier.name}", flush=True)
        self.file = open(path, "ab" if step else "wb", buffering=0)  # noqa: SIM115  open for the whole run

    def add(self, record: dict) -> None:
        """Add a line. record: its first key is `step`."""
        try:
            if self.file is not None:
                self.file.write(json.dumps(record).encode() + b"\n")
        except OSError as error:
            print(f"--out {self.path}: {error.strerror}; nothing more is written to it", flush=True)
            self.file = None
