"""`launch_nb_torchrun.py train`: the library's training program instead of a notebook's. Ranks run on the CPU, gloo.

The toy course of test_launch.py, with a short training program: what is shown is how the launcher starts it.
"""

import shlex
from pathlib import Path

import pytest

from test_launch import Launch, course, launch, launcher, make_course, running, snapshot  # noqa: F401

PROGRAM = '''\
"""A short program with the interface of course_lib.train.program."""

import sys
from pathlib import Path

import torch.distributed as dist


def options(argv):
    if argv and argv[0] == "--help":
        print("usage: train")
        raise SystemExit(0)
    if argv and not Path(argv[0]).is_file():
        print(f"train: error: {argv[0]}: no such file", file=sys.stderr)
        raise SystemExit(2)
    return argv


def main(argv):
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {Path(options(argv)[0]).read_text()}")
'''


def write_program(folder: Path) -> None:
    """Write the training program of a course, and a file of its settings in another folder."""
    for file, text in (("course_lib/train/program.py", PROGRAM), ("elsewhere/run.toml", "steps = 2")):
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(text)


@pytest.fixture
def elsewhere(course, monkeypatch):  # noqa: F811
    """The folder beside the course's notebooks, as the current one."""
    write_program(course)
    monkeypatch.chdir(course / "elsewhere")
    return course


def test_train_starts_the_librarys_program_from_any_folder(launch, elsewhere):  # noqa: F811
    before = snapshot(elsewhere)
    status, out, err = launch("train", "--max-restarts", "1", "--dry-run", "--", "run.toml", "--steps", "2")
    assert (status, err) == (0, "")
    assert "--nproc-per-node 2 --max-restarts 1 " in out, "as a notebook whose metadata names no number"
    assert out.endswith("rank_entry.py train.program run.toml --steps 2\n") and "overlay" not in out
    assert launch("train", "--", "--help") == (0, "usage: train\n", "")
    assert snapshot(elsewhere) == before


@pytest.mark.parametrize(
    "line, expected",
    [
        ("train -- gone.toml", "launch: train: gone.toml: no such file\n"),
        ("trian -- run.toml", "launch: trian: no such file; did you mean train?\n"),
        ("train run.toml", "launch: one notebook at a time: 'run.toml' is too many (is a '--' missing?)\n"),
        ("train --unchecked", "--unchecked is for a notebook of workbook/: train has nothing but the reference\n"),
        ("train --reference 05", "--reference is for a notebook of workbook/: train has nothing but the reference\n"),
        ("train --nproc-per-node 0", "0 processes: at least one"),
    ],
)  # fmt: skip
def test_what_cannot_start_gets_one_line(line, expected, launch, elsewhere):  # noqa: F811
    before = snapshot(elsewhere)
    status, out, err = launch(*shlex.split(line))
    assert (status, out) == (2, "") and expected in err and err.count("\n") == 1
    assert snapshot(elsewhere) == before


def test_slurm_starts_train_on_each_node(launch, elsewhere):  # noqa: F811
    status, out, err = launch("train", "--slurm", "nodes=2,gpus=4", "--dry-run", "--", "run.toml")
    assert (status, err) == (0, "") and "#SBATCH --job-name=train\n" in out
    assert f"{elsewhere}/scripts/launch_nb_torchrun.py train --no-export " in out and out.endswith(" -- run.toml\n")


def test_it_trains_and_leaves_no_process(running):  # noqa: F811
    write_program(running)
    status, out, err = Launch(running, "train", "--nproc-per-node", "2", "--", "elsewhere/run.toml").end()
    assert (status, err) == (0, "")
    assert sorted(out.splitlines()) == [f"rank {rank} of 2: steps = 2" for rank in (0, 1)]
