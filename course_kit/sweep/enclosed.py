"""A command and everything that it starts, under a time limit: when it is over, no process of it is left.

torchrun makes each rank the head of a session, and a rank may start processes of its own, so no process group holds
them all; and a SIGKILL of torchrun leaves its ranks to process 1. So a small process stands between, the keeper. Linux
gives it the orphans of all that runs below it (PR_SET_CHILD_SUBREAPER, prctl(2)): what the command has started is then
what stands below the keeper, whatever sessions and groups it has made. The keeper ends it all when the command ends,
at the time limit, when it is told to, and when the process that started it is gone, by SIGKILL too.

    run_enclosed([sys.executable, "-m", "torch.distributed.run", ...], 60.0, Path("run.log"))
    Outcome(how="time limit", status=None, seconds=60.02, ended="2026-03-01T12:00:00+00:00", left=[])

Elsewhere than on Linux a process whose parent has died before it is out of the keeper's sight.
"""

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
    left: list[int]  # processes that are still there, KILL_S after SIGKILL


def now() -> str:
    """Date and time, UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def last_change(path: Path) -> str:
    """When a file, or what is in a folder, has last changed, in the same form."""
    return datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.UTC).isoformat(timespec="seconds")


def run_enclosed(command: list[str], time_limit_s: float, log: Path) -> Outcome:
    """Run a command in the folder of course_lib, its output appended to `log`, for time_limit_s seconds at most.

    None of its processes is left when this returns or raises, save for those that Outcome.left names.
    """
    start, about = time.monotonic(), (os.getpid(), time_limit_s, log.resolve())
    keeper = subprocess.Popen(
        [sys.executable, "-m", "course_kit.sweep.enclosed", *(str(word) for word in about), *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,  # the Ctrl-C of a terminal is not for it
        cwd=ROOT,
    )
    try:
        told = keeper.stdout.read()
    finally:  # Ctrl-C
        if keeper.poll() is None:
            keeper.terminate()
        keeper.wait()
        keeper.stdout.close()
    return Outcome(**json.loads(told)) if told else Outcome("lost", None, time.monotonic() - start, now(), [])


def keep(command: list[str], time_limit_s: float, log: Path, parent: int) -> Outcome:
    """The keeper's life: start the command, watch it, end all of it."""
    adopt_orphans()
    told_to_stop = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: told_to_stop.append(True))
    start, how, status = time.monotonic(), None, None
    with open(log, "ab") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, preexec_fn=die_with_keeper
        )
    while how is None:
        status = reap().get(process.pid)
        if status is not None:
            how = "ended"
        elif told_to_stop or os.getppid() != parent:
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
        raise OSError(ctypes.get_errno(), "the keeper can't adopt orphans")


def die_with_keeper() -> None:
    """In the command, before it starts: a SIGTERM when the keeper is gone, at which torchrun ends its ranks."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, int(signal.SIGTERM), 0, 0, 0)


def reap() -> dict[int, int]:
    """Exit status (-9 for signal 9) of each child, adopted ones too, that has ended since the last time."""
    ended = {}
    with contextlib.suppress(ChildProcessError):  # there is none
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = os.waitstatus_to_exitcode(found[1])
    return ended


def parents() -> dict[int, int]:
    """The parent of each process of this machine."""
    if not Path("/proc/self/stat").exists():
        lines = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True).stdout.splitlines()
        return {int(line.split()[0]): int(line.split()[1]) for line in lines}
    found = {}
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):  # gone meanwhile
            if name.isdigit():
                about = Path("/proc", name, "stat").read_text(errors="replace")  # 123 (a name (of any kind)) S 45 …
                found[int(name)] = int(about.rsplit(")", 1)[1].split()[1])
    return found


def below(top: int) -> set[int]:
    """The processes that `top` has started, and they, and so on."""
    table, found, new = parents(), set(), {top}
    while new:
        new = {process for process, parent in table.items() if parent in new} - found
        found |= new
    return found


def end_all() -> list[int]:
    """End everything below this process: SIGTERM, after GRACE_S SIGKILL, until nothing is there. Returns what is there
    after KILL_S more.
    """
    start, asked = time.monotonic(), set()
    while there := below(os.getpid()):
        waited = time.monotonic() - start
        if waited > GRACE_S + KILL_S:
            return sorted(there)
        for process in there if waited > GRACE_S else there - asked:  # a process may start others until it is killed
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL if waited > GRACE_S else signal.SIGTERM)
        asked |= there
        time.sleep(POLL_S)
        reap()
    return []


def main(argv: list[str]) -> None:
    """PARENT TIME_LIMIT_S LOG COMMAND …: keep the command, and print the outcome for `run_enclosed`."""
    print(json.dumps(asdict(keep(argv[3:], float(argv[1]), Path(argv[2]), int(argv[0])))))


if __name__ == "__main__":
    main(sys.argv[1:])
