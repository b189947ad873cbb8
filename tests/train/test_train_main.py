"""python -m course_lib.train, in one process and under torchrun: the group, the errors and the exit status. CPU, gloo.

The program is a short one that the test writes: what is shown here is how it is started and how it ends.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
START = """\
import runpy
import sys
import time
import types

import torch
import torch.distributed as dist

from course_lib.train.settings import SettingsError, read_settings

program = types.ModuleType("course_lib.train.program")
sys.modules["course_lib.train.program"] = program


def options(argv):
    try:
        return read_settings(argv)
    except SettingsError as error:
        print(f"train: error: {error}", file=sys.stderr)
        raise SystemExit(2)


def main(argv):
    seed, rank = options(argv).run.seed, dist.get_rank()
    total = torch.tensor(rank + 1)
    dist.all_reduce(total)
    if seed == 1:
        raise ValueError("the text\\nhas no documents")
    if seed == 2 and rank == dist.get_world_size() - 1:
        raise ValueError("the last rank has no text")
    if seed == 3:
        raise RuntimeError("planted")
    if seed == 6:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory:\\n9 bytes")
    if seed == 5:
        print("waits", flush=True)
        time.sleep(100)
    if seed == 4:
        sys.exit("a.jsonl: line 3")
    if rank == 0:
        print(f"rank {rank} of {dist.get_world_size()}: total {total.item()}")


program.options, program.main = options, main
import course_lib.train

course_lib.train.program = program
runpy.run_module("course_lib.train", run_name="__main__", alter_sys=True)
"""


@pytest.fixture
def start(tmp_path):
    """Start the module with these options, on a number of ranks; gives the status, stdout and stderr."""
    (tmp_path / "start.py").write_text(START)

    def run(*options: str, ranks: int = 0):
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
        command = [sys.executable, *torchrun, str(tmp_path / "start.py"), *options]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
        return done.returncode, done.stdout, done.stderr

    return run


def test_one_process_needs_no_torchrun(start):
    assert start("--steps", "2") == (0, "rank 0 of 1: total 1\n", "")


@pytest.mark.parametrize(
    "options, status, told",
    [
        (["--steps", "0"], 2, "train: error: --steps is 0; it must be 1 or more\n"),
        (["--stepz", "3"], 2, "train: error: there is no option --stepz; did you mean --steps?\n"),
        (["--seed", "1"], 1, "train: error: the text has no documents\n"),
        (["--seed", "4"], 1, "train: error: a.jsonl: line 3\n"),
        (
            ["--seed", "6"],
            1,
            "train: error: DefaultCPUAllocator: can't allocate memory: 9 bytes; a smaller mb or seq, recompute full, "
            "or attention flash needs less\n",
        ),
    ],
)
def test_what_cannot_be_used_is_told_in_one_line(start, options, status, told):
    assert start(*options) == (status, "", told)


def test_any_other_error_has_its_traceback(start):
    status, out, err = start("--seed", "3")
    assert (status, out) == (1, "") and err.startswith("Traceback") and err.endswith("RuntimeError: planted\n")


@pytest.mark.parametrize("option", ["--help", "--print-config"])
def test_help_and_settings_are_printed_without_a_group(start, option):
    status, out, err = start(option)
    assert (status, err) == (0, "") and ("--peak-tflops" in out or "peak_tflops =" in out)


def test_two_ranks_under_torchrun(start):
    status, out, err = start(ranks=2)
    assert (status, out) == (0, "rank 0 of 2: total 3\n"), err
    status, _, err = start("--seed", "2", ranks=2)
    assert status == 1 and err.count("train: error: the last rank has no text\n") == 1
    status, _, err = start("--steps", "0", ranks=2)
    assert status == 1 and err.count("train: error: --steps is 0; it must be 1 or more\n") == 1


@pytest.mark.parametrize("importing", [True, False])
def test_ctrl_c_ends_the_program_without_a_traceback(tmp_path, importing):
    (tmp_path / "start.py").write_text(START)
    program = ["-m", "course_lib.train", "--print-config"] if importing else [str(tmp_path / "start.py"), "--seed", "5"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, *program], cwd=ROOT, **pipes) as process:
        if importing:
            time.sleep(0.7)
        else:
            assert process.stdout.readline() == "waits\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert "Traceback" not in err
    assert importing or (process.returncode, err) == (130, "train: stopped by Ctrl-C\n")


def test_an_error_of_one_machine_alone_is_told(tmp_path):
    """Rank 1 waits for rank 0 to tell its error, and tells its own if rank 0 has none."""
    code = "from course_lib.train import __main__ as program; program.GRACE_S = 0.1; program.main(['--stepz', '3'])"
    environment = os.environ | {"RANK": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "train: error: there is no option --stepz; did you mean --steps?\n"
