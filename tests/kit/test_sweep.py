"""Sweeps of layouts, on the CPU: real runs by torchrun on two ranks, planted faults, and that no process is left.

The array job's script runs under bash with a srun that starts two "nodes" on this machine.
"""

import contextlib
import csv
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch

from course_kit.figures.best_config import heatmap
from course_kit.sweep import program as sweep
from course_kit.sweep import rank as sweep_rank
from course_kit.sweep.enclosed import ROOT, run_enclosed
from course_kit.sweep.rows import COUNTS, Rows
from course_kit.sweep.runs import (
    COLUMNS,
    PUBLISHED,
    Run,
    layouts_of,
    refusal,
    refused,
    row_of,
    settings,
    torchrun_command,
)
from course_kit.sweep.slurm import collect, write_arrays
from course_lib.five_d.layouts import Layout

PATIENCE_S = 300  # a deadline for what hangs
PLANTED = f"""\
import os, signal, subprocess, sys, time
sys.path.insert(0, {str(ROOT)!r})
from course_kit.sweep import rank as sweep_rank

GRANDCHILD = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def train(folder, options):
    import torch.distributed as dist

    sweep_rank.join_group()
    subprocess.Popen([sys.executable, "-c", GRANDCHILD, str(folder)], start_new_session=True)
    dist.barrier()
    if dist.get_rank() == 1 and fault == "raise":
        raise ValueError("planted\\non rank 1")
    if dist.get_rank() == 1 and fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if dist.get_rank() == 1 and fault == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("hangs", flush=True)
        time.sleep(600)
    dist.barrier()


fault = sys.argv[1]
sweep_rank.train = train
sweep_rank.main(sys.argv[2:])
"""


def processes_of(folder: Path) -> list[psutil.Process]:
    """Return the processes that carry a folder in their command line."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and any(str(folder) in word for word in process.cmdline()):
                found.append(process)
    return found


def all_gone(folder: Path, within_s: float) -> bool:
    """Return whether all processes of a folder end in time."""
    deadline = time.monotonic() + within_s
    while processes_of(folder):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture
def folder(tmp_path):
    """A folder; no process that carries its name may be left."""
    yield tmp_path
    left = processes_of(tmp_path)
    for process in left:
        process.kill()
    assert left == []


def run_of(layout: str, **changes) -> Run:
    return Run(**{"preset": "debug", "layout": Layout.parse(layout), "batch": 8, "seq": 32, "steps": 3} | changes)


def faulty(folder: Path, fault: str) -> tuple[str, str]:
    """Return what torchrun starts on each rank, a fault planted."""
    file = folder / "planted.py"
    file.write_text(PLANTED)
    return str(file), fault


# --- one command and its processes


STUBBORN = """\
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv[2]) < 3:  # x starts xx, xx starts xxx, each in a session of its own; xx ends: xxx is an orphan
    subprocess.Popen([sys.executable, __file__, sys.argv[1], sys.argv[2] + "x"], start_new_session=True)
    open(os.path.join(sys.argv[1], "started" + sys.argv[2]), "w").close()
if len(sys.argv[2]) == 2:
    sys.exit()
