"""A run that goes on where its last checkpoint is: at which step and sample, and when it saves again."""

from __future__ import annotations

import json
import math
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from course_lib.checkpoint.checkpoints import CheckpointError, Checkpoints, DamagedError, latest, load
from course_lib.checkpoint.files import complete, describe
from course_lib.checkpoint.groups import together
from course_lib.checkpoint.lock import FolderLock
from course_lib.five_d.model import ParallelModel
from course_lib.single_gpu.data import TokenBatches

UNPROVEN = ".unproven"  # ends the name of a checkpoint that no finite step has followed


class SavedRun:
    """Its constructor takes over the last checkpoint of a folder, if there is one, and the position of the data; then
    after(step, loss, norm) saves every so many steps. step: how many are done. Collective.

    root: None for a run that saves nothing. same: what the run that goes on must have in common with the one before;
    plan: what it need not, and is told of; bad_steps: in a row, until the run stops. Raises CheckpointError, on all
    ranks, where it has not, the checkpoint can't be loaded, a running job holds the folder (see FolderLock), or
    there is no such folder and none can be made. The folder is its own until finish() or release().
    """

    def __init__(
        self, parallel: ParallelModel, batches: TokenBatches, root: Path | None, every: int, keep: int,
        same: dict, plan: dict, bad_steps: int = 3,
    ):  # fmt: skip
        self.parallel, self.batches, self.every, self.step, self.checkpoints = parallel, batches, every, 0, None
        self.bad_steps, self.bad, self.skipped, self.good, self.due = bad_steps, 0, 0, 0, False
        text = batches.tokens[:: max(1, len(batches.tokens) // 2**20)].contiguous()  # enough to know it by
        self.same = {"seq": batches.seq, "text": [len(batches.tokens), zlib.crc32(text.numpy())]} | same
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
                    advice = f"rename it {last.stem} to go on from it"
                    self.say(f"begins anew: no finite step followed {last.name}; {advice}")
                self.checkpoints = Checkpoints(parallel, self.root, keep, self.say)
            except BaseException:
                self.release()
                raise

    def on_first(self, work: Callable[[], object]) -> object:
        """What `work` gives on rank 0. Collective."""
        return together(dist.group.WORLD, lambda: work() if dist.get_rank() == 0 else None)[0]

    def say(self, line: str) -> None:
        """Print a line, once."""
        if dist.get_rank() == 0:
            print(line, flush=True)

    def take(self, root: Path) -> None:
        """On rank 0: lock the folder, and make it if it is missing."""
        try:
            root.mkdir(mode=0o750, parents=True, exist_ok=True)
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
                    raise CheckpointError(f"{folder} is of another run: its {name} is {there}, and here {value}")
            load(self.parallel, folder)
        except DamagedError as error:
            self.say(f"{error}; it is called {folder.name}.damaged now")
            self.on_first(lambda: folder.rename(folder.with_suffix(".damaged")) and None)
            return False
        self.step, self.batches.position = about["step"], about["position"]
        self.good = self.step
        self.say(f"goes on after step {self.step}, from {folder}, written in {about['layout']}")
        for name, value in self.plan.items():
            if (there := about.get("plan", {}).get(name)) != value:
                self.say(f"goes on with another {name}: {value}, was {there}")
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
        self.say(f"step {step} is skipped, the {self.skipped}. of this run: its loss is {loss}, its norm {norm}")
        if stops or last and saves:
            words = f"{'stopped' if stops else 'ended'}: {self.bad} steps in a row skipped, with the weights of step "
            words += f"{self.good}"
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
        return f"no finite step has followed {found[last].name}, it is called {target.name} now; "

    def last_good(self) -> str:
        """Return a line that names the checkpoint from which a later run continues. Collective."""
        folder = self.on_first(lambda: latest(self.root))
        return f"the last good checkpoint is {folder.name}" if folder else "there is no good checkpoint"

    def finish(self) -> None:
        """Until the last save is on the disk, or has failed; then others may have the folder. Collective."""
        if self.checkpoints is not None:
            self.checkpoints.close()
        self.release()


class Log:
    """A file of JSON lines; None: no file. A line that can't be written is told of, once, and ends nothing.

    more: what is there stays, but for half a line that a kill has left.
    """

    def __init__(self, path: Path | None, more: bool):
        self.path, self.file = path, None
        if path is not None:
            if more and path.exists():
                os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
            self.file = open(path, "ab" if more else "wb", buffering=0)

    def put(self, data: bytes) -> None:
        """Write, if that is possible."""
        try:
            if self.file is not None:
                self.file.write(data)
        except OSError as error:
            print(f"--out {self.path}: {error.strerror}; nothing more is written to it", flush=True)
            self.file = None

    def add(self, record: dict) -> None:
        """One more line."""
        self.put(json.dumps(record).encode() + b"\n")
