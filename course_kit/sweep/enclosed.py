"""A command with all processes that it starts, under a time limit: at its end none of them is left.

torchrun makes each rank the leader of a session, and a rank may start processes of its own, so no process group holds
all of them; and a SIGKILL of torchrun leaves its ranks to process 1. Therefore a small process, the keeper, runs
between. Linux makes it the parent of orphans below it (PR_SET_CHILD_SUBREAPER, prctl(2)): all processes that the
command starts are then descendants of the keeper, in any session or group. The keeper ends all of them when the command
ends, at the time limit, on a signal, and when the process that started it is gone, even by SIGKILL.

    run_enclosed([sys.executable, "-m", "torch.distributed.run", ...], 60.0, Path("run.log"))
    Outcome(how="time limit", status=None, seconds=60.02, ended="2026-03-01T12:00:00+00:00", left=[])

On other systems than Linux, the keeper does not see a process whose parent has died before it.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import course_lib

ROOT = Path(course_lib.__file__).resolve().parent.parent  # of course_lib: `python -m course_lib.X` works there
POLL_S = 0.05
GRACE_S = 1.5  # from SIGTERM to SIGKILL
KILL_S = 20.0  # for the kernel to end what SIGKILL was sent to; a process in a driver call may take longer
SET_DEATH_SIGNAL, SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    how: str  # "ended" by itself, "time limit", "stopped" from outside, or "lost": the keeper was killed
    status: int | None  # the exit status, -9 for signal 9; None where it did not end by itself
    seconds: float
    ended: str  # date and time
    left: list[int]  # processes that still exist KILL_S after SIGKILL


def now() -> str:
    """Return the date and time, UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def last_change(path: Path) -> str:
    """Return the last change of a file, or of a folder's entries, in the form of `now`."""
    return datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.UTC).isoformat(timespec="seconds")


def run_enclosed(command: list[str], time_limit_s: float, log: Path) -> Outcome:
    """Run a command in the folder of course_lib, its output appended to `log`, for time_limit_s seconds at most.

    None of its processes is left when this returns or raises, except those in Outcome.left.
    """
    start, arguments = time.monotonic(), (os.getpid(), time_limit_s, log.resolve())
    keeper = subprocess.Popen(
        [sys.executable, "-m", "course_kit.sweep.enclosed", *map(str, arguments), *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,  # a terminal's Ctrl-C must not reach it
        cwd=ROOT,
    )
    assert keeper.stdout is not None  # a pipe
    try:
        outcome = keeper.stdout.read()
    finally:  # Ctrl-C
        if keeper.poll() is None:
            keeper.terminate()
        keeper.wait()
        keeper.stdout.close()
    return Outcome(**json.loads(outcome)) if outcome else Outcome("lost", None, time.monotonic() - start, now(), [])


def keep(command: list[str], time_limit_s: float, log: Path, parent: int) -> Outcome:
    """Start the command, wait for its end, and end all its processes: the keeper's work."""
    adopt_orphans()
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: signals.append(number))
    start, how, status = time.monotonic(), None, None
    with open(log, "ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            preexec_fn=die_with_keeper,  # noqa: PLW1509  the keeper has one thread
        )
    while how is None:
        status = reap().get(process.pid)
        if status is not None:
            how = "ended"
        elif signals or os.getppid() != parent:
            how = "stopped"
        elif time.monotonic() - start >= time_limit_s:
            how = "time limit"
        else:
            time.sleep(POLL_S)
    seconds = time.monotonic() - start
    return Outcome(how, status, round(seconds, 3), now(), end_all())


def adopt_orphans() -> None:
    """Make this process the parent of every orphan below it."""
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "the keeper cannot adopt orphans")


def die_with_keeper() -> None:
    """Request a SIGTERM when the keeper is gone, at which torchrun ends its ranks; called in the command's process."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, int(signal.SIGTERM), 0, 0, 0)


def reap() -> dict[int, int]:
    """Return the exit status (-9 for signal 9) of each child, adopted or not, that has ended since the last call."""
    ended = {}
    with contextlib.suppress(ChildProcessError):  # there is none
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            ended[child[0]] = os.waitstatus_to_exitcode(child[1])
    return ended


def parents() -> dict[int, int]:
    """Return the parent of each process of this machine."""
    if not Path("/proc/self/stat").exists():
        lines = subprocess.run(
            ["ps", "-A", "-o", "pid=,ppid="], capture_output=True, check=False, text=True
        ).stdout.splitlines()
        return {int(line.split()[0]): int(line.split()[1]) for line in lines}
    parent_of = {}
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):  # the process has ended
            if name.isdigit():
                stat = Path("/proc", name, "stat").read_text(errors="replace")  # 123 (a name (of any kind)) S 45 …
                parent_of[int(name)] = int(stat.rsplit(")", 1)[1].split()[1])
    return parent_of


def descendants(top: int) -> set[int]:
    """Return all descendants of process `top`."""
    table, result, new = parents(), set[int](), {top}
    while new:
        new = {process for process, parent in table.items() if parent in new} - result
        result |= new
    return result


def end_all() -> list[int]:
    """End all descendants of this process: by SIGTERM, after GRACE_S by SIGKILL, until none is left. Return the
    processes that still exist after KILL_S more.
    """
    start, asked = time.monotonic(), set[int]()
    while processes := descendants(os.getpid()):
        waited = time.monotonic() - start
        if waited > GRACE_S + KILL_S:
            return sorted(processes)
        # a process may start others until it is killed
        for process in processes if waited > GRACE_S else processes - asked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL if waited > GRACE_S else signal.SIGTERM)
        asked |= processes
        time.sleep(POLL_S)
        reap()
    return []


def main(argv: list[str]) -> None:
    """Keep the command of PARENT TIME_LIMIT_S LOG COMMAND …, and print the outcome for `run_enclosed`."""
    print(json.dumps(asdict(keep(argv[3:], float(argv[1]), Path(argv[2]), int(argv[0])))))


if __name__ == "__main__":
    main(sys.argv[1:])