time.sleep(600)
"""


def stubborn(folder: Path) -> list[str]:
    """Return a command whose processes ignore SIGTERM, one of them an orphan in a session of its own."""
    (folder / "stubborn.py").write_text(STUBBORN)
    return [sys.executable, str(folder / "stubborn.py"), str(folder), "x"]


def started(folder: Path) -> None:
    """Wait until the orphan is one."""
    deadline = time.monotonic() + PATIENCE_S
    while not (folder / "startedxx").exists() or len(processes_of(folder)) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_time_limit_ends_processes_that_ignore_sigterm(folder):
    outcome = run_enclosed(stubborn(folder), 2.0, folder / "log")
    assert (outcome.how, outcome.status, outcome.left) == ("time limit", None, []) and outcome.seconds >= 2
    assert processes_of(folder) == []


def test_nothing_outlives_who_started_it(folder):
    """Ctrl-C, and SIGKILL, of a program that has a command running; it is the same command, in two folders."""
    call = "from pathlib import Path; from course_kit.sweep.enclosed import run_enclosed; import sys; "
    call += "run_enclosed(sys.argv[2:], 600.0, Path(sys.argv[1]))"
    starters = {}
    for number in (signal.SIGINT, signal.SIGKILL):
        own = folder / number.name
        own.mkdir()
        command = [sys.executable, "-c", call, str(own / "log"), *stubborn(own)]
        starters[number] = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    for number, starter in starters.items():
        started(folder / number.name)
        starter.send_signal(number)
    for number, starter in starters.items():
        assert starter.wait(PATIENCE_S) == -number
        if number == signal.SIGINT:
            assert processes_of(folder / number.name) == [], "it waited until all was gone"
    assert all_gone(folder, within_s=PATIENCE_S)


# --- runs


def test_real_runs_and_resume(folder, capfd):
    """Layouts train the same model, so they end with the same loss; one can't be. Then nothing is run again."""
    runs = [run_of(layout) for layout in ("dp2,zero1", "tp2,sp", "dp16")]
    file = folder / "sweep.csv"
    rows = sweep.sweep(runs, file, 300.0)
    assert [row["ok"] for row in rows] == [1, 1, 0], [row["why"] for row in rows]
    ran = [row for row in rows if row["ok"]]
    assert all(abs(row["loss"] - ran[0]["loss"]) < 2e-4 for row in ran)
    for row, _run in zip(rows, runs, strict=True):
        if row["ok"]:
            assert row["tokens_per_s_per_gpu"] == pytest.approx(8 * 32 / row["step_s"] / 2, rel=1e-3)
            assert 0.05 < row["peak_mem_gb"] < 4 and row["seconds"] > row["step_s"] and "CPU" in row["machine"]
            assert math.isnan(row["mfu_pct"]), "a CPU's peak is not known"
    assert rows[2]["why"].startswith("batch 8 is not a multiple of dp 16") and rows[2]["seconds"] == 0
    lines = list(csv.reader(file.open()))
    assert lines[0][:13] == PUBLISHED and len(lines) == 4
    assert lines[1][:10] == ["debug", "1", "2", "1", "1", "1", "1", "4", "8", "1"]
    assert processes_of(folder) == []

    before, said = file.read_bytes(), []
    with open(file, "ab") as torn:
        torn.write(b"debug,1,2,1")
    again = sweep.sweep(runs, file, 300.0, retry_failed=True, say=said.append)
    assert file.read_bytes() == before and all("(there already)" in line for line in said)
    assert [row["loss"] for row in again[:2]] == [row["loss"] for row in rows[:2]]


def test_faults_are_results(folder):
    """A rank raises, a rank is killed, a rank hangs, side by side; each rank has a child in a session of its own that
    ignores SIGTERM. The hang is tried again only where that is asked for, and then the later row counts.
    """
    limits = {"raise": 120.0, "kill": 120.0, "hang": 8.0}

    def why(fault):
        (row,) = sweep.sweep([run_of("dp2")], folder / f"{fault}.csv", limits[fault], program=faulty(folder, fault))
        assert row["ok"] == 0 and math.isnan(row["step_s"]) and row["seconds"] > 0
        return row["why"]

    with ThreadPoolExecutor() as threads:
        found = list(threads.map(why, limits))
    killed = "rank 1 was killed by signal 9; a machine that runs out of memory does this"
    assert found == ["rank 1: ValueError: planted on rank 1", killed, "time limit 8 s"]
    assert processes_of(folder) == []

    file, said, program = folder / "hang.csv", [], faulty(folder, "hang")
    sweep.sweep([run_of("dp2")], file, 0.1, say=said.append, program=program)
    assert "(there already)" in said[-1]
    (again,) = sweep.sweep([run_of("dp2")], file, 0.1, retry_failed=True, say=said.append, program=program)
    assert again["why"] == "time limit 0.1 s" and len(file.read_text().splitlines()) == 3
    with Rows(file) as rows:
        assert rows.of(run_of("dp2")) == pytest.approx(again, nan_ok=True)


