"""The launcher: what it exports and starts, how each fault ends, that no process stays. Ranks run on the CPU, gloo.

A toy course in a temporary folder, with a copy of scripts/. What needs no ranks is tried inside this process.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import psutil
import pytest

from course_kit.exercises import notes
from course_kit.exercises.saved import digest_of_cells, exercise_cells

ROOT = Path(__file__).resolve().parents[2]
FIRST = "notebooks/06_base.ipynb"
TOY, LEARNERS = "notebooks/07_toy.ipynb", "workbook/07_toy.ipynb"
PATIENCE_S = 300  # a deadline for what hangs; a launch takes less than a tenth of it on a quiet machine

IMPORTS = """\
import argparse
import gc
import os
import subprocess
import sys
import threading
import time

import torch
import torch.distributed as dist

from course_lib.base.scales import scale
"""

EXERCISE = """\
#| export toy.program
def double(x):
    ### BEGIN SOLUTION
    return 2 * x
    ### END SOLUTION
"""

BLANK = """\
#| export toy.program
def double(x):
    # YOUR CODE HERE
    raise NotImplementedError()
"""

FAULTS = '''\
#| export toy.program
def fail(rank):
    """Rank 1 raises and is slow to go: rank 0 has lost its connection, and said so, before."""
    if rank == 0:
        dist.all_reduce(torch.ones(1))
    try:
        raise ValueError("planted on rank 1")
    finally:
        dist.destroy_process_group()
        time.sleep(1.5)


def wait():
    """For ever, with a child process."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("waits", os.getpid(), child.pid)
    while True:
        time.sleep(60)
