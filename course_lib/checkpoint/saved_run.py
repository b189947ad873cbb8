"""A run that goes on where its last checkpoint is: at which step and sample, and when it saves again."""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from course_lib.checkpoint.checkpoints import CheckpointError, Checkpoints, DamagedError, latest, load
from course_lib.checkpoint.files import check_root, complete, describe
from course_lib.checkpoint.groups import together
from course_lib.checkpoint.lock import FolderLock
from course_lib.five_d.model import ParallelModel
from course_lib.single_gpu.data import TokenBatches
from course_lib.single_gpu.same_text import text_sum
from course_lib.single_gpu.training import out_file

UNPROVEN = ".unproven"  # ends the name of a checkpoint that no finite step has followed


def readable(name: str, value: object) -> object:
    """Return a setting of a run for a message; its text is a number of tokens and a checksum."""
    return f"{value[0]:,} tokens (checksum {value[1]})" if name == "text" and value else value


class SavedRun:
    """Its constructor takes over the last checkpoint of a folder, if there is one, and the position of the data; then
    after(step, loss, norm) saves every so many steps. step: how many are done. Collective.

    root: None for a run that saves nothing. same: settings that must be those of the run that it continues; plan:
    settings that may differ, which is printed; bad_steps: in a row, until the run stops. Raises CheckpointError, on all
    ranks, if `same` differs, the checkpoint can't be loaded, a running job holds the folder (see FolderLock), anyone
    may write to it, or it can't be made. The folder is locked until finish() or release().
    """

    def __init__(
        self, parallel: ParallelModel, batches: TokenBatches, root: Path | None, every: int, keep: int,
        same: dict, plan: dict, bad_steps: int = 3,
    ):  # fmt: skip
        self.parallel, self.batches, self.every, self.step, self.checkpoints = parallel, batches, every, 0, None
        self.bad_steps, self.bad, self.skipped, self.good, self.due = bad_steps, 0, 0, 0, False
        self.same = {"seq": batches.seq, "text": text_sum(batches.tokens)} | same
        self.plan, self.lock = plan, None
        if root is not None:
            self.root = root.absolute()
            try:
                self.on_first(lambda: self.take(self.root))
                while folder := self.on_first(lambda: latest(self.root)):
                    if self.takes_over(folder):
                        break
                if not folder and (unproven := self.on_first(lambda: sorted(self.root.glob(f"step-*{UNPROVEN}")))):
                    last = unproven[-1]
                    advice = f"rename it {last.stem} to continue from it"
                    self.say(f"starts at step 1: no finite step followed {last.name}; {advice}")
                elif not folder:
                    self.say_restarted(f"no checkpoint in {root}")
                self.checkpoints = Checkpoints(parallel, self.root, keep, self.say)
            except BaseException:
                self.release()
                raise
        else:
            self.say_restarted("no --checkpoints folder")

    def on_first(self, work: Callable[[], object]) -> object:
        """What `work` gives on rank 0. Collective."""
        return together(dist.group.WORLD, lambda: work() if dist.get_rank() == 0 else None)[0]

    def say(self, line: str) -> None:
        """Print a line, once."""
        if dist.get_rank() == 0:
            print(line, flush=True)

    def say_restarted(self, reason: str) -> None:
        """After a restart by torchrun, say that all steps are lost, and why."""
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
            self.say(f"starts at step 1 again: {reason}")

    def take(self, root: Path) -> None:
        """On rank 0: lock the folder, and make it if it is missing."""
        try:
            root.mkdir(mode=0o750, parents=True, exist_ok=True)
            check_root(root)
            self.lock = FolderLock(root)
        except OSError as error:
            raise CheckpointError(f"--checkpoints {root}: {error.strerror}") from None

    def release(self) -> None:
        """Release the folder to other jobs."""
        if self.lock is not None:
            self.lock.release()

    def takes_over(self, folder: Path) -> bool:
        """Whether this checkpoint has been loaded; else it was damaged, and has another name now."""
        try:
            about = self.on_first(lambda: describe(folder))
            for name, value in self.same.items():
                if (there := about.get(name)) != value:
                    there, value = readable(name, there), readable(name, value)
                    raise CheckpointError(f"{folder} belongs to another run: its {name} is {there}, here it is {value}")
            load(self.parallel, folder)
        except DamagedError as error:
            self.say(f"{error}; it is renamed {folder.name}.damaged")
            self.on_first(lambda: folder.rename(folder.with_suffix(".damaged")) and None)
            return False
        self.step, self.batches.position = about["step"], about["position"]
        self.good = self.step
        self.say(f"continues after step {self.step}, from {folder}, written in {about['layout']}")
        for name, there in about.get("plan", {}).items():
            if name in self.plan and self.plan[name] != there:
                self.say(f"continues with {name} {self.plan[name]} instead of {there}")
        return True

    def after(self, step: int, loss: float, norm: float, last: bool = False) -> None:
        """Begin to save, where it is time. A step whose loss or norm is not finite has changed nothing: it is counted
        and told of, and its save waits for the next good step. Collective. Raises CheckpointError after `bad_steps` of
        them in a row, and where a run that saves ends in one, or with weights that are not finite.

        That a step's loss is finite says nothing of the weights that its update leaves: the next step does. So a run
        that ends in bad steps saves none of them, and sets aside the save of the weights that they began with.
        """
        finite, self.due = math.isfinite(loss) and math.isfinite(norm), self.due or step % self.every == 0
        self.bad, self.good = (0, step) if finite else (self.bad + 1, self.good)
        stops, saves = self.bad == self.bad_steps, self.checkpoints is not None
        if finite and saves and (last or self.due):
            begun = self.checkpoints.save(step, self.same | {"plan": self.plan, "position": self.batches.position})
            self.due = False
            if last and not begun:
                failure = self.checkpoints.failure
                self.checkpoints.close()
                words = f"ended without a checkpoint of its last step: {failure}; {self.last_good()}"
                self.release()
                raise CheckpointError(words)
        if finite:
            return
        self.skipped += 1
        self.say(f"step {step} skipped: loss {loss}, norm {norm} ({self.skipped} skipped in this run)")
        if stops or last and saves:
            words = f"{'stopped' if stops else 'ended'}: {self.bad} steps in a row skipped; "
            words += f"the weights are those of step {self.good}"
            if saves:
                self.checkpoints.close()
                words += f"; {self.on_first(self.set_aside) or ''}{self.last_good()}"
            self.release()
            raise CheckpointError(words)

    def set_aside(self) -> str | None:
        """On rank 0: rename the last checkpoint if no finite step has followed it, and say so.

        One with a later one beside it, or set aside, has been followed by a finite step: a device that makes NaN of
        good weights can't make one restart after the other lose a checkpoint.
        """
        found, last = complete(self.root), max(complete(self.root), default=-1)
        aside = [int(each.stem[5:]) for each in self.root.glob(f"step-*{UNPROVEN}") if each.stem[5:].isdecimal()]
        if last != self.good or last < max(aside, default=-1) or last < 0:
            return None
        target = found[last].with_suffix(UNPROVEN)
        shutil.rmtree(target, ignore_errors=True)
        found[last].rename(target)
        return f"no finite step has followed {found[last].name}: it is renamed {target.name}; "

    def last_good(self) -> str:
        """Return a line that names the checkpoint from which a later run continues. Collective."""
        folder = self.on_first(lambda: latest(self.root))
        return f"the last good checkpoint is {folder.name}" if folder else "there is no good checkpoint"

    def finish(self) -> None:
        """Until the last save is on the disk, or has failed; then others may have the folder. Collective."""
        if self.checkpoints is not None:
            self.checkpoints.close()
        self.release()