def test_ctrl_c(folder):
    """One rank sleeps and ignores SIGTERM, the other waits for it in a barrier: its stack is in the log. Both end, with
    their children; the run has no row, so a sweep that starts again runs it.
    """
    call = "import sys; from pathlib import Path; from course_kit.sweep.program import sweep; f = Path(sys.argv[1]); "
    call += "from course_kit.sweep.runs import Run; from course_lib.five_d.layouts import Layout; "
    call += "sweep([Run('debug', Layout.parse(w), 8, 32, 3) for w in ('dp16', 'dp2')], f, 600.0, program=sys.argv[2:])"
    file = folder / "sweep.csv"
    command = [sys.executable, "-c", call, str(file), *faulty(folder, "hang")]
    job = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + PATIENCE_S
    while not any("hangs" in log.read_text() for log in folder.glob("sweep.csv.runs/*/node-0.log")):
        assert job.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    with pytest.raises(ValueError, match="another sweep is writing to it"):
        Rows(file)
    assert len(processes_of(folder)) >= 7  # the sweep, the keeper, torchrun, two ranks, two children
    job.send_signal(signal.SIGINT)
    assert job.wait(PATIENCE_S) == -signal.SIGINT and processes_of(folder) == []
    assert len(file.read_text().splitlines()) == 2, "the columns, and the run that could not be"
    (log,) = folder.glob("sweep.csv.runs/*/node-0.log")
    assert "in barrier" in log.read_text()


def test_memory_that_runs_out_is_named(tmp_path, monkeypatch):
    """The error of an allocation that failed, on this machine, and how a rank's report becomes a row."""
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(RuntimeError) as failed:
        torch.empty(2**60, dtype=torch.int8)
    found = [sweep_rank.report(error) for error in (failed.value, torch.OutOfMemoryError("CUDA out of memory."))]
    assert all(each["no_memory"] and not each["lost_peer"] for each in found)
    lost = sweep_rank.report(RuntimeError("Connection closed by peer [127.0.0.1]:1")) | {"rank": 0, "time_ns": 0}
    for number, each in enumerate([lost, found[1]]):
        (tmp_path / f"error-{number}.json").write_text(json.dumps(each))
    why = row_of(run_of("dp2"), tmp_path, 60.0)["why"]
    assert why == "out of memory: rank 1: OutOfMemoryError: CUDA out of memory."


def test_which_layouts():
    """All of two ranks, by hand; of four ranks each fits, and none is there twice."""
    assert {str(layout) for layout in layouts_of(2, "debug", 8, 32)} == {
        "dp2", "dp2,zero1", "pp2", "cp2", "cp2,zero1", "tp2,sp",
    }  # fmt: skip
    four = layouts_of(4, "debug", 8, 32, zero_stages=(0, 1, 3), micro_batches=(1, 2))
    assert len(set(four)) == len(four) and all(refusal(Run("debug", each, 8, 32, 3)) == "" for each in four)
    assert Layout.parse("dp2,pp2,zero3,mb2,keep") in four
    assert all(layout.tp < 8 for layout in layouts_of(8, "debug", 8, 32)), "four heads"
    assert refusal(run_of("dp2", nodes=3)) == "3 nodes do not divide 2 ranks"


# --- the CSV


def test_another_csv_is_refused_and_stays(tmp_path):
    file = tmp_path / "other.csv"
    for text, said in [("a,b\n1,2\n", "other columns"), (",".join(COLUMNS) + "\ndebug,x\n", "line 2")]:
        file.write_text(text)
        with pytest.raises(ValueError, match=said) as refused:
            sweep.sweep([run_of("dp2")], file, 60.0)
        assert file.read_text() == text and "\n" not in str(refused.value)
    file.write_text(",".join(COLUMNS)[:20])  # killed while it wrote the first line
    with Rows(file) as rows:
        assert rows.by_run == {}
    assert file.read_text() == ",".join(COLUMNS) + "\n"


@pytest.mark.parametrize("text", ["plain", 'a "quoted", word', "two\nlines"])
def test_rows_come_back(tmp_path, text):
    """Also with quotes and commas; runs that differ in batch, length, steps or options do not mix."""
    changes = ({}, {"batch": 16}, {"seq": 64}, {"steps": 9}, {"options": ("--lr", "1")})
    runs = [run_of("tp2,sp", **change) for change in changes]
    with Rows(tmp_path / "a.csv") as rows:
        for number, run in enumerate(runs):
            rows.add(settings(run) | {"ok": 0, "why": text, "seconds": float(number)})
    with Rows(tmp_path / "a.csv") as rows:
        assert [rows.of(run)["seconds"] for run in runs] == [0, 1, 2, 3, 4]
        row = rows.of(runs[0])
        assert row["why"] == " ".join(text.split()) and row["layout"] == "tp2,sp" and math.isnan(row["loss"])
        assert all(isinstance(row[name], int) for name in COUNTS)


