"""course_lib.checkpoint.lock: whose a folder of checkpoints is, and when it is free. No GPU, no ranks."""

import errno
import json
import os
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from course_lib.checkpoint import lock
from course_lib.checkpoint.files import CheckpointError
from course_lib.checkpoint.lock import FolderLock, this_process

HOLDER = """
import sys, time
from course_lib.checkpoint.lock import FolderLock
held = FolderLock(sys.argv[1])
print("held", flush=True)
time.sleep(600)
"""
VARIABLES = "SLURM_JOB_ID", "SLURM_CLUSTER_NAME", "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID"
ELSEWHERE = {"host": "node7", "boot": "another kernel", "pid": 4711, "began": "1", "restarts": None}


@pytest.fixture(autouse=True)
def no_job(monkeypatch):
    """Neither of Slurm nor of torchrun; and no test waits, unless it says what happens meanwhile."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    meanwhile(monkeypatch, lambda: pytest.fail("it waits"))


def meanwhile(monkeypatch, happens) -> None:
    """Instead of each sleep of the lock's own; `subprocess` sleeps while it waits for squeue."""
    clock = types.SimpleNamespace(sleep=lambda _: happens(), monotonic=time.monotonic)
    monkeypatch.setattr(lock, "time", clock)


@pytest.fixture
def held(tmp_path):
    """A function that starts a process which holds the folder, with more variables of the environment."""
    started = []

    def start(**environment) -> subprocess.Popen:
        command = [sys.executable, "-c", HOLDER, str(tmp_path)]
        process = subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def refusal(folder: Path) -> str:
    """Return why the folder is refused, and assert that nothing in it has changed."""
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(CheckpointError) as refused:
        FolderLock(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    return str(refused.value)


def left_by(folder: Path, **holder) -> None:
    """A lock whose holder has no flock here."""
    (folder / lock.LOCK).write_text(json.dumps(holder))


def is_free(folder: Path) -> bool:
    """Whether the folder can be had, with this process's name in the lock; nothing is left of it at the end."""
    taken = FolderLock(folder)
    own = json.loads((folder / lock.LOCK).read_text())["pid"] == os.getpid()
    assert [path.name for path in folder.iterdir()] == [lock.LOCK]
    taken.release()
    taken.release()
    return own and not list(folder.iterdir())


def test_one_process_has_a_folder_until_it_gives_it_back(tmp_path):
    first, who = FolderLock(tmp_path), this_process()
    line = f"{tmp_path} is in use by a run on host {who['host']}, pid {os.getpid()}: end it, or use another folder"
    assert refusal(tmp_path) == refusal(tmp_path) == line
    first.release()
    assert is_free(tmp_path)
    first = FolderLock(tmp_path)
    del first  # a run that was given up
    assert is_free(tmp_path)


def test_a_job_that_lives_is_named_and_one_that_was_killed_is_gone(tmp_path, held):
    process = held(SLURM_JOB_ID="123")
    assert f"is in use by job 123 on host {this_process()['host']}, pid {process.pid}: " in refusal(tmp_path)
    process.kill()
    process.wait()
    assert (tmp_path / lock.LOCK).exists() and is_free(tmp_path)


def test_a_restart_waits_for_a_process_of_its_own_run_and_no_other_does(tmp_path, held, monkeypatch):
    process = held(TORCHELASTIC_RUN_ID="run1")

    def end() -> None:
        process.kill()
        process.wait()

    assert "is in use" in refusal(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run2")
    assert "is in use" in refusal(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run1")
    meanwhile(monkeypatch, end)
    assert is_free(tmp_path)


def test_the_default_run_of_torchrun_is_nobodys_own(tmp_path, held, monkeypatch):
    held(TORCHELASTIC_RUN_ID="none")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert "is in use" in refusal(tmp_path)


def test_a_restart_that_waited_long_enough_is_refused(tmp_path, held, monkeypatch):
    held(TORCHELASTIC_RUN_ID="run1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run1")
    monkeypatch.setattr(lock, "PATIENCE_S", 0.0)
    assert "is in use" in refusal(tmp_path)


def test_a_lock_of_a_process_that_has_ended_here(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left_by(tmp_path, **this_process() | {"pid": ended.pid})
    assert is_free(tmp_path)
    left_by(tmp_path, **this_process())  # even if its pid is in use again: no process holds the flock
    assert is_free(tmp_path)


def test_without_flock_the_process_and_its_beginning_decide(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "flocked", lambda file: None)
    left_by(tmp_path, **this_process())
    assert "is in use" in refusal(tmp_path)
    left_by(tmp_path, **this_process() | {"began": "1"})  # the number is another process's now
    assert is_free(tmp_path)


@pytest.mark.parametrize(
    "own, holder",
    [
        ({"SLURM_JOB_ID": "5", "SLURM_RESTART_COUNT": "1"}, {"job": "5", "run": None}),
        ({"SLURM_JOB_ID": "5", "TORCHELASTIC_RUN_ID": "5"}, {"job": "5", "run": "5"}),
    ],
    ids=["requeued", "a restart in a Slurm job"],
)
def test_the_successor_on_another_host_has_it_at_once(tmp_path, monkeypatch, own, holder):
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    left_by(tmp_path, **ELSEWHERE, **holder)
    assert is_free(tmp_path)


@pytest.mark.parametrize(
    "script, lives",
    [
        ("echo RUNNING", True),
        ("echo COMPLETING", True),
        ("echo PENDING", False),
        ("", False),
        ("echo slurm_load_jobs error: Invalid job id specified >&2; exit 1", False),
    ],
)
def test_slurm_says_whether_a_job_of_another_host_lives(tmp_path, monkeypatch, script, lives):
    folder, programs = tmp_path / "c", tmp_path / "programs"
    folder.mkdir(), programs.mkdir()
    program = f'#!/bin/sh\n[ "$*" = "--noheader --jobs=123 --format=%T" ] || exit 3\n{script}\n'
    (programs / "squeue").write_text(program)
    (programs / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    left_by(folder, **ELSEWHERE, job="123", run="123")
    if lives:
        assert "c is in use by job 123 on host node7, pid 4711: " in refusal(folder)
    else:
        assert is_free(folder)


def test_the_holder_may_give_it_back_while_another_waits_for_its_beat(tmp_path, monkeypatch):
    """A run's name without a job is no proof: `--rdzv-id 100` may be two runs on two hosts. So it waits."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "100")
    waited = []
    meanwhile(monkeypatch, lambda: (waited.append(1), (tmp_path / lock.LOCK).unlink()))
    left_by(tmp_path, **ELSEWHERE, job=None, run="100")
    assert is_free(tmp_path) and waited == [1]


def test_a_process_forked_from_the_holder_gives_nothing_back(tmp_path):
    held = FolderLock(tmp_path)
    if (child := os.fork()) == 0:
        held.release()
        os._exit(0)
    os.waitpid(child, 0)
    assert "is in use" in refusal(tmp_path)
    held.release()
    assert is_free(tmp_path)


def test_the_end_of_a_process_says_nothing_and_leaves_it_free(tmp_path):
    ends = f"from course_lib.checkpoint.lock import FolderLock; held = FolderLock({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", ends], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and is_free(tmp_path)


def test_without_links_it_is_renamed(tmp_path, monkeypatch):
    def link(*paths) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(lock.os, "link", link)
    assert is_free(tmp_path)


OF_OTHERS = [{"job": None}, {"job": "123"}, {"job": "123", "cluster": "b"}, {"job": "9"}]


@pytest.mark.parametrize("holder", OF_OTHERS, ids=str)
def test_else_the_file_is_touched_or_it_is_stale(tmp_path, monkeypatch, holder):
    """No squeue, no Slurm, another cluster's job, or a second run within one allocation."""
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    waited = []

    def touch_at_last() -> None:
        waited.append(1)
        if len(waited) == lock.BEATS:
            os.utime(tmp_path / lock.LOCK, ns=(0, 0))  # its clock is another one

    left_by(tmp_path, **ELSEWHERE, **holder, run="none")
    meanwhile(monkeypatch, touch_at_last)
    assert "is in use by " in refusal(tmp_path)
    waited.clear()
    meanwhile(monkeypatch, lambda: waited.append(1))
    assert is_free(tmp_path) and len(waited) == lock.BEATS


def test_a_file_that_says_nothing_is_stale(tmp_path, monkeypatch):
    meanwhile(monkeypatch, lambda: None)
    for text in ("", "{", "3", "[1]"):
        (tmp_path / lock.LOCK).write_text(text)
        assert is_free(tmp_path)


def test_a_file_that_says_nothing_but_is_held_names_an_unknown_process(tmp_path):
    with open(tmp_path / lock.LOCK, "w") as held:
        assert lock.flocked(held)
        assert "is in use by an unknown process: end it, or use another folder" in refusal(tmp_path)


def test_a_holder_touches_its_file(tmp_path, monkeypatch):
    class Twice:
        """An event that is set at the second look."""

        looks = 0

        def wait(self, seconds: float) -> bool:
            assert seconds == lock.BEAT_S
            self.looks += 1
            return self.looks == 2

    file = tmp_path / "file"
    file.touch()
    os.utime(file, (0, 0))
    with open(file) as opened:
        FolderLock.beat(opened.fileno(), Twice())
    assert file.stat().st_mtime > 0