RECORD = b'{"step": '  # what each line of a Log begins with


def log_file(path: str) -> Path:
    """Return the path of a Log, as the type of an option. Raises ArgumentTypeError if it can't be written, or is a file
    of another kind: a Log overwrites what it finds.
    """
    file = out_file(path)
    try:
        with open(file, "rb") if file.is_file() else io.BytesIO() as found:
            begins = found.read(len(RECORD))
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{file}: {error.strerror}") from None
    if not RECORD.startswith(begins):
        raise argparse.ArgumentTypeError(f"{file} is not a log of this program: name another file, or remove it")
    return file


def records_up_to(data: bytes, step: int) -> tuple[bytes, int]:
    """Return the lines of a Log up to this step, one per step (the last one), and the number of unreadable lines."""
    lines, unreadable = {}, 0
    for line in data[: data.rfind(b"\n") + 1].splitlines(keepends=True):  # the rest is half a line, left by a kill
        try:
            lines[int(json.loads(line)["step"])] = line
        except (ValueError, TypeError, KeyError):
            unreadable += 1
    return b"".join(line for number, line in lines.items() if number <= step), unreadable


class Log:
    """A file of JSON lines, one per step; None: no file. A line that can't be written is reported once, and ends
    nothing.

    step: after which the run continues. Removes the records of later steps (of all steps for 0), and lines that can't
    be read, so that no step is in the file twice.
    """

    def __init__(self, path: Path | None, step: int):
        self.path, self.file = path, None
        if path is None:
            return
        if step and path.is_file():
            kept, unreadable = records_up_to(data := path.read_bytes(), step)
            if unreadable:
                print(f"--out {path}: removed {unreadable} lines that are not records", flush=True)
            if kept != data:
                file = path.resolve()  # a link may lead to another disk
                rewritten = file.with_name(f"{file.name}.part")
                rewritten.write_bytes(kept)
                rewritten.replace(file)
        self.file = open(path, "ab" if step else "wb", buffering=0)

    def put(self, data: bytes) -> None:
        """Write, if that is possible."""
        try:
            if self.file is not None:
                self.file.write(data)
        except OSError as error:
            print(f"--out {self.path}: {error.strerror}; nothing more is written to it", flush=True)
            self.file = None

    def add(self, record: dict) -> None:
        """Add a line. record: its first key is `step`."""
        self.put(json.dumps(record).encode() + b"\n")
