"""A run that is killed and restarted, and runs that resume with a part of their state missing."""

from __future__ import annotations

import contextlib
import csv
import io
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from course_kit.labs.five_d.models import built
from course_kit.ranks import Ranks
from course_lib.checkpoint.checkpoints import latest, load, save
from course_lib.five_d.plan import learning_rate
from course_lib.single_gpu import training as single_gpu
from course_lib.single_gpu.data import ByteTokenizer, TokenBatches, corpus
from course_lib.single_gpu.model import PRESETS
from course_lib.train import program
from course_lib.train.log_curves import read_log

ROOT = Path(__file__).resolve().parents[3]
OPTIONS = "--layout dp2,zero1 --preset debug --batch 8 --seq 64 --lr 0.003 --drop-tokens 0.05 --log-every 1".split()
FORGOTTEN = ("optimizer", "position", "step")
Rows = list[tuple[float, float]]  # loss and learning rate of each step


def killed_run(folder: Path, when: int = 12, steps: int = 20) -> tuple[int, list[str]]:
    """Run the program through the launcher; kill rank 1 when step `when` is printed. Return exit status and lines.

    Leaves log.jsonl in the folder, and killed.jsonl, a copy made at the kill: a restart removes the steps that it
    repeats.
    """
    import psutil

    command = [sys.executable, str(ROOT / "scripts/launch_nb_torchrun.py")]
    command += [str(ROOT / "notebooks/10b_checkpoint.ipynb"), "--no-export"]
    command += ["--nproc-per-node", "2", "--max-restarts", "1", "--", *OPTIONS, "--steps", str(steps)]
    command += ["--checkpoints", str(folder / "checkpoints"), "--save-every", "5", "--out", str(folder / "log.jsonl")]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    printed, killed = [], False
    assert job.stdout is not None
    for line in job.stdout:
        printed.append(line.rstrip().replace(str(folder), ""))
        if line.startswith("launch: rank 1: "):  # the rank is dead, and the restart has not begun
            shutil.copy(folder / "log.jsonl", folder / "killed.jsonl")
        if not killed and line.startswith(f"step {when:>5}"):
            killed = True
            for process in psutil.Process(job.pid).children(recursive=True):
                if process.name() == "rank 1" or process.environ().get("RANK") == "1":
                    process.send_signal(signal.SIGKILL)
                    printed.append(f"--- SIGKILL to rank 1, process {process.pid} ---")
    return job.wait(), printed


def published_interruptions() -> list[dict[str, str]]:
    """Return the rows of data/llama3_interruptions.csv: the interruptions of Llama 3's training by component."""
    with (ROOT / "data" / "llama3_interruptions.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def recorded_run() -> list[dict]:
    """Return the records of data/lesson_run.jsonl, a run of examples/lesson.toml."""
    return read_log(ROOT / "data" / "lesson_run.jsonl")


def losses_without_kill(steps: int = 20) -> list[float]:
    """On a rank: the losses of the same run, uninterrupted."""
    with contextlib.redirect_stdout(io.StringIO()):
        return [record["loss"] for record in program.main([*OPTIONS, "--steps", str(steps)])]


def resumed_runs(root: Path) -> dict[str, Rows]:
    """On a rank: steps 21 to 40 of four runs that resume from step 20 of 40, by the state that each has forgotten."""
    tokens = ByteTokenizer().encode(corpus()[:40000])

    def new():
        _, mesh, parallel = built("dp2,mb2", PRESETS["debug"], lr=1e-3, **single_gpu.ADAMW)
        return parallel, TokenBatches(tokens, 4, 64, mesh.dp.rank(), 2)

    def go_on(parallel, batches, numbers) -> Rows:
        rows = []
        for number in numbers:
            rate = learning_rate(number, 6e-3, 10, 40)
            for group in parallel.optimizer.param_groups:
                group["lr"] = rate
            inputs, targets = next(batches)
            rows.append((parallel.step(inputs, targets)[0].item(), rate))
        return rows

    parallel, batches = new()
    go_on(parallel, batches, range(1, 21))
    save(parallel, root, 20, {"position": batches.position})
    runs = {}
    for forgot in ("nothing", "step", "optimizer", "position"):
        parallel, batches = new()
        folder = latest(root)
        assert folder is not None
        batches.position = load(parallel, folder)["position"]
        if forgot == "optimizer":
            parallel.optimizer.state.clear()
        if forgot == "position":
            batches.position = 0
        runs[forgot] = go_on(parallel, batches, range(1, 21) if forgot == "step" else range(21, 41))
    return runs


def drawn() -> dict[str, str]:
    """Return the state that runs A, B and C have forgotten, drawn by chance."""
    return dict(zip("ABC", random.Random(1001).sample(FORGOTTEN, 3), strict=True))


def forgetful_runs(ranks: Ranks) -> dict[str, Rows]:
    """Return the rows of the run that has forgotten nothing, "whole", and of A, B and C, on two ranks."""
    runs = ranks(resumed_runs, Path(tempfile.mkdtemp()))[0]
    return {"whole": runs["nothing"]} | {letter: runs[forgot] for letter, forgot in drawn().items()}
