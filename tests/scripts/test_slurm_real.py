"""The launcher and the sweep under a real Slurm of two nodes, on this machine (slurm_cluster.py). CPU, gloo.

Without Slurm, or where this is not root, these are skipped: test_launch.py and tests/kit/test_sweep.py try the scripts
everywhere, with commands that stand for Slurm's.
"""

import collections
import contextlib
import json
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from course_kit.sweep import program as sweep
from course_kit.sweep.enclosed import ROOT, now
from course_kit.sweep.rows import Rows
from course_kit.sweep.runs import refused
from course_kit.sweep.slurm import collect
from slurm_cluster import NODES, PATIENCE_S, Cluster, wait_for, why_not

REASON = "its ranks are for the CPU, and here are GPUs" if torch.cuda.is_available() else why_not()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)
SMALL = "--preset debug --seq 32 --batch 8".split()


@pytest.fixture(scope="module")
def cluster():
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def folder(cluster, tmp_path):
    """The current folder of what a test submits. At the end no process of a job may be left."""
    yield tmp_path
    cluster.tidy()


class Job:
    """A launch of a notebook by --slurm, on two nodes of two ranks."""

    def __init__(self, cluster: Cluster, folder: Path, notebook: str, more: str, *options: str):
        command = [sys.executable, str(ROOT / "scripts" / "launch_nb_torchrun.py"), str(ROOT / "notebooks" / notebook)]
        command += ["--no-export", "--slurm", f"nodes=2,gpus=2{more}", *options]
        done = subprocess.run(
            command, cwd=folder, env=cluster.environment, capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert done.returncode == 0 and done.stderr == "", done.stderr
        name = Path(notebook).stem
        written, submitted = done.stdout.splitlines()
        assert written == f"runs/slurm/{name}.sbatch is written"
        self.cluster, self.number = cluster, submitted.removeprefix("Submitted batch job ")
        self.log = folder / "runs" / "slurm" / f"{name}-{self.number}.log"

    def text(self) -> str:
        """What it has printed so far."""
        return self.log.read_text() if self.log.exists() else ""

    def while_it_goes_on(self, found) -> object:
        """What `found` gives, as soon as that is something; the end of the job is an error."""

        def look():
            state = self.cluster.state(self.number)
            assert state in ("PENDING", "CONFIGURING", "RUNNING"), f"{state}\n{self.text()}"
            return found()

        return wait_for(look, self.text)

    def ranks(self) -> dict[str, set[str]]:
        """The ranks that run, by node."""
        found = collections.defaultdict(set)
        for process in self.cluster.of_jobs():
            with contextlib.suppress(psutil.NoSuchProcess):
                if re.fullmatch(r"rank \d+", process.name()):
                    found[process.environ()["SLURMD_NODENAME"]].add(process.name())
        return found

    def has_ranks_on_both_nodes(self) -> None:
        """Wait until there are two ranks on each."""
        wanted = [{"rank 0", "rank 1"}, {"rank 2", "rank 3"}]  # either node may be the first
        self.while_it_goes_on(lambda: sorted(self.ranks().values(), key=sorted) == wanted)
        assert set(self.ranks()) <= {*NODES[:2]}

    def cores(self) -> tuple[str, str]:
        """Of the job, those for a task; of its step, those in all."""
        job = self.cluster.run("scontrol", "--oneliner", "show", "job", self.number)
        step = self.cluster.run("scontrol", "--oneliner", "show", "step", f"{self.number}.0")
        return re.search(r" CPUs/Task=(\d+) ", job)[1], re.search(r" CPUs=(\d+) ", step)[1]

    def completed(self) -> str:
        """Wait for its end, which has to be a good one; what it has printed."""
        ended = self.cluster.when(self.number, "COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT")
        assert ended == "COMPLETED", self.text()
        return self.text()


def temporary(cluster: Cluster) -> set[Path]:
    """The temporary files that are there; PyTorch keeps a cache of its own."""
    return {path for path in (cluster.folder / "tmp").iterdir() if "torchinductor" not in path.name}


def test_notebook_04_on_two_nodes(cluster, folder):
    """Each node's task has the cores that the user says."""
    out = folder / "log.json"
    job = Job(cluster, folder, "04_data_parallel.ipynb", ",cpus=3", "--", *SMALL, "--steps", "20", "--out", str(out))
    job.has_ranks_on_both_nodes()
    assert job.cores() == ("6", "12")
    text = job.completed()
    assert re.findall(r"^step +(\d+)", text, re.MULTILINE) == [str(step) for step in range(1, 21)], text
    records = json.loads(out.read_text())["records"]
    assert len(records) == 20 and records[-1]["loss"] < records[0]["loss"]
    assert not temporary(cluster)


def test_notebook_10_goes_on_after_the_death_of_a_node_until_scancel(cluster, folder):
    """Under --max-restarts Slurm starts the job anew, on two nodes that live; the program finds its checkpoint. scancel
    leaves no process and no file.
    """
    out = folder / "log.jsonl"
    program = [*SMALL, *"--layout dp2,tp2,zero1 --steps 1000000 --save-every 4".split(), "--out", str(out)]
    program += ["--checkpoints", str(folder / "checkpoints")]
    job = Job(cluster, folder, "10_5d.ipynb", "", "--max-restarts", "1", "--", *program)

    def steps() -> list[int]:
        lines = out.read_text().split("\n")[:-1] if out.exists() else []
        return [json.loads(line)["step"] for line in lines]

    job.has_ranks_on_both_nodes()
    assert job.cores() == ("16", "32"), "8 a GPU, where the user does not say"
    job.while_it_goes_on(lambda: len(steps()) >= 10)
    cluster.kill_node(NODES[1])
    cluster.when(job.number, "PENDING")
    cluster.none_left()
    before, left = steps(), temporary(cluster)
    assert before == [*range(1, len(before) + 1)]

    cluster.run("scontrol", "update", f"jobid={job.number}", "starttime=now")  # by itself it would wait for two minutes
    job.while_it_goes_on(lambda: len(steps()) >= len(before) + 10)
    (last,) = re.findall(r"continues after step (\d+), from ", job.text())
    assert int(last) % 4 == 0 and 0 < int(last) <= len(before)
    assert job.text().count("layout dp2,tp2,zero1: 4 ranks") == 2, "the log goes on too"
    assert set(job.ranks()) == {NODES[0], NODES[2]}
    cluster.run("scancel", job.number)
    cluster.when(job.number, "CANCELLED")
    cluster.none_left()
    assert temporary(cluster) == left
    assert (found := steps()) == [*range(1, len(found) + 1)], "no step is in the log twice"


PLANTED = f"""\
import pathlib, sys, time
layout = sys.argv[sys.argv.index("--layout") + 1]
if layout == "mb2":
    pathlib.Path(sys.argv[1], "waits").touch()
    time.sleep(10 * {PATIENCE_S})
sys.path.insert(0, {str(ROOT)!r})
from course_kit.sweep import rank

def fail(folder, options):
    raise ValueError("planted")

rank.train = fail if layout == "mb4" else rank.train
rank.main(sys.argv[1:])
"""


def test_a_sweep_as_array_jobs(cluster, folder, monkeypatch, capsys):
    """A run of two nodes, one that fails and one that scancel ends have their rows; one that has a row is left out."""
    monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])  # for collect
    jobs, file = folder / "jobs", folder / "sweep.csv"
    layouts = ["dp2", "dp1", "mb2", "mb4"]
    line = [*SMALL, *"--steps 3 --gpus-per-node 1".split(), "--csv", str(file), "--layouts", *layouts, "--slurm"]
    (there,) = [run for run in sweep.options([*line, str(jobs)])[1] if str(run.layout) == "dp1"]
    with Rows(file) as rows:
        rows.add(refused(there, "of a sweep before", now()))
    sweep.main([*line, str(jobs)])
    said, *submit = capsys.readouterr().out.splitlines()
    assert said == f"1 of 4 runs have their rows in {file} already"
    assert submit == [f"sbatch {jobs}/array-1x1.sbatch", f"sbatch {jobs}/array-2x1.sbatch"]
    (folder / "planted.py").write_text(PLANTED)
    plan = json.loads((jobs / "runs.json").read_text())
    assert [run["layout"] for run in plan["runs"]] == ["dp2", "mb2", "mb4"]
    (jobs / "runs.json").write_text(json.dumps(plan | {"program": [str(folder / "planted.py")]}))

    one_node, _ = [cluster.run(*command.split()).split()[-1] for command in submit]
    wait_for(lambda: [*jobs.glob("1-*/waits")], cluster.logs)
    assert "mb2" not in [row["layout"] for row in collect(jobs, file)], "it runs"
    cluster.run("scancel", f"{one_node}_1")
    rows = wait_for(lambda: len(found := collect(jobs, file)) == 3 and found, cluster.logs)
    assert {row["layout"]: (row["ok"], row["why"]) for row in rows} == {
        "dp2": (1, ""),
        "mb2": (0, "ended by Slurm: cancelled"),
        "mb4": (0, "rank 0: ValueError: planted"),
    }, [log.read_text() for log in jobs.glob("*/node-*.log")]
    before = file.read_bytes()
    assert len(before.splitlines()) == 5
    capsys.readouterr()
    sweep.main([*line, str(folder / "more")])
    assert capsys.readouterr().out == f"4 of 4 runs have their rows in {file} already\n"
    collect(jobs, file)
    assert file.read_bytes() == before and not (folder / "more").exists(), "again: nothing new"