'''

MAIN = """\
#| export toy.program
def options(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--fault", choices=["raise", "once", "wait"])
    return parser.parse_args(argv)


def main(argv=None):
    args = options(argv)
    rank, again = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
    total = torch.tensor([scale() * double(rank + 1)])
    dist.all_reduce(total)
    print(f"rank {rank} of {dist.get_world_size()}: {args.steps} steps, total {total.item()},", end=" ")
    time.sleep(0.1)
    print(f"{torch.get_num_threads()} threads, again {again}")
    if args.fault == "raise" or (args.fault == "once" and not again):
        fail(rank)
    if args.fault == "wait":
        wait()
    assert gc.isenabled() and gc.get_freeze_count() > 100_000, "a collection looks through PyTorch"
    if dist.get_backend() == "gloo" and hasattr(os, "SCHED_BATCH"):
        assert os.sched_getscheduler(0) == os.SCHED_BATCH
"""

BASE = "#| export base.scales\ndef scale():\n    ### BEGIN SOLUTION\n    return 1\n    ### END SOLUTION\n"
SETUP = "from __future__ import annotations"


def of_library(cell_source: str, owner: str) -> str:
    """What the library holds of an exported cell."""
    lines = [line for line in cell_source.splitlines()[1:] if "### " not in line]
    return f"# {owner}\n" + "\n".join(lines).replace("\n\n\ndef", f"\n\n\n# {owner}\ndef") + "\n"


LIBRARY = {
    "base/scales": of_library(BASE, "exercise 06.1") + "\n\ndef main(argv=None):\n    pass\n",
    "base/words": "WORDS = 3\n",
    "toy/program": f"{SETUP}\n\n{IMPORTS}\n\n" + "\n\n".join(
        of_library(source, owner)
        for source, owner in (
            (EXERCISE, "exercise 07.1"), (FAULTS, "notebook 07, cell faults"), (MAIN, "notebook 07, cell main"))
    ),
}  # fmt: skip


def cell(cell_id: str, source: str, cell_type: str = "code") -> dict:
    more = {"outputs": [], "execution_count": None} if cell_type == "code" else {}
    return {"cell_type": cell_type, "id": cell_id, "metadata": {}, "source": source, **more}


def notebook(*cells: dict, program: object, processes: object = None) -> str:
    course = {"program": program} | ({} if processes is None else {"nproc_per_node": processes})
    return json.dumps({"cells": list(cells), "metadata": {"course": course}, "nbformat": 4, "nbformat_minor": 5})


def toy(
    exercise: str = EXERCISE, faults: str = FAULTS, main: str = MAIN, processes: object = 2, program="toy.program"
) -> str:
    """The toy notebook: cell 4 is its exercise, cell 5 fails, cell 6 is what the launcher starts."""
    cells = {"setup": SETUP, "use": "1 + 1", "ex-07-1": exercise, "faults": faults, "main": main}
    title = cell("title", "# A toy", "markdown")
    return notebook(title, *(cell(*item) for item in cells.items()), processes=processes, program=program)


def base(exercise: str = BASE) -> str:
    """The notebook before it: one exercise."""
    return notebook(cell("setup", SETUP), cell("ex-06-1", exercise), program="base.scales")


def passed(path: Path, text: str) -> None:
    """Save a learner's notebook, all of its exercises noted as passed."""
    path.write_text(text)
    for name, cells in exercise_cells(json.loads(text)).items():
        notes.note(path.parent, name, True, digest_of_cells(cells))


def write_library(course: Path) -> None:
    """The library of the toy course, as the notebooks export it."""
    for name, text in LIBRARY.items():
        file = course / "course_lib" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        (file.parent / "__init__.py").touch()
        file.write_text(text)
    (course / "course_lib" / "__init__.py").touch()


def make_course(folder: Path) -> Path:
    """A course of two chapters, of which a learner has begun neither."""
    for name in ("notebooks", "workbook", "elsewhere"):
        (folder / name).mkdir(parents=True)
    shutil.copytree(ROOT / "scripts", folder / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    write_library(folder)
    (folder / FIRST).write_text(base())
    (folder / TOY).write_text(toy())
    (folder / LEARNERS).write_text(toy(BLANK))
    return folder


def snapshot(folder: Path) -> dict:
    """Every path below `folder` with its time of change and content."""
    return {
        path: (path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in [folder, *folder.rglob("*")]
    }


# --- without ranks: the launcher inside this process


@contextlib.contextmanager
def loaded_launcher(course: Path):
    """The launcher of a course, imported here: `module`, and the course's folder, `course`."""
    ours = {file.stem for file in (course / "scripts").glob("*.py")} | {"launcher"}

    def loaded():
        return {name: module for name, module in sys.modules.items() if name.split(".")[0] in ours}

    before, path, bytecode = loaded(), sys.path[:], sys.dont_write_bytecode
    for name in before:
        del sys.modules[name]
    sys.path.insert(0, str(course / "scripts"))
    sys.dont_write_bytecode = False
    import launch_nb_torchrun

    yield SimpleNamespace(module=launch_nb_torchrun, course=course)
    for name in loaded():
        del sys.modules[name]
    sys.modules.update(before)
    sys.path[:], sys.dont_write_bytecode = path, bytecode


@pytest.fixture(scope="module")
def launcher(tmp_path_factory):
    """The launcher of a toy course."""
    with loaded_launcher(make_course(tmp_path_factory.mktemp("course"))) as loaded:
        yield loaded


@pytest.fixture
def course(launcher, monkeypatch):
    """The toy course as the current folder, as new."""
    monkeypatch.chdir(launcher.course)
    yield launcher.course
    (launcher.course / TOY).write_text(toy())
    (launcher.course / LEARNERS).write_text(toy(BLANK))
    write_library(launcher.course)
    for name in ("workbook/.progress", "workbook/course_lib", "runs"):
        shutil.rmtree(launcher.course / name, ignore_errors=True)


@pytest.fixture
def launch(launcher, course, capsys):
    """Run the launcher with these arguments; gives its status and what it wrote to stdout and stderr."""

    def run(*arguments):
        with mock.patch.dict(os.environ):
            status = launcher.module.main(list(arguments))
        return status, *capsys.readouterr()

    return run


OTHER = EXERCISE.replace("2 * x", "x + x")  # than the library's
SYNTAX = toy(faults="#| export toy.program\ndef fail(rank):\n    return (\n")
OUTSIDE = "elsewhere/07_toy.ipynb"

BAD_NOTEBOOKS = {
    "not JSON": ("# a text", "is not a notebook"),
    "JSON of another kind": ("[1, 2]", "is not a notebook"),
    "cells of another kind": ('{"cells": [1]}', "is not a notebook"),
    "cut short": (toy()[:-40], "cut short"),
    "no program": (toy(program=None), "its metadata must name the module to start"),
    "no such module": (toy(program="toy.none"), "its module 'toy.none' has no function main"),
    "no main": (toy(program="base.words"), "its module 'base.words' has no function main"),
    "syntax error": (SYNTAX, "cell faults, line 3: syntax error: '(' was never closed"),
    "processes in words": (toy(processes="two"), "'two'"),
    "no processes": (toy(processes=0), "0 processes: at least one"),
}


@pytest.mark.parametrize("case", BAD_NOTEBOOKS)
def test_a_bad_notebook_gets_one_line_and_changes_nothing(case, launch, course):
    text, expected = BAD_NOTEBOOKS[case]
    (course / TOY).write_text(text)
    before = snapshot(course)
    status, out, err = launch(TOY)
    assert status == 2 and out == "" and err.count("\n") == 1 and err.startswith("launch: ")
    assert expected in err and (TOY in err or "processes" in case)
    assert snapshot(course) == before


BAD_OPTIONS = [
    ("notebooks/08_none.ipynb", "notebooks/08_none.ipynb: no such file"),
    ("notebooks", "notebooks is a folder"),
    (OUTSIDE, "neither in notebooks nor in workbook"),
    ("", "which notebook?"),
    ("--nnodes 2", "which notebook?"),
    (f"{TOY} {TOY}", "one notebook at a time"),
    (f"{TOY} --nproc-per-node 0", "0 processes: at least one"),
    (f"{TOY} --nproc-per-node -1", "-1 processes: at least one"),
    (f"{TOY} --nproc_per_node=abc", "--nproc-per-node abc: not a number"),
    (f"{TOY} --bogus", "torchrun: unrecognized arguments: --bogus"),
    (f"--bogus 3 {TOY}", "torchrun: unrecognized arguments: --bogus"),
    (f"{TOY} --nnodes", "torchrun: argument --nnodes: expected one argument"),
    (f"{TOY} --nnodes x", "--nnodes x is neither"),
    (f"{TOY} --nnodes 2", "--nnodes 2 needs --rdzv-endpoint"),
    (f"{TOY} --max-restarts -1", "torchrun: max_restarts must be >= 0"),
    (f"{TOY} --redirects 9", "torchrun: 9 does not match"),
    (f"{TOY} --rdzv-endpoint localhost:99999", "torchrun: The port number"),
    (f"{TOY} --log-dir {TOY}", "is a file"),
    (f"{TOY} --no-python", "--no-python says what torchrun runs"),
    (f"{TOY} --reference 06", "--reference is for a notebook of workbook/"),
    (f"{LEARNERS} --reference 13", "--reference 13: no such chapter"),
    (f"{TOY} --slurm nodes=2", "gpus is missing"),
    (f"{TOY} --slurm nodes=2,gpus=0", "gpus is a number of 1 or more, not '0'"),
    (f"{TOY} --slurm nodes=two,gpus=8", "nodes is a number of 1 or more, not 'two'"),
    (f"{TOY} --slurm nodes=2,gpus=8,cpus=0", "cpus is a number of 1 or more, not '0'"),
    (f"{TOY} --slurm nodes=2,gpus=8,time=soon", "'soon' is no time"),
    (f"{TOY} --slurm nodes=2,gpus=8,partition=x", "'partition' is none of its keys"),
    (f"{TOY} --slurm nodes=2,gpus=8 --nnodes 2", "--slurm sets --nnodes itself"),
    (f"{TOY} -- --bogus", f"{TOY}: unrecognized arguments: --bogus"),
    (f"{TOY} -- --steps x", f"{TOY}: argument --steps: invalid int value: 'x'"),
    (f"{TOY} --slurm nodes=2,gpus=8 -- --bogus", f"{TOY}: unrecognized arguments: --bogus"),
]


@pytest.mark.parametrize("line, expected", BAD_OPTIONS)
def test_a_bad_option_gets_one_line_and_changes_nothing(line, expected, launch, course):
    (course / OUTSIDE).write_text(toy())
    before = snapshot(course)
    status, out, err = launch(*shlex.split(line))
    assert status == 2 and out == "" and err.count("\n") == 1 and expected in err
    assert snapshot(course) == before


def test_an_unwritable_folder_gets_one_line_and_changes_nothing(launch, launcher, course, monkeypatch):
    passed(course / LEARNERS, toy())
    (course / "workbook" / "course_lib").write_text("a file")
    before = snapshot(course)
    status, _, err = launch(LEARNERS)
    assert (status, err) == (2, "launch: cannot export: workbook/course_lib is not a folder\n")
    assert snapshot(course) == before
    (course / "workbook" / "course_lib").unlink()

    (course / TOY).write_text(toy(OTHER))
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    before = snapshot(course)
    status, _, err = launch(TOY)
    assert (status, err) == (2, "launch: cannot export: course_lib is not writable\n")
    assert snapshot(course) == before


def test_a_cell_that_fails_on_import_is_named_and_nothing_is_written(launch, course):
    wrong = FAULTS.replace("def wait():", "def wait(limit=1 // 0):")
    (course / TOY).write_text(toy(faults=wrong))
    before = snapshot(course)
    status, _, err = launch(TOY)
    line = wrong.split("\n").index("def wait(limit=1 // 0):") + 1
    assert status == 1 and "ZeroDivisionError" in err
    assert f"{TOY}, cell 5 (faults), line {line}: def wait(limit=1 // 0):" in err
    assert snapshot(course) == before


def test_an_earlier_notebook_that_cannot_be_read_is_named(launch, course):
    """And may be left out; later ones do not matter."""
    (course / "workbook" / "08_later.ipynb").write_text("{")
    (course / "workbook" / "06_base.ipynb").write_text("{")
    before = snapshot(course)
    status, _, err = launch(LEARNERS, "--dry-run")
    assert status == 2 and err.count("\n") == 1 and "06_base.ipynb is not a notebook" in err
    assert err.endswith("(--reference 06 leaves this chapter out)\n")
    assert launch(LEARNERS, "--reference", "06", "--dry-run")[0] == 0
    assert snapshot(course) == before
    for name in ("06_base", "08_later"):
        (course / "workbook" / f"{name}.ipynb").unlink()


def test_a_chapters_second_part_starts_the_program_of_the_first(launch, course, tmp_path):
    """The learner's answers of both parts go with it, --reference 06 leaves both out, and 06b the second."""
    more = notebook(cell("ex-06-2", BASE.replace("def scale", "def more")), program="base.scales")
    library = course / "course_lib" / "base" / "scales.py"
    library.write_text(LIBRARY["base/scales"] + "\n\ndef more():\n    return 2\n")
    (course / "notebooks" / "06b_more.ipynb").write_text(more)
    mine = {"06_base": base(BASE.replace("1", "10")), "06b_more": more.replace("return 1", "return 20")}
    for name, text in mine.items():
        passed(course / "workbook" / f"{name}.ipynb", text)

    def launched(*arguments):
        with mock.patch.dict(os.environ, {"PATH": str(tmp_path)}):  # without Slurm, nothing but the export happens
            return launch(*arguments, "--slurm", "nodes=1,gpus=1")[2]

    def answers():
        return (course / "workbook" / "course_lib" / "base" / "scales.py").read_text().count("(yours)")

    assert "rank_entry.py base.scales\n" in launch("notebooks/06b_more.ipynb", "--dry-run")[1]
    assert "your own answers come from 06.1 and 06.2;" in launched("workbook/06b_more.ipynb") and answers() == 2
    assert "your own answers come from 06.1;" in launched(LEARNERS, "--reference", "06b") and answers() == 1
    assert "your own answers come from no notebook yet;" in launched(LEARNERS, "--reference", "06")
    out = launch(LEARNERS, "--reference", "06", "--dry-run")[1]
    assert "--reference-modules base.scales toy.program\n" in out, "the copy that an earlier launch has left"
    for file in ("notebooks/06b_more.ipynb", "workbook/06b_more.ipynb", "workbook/06_base.ipynb"):
        (course / file).unlink()


def test_the_programs_help(launch, course):
    before = snapshot(course)
    status, out, err = launch(TOY, "--", "--help")
    assert status == 0 and err == "" and "--steps" in out and "usage: 07_toy.ipynb --" in out
    assert snapshot(course) == before


def test_the_dry_run_gives_torchruns_options_as_they_are(launch, course):
    before = snapshot(course)
    more = "--max-restarts 3 --nnodes=1:1 --log-dir logs -r 3 --local-ranks-filter 0"
    status, out, err = launch("--max-restarts", "3", TOY, *more.split()[2:], "--dry-run", "--", "--steps", "2")
    assert status == 0 and err == "" and out.count("\n") == 1
    assert f" -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node 2 {more} " in out
    assert out.endswith("rank_entry.py toy.program --steps 2\n")
    assert snapshot(course) == before


def test_the_default_rendezvous(launch):
    def added(*options):
        status, out, err = launch(TOY, *options, "--dry-run")
        assert status == 0, err
        return out.split("torch.distributed.run ")[1].split("--nproc-per-node")[0].strip()

    assert added() == "--standalone --local-addr 127.0.0.1"
    assert added("--nnodes", "2", "--rdzv-endpoint", "node1:29400") == "--rdzv-backend c10d"
    assert added("--nnodes", "2", "--master-addr", "node1", "--node-rank", "1") == ""


def test_where_nodes_may_come_the_store_is_not_shared(launch):
    """With torchrun's shared store a node that joins later waits in vain; see test_survival.py for one that joins."""
    several = ("--nnodes", "1:2", "--rdzv-endpoint", "node1:29400", "--dry-run")
    switch = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    assert f" {switch}=1 " in f" {launch(TOY, *several)[1]}"
    with mock.patch.dict(os.environ, {switch: "0"}):  # the user's own word
        assert f" {switch}=0 " in f" {launch(TOY, *several)[1]}"
    assert switch not in launch(TOY, "--nnodes", "2:2", *several[2:])[1]


def test_processes():
    from launcher.program import LaunchError
    from launcher.torchrun import process_count

    assert process_count("auto", from_notebook=1, gpus=8) == 1
    assert process_count("auto", from_notebook=None, gpus=8) == 8
    assert process_count("auto", from_notebook=None, gpus=0) == 2
    assert process_count("4", from_notebook=1, gpus=0) == 4
    with pytest.raises(LaunchError, match="4 processes, but 2 GPUs"):
        process_count("4", from_notebook=None, gpus=2)
    with pytest.raises(LaunchError, match="4 processes, but 2 GPUs"):
        process_count("auto", from_notebook=4, gpus=2)


def test_a_port_that_another_program_holds(launch, course, monkeypatch):
    from torch.distributed import TCPStore

    before = snapshot(course)
    silent = socket.create_server(("", 0))
    port = silent.getsockname()[1]
    for options in (f"--rdzv-endpoint localhost:{port}", f"--master-port {port}"):
        status, out, err = launch(TOY, *options.split(), "--dry-run")
        assert status == 2 and out == "" and err.count("\n") == 1 and f"port {port}" in err, options
    # Another node keeps the rendezvous: nothing to look at here.
    assert launch(TOY, "--nnodes", "2", "--rdzv-endpoint", f"192.0.2.1:{port}", "--dry-run")[0] == 0
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    store.set("torch.rendezvous.another", "job")
    for patience_s, port in ((20, store.port), (1, silent.getsockname()[1])):
        monkeypatch.setattr("launcher.port.HANDSHAKE_S", patience_s)
        status, out, err = launch(TOY, "--nnodes", "2", "--rdzv-endpoint", f"localhost:{port}", "--dry-run")
        assert status == 2 and err.count("\n") == 1 and "another program holds it" in err
    silent.close()
    assert snapshot(course) == before


def test_a_port_that_another_launcher_looks_at_is_free(launcher, monkeypatch):
    """srun starts the launchers of several nodes at once, and here they are on one machine."""
    from launcher.port import held

    other = socket.create_server(("", 0))
    monkeypatch.setattr("launcher.port.LOOK_S", 0.0)
    assert held(other.getsockname()[1]) == "another program holds it"
    monkeypatch.setattr("launcher.port.time", SimpleNamespace(sleep=lambda seconds: seconds and other.close()))
    monkeypatch.setattr("launcher.port.LOOK_S", 1.0)
    assert held(other.getsockname()[1]) is None


def test_the_learners_modules_replace_the_references(course):
    """A copy of a module does, as long as the module is what it was made from; --reference leaves it out."""
    from launcher.copies import headed

    own = course / "workbook" / "course_lib"
    (own / "base").mkdir(parents=True)
    original = LIBRARY["base/scales"]
    copy = headed(original.replace("return 1", "return 100"), "base.scales", original)
    code = (
        "import sys; from rank_entry import open_library; from pathlib import Path; "
        "open_library(Path(sys.argv[1]), sys.argv[2:]); from course_lib.base import scales; print(scales.scale())"
    )
    stale = copy.replace("return 100", "return 200").replace(copy[:60], headed("", "base.scales", "")[:60])
    for text, reference, found in ((copy, [], "100\n"), (copy, ["base.scales"], "1\n"), (stale, [], "1\n")):
        (own / "base" / "scales.py").write_text(text)
        command = [sys.executable, "-c", code, str(own), *reference]
        assert subprocess.run(command, capture_output=True, text=True, cwd=course / "scripts").stdout == found


def test_slurm(launch, course, tmp_path):
    """The script's own srun line is run, with a scontrol that names two nodes; what it starts is a launch of both."""
    more = ("--max-restarts", "1", "--", "--steps", "5")
    (course / TOY).write_text(toy(OTHER))
    with mock.patch.dict(os.environ, {"PATH": str(tmp_path)}):  # this machine may have Slurm
        status, out, err = launch(TOY, "--slurm", "nodes=2,gpus=4,cpus=6,time=1:30:00", *more)
    script = (course / "runs" / "slurm" / "07_toy.sbatch").read_text()
    assert status == 0 and err == "" and "no sbatch" in out
    wanted = ("--nodes=2", "--gpus-per-node=4", "--ntasks-per-node=1", "--time=1:30:00", "--job-name=07_toy")
    wanted += ("--cpus-per-task=24", "--requeue", "--open-mode=append")  # the last two: there is --max-restarts
    assert all(f"#SBATCH {option}\n" in script for option in wanted)
    exported = (course / "course_lib" / "toy" / "program.py").read_text()
    assert "return x + x" in exported, "what the job runs is exported when it is submitted"

    commands = {
        "scontrol": 'test "$*" = "show hostnames node[1-2]" && printf "node1\\nnode2\\n"',
        "srun": f'printf "%s\\n" "$@" > {tmp_path}/started',
        "sbatch": 'echo "Submitted $@"; bash "$1"',
    }
    for name, text in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    job = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "123456", "SLURM_JOB_NODELIST": "node[1-2]"}
    with mock.patch.dict(os.environ, job):
        assert launch(TOY, "--slurm", "nodes=2,gpus=4", *more)[0] == 0
    started = (tmp_path / "started").read_text().splitlines()
    assert started[:5] == [
        "--cpus-per-task=32",  # 8 a GPU, where the user does not say
        "--kill-on-bad-exit=1",
        sys.executable,
        str(course / "scripts" / "launch_nb_torchrun.py"),
        str(course / TOY),
    ]
    status, out, err = launch("--dry-run", *started[4:])  # as on a node
    assert status == 0, err
    torchrun = "--nproc-per-node 4 --nnodes 2 --rdzv-backend c10d --rdzv-endpoint node1:23456 --rdzv-id 123456"
    assert f"torch.distributed.run {torchrun} --max-restarts 1 " in out and out.endswith("toy.program --steps 5\n")
    assert "requeue" not in launch(TOY, "--slurm", "nodes=2,gpus=4", "--dry-run")[1]


# What Slurm 22.05's sbatch says.
NOT_SET_UP = """\
sbatch: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host
sbatch: error: fetch_config: DNS SRV lookup failed
sbatch: error: _establish_config_source: failed to fetch config
sbatch: fatal: Could not establish a configuration source
"""
NO_FILE = """\
sbatch: error: s_p_parse_file: cannot stat file /etc/slurm/none: No such file or directory, retrying in 1sec up to 60sec
sbatch: error: ClusterName needs to be specified
sbatch: fatal: Unable to process configuration file
"""
NO_ANSWER = "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)\n"
REFUSED = """\
sbatch: error: CPU count per node can not be satisfied
sbatch: error: Batch job submission failed: Requested node configuration is not available
"""
FILE = "runs/slurm/07_toy.sbatch"
ELSEWHERE = f"{FILE} is written; this machine's sbatch is not set up: submit it where it is, by 'sbatch {FILE}'\n"


@pytest.mark.parametrize(
    "said, status, out, err",
    [
        (NOT_SET_UP, 0, ELSEWHERE, ""),
        (NO_FILE, 0, ELSEWHERE, ""),
        (NO_ANSWER, 2, "", f"launch: {FILE} is written, and not submitted: Slurm's controller does not answer\n"),
        (REFUSED, 1, f"{FILE} is written\n", REFUSED),
    ],
    ids=["not set up", "no file", "no controller", "refused"],
)
def test_sbatch_that_submits_nothing(said, status, out, err, launch, course, tmp_path):
    """One line where no Slurm is behind it, and no other files than without it; its own words where it refuses."""
    with mock.patch.dict(os.environ, {"PATH": str(tmp_path)}):
        launch(TOY, "--slurm", "nodes=2,gpus=4")
        without = {path: content for path, (_, content) in snapshot(course).items()}
        shutil.rmtree(course / "runs")
        (tmp_path / "said").write_text(said)
        (tmp_path / "sbatch").write_text(f'#!/bin/bash\necho "$(<{tmp_path}/said)" >&2; exit 1\n')
        (tmp_path / "sbatch").chmod(0o755)
        assert launch(TOY, "--slurm", "nodes=2,gpus=4") == (status, out, err)
    assert {path: content for path, (_, content) in snapshot(course).items()} == without


@pytest.mark.skipif(not shutil.which("sbatch"), reason="no sbatch here")
def test_a_real_sbatch_that_is_not_set_up(launch, course, tmp_path):
    (tmp_path / "slurm.conf").write_text("")
    with mock.patch.dict(os.environ, {"SLURM_CONF": str(tmp_path / "slurm.conf")}):
        assert launch(TOY, "--slurm", "nodes=2,gpus=4") == (0, ELSEWHERE, "")


def test_each_round_has_a_store_of_its_own(launcher):
    """Rank 1 asks before rank 0 is there; a rank of the round before has died while it asked."""
    from torch.distributed import TCPStore

    from launcher.round_store import round_store

    server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    found = []

    def rank(number):
        store = round_store("localhost", server.port, number, world_size=2)
        if number == 0:
            time.sleep(0.2)
            store.set("address", str(len(found)))
        found.append(store.get("address").decode())

    for _turn in range(3):
        server.add("questions", 1)
        ranks = [threading.Thread(target=rank, args=(number,)) for number in (1, 0)]
        for thread in ranks:
            thread.start()
            time.sleep(0.1)
        for thread in ranks:
            thread.join(timeout=PATIENCE_S)
    assert sorted(found) == ["0", "0", "2", "2", "4", "4"]


def test_which_failure_is_the_cause(course):
    from launcher.first_error import cause

    def report(rank, lost_peer=False):
        return {"rank": rank, "lost_peer": lost_peer, "headline": f"Error {rank}", "frames": []}

    killed, ended = (SimpleNamespace(pid=n, exitcode=code, local_rank=n) for n, code in ((1, -9), (2, -15)))
    lost, first, second = report(0, lost_peer=True), report(1), report(2)
    assert cause({}, [lost, first, second]) == "rank 1: Error 1"
    died = f"rank 3: process 1, local rank 1 on host {socket.gethostname()}, was killed by signal 9 (SIGKILL)"
    assert died in cause({0: ended, 3: killed}, [lost])
    assert cause({3: killed}, [first]) == "rank 1: Error 1", "torchrun kills a rank that will not go"
    elsewhere = {"rank": 4, "host": "node7", "headline": "Error 4"}
    assert "rank 4 on node node7 failed first: Error 4" in cause({}, [lost | {"first": elsewhere}])
    assert cause({}, [lost]) == "rank 0: Error 0 (it lost another rank)"


def test_a_message_for_the_user_has_no_stack(course):
    """As in Python, where SystemExit with a text prints that text alone."""
    from launcher.first_error import cause
    from launcher.reports import describe

    def reported(error):
        try:
            raise error
        except BaseException as caught:
            return cause({}, [describe(caught)])

    assert reported(SystemExit("a.jsonl: line 3")) == "rank 0: a.jsonl: line 3"
    assert "\n  inside" in reported(SystemExit(3)) and "\n  inside" in reported(ValueError("a"))


REFUSALS = """def refuse():
    raise ValueError("no such size")


def slip():
    return int("x")
"""


@pytest.mark.parametrize("name, place", [("refuse", None), ("slip", "line 6: return int")])
def test_what_the_library_refuses_is_told_in_one_line(course, name, place):
    """A slip of the library, which raises no ValueError of its own, is told with its place."""
    from launcher.first_error import describe_report
    from launcher.reports import describe

    file, found = course / "course_lib" / "base" / "words.py", {}
    file.write_text(REFUSALS)
    exec(compile(REFUSALS, str(file), "exec"), found)
    with pytest.raises(ValueError) as raised:
        found[name]()
    first, *more = describe_report(describe(raised.value)).splitlines()
    assert first.startswith("rank 0: ValueError: ")
    assert (len(more) == 1 and place in more[0]) if place else not more, more


# --- with ranks: launches in processes of their own


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """A toy course whose launches run in processes of their own; at the end none of its processes may be left."""
    course = make_course(tmp_path_factory.mktemp("running"))
    for name in ("tmp", "output"):
        (course / name).mkdir()
    yield course
    left = processes_of(course)
    ended = all_gone(left)  # multiprocessing's own end a moment after their launcher
    for process in left:
        process.kill()
    assert ended


def processes_of(course: Path) -> list[psutil.Process]:
    """The processes that carry the course's folder in their command line, or have it for their temporary files."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = [*process.cmdline(), process.environ().get("TMPDIR", "")]
            if process.pid != os.getpid() and any(str(course) in word for word in words):
                found.append(process)
    return found


class Launch:
    """A launch in a process and a session of its own, as from a terminal."""

    def __init__(self, course: Path, *arguments: str, bare: bool = False, **more: str):
        self.course = course
        dropped = "PYTHON", "OMP_", "TRITON_INTERPRET"
        environment = {name: value for name, value in os.environ.items() if not name.startswith(dropped)} | more
        environment["TMPDIR"] = str(course / "tmp")
        if bare:
            environment["PYTHONPATH"] = str(bare_node(course))
        command = [sys.executable, str(course / "scripts" / "launch_nb_torchrun.py"), *arguments]
        self.out, self.err = (course / "output" / f"{id(self)}.{name}" for name in ("out", "err"))
        with open(self.out, "w") as out, open(self.err, "w") as err:
            self.process = psutil.Popen(
                command, cwd=course, env=environment, stdout=out, stderr=err, start_new_session=True
            )

    def end(self) -> tuple[int, str, str]:
        """Wait for the end; status, stdout and stderr."""
        status = self.process.wait(timeout=PATIENCE_S)
        return status, self.out.read_text(), self.err.read_text()

    def waiting(self, ranks: int) -> list[psutil.Process]:
        """The ranks, and a child of each, once all of them wait."""
        deadline = time.monotonic() + PATIENCE_S
        while len(found := re.findall(r"waits (\d+) (\d+)\n", self.out.read_text())) < ranks:
            assert self.process.is_running() and time.monotonic() < deadline, self.err.read_text()
            time.sleep(0.1)
        return [psutil.Process(int(number)) for pair in found for number in pair]


def bare_node(course: Path) -> Path:
    """A folder that keeps Python from importing what a cluster node does not have."""
    folder = course / "bare"
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        "for name in 'nbformat nbgrader nbconvert IPython jupyter_core ipyparallel'.split():\n"
        "    sys.modules[name] = None\n"
    )
    return folder


def all_gone(processes: list[psutil.Process]) -> bool:
    """Whether all of them end in time; a zombie has ended."""
    deadline = time.monotonic() + PATIENCE_S
    while any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_it_exports_and_runs(running):
    file = running / "course_lib" / "toy" / "program.py"
    file.write_text(file.read_text().replace("return 2 * x", "return 3 * x"))
    status, out, err = Launch(running, TOY, "--", "--steps", "3").end()
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    lines = [f"rank {rank} of 2: 3 steps, total 6, {threads} threads, again False" for rank in (0, 1)]
    assert (status, sorted(out.splitlines()), err) == (0, lines, "")
    text = file.read_text()
    assert "# exercise 07.1\ndef double(x):\n    return 2 * x\n" in text and "SOLUTION" not in text
    assert not [path for path in (running / "tmp").iterdir() if "torchinductor" not in path.name]  # PyTorch's cache


def test_an_error_is_told_once_with_its_cell_also_on_a_bare_node(running):
    """Rank 0 loses its connection, and says so, a second and a half before rank 1 ends. With PYTHONSAFEPATH, Python
    leaves the folder of a script out of its path.
    """
    status, out, err = Launch(running, TOY, "--", "--fault", "raise", bare=True, PYTHONSAFEPATH="1").end()
    assert status == 1
    assert err == (
        "launch: rank 1: ValueError: planted on rank 1\n"
        f'  in {TOY}, cell 5 (faults), line 7: raise ValueError("planted on rank 1")\n'
        f"  called from {TOY}, cell 6 (main), line 18: fail(rank)\n"
    )
    assert not [path for path in (running / "tmp").iterdir() if "torchinductor" not in path.name]  # PyTorch's cache


def test_a_restart_meets_no_address_of_before(running):
    status, out, err = Launch(running, TOY, "--max-restarts", "1", "--", "--fault", "once").end()
    assert (status, err) == (0, "launch: rank 1: ValueError: planted on rank 1; restart 1 of 1\n")
    assert out.count("again False") == 2 and out.count("again True") == 2


def test_a_learners_notebook(running):
    """The learner's answers, those of the notebooks before it too, are spliced into copies beside the notebook; what is
    blank is the reference's, and is named.
    """
    before, earlier = snapshot(running / "course_lib"), running / "workbook" / "06_base.ipynb"
    passed(earlier, base(BASE.replace("return 1", "return 100")))
    status, out, err = Launch(running, LEARNERS, "--nproc-per-node", "1").end()
    assert status == 0 and "rank 0 of 1: 1 steps, total 200," in out
    blank = "launch: still blank, taken from the reference: 07.1\n"
    assert err == blank + "launch: your own answers come from 06.1; all else is the reference's\n"
    own = running / "workbook" / "course_lib"
    assert [file.relative_to(own).as_posix() for file in own.rglob("*.py")] == ["base/scales.py"]
    assert "# exercise 06.1 (yours)\ndef scale():\n" in (own / "base" / "scales.py").read_text()
    assert {path: found for path, found in snapshot(running / "course_lib").items() if path.suffix == ".py"} == {
        path: found for path, found in before.items() if path.suffix == ".py"
    }

    passed(running / LEARNERS, toy("#| export toy.program\ndef double(x):\n    return x / 0\n"))
    earlier.write_text("{")
    status, out, err = Launch(running, LEARNERS, "--nproc-per-node", "1", "--reference", "06").end()
    assert "launch: your own answers come from 07.1; all else is the reference's\n" in err
    assert status == 1 and "blank" not in err
    error = "rank 0: ZeroDivisionError: division by zero"
    assert f"{error}\n  in {LEARNERS}, cell 4 (ex-07-1), line 3: return x / 0\n" in err
    earlier.unlink()


CHOICE = "notebooks/08_choice.ipynb"
CHOICE_MAIN = """\
import os
import subprocess
from pathlib import Path

import torch
import triton
import triton.language as tl


@triton.jit
def total_kernel(x, out, N: tl.constexpr):
    tl.store(out, tl.sum(tl.load(x + tl.arange(0, N))))


def main(argv=None):
    out = torch.zeros(1)
    total_kernel[(1,)](torch.arange(8.0), out, 8)
    at_start = Path("/proc/self/environ").read_text().split("\\0")
    child = subprocess.run(["env"], capture_output=True, text=True).stdout.splitlines()
    print(out.item(), *([line for line in each if line.startswith("TRITON_INTERPRET")] for each in (at_start, child)))
"""


@pytest.fixture
def choosing(running):
    """The course with the library's own `course_lib/__init__.py`, and a program that runs a kernel."""
    if not pytest.importorskip("triton").knobs.runtime.interpret:
        pytest.skip("kernels run on the GPU")
    own, program = running / "course_lib" / "__init__.py", running / "course_lib" / "choice" / "program.py"
    own.write_text((ROOT / "course_lib" / "__init__.py").read_text())
    program.parent.mkdir()
    program.write_text(CHOICE_MAIN)
    (running / CHOICE).write_text(notebook(cell("setup", SETUP), program="choice.program"))
    yield running
    (running / CHOICE).unlink()
    own.write_text("")
    shutil.rmtree(program.parent)
    shutil.rmtree(running / "runs", ignore_errors=True)


@pytest.mark.parametrize("ranks", [1, 2], ids=["started by torchrun", "forked"])
def test_ranks_interpret_by_a_choice_of_their_own(ranks, choosing):
    """The fork server has imported Triton, without the interpreter, before a rank imports the library."""
    status, out, err = Launch(choosing, CHOICE, "--nproc-per-node", str(ranks)).end()
    assert (status, out.splitlines(), err) == (0, ["28.0 [] []"] * ranks, "")


def test_ranks_inherit_what_the_user_has_set(choosing):
    status, out, err = Launch(choosing, CHOICE, "--nproc-per-node", "2", TRITON_INTERPRET="1").end()
    assert (status, out.splitlines(), err) == (0, ["28.0 ['TRITON_INTERPRET=1'] ['TRITON_INTERPRET=1']"] * 2, "")


@pytest.mark.parametrize("value", [None, "1", "0"])
def test_a_job_inherits_no_choice_of_the_launcher(value, choosing, tmp_path):
    """The launcher imports the program on a login node without a GPU; sbatch hands its environment to the job."""
    (tmp_path / "sbatch").write_text(f"#!/bin/bash\nenv > {tmp_path}/inherited\n")
    (tmp_path / "sbatch").chmod(0o755)
    own = {"PATH": f"{tmp_path}:{os.environ['PATH']}"} | ({} if value is None else {"TRITON_INTERPRET": value})
    status, out, err = Launch(choosing, CHOICE, "--slurm", "nodes=1,gpus=1", **own).end()
    assert (status, err) == (0, "") and out.startswith("runs/slurm/08_choice.sbatch is written")
    inherited = (tmp_path / "inherited").read_text().splitlines()
    wanted = [] if value is None else [f"TRITON_INTERPRET={value}"]
    assert [line for line in inherited if line.startswith("TRITON_INTERPRET")] == wanted


def test_the_printed_command_can_be_pasted(running):
    status, printed, _ = Launch(running, TOY, "--nproc-per-node", "1", "--dry-run", "--", "--steps", "4").end()
    environment = os.environ | {"TMPDIR": str(running / "output")}  # torchrun leaves its folders there
    done = subprocess.run(
        ["bash", "-c", printed], cwd=running / "elsewhere", env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and "rank 0 of 1: 4 steps" in done.stdout


def test_signals(running):
    """Four launches side by side, each ended in another way, none of which touches the others. One runs under nohup:
    the end of its terminal does not end it.
    """
    wait = ("--", "--fault", "wait")
    killed_rank, interrupted, orphaned = (Launch(running, TOY, *wait) for _ in range(3))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # what nohup does: a child inherits it
    terminated = Launch(running, TOY, "--nproc-per-node", "1", *wait)
    signal.signal(signal.SIGHUP, before)
    ranks = {launch: launch.waiting(2) for launch in (killed_rank, interrupted, orphaned)}
    ranks[terminated] = terminated.waiting(1)
    for process in (terminated.process, *ranks[terminated]):
        process.send_signal(signal.SIGHUP)
    others = [process for launch in ranks if launch is not killed_rank for process in ranks[launch]]

    marks = [json.loads(mark.read_text())["process"] for mark in (running / "tmp").glob("launch-*/1.rank")]
    victim = next(found for found in ranks[killed_rank] if found.pid in marks)
    title = victim.cmdline()
    assert victim.name() == "rank 1" and title[0].startswith("rank 1 (local rank 1): toy.program --fault wait"), title
    victim.kill()
    status, _, err = killed_rank.end()
    assert status == 1
    died = f"process {victim.pid}, local rank 1 on host {socket.gethostname()}, was killed by signal 9 (SIGKILL)"
    assert err.startswith(f"launch: rank 1: {died}")
    assert err.count("\n") == 1
    assert all_gone(ranks[killed_rank]), "a killed rank's child too"
    assert all(process.is_running() for process in others)

    os.killpg(interrupted.process.pid, signal.SIGINT)  # as a terminal does
    status, _, err = interrupted.end()
    assert (status, err) == (130, "launch: stopped by Ctrl-C\n")
    assert all_gone(ranks[interrupted])

    terminated.process.terminate()
    status, _, err = terminated.end()
    assert (status, err) == (143, "launch: stopped by SIGTERM\n")
    assert all_gone(ranks[terminated])

    assert all(process.is_running() for process in ranks[orphaned])
    orphaned.process.kill()
    orphaned.end()
    assert all_gone(ranks[orphaned]), "without their launcher"
    time.sleep(0.2)
    assert not [path for path in (running / "tmp").iterdir() if "torchinductor" not in path.name]  # PyTorch's cache


SWALLOWS = """\
import sys, time
try:
    print("importing", file=sys.stderr)
    time.sleep(20)
except KeyboardInterrupt:
    pass
"""


def test_ctrl_c_before_the_ranks(running):
    """An import may swallow the exception that Ctrl-C usually raises, as PyTorch's does. Nothing is written by then."""
    (running / "notebooks" / "08_slow.ipynb").write_text(notebook(cell("setup", SETUP), program="slow.program"))
    (running / "course_lib" / "slow").mkdir()
    (running / "course_lib" / "slow" / "program.py").write_text(SWALLOWS + "\n\ndef main(argv=None):\n    pass\n")
    before = snapshot(running / "scripts"), snapshot(running / "course_lib")
    launch = Launch(running, "notebooks/08_slow.ipynb")
    while "importing" not in launch.err.read_text():
        assert launch.process.is_running()
        time.sleep(0.05)
    launch.process.send_signal(signal.SIGINT)
    assert launch.end() == (130, "", "importing\nlaunch: stopped by Ctrl-C\n")
    assert (snapshot(running / "scripts"), snapshot(running / "course_lib")) == before


def test_two_nodes(running, port):
    """Two launches meet at a port that one of them holds; the node of the failing rank tells where, the other who."""
    options = f"--nnodes 2 --nproc-per-node 1 --rdzv-endpoint localhost:{port} -- --fault raise".split()
    nodes = [Launch(running, TOY, *options)]
    deadline = time.monotonic() + PATIENCE_S
    while not any(found.laddr.port == port for found in nodes[0].process.net_connections()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    nodes.append(Launch(running, TOY, *options))
    ends = [node.end() for node in nodes]
    assert [status for status, _, _ in ends] == [1, 1]
    (there,) = [err for _, out, err in ends if "rank 1 of 2" in out]
    (here,) = [err for _, out, err in ends if "rank 0 of 2" in out]
    assert there.startswith(f"launch: rank 1: ValueError: planted on rank 1\n  in {TOY}, cell 5 (faults), line 7: ")
    assert here == (
        f"launch: rank 1 on node {socket.gethostname()} failed first: ValueError: planted on rank 1 "
        "(that node tells more)\n"
    )