# --- the program


BAD = [
    ("--layouts dp2,x", "'x' is not one of"),
    ("--ranks 0", "are above 0"),
    ("--time-limit 0", "are above 0"),
    ("--steps 2", "2 steps: the first 2 are not counted"),
    ("--ranks 7", "no layout of [7] ranks fits debug"),
    ("--layouts dp2 -- --layout=tp2", "--layout is set for each run"),
    ("--layouts dp2 -- --checkpoints a", "--checkpoints is not for a sweep"),
    ("--layouts dp2 -- --layers 3", "--layers is not for a sweep"),
    ("--layouts dp2 -- --document-masks", "--document-masks is set for each run"),
    ("--layouts dp2 -- run.toml", "run.toml is not for a sweep: give options"),
    ("--layouts dp2 -- --bogus", "there is no option --bogus"),
]


@pytest.mark.parametrize("line, expected", BAD)
def test_a_bad_option_gets_one_error(line, expected, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        sweep.main(line.split())
    said = capsys.readouterr().err
    assert ended.value.code == 2 and expected in said.splitlines()[-1] and list(tmp_path.iterdir()) == []


def test_the_program_sweeps_and_plots(tmp_path, monkeypatch, capsys):
    """Without a process: the one layout can't be, and that is a row and a picture."""
    monkeypatch.chdir(tmp_path)
    (row,) = sweep.main("--layouts dp16 --plot a.png".split())
    said = "1 of 1: debug, 16 ranks, dp16: failed after 0.0 s: batch 8 is not a multiple of dp 16"
    assert said in capsys.readouterr().out
    assert (tmp_path / "a.png").stat().st_size > 5000 and (tmp_path / "sweep.csv").exists()
    with pytest.raises(SystemExit, match="sweep: missing/a.csv: there is no folder missing"):
        sweep.main("--layouts dp16 --csv missing/a.csv".split())
    with pytest.raises(ValueError, match="dp2 on 2 nodes: this machine is one"):
        sweep.sweep([run_of("dp2", nodes=2)], tmp_path / "b.csv", 60.0)


# --- Slurm


def fake_slurm(folder: Path, nodes: int) -> None:
    """srun and scontrol that have `nodes` nodes, all of them this machine."""
    srun = f"""test "$1 $2" = "--cpus-per-task=3 --kill-on-bad-exit=1" || exit 9; shift 2
for node in $(seq 0 {nodes - 1}); do SLURM_NODEID=$node "$@" & done
for node in $(seq 0 {nodes - 1}); do wait -n || status=1; done; exit ${{status:-0}}"""
    for name, text in {"srun": srun, "scontrol": 'test "$*" = "show hostnames nodes" && echo localhost'}.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)


def free_port() -> int:
    """Return a port that a job's number can stand for."""
    for port in range(20000 + os.getpid() % 9000, 30000):
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port


def test_array_jobs(folder):
    """Two nodes of one rank each, by the script itself; runs of other sizes have scripts of their own."""
    runs = [run_of("dp16"), run_of("dp2", nodes=2), run_of("dp2"), run_of("dp4", nodes=2)]
    jobs = folder / "jobs"
    scripts = write_arrays(runs, jobs, 120.0, at_once=3)
    assert [script.name for script in scripts] == ["array-1x2.sbatch", "array-2x1.sbatch", "array-2x2.sbatch"]
    text = scripts[1].read_text()
    wanted = ("--array=1%3", "--nodes=2", "--gpus-per-node=1", "--ntasks-per-node=1", "--time=5")
    assert all(f"#SBATCH {option}\n" in text for option in wanted)
    assert "#SBATCH --array=3%3\n" in scripts[2].read_text()
    with pytest.raises(ValueError, match="File exists"):
        write_arrays(runs, jobs, 120.0)

    fake_slurm(folder, nodes=2)
    job = {
        "SLURM_JOB_ID": str(free_port() - 20000),
        "SLURM_ARRAY_TASK_ID": "1",
        "SLURM_JOB_NODELIST": "nodes",
        "SLURM_CPUS_ON_NODE": "3",
    }
    environment = os.environ | job | {"PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", str(scripts[1])], env=environment, capture_output=True, text=True, timeout=300)
    (task,) = jobs.glob("1-*")
    assert (task / "ended").read_text() == "0\n", (done.stderr, (task / "node-0.log").read_text())
    assert {file.name for file in task.glob("node-*.json")} == {"node-0.json", "node-1.json"}
    rows = collect(jobs, folder / "all.csv")
    assert [(row["layout"], row["nodes"], row["ok"]) for row in rows] == [("dp16", 1, 0), ("dp2", 2, 1)]
    before = (folder / "all.csv").read_bytes()
    collect(jobs, folder / "all.csv")
    assert (folder / "all.csv").read_bytes() == before, "again: nothing new"
    with pytest.raises(ValueError, match="is no folder of a sweep's array jobs"):
        collect(folder, folder / "all.csv")


