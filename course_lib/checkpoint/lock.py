"""A lock on a folder of checkpoints: two jobs in it would remove each other's saves.

A file `.lock` in the folder names its holder: host, process, Slurm job, torchrun's run. The holder also has a `flock`
on the file, which the kernel releases when the process ends, for any reason. Some network file systems limit a flock to
one host, or do not support it. The rules, in this order:

1. The flock is held: in use. A restart by torchrun waits for the processes of its own run, which are about to end.
2. The flock is free, and the holder ran under this kernel (its boot id): gone. Without flock, the process id and the
   start time of the process decide.
3. Another host, but the same Slurm job after a requeue, or the same run of torchrun within the job: gone, and this
   process is the successor.
4. Another host and another Slurm job of this cluster: squeue decides.
5. Otherwise a heartbeat decides: a holder touches its file every BEAT_S seconds, so a file that is not touched for
   BEATS intervals is stale. Clocks of two hosts are never compared. (The name of a run proves nothing: two jobs may use
   `--rdzv-id 100`.)
"""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

from course_lib.checkpoint.files import CheckpointError

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]  # flocked looks

LOCK = ".lock"
BEAT_S, BEATS = 10.0, 6
PATIENCE_S = 60.0  # for which a restart waits for the processes of its own run to end


def began(pid: int | None) -> str | None:
    """Return the start time of a process on this machine, in clock ticks since boot, or None if it does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


def this_process() -> dict:
    """Return the description of this process that a lock file holds."""
    boot = Path("/proc/sys/kernel/random/boot_id")  # in a container, two hosts may have the same name
    description = {"host": socket.gethostname(), "pid": os.getpid(), "began": began(os.getpid())}
    description |= {"boot": boot.read_text().strip() if boot.exists() else socket.gethostname()}
    names = {"job": "SLURM_JOB_ID", "cluster": "SLURM_CLUSTER_NAME"}
    names |= {"restarts": "SLURM_RESTART_COUNT", "run": "TORCHELASTIC_RUN_ID"}
    return description | {name: os.environ.get(variable) for name, variable in names.items()}


def flocked(file) -> bool | None:
    """Return True if `file` now holds the flock, False if another process does, None if flock is not supported."""
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
    return None


def in_queue(job: str) -> bool | None:
    """Return whether Slurm still runs this job, or None if squeue gives no answer."""
    try:
        command = ["squeue", "--noheader", f"--jobs={job}", "--format=%T"]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    if done.returncode:
        return False if "Invalid job id" in done.stderr else None
    return bool(set(done.stdout.split()) - {"PENDING"})


class FolderLock:
    """A lock on the folder `root`, taken by the constructor.

    Raises CheckpointError if a live process holds it, and OSError if the lock file cannot be written.
    """

    def __init__(self, root: Path):
        self.path, self.holder, self.ended = Path(root) / LOCK, this_process(), threading.Event()
        ready = self.path.with_name(f"{LOCK}-{uuid.uuid4().hex}")
        self.file = open(ready, "x")  # noqa: SIM115  release() closes it
        try:
            self.file.write(json.dumps(self.holder))
            self.file.flush()
            flocked(self.file)
            while not self.install(ready):
                pass  # another process has since replaced or removed the lock
        except BaseException:
            self.file.close()
            raise
        finally:
            ready.unlink(missing_ok=True)
        self.thread = threading.Thread(target=self.beat, args=(self.file.fileno(), self.ended), daemon=True)
        self.thread.start()

    @staticmethod
    def beat(file: int, ended: threading.Event) -> None:
        """Touch the lock file every BEAT_S seconds, in a thread, so that other hosts see that this process is alive."""
        while not ended.wait(BEAT_S):
            try:
                os.utime(file)
            except OSError:  # a network file system may fail for a moment
                continue

    def install(self, ready: Path) -> bool:
        """Install the file `ready` as the lock, unless a live process holds it. Return False to try again."""
        try:
            os.link(ready, self.path)  # unlike a rename, a link never replaces a file
            return True
        except FileExistsError:
            if self.is_at(self.file):  # the server answered twice
                return True
        except OSError as error:  # some file systems have no links
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
                raise
            if not self.path.exists():
                os.replace(ready, self.path)
                return True
        try:
            old = open(self.path, "r+")  # noqa: SIM115  closed by the `with` below
        except FileNotFoundError:
            return False
        with old:
            free = flocked(old)
            if not self.is_at(old):
                return False
            try:
                holder = dict(json.loads(old.read()))
            except (ValueError, TypeError):  # written by another program: the holder is unknown
                holder = {}
            if self.in_use(holder, free, old):
                job = f"job {holder['job']}" if holder.get("job") else "a run"
                who = f"{job} on host {holder.get('host')}, pid {holder.get('pid')}" if holder else "an unknown process"
                raise CheckpointError(f"{self.path.parent} is in use by {who}: end it, or use another folder")
            if not self.is_at(old):  # another process was faster
                return False
            os.replace(ready, self.path)
        return True

    def is_at(self, file) -> bool:
        """Return whether the open file is the current lock file."""
        try:
            return os.path.samestat(os.fstat(file.fileno()), os.stat(self.path))
        except FileNotFoundError:
            return False

    def in_use(self, holder: dict, free: bool | None, old) -> bool:
        """Return whether the holder is alive, by the rules in the module docstring. free: `flocked(old)`."""
        this, same_kernel = self.holder, holder.get("boot") == self.holder["boot"]
        job, run, cluster = (holder.get(name) == this[name] for name in ("job", "run", "cluster"))
        in_job = job and cluster and this["job"] is not None
        requeued = in_job and holder.get("restarts") != this["restarts"]
        same = requeued or job and run and this["run"] not in (None, "", "none")
        if free is False:
            return not (same and (requeued and not same_kernel or self.wait_for_release(old)))
        if same_kernel:
            return free is None and began(holder.get("pid")) == holder.get("began") is not None
        if same and in_job:
            return False
        if cluster and not job and holder.get("job") and (running := in_queue(holder["job"])) is not None:
            return running
        return self.beats()

    @staticmethod
    def wait_for_release(old) -> bool:
        """Wait up to PATIENCE_S for the flock; return whether the holder has released it."""
        until = time.monotonic() + PATIENCE_S
        while not (free := flocked(old)) and time.monotonic() < until:
            time.sleep(0.05)
        return bool(free)

    def touched(self) -> int | None:
        """Return when the lock file was modified, or None if it is gone. Opening it refreshes a network file system."""
        try:
            with open(self.path) as file:
                return os.fstat(file.fileno()).st_mtime_ns
        except FileNotFoundError:
            return None

    def beats(self) -> bool:
        """Return whether the lock file is touched while this process waits."""
        first = self.touched()
        for _ in range(BEATS):
            time.sleep(BEAT_S)
            if (last := self.touched()) != first:
                return last is not None
        return False

    def release(self) -> None:
        """Release the lock. A second call does nothing, nor does a call in a process forked from the holder."""
        if not self.ended.is_set() and os.getpid() == self.holder["pid"]:
            self.ended.set()
            self.thread.join()
            if self.is_at(self.file):
                self.path.unlink(missing_ok=True)
            self.file.close()

    def __del__(self, finalizing=sys.is_finalizing):  # at the end of a process, the module's names are gone
        if hasattr(self, "thread") and not finalizing():
            self.release()
