"""Kill a job while it saves, at each kind of file operation of either rank, and start it again: a trial a second.

    python tests/checkpoint/killed_saves.py FOLDER        # prints what came of each trial, as JSON

A job is two forked ranks, in a process group of their own, that run course_lib.train.program and save after every
step. An audit hook of one rank sends the whole job SIGKILL when the operation is about to begin, or some milliseconds
later. Before each trial there are remains of killed jobs to be removed.
"""

import contextlib
import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch._dynamo  # a model on the meta device asks for it: once here, not in each rank
import torch.distributed as dist

from course_lib.checkpoint.checkpoints import latest
from course_lib.checkpoint.files import damaged, describe
from course_lib.train import program
from course_lib.train.program import main, options

STEPS = 50  # more than all trials together can do
PROGRAM = "--preset debug --layout dp2,zero1 --batch 2 --seq 16 --warmup 9 --drop-tokens 0.1 --log-every 1".split()
PROGRAM += ["--steps", str(STEPS)]
SAVING = ["--save-every", "1", "--keep", "1"]
LATER_S = (0.002, 0.005, 0.01, 0.02)  # after the file of a rank's chunks was opened: it is written then
LONGEST_S = 60


class FileOperations:
    """What this process does in a folder, from the first save on: each operation in words, as it is about to begin."""

    EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir"}

    def __init__(self, root: Path, then):
        self.root, self.then, self.saves = str(root), then, False
        sys.addaudithook(self.hook)

    def hook(self, event: str, args: tuple) -> None:
        if event not in self.EVENTS:
            return
        paths = [os.fsdecode(each) for each in args[: 1 + (event == "os.rename")] if not isinstance(each, int)]
        if not any(self.root in path or event == "os.rmdir" for path in paths):
            within = event == "os.remove" and args[1] != -1  # shutil.rmtree names a file within its open folder
            if not within:
                return
        names = [re.sub(r"\d{9}", "N", path.replace(self.root, "")).lstrip("/") for path in paths]
        self.saves = self.saves or event == "os.rmdir" or any(".saving" in name for name in names)
        if self.saves and not any(name.endswith((".jsonl", ".lock")) for name in names):  # a lock goes at the very end
            mode = args[1] if event == "open" else None
            self.then(" ".join([event, *names, *([mode] if mode else [])]))


def rank_main(rank: int, folder: Path, number: int, argv: list[str], then) -> None:
    """The life of a rank."""
    os.dup2(os.open(folder / f"{number}.text", os.O_CREAT | os.O_WRONLY | os.O_APPEND), 1)
    os.dup2(1, 2)
    if then:
        FileOperations(folder / "checkpoints", then)
    store = dist.FileStore(str(folder / f"{number}.store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    main(argv)


def job(folder: Path, number: int, argv: list[str], then: dict) -> tuple[int, str]:
    """Run two ranks to their end; status of rank 0, and what was printed. then: by rank, what FileOperations calls."""
    ranks = []
    for rank in range(2):
        if not (pid := os.fork()):
            status = 1
            with contextlib.suppress(BaseException):
                os.setpgid(0, ranks[0] if ranks else 0)
                rank_main(rank, folder, number, argv, then.get(rank))
                status = 0
            sys.stdout.flush()
            os._exit(status)
        ranks.append(pid)
        with contextlib.suppress(OSError):
            os.setpgid(pid, ranks[0])
    timer = threading.Timer(LONGEST_S, os.killpg, (ranks[0], signal.SIGTERM))
    timer.start()
    statuses = [os.waitpid(pid, 0)[1] for pid in ranks]
    timer.cancel()
    return os.waitstatus_to_exitcode(statuses[0]), (folder / f"{number}.text").read_text()


def remains(root: Path) -> None:
    """What killed jobs have left behind, of other steps."""
    for name in ("step-000000000.deleting", "step-000000999.saving"):
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name / "old").write_text("a file")


def kill_at(moment: str, later_s: float):
    """To be called with each operation: has this one come, end all ranks of the job."""

    def then(operation: str) -> None:
        if operation == moment:
            if later_s:
                threading.Timer(later_s, os.killpg, (0, signal.SIGKILL)).start()
            else:
                os.killpg(0, signal.SIGKILL)

    return then


def trial(folder: Path, number: int, rank: int, moment: str, later_s: float = 0.0) -> dict:
    """Kill a job, look at its folder, and leave the rest to the next trial."""
    root = folder / "checkpoints"
    before, start = latest(root), time.perf_counter()
    remains(root)
    argv = [*PROGRAM, *SAVING, "--checkpoints", str(root), "--out", str(folder / "log.jsonl")]
    status, text = job(folder, number, argv, {rank: kill_at(moment, later_s)})
    after = latest(root)
    return {
        "rank": rank,
        "moment": moment,
        "later_s": later_s,
        "status": status,
        "went on": f"continues after step {int(before.name.split('-')[1])}, from {before}" in text,
        "damaged": damaged(after, describe(after)["files"]),
        "before": before.name,
        "after": after.name,
        "left": sorted(re.sub(r"\d{9}", "N", each.name) for each in root.iterdir() if each.name != ".lock"),
        "text": text,
        "seconds": time.perf_counter() - start,
    }


def operations(folder: Path) -> list[list[str]]:
    """Of each rank: the kinds of operation of a save, in their order."""
    for rank in range(2):
        (folder / f"{rank}.operations").touch()
    files = [open(folder / f"{rank}.operations", "a", buffering=1) for rank in range(2)]
    then = {rank: lambda operation, rank=rank: print(operation, file=files[rank]) for rank in range(2)}
    root = folder / "checkpoints"
    argv = [*PROGRAM, *SAVING, "--checkpoints", str(root), "--out", str(folder / "log.jsonl")]
    for number in range(2):  # the second one has a checkpoint to remove, and remains
        remains(root)
        steps = str(number + 1)
        status, text = job(folder, number, [*argv, "--steps", steps, "--warmup", "9"], then if number else {})
        assert status == 0, text
    return [list(dict.fromkeys((folder / f"{rank}.operations").read_text().splitlines())) for rank in range(2)]


def run(folder: Path) -> dict:
    """All trials, and a last start without a kill: records in log.jsonl; in alone.jsonl those of a job left alone."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    text = program.open_text(options([*PROGRAM, "--cache", str(folder / "tokens")]))
    program.open_text = lambda settings: text  # once for all trials
    (folder / "sought").mkdir()
    kinds = operations(folder / "sought")
    status, printed = job(folder, 0, [*PROGRAM, "--out", str(folder / "alone.jsonl")], {})
    assert status == 0, printed
    argv = [*PROGRAM, *SAVING, "--checkpoints", str(folder / "checkpoints"), "--out", str(folder / "log.jsonl")]
    moments = [(rank, moment, 0.0) for rank in range(2) for moment in kinds[rank]]
    written = [(rank, moment) for rank, moment, _ in moments if moment.startswith("open") and f"__{rank}_0" in moment]
    moments += [(*written[i % len(written)], later_s) for i, later_s in enumerate(LATER_S)]
    job(folder, 1, argv, {0: kill_at("os.rename step-N step-N.deleting", 0.0)})  # in the second save
    trials = [trial(folder, number, *each) for number, each in enumerate(moments, 2)]
    status, printed = job(folder, len(trials) + 2, argv, {})
    return {"operations": kinds, "trials": trials, "last": {"status": status, "text": printed}}


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1])), indent=1))