def test_what_slurm_has_ended_gets_a_row(tmp_path, monkeypatch):
    """squeue, a stand-in, tells of jobs: it is asked for those that have not said themselves that all went well."""
    jobs, file = tmp_path / "jobs", tmp_path / "all.csv"
    write_arrays([run_of("dp2", batch=batch) for batch in (2, 4, 6, 8)], jobs, 60.0)
    for name in ("0-11", "1-12", "1-9", "2-13", "3-14"):
        (jobs / name).mkdir()
    (jobs / "1-9" / "ended").write_text("1\n")  # by itself; then it was submitted again, and that goes on
    os.utime(jobs / "1-9", (0, 0))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [row["why"] for row in collect(jobs, file)] == ["0 of 1 nodes have reported their outcome"]

    def squeue(answer: str, error: str = "") -> None:
        status = f'echo "{error}" >&2; exit 1' if error else ""
        (tmp_path / "squeue").write_text(f'#!/bin/bash\necho "$*" >{tmp_path}/asked; printf "{answer}"; {status}\n')
        (tmp_path / "squeue").chmod(0o755)

    squeue("", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    assert len(collect(jobs, file)) == 1, "nobody knows"
    squeue("11 CANCELLED\\n12 RUNNING\\n13 OUT_OF_MEMORY\\n14 COMPLETING\\n")
    whys = {row["global_batch_seqs"]: row["why"] for row in collect(jobs, file)}
    cancelled, no_memory = "ended by Slurm: cancelled", "ended by Slurm: out of memory"
    assert whys == {2: cancelled, 4: "0 of 1 nodes have reported their outcome", 6: no_memory}
    assert sorted((tmp_path / "asked").read_text().split("--jobs=")[1].strip().split(",")) == "11 12 13 14 9".split()
    (jobs / "3-14" / "ended").write_text("0\n")
    squeue("", "slurm_load_jobs error: Invalid job id specified")  # all is long ago
    whys = {row["global_batch_seqs"]: row["why"] for row in collect(jobs, file)}
    assert whys == {2: cancelled, 4: "ended by Slurm", 6: no_memory, 8: "0 of 1 nodes have reported their outcome"}
    before = file.read_bytes()
    collect(jobs, file)
    assert file.read_bytes() == before, "again: nothing new"


def test_array_jobs_are_of_the_runs_that_have_no_row(tmp_path, capsys):
    def layouts(name: str, *more: str) -> list[str]:
        line = "--preset debug --batch 8 --seq 32 --gpus-per-node 2 --layouts dp2 tp2 --csv"
        sweep.main([*line.split(), str(tmp_path / "all.csv"), "--slurm", str(tmp_path / name), *more])
        plan = tmp_path / name / "runs.json"
        return [run["layout"] for run in json.loads(plan.read_text())["runs"]] if plan.exists() else []

    file = tmp_path / "all.csv"
    assert layouts("first") == ["dp2", "tp2"] and not file.exists()
    with Rows(file) as rows:
        rows.add(refused(run_of("dp2", steps=6), "of a run before", "2026-01-01"))
    capsys.readouterr()
    assert layouts("second") == ["tp2"]
    script = tmp_path / "second" / "array-1x2.sbatch"
    assert capsys.readouterr().out == f"1 of 2 runs have their rows in {file} already\nsbatch {script}\n"
    assert layouts("third", "--retry-failed") == ["dp2", "tp2"]
    with Rows(file) as rows:
        rows.add(refused(run_of("tp2", steps=6), "of a run before", "2026-01-01"))
    assert layouts("fourth") == [] and not (tmp_path / "fourth").exists()


def test_a_node_that_says_nothing(tmp_path):
    """Of two nodes one has been killed with its keeper: no success, whatever the other says."""
    run = run_of("dp2", nodes=2)
    outcome = {"how": "ended", "status": 0, "seconds": 1.0, "ended": "2026-01-01", "left": []}
    (tmp_path / "node-0.json").write_text(json.dumps(outcome))
    assert row_of(run, tmp_path, 60.0)["why"] == "1 of 2 nodes have reported their outcome"
    (tmp_path / "node-1.json").write_text(json.dumps(outcome))
    assert row_of(run, tmp_path, 60.0)["why"] == "0 of 3 steps are logged"
    (tmp_path / "node-1.json").write_text(json.dumps(outcome | {"how": "lost", "status": None}))
    assert row_of(run, tmp_path, 60.0)["why"] == "the process that keeps the command was killed"
    meeting = torchrun_command(run, tmp_path, rendezvous=["--nnodes", "2", "--rdzv-endpoint", "first:1"])
    assert meeting[3:9] == ["--nnodes", "2", "--rdzv-endpoint", "first:1", "--nproc-per-node", "1"]


# --- the heatmap


def published(**changes) -> dict:
    """Return a row as the published runs have it."""
    numbers = dict(zip(PUBLISHED, ["1B", 1, 8, 1, 1, 0, 2, 16, 256, 1, 39.2, 40150.0, 50.2], strict=True))
    return numbers | changes


FAILED = {"ok": 0, "mfu_pct": math.nan, "tokens_per_s_per_gpu": math.nan, "peak_mem_gb": math.nan}


def texts(figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def test_the_heatmap_of_published_rows():
    """The best by tokens/s, though another has a higher MFU (embeddings counted twice); where all failed it says so."""
    rows = [published(), published(dp=4, pp=2, zero_stage=1, mfu_pct=44.0, tokens_per_s_per_gpu=39000.0)]
    rows += [published(nodes=2, dp=16, **FAILED), published(nodes=2, dp=8, tp=2, **FAILED)]
    rows += [published(model="80B", nodes=4, dp=4, tp=8, zero_stage=1, mfu_pct=30.0, tokens_per_s_per_gpu=600.0)]
    figure = heatmap(rows, "Published runs")
    axes = figure.axes[0]
    assert texts(figure) == ["39.2%\ndp8\nmb2", "none of 2\nran", "30.0%\ndp4 tp8\nzero1 mb2"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["1B", "80B"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "2", "4"]
    assert axes.get_xlabel() == "nodes" and axes.get_title().startswith("Published runs\n")
    hatched = [patch for patch in axes.patches if patch.get_hatch()]
    assert len(hatched) == 1 and hatched[0].get_xy() == (0.5, -0.5)
    shades = axes.images[0].get_array()
    assert shades[0][0] == 39.2 and shades.mask[0].tolist() == [False, True, True]


def test_the_heatmap_of_own_rows(tmp_path):
    """Where MFU is not known: tokens/s, colored by the share of the row's best."""
    with Rows(tmp_path / "a.csv") as file:
        rows = [
            file.add(settings(run_of(layout)) | {"ok": 1, "tokens_per_s_per_gpu": speed})
            for layout, speed in [("tp2,sp", 1000.0), ("dp2,zero1", 2000.0), ("cp2,tp2,sp", 500.0)]
        ]
        rows.append(file.add(settings(run_of("dp8")) | {"ok": 0}))
    figure = heatmap(rows, "here", across="ranks")
    assert texts(figure) == ["2,000\ndp2\nzero1 mb1", "500\ncp2 tp2\nmb1", "did not\nrun"]
    assert figure.axes[0].images[0].get_array()[0].tolist() == [100.0, 25.0, None]


def test_what_can_not_be_compared():
    with pytest.raises(ValueError, match="1B has rows of several batches.*: 128 x None, 256 x None; choose one"):
        heatmap([published(), published(global_batch_seqs=128)], "x")
    with pytest.raises(ValueError, match="a heatmap needs rows"):
        heatmap([], "x")
    with pytest.raises(ValueError, match="across 'gpus': it is one of nodes, ranks"):
        heatmap([published()], "x", across="gpus")
