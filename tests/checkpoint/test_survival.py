"""Jobs of course_lib.train that are killed go on: a rank, a whole job while it saves, a node without
warning.

Also options that can't be, checkpoints of other runs, and a run that is resumed in another layout. CPU, gloo.
"""

import contextlib
import io
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch

from calls import said, short_text
from course_lib.checkpoint.checkpoints import latest
from course_lib.checkpoint.files import complete, damaged, describe
from course_lib.checkpoint.saved_run import Log, SavedRun, log_file, readable
from course_lib.five_d.layouts import Layout
from course_lib.five_d.meshes import build_mesh
from course_lib.five_d.model import parallelize
from course_lib.single_gpu import training as single_gpu
from course_lib.single_gpu.data import TokenBatches
from course_lib.train.program import main, options

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 600  # a deadline for what hangs; beside three others, all of a launch took three minutes
RENDEZVOUS = "last_call_timeout=1,keep_alive_interval=2,keep_alive_max_attempt=5"  # a busy launcher is not a lost one
SMALL = "--preset debug --seq 32 --batch 8 --log-every 1".split()


def records(out: Path) -> list[dict]:
    """What a run has written so far."""
    lines = out.read_text().split("\n")[:-1] if out.exists() else []  # without one that is not written whole
    return [json.loads(line) for line in lines]


def losses(found: list[dict]) -> dict[int, float]:
    """By step; of a step that was done twice, the second."""
    return {record["step"]: record["loss"] for record in found}


def wait_for(found: Callable[[], object], what: str, within_s: float = PATIENCE_S) -> object:
    """What `found` gives, as soon as that is something."""
    deadline = time.monotonic() + within_s
    while not (value := found()):
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
    return value


def trained(argv: list[str]) -> tuple[list[dict], str]:
    """On a rank: the records and what is printed of a run; with a --cache, of the text that launches have."""
    text = contextlib.nullcontext() if "--cache" in argv else short_text()
    with contextlib.redirect_stdout(io.StringIO()) as out, text:
        found = main(argv)
    return found, out.getvalue()


# --- what takes no pool of ranks comes first: a test without one closes the pools


def test_a_job_killed_while_it_saves_leaves_a_complete_checkpoint(tmp_path):
    """At each kind of file operation of a save, of the coordinator and of another rank; see killed_saves.py."""
    command = [sys.executable, str(ROOT / "tests" / "checkpoint" / "killed_saves.py"), str(tmp_path)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    coordinator, other = found["operations"]
    assert {
        "os.mkdir step-N.saving",
        "open step-N.saving/__0_0.distcp w",
        "os.rename step-N.saving/.metadata.tmp step-N.saving/.metadata",
        "open step-N.saving/__0_0.distcp r",
        "open step-N.saving/checkpoint.json w",
        "os.rename step-N.saving step-N",
        "os.rename step-N step-N.deleting",
        "os.rmdir step-N.deleting",
    } < set(coordinator), coordinator
    assert {"open step-N.saving/__1_0.distcp w", "open step-N.saving/__1_0.distcp r"} < set(other), other
    assert len(found["trials"]) > 25
    for each in found["trials"]:
        assert each["status"] == -signal.SIGKILL and each["went on"] and each["damaged"] is None, each
        assert each["before"] <= each["after"], each
        if each["moment"] == "os.rename step-N.saving step-N":
            assert each["before"] == each["after"] and each["left"].count("step-N.saving") == 1, each
        if each["moment"] == "os.rename step-N step-N.deleting":
            assert each["before"] < each["after"] and set(each["left"]) == {"step-N", "run.toml"}, each
    assert found["last"]["status"] == 0 and "failed" not in found["last"]["text"], found["last"]
    assert {each.name for each in (tmp_path / "checkpoints").iterdir()} == {"step-000000050", "run.toml"}
    alone, log = records(tmp_path / "alone.jsonl"), records(tmp_path / "log.jsonl")
    expected, steps = losses(alone), [record["step"] for record in log]
    assert steps == [*range(1, 51)], "no step is there twice, however often the job was killed"
    assert [record["loss"] for record in log] == [expected[step] for step in steps]


def snapshot(folder: Path) -> dict:
    """Every path below `folder`; of files, the time of change and the content. A folder's time changes with a lock."""
    found = [folder, *folder.rglob("*")]
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) if path.is_file() else None for path in found}


def checkpoints_in(folder: Path) -> dict:
    """As `snapshot`, without the settings of the last run that continued."""
    return {path: found for path, found in snapshot(folder).items() if path != folder / "run.toml"}


@pytest.mark.parametrize(
    "line, expected",
    [
        ("--save-every 0", "--save-every is 0; it must be 1 or more"),
        ("--bad-steps 0", "--bad-steps is 0; it must be 1 or more"),
        ("--keep 0", "--keep is 0; it must be 1 or more"),
        ("--drop-tokens 1", "--drop-tokens is 1.0; it must be below 1"),
        ("--drop-tokens -0.1", "--drop-tokens is -0.1; it must be 0 or more"),
        ("--from-hf empty", "config.json"),
        ("--from-hf missing", "missing"),
    ],
)
def test_an_option_that_cannot_be_gets_one_line(line, expected, tmp_path, monkeypatch, capsys):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    before = snapshot(tmp_path)
    with pytest.raises(SystemExit) as ended:
        options(line.split())
    out, err = capsys.readouterr()
    assert ended.value.code == 2 and out == "" and err.startswith("train: error: ")
    assert expected in err and err.count("\n") == 1
    assert snapshot(tmp_path) == before


def line(step: int, run: str = "a") -> str:
    """A line of a log."""
    return json.dumps({"step": step, "loss": math.nan, "run": run}) + "\n"


LOGS = {  # what is there when a run continues after step 3: what stays, and what is said
    "all of it": (line(1) + line(2) + line(3), [1, 2, 3], ""),
    "half a line": (line(1) + line(2) + line(3)[:9], [1, 2], ""),
    "steps after the checkpoint": (line(1) + line(2) + line(3) + line(4) + line(5)[:-1], [1, 2, 3], ""),
    "a longer run of another layout": ("".join(line(step, "b") for step in range(1, 9)), [1, 2, 3], ""),
    "steps twice": (line(1) + line(2, "b") + line(3, "b") + line(4) + line(2) + line(3) + line(4), [1, 2, 3], ""),
    "a disk's zeros": (
        line(1) + "\0\0\0\n" + line(2) + '{"step": "x"}\n[3]\n' + line(3),
        [1, 2, 3],
        "removed 3 lines that are not records",
    ),
    "nothing": ("", [], ""),
    "no file": (None, [], ""),
}


@pytest.mark.parametrize("name", LOGS)
def test_no_step_is_twice_in_the_log_of_a_run_that_continues(name, tmp_path, capsys):
    text, expected, said = LOGS[name]
    file = tmp_path / "log.jsonl"
    if text is not None:
        file.write_text(text)
    log = Log(log_file(str(file)), 3)
    log.add({"step": 4})
    found = records(file)
    assert [record["step"] for record in found] == [*expected, 4] and [*tmp_path.iterdir()] == [file]
    if name == "steps twice":
        assert [record["run"] for record in found[:-1]] == ["a"] * 3, "the last line of a step counts"
    printed = capsys.readouterr().out
    assert (said in printed and printed.count("\n") == 1) if said else not printed


def test_a_log_that_is_a_link_is_rewritten_where_it_leads(tmp_path):
    (tmp_path / "here").mkdir()
    (target := tmp_path / "log.jsonl").write_text(line(1) + line(2))
    (link := tmp_path / "here" / "log.jsonl").symlink_to(target)
    with mock.patch.object(Path, "replace", autospec=True, side_effect=Path.replace) as replace:
        Log(log_file(str(link)), 1).add({"step": 2})
    assert link.is_symlink() and [record["step"] for record in records(target)] == [1, 2]
    assert replace.call_args.args[0].parent == tmp_path, "a rename works within one disk only"


def test_a_log_survives_a_full_disk(tmp_path, capsys):
    """A new run starts a new log and renames the old one. A write error is reported once."""
    file = tmp_path / "log.jsonl"
    file.write_text(line(1) + line(2))
    Log(log_file(str(file)), 0).add({"step": 3})
    assert records(file) == [{"step": 3}]
    assert file.with_name("log.jsonl.old").read_text() == line(1) + line(2)
    assert capsys.readouterr().out == f"--out {file}: the log of an earlier run is now log.jsonl.old\n"
    Log(None, 1).add({"step": 4})
    log = Log(log_file("/dev/full"), 0)
    log.add({"step": 5})
    log.add({"step": 6})
    told = capsys.readouterr().out
    assert told == "--out /dev/full: No space left on device; nothing more is written to it\n"


@pytest.mark.parametrize("text", ['{"text": "a document"}\n', "step,loss\n1,2.0\n", "\n", '{"stop": 1}\n', "\x89PNG"])
def test_a_file_that_is_no_log_is_refused_and_stays(text, tmp_path, capsys):
    file = tmp_path / "data.jsonl"
    file.write_text(text)
    with pytest.raises(SystemExit) as ended:
        options(["--out", str(file)])
    error = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 2 and error.endswith(
        f"{file} is not a log of this program: name another file, or remove it"
    )
    assert file.read_text() == text


# --- launches in processes of their own


class Launch:
    """A launch of notebook 10 in a process and a session of its own; all its processes have TMPDIR=folder."""

    def __init__(self, folder: Path, torchrun: list[str], program: list[str]):
        self.out = folder / "log.jsonl"
        more = ["--checkpoints", str(folder / "checkpoints"), "--out", str(self.out), "--cache", str(folder / "tokens")]
        command = [sys.executable, str(ROOT / "scripts" / "launch_nb_torchrun.py"), "notebooks/10_5d.ipynb"]
        command += ["--no-export", *torchrun, "--", *SMALL, *program, *more]
        environment = os.environ | {"TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
        self.text = folder / f"{id(self)}.text"
        with open(self.text, "w") as text:
            self.process = psutil.Popen(
                command, cwd=ROOT, env=environment, stdout=text, stderr=subprocess.STDOUT, start_new_session=True
            )

    def ranks(self) -> dict[int, psutil.Process]:
        """Its ranks that run, by RANK."""
        found = {}
        for process in self.process.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if name := re.fullmatch(r"rank (\d+)", process.name()):
                    found[int(name[1])] = process
        return found

    def after_step(self, step: int, layout: str = "") -> None:
        """Wait until a step is done, in a layout."""

        def done() -> bool:
            assert self.process.poll() is None, self.text.read_text()
            return any(each["step"] >= step and layout in each["layout"] for each in records(self.out))

        wait_for(done, f"no step {step}")

    def end(self) -> tuple[int, str]:
        """Wait for the end; status, and what was printed."""
        return self.process.wait(timeout=PATIENCE_S), self.text.read_text()


def left_of(folder: Path) -> list[psutil.Process]:
    """The processes of launches that have a folder for their temporary files."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("TMPDIR") == str(folder) and not gone(process):
                found.append(process)
    return found


def none_left(folder: Path) -> bool:
    """Whether all of them end; multiprocessing's own do so a moment after their launcher."""
    with contextlib.suppress(AssertionError):
        return wait_for(lambda: not left_of(folder), "some are left", within_s=20)
    return False


def gone(process: psutil.Process) -> bool:
    """Whether a process has ended; so has a zombie."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    return True


@pytest.fixture
def folder(tmp_path):
    """For launches; at the end no process of theirs may be left."""
    yield tmp_path
    ended = none_left(tmp_path)
    for process in left_of(tmp_path):
        process.kill()
    assert ended


def test_a_job_goes_on_after_a_rank_is_killed(ranks, folder):
    """By itself, to the same bits; no more is done twice than the steps since the last checkpoint that was complete."""
    every = 4
    program = "--layout dp2,tp2,zero1 --steps 80 --drop-tokens 0.1 --warmup 6 --start-batch 2 --ramp 18".split()
    launch = Launch(folder, ["--nproc-per-node", "4", "--max-restarts", "1"], [*program, "--save-every", str(every)])
    launch.after_step(7)
    wait_for(lambda: complete(folder / "checkpoints"), "no checkpoint")  # the first save may still be under way
    victim = launch.ranks()[1]
    victim.send_signal(signal.SIGKILL)
    status, text = launch.end()
    assert status == 0, text
    place = f"process {victim.pid}, local rank 1 on host {socket.gethostname()}"
    (told,) = re.findall("^launch: .*$", text, re.MULTILINE)
    assert told.startswith(f"launch: rank 1: {place}, was killed by signal 9 (SIGKILL); "), told
    assert told.endswith("; restart 1 of 1") and text.index(told) < text.index("continues after"), text

    found = records(launch.out)
    steps = [record["step"] for record in found]
    goes_on = int(re.search(r"continues after step (\d+), from ", text)[1]) + 1
    assert steps == [*range(1, 81)], "no step is there twice"
    last = max(
        int(step) for step in re.findall(r"^step +(\d+) \|", text[: text.index("continues after")], re.MULTILINE)
    )
    assert 7 <= last < 80, "it was killed before its end, however fast the machine is"
    # The save of this step may not have begun yet, and the one before it is then still under way.
    assert 0 <= last - (goes_on - 1) <= 2 * every and (goes_on - 1) % every == 0
    assert text.count("continues after") == 1

    expected = ranks(trained, [*SMALL, *program, "--cache", str(folder / "tokens")])[0][0]
    assert len({record["batch"] for record in expected}) > 2 and len({record["lr"] for record in expected}) == 80
    for record in found:
        same = expected[record["step"] - 1]
        assert all(record[name] == same[name] for name in ("loss", "norm", "lr", "batch", "tokens")), record["step"]
    checkpoints = complete(folder / "checkpoints")
    assert [*checkpoints] == [76, 80] and {each.name for each in (folder / "checkpoints").iterdir()} == {
        *(each.name for each in checkpoints.values()),
        "run.toml",
    }
    assert all(damaged(each, describe(each)["files"]) is None for each in checkpoints.values())


def test_a_second_job_in_a_folder_is_refused_and_the_next_after_a_kill_is_not(folder):
    program = "--layout dp2 --save-every 1 --steps".split()
    first = Launch(folder, ["--nproc-per-node", "2"], [*program, "100000"])
    first.after_step(2)
    status, text = Launch(folder, ["--nproc-per-node", "2"], [*program, "100000"]).end()
    line = r"CheckpointError: .*/checkpoints is in use by a run on host \S+, pid \d+: end it, or use another folder"
    assert status != 0 and re.search(line, text) and "step     1" not in text, text
    done = records(first.out)[-1]["step"]
    first.after_step(done + 3)
    assert "failed" not in first.text.read_text()
    first.process.kill()
    for rank in left_of(folder):
        rank.kill()
    assert none_left(folder)
    saves = complete(folder / "checkpoints")
    assert all(damaged(each, describe(each)["files"]) is None for each in saves.values())
    last = max(saves)
    status, text = Launch(folder, ["--nproc-per-node", "2"], [*program, str(last + 2)]).end()
    assert status == 0 and f"continues after step {last}, from " in text, text
    assert max(complete(folder / "checkpoints")) == last + 2 and not (folder / "checkpoints" / ".lock").exists()


def ports_of(launch: Launch, status: str) -> set[int]:
    """The ports that a launcher listens on, or is connected to."""
    found = [each for each in launch.process.net_connections() if each.status == status]
    return {each.laddr.port if status == psutil.CONN_LISTEN else each.raddr.port for each in found}


def test_a_job_goes_on_when_a_node_comes_and_when_it_is_lost(ranks, folder, port):
    """Two launchers of two ranks each. The second joins a round that has begun, and is killed without warning."""
    torchrun = "--nnodes 1:2 --nproc-per-node 2 --max-restarts 3 --rdzv-backend c10d --rdzv-id survival".split()
    torchrun += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", RENDEZVOUS]
    program = "--layout dp4 --elastic --steps 160 --drop-tokens 0.1 --warmup 6 --lr 1e-4".split()
    stays = Launch(folder, torchrun, [*program, "--save-every", "2"])
    wait_for(lambda: len(stays.ranks()) == 2, "no ranks")
    first_round = stays.ranks().values()
    for rank in first_round:  # or they would have done all steps before the other node is there
        rank.suspend()
    goes = Launch(folder, torchrun, [*program, "--save-every", "2"])
    wait_for(lambda: port in ports_of(goes, psutil.CONN_ESTABLISHED), "the node does not come")
    for rank in first_round:
        rank.resume()
    goes.after_step(5, "dp4")
    # Without a checkpoint of four ranks, their steps are done again by two, and leave no record.
    first = next(record["step"] for record in records(stays.out) if record["layout"] == "dp4")
    wait_for(lambda: max(complete(folder / "checkpoints"), default=0) >= first, "no checkpoint of four ranks")
    assert port in ports_of(stays, psutil.CONN_LISTEN) - ports_of(goes, psutil.CONN_LISTEN)
    lost, before = goes.ranks(), len(records(stays.out))
    assert len(lost) == 2
    goes.process.kill()
    status, text = stays.end()
    assert status == 0, text
    assert none_left(folder) and all(gone(rank) for rank in lost.values())

    found = records(stays.out)
    steps, layouts = [record["step"] for record in found], [record["layout"] for record in found]
    changed = len(layouts) - layouts[::-1].index("dp4")  # the first record after the kill
    assert set(layouts[changed:]) == {"dp2"} and changed >= before - 4  # steps that are done again
    assert steps == [*range(1, 161)], "no step is there twice"
    assert {record["batch"] for record in found} == {8}
    expected = losses(ranks(trained, [*SMALL, *program, "--cache", str(folder / "tokens")])[0][0])
    # Two ranks add up in another order than four: their losses drift apart, the faster the larger the steps.
    apart = {record["step"]: abs(record["loss"] / expected[record["step"]] - 1) for record in found}
    assert {step: each for step, each in apart.items() if each > 1e-5} == {}


# --- options, other runs, other layouts


def refused(runs: list[list[str]]) -> list[str]:
    """On a rank: what `main` raises with each of these options, and what it has printed of a step."""
    found = []
    with short_text():
        for argv in runs:
            with contextlib.redirect_stdout(io.StringIO()) as out:
                error = said(lambda: main(argv))
            found.append(error + "".join(line for line in out.getvalue().splitlines() if line.startswith("step ")))
    return found


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """A folder with the checkpoints of a run of 8 steps in dp2,tp2, its records and its options."""
    folder = tmp_path_factory.mktemp("saved")
    argv = [*SMALL, *"--steps 8 --save-every 4 --drop-tokens 0.1 --checkpoints".split(), str(folder / "c")]
    argv += ["--out", str(folder / "log.jsonl")]
    ranks(trained, [*argv, "--layout", "dp2,tp2"])
    return folder, argv


def test_another_text_is_told_by_its_tokens():
    assert readable("text", [8_000_016, 7]) == "8,000,016 tokens (checksum 7)"
    assert (readable("text", None), readable("seed", 3)) == (None, 3)


def test_the_ranks_refuse_what_cannot_be_and_change_nothing(ranks, saved, tmp_path):
    folder, argv = saved
    (shared := tmp_path / "shared").mkdir()
    shared.chmod(0o777)
    before = snapshot(folder), snapshot(tmp_path)
    last = latest(folder / "c")
    cp3 = "--layout dp2,cp3 --seq 48"
    cases = {
        "--seq 16": f"CheckpointError: {last} belongs to another run: its seq is 32, here it is 16",
        "--seed 1": f"CheckpointError: {last} belongs to another run: its seed is 0, here it is 1",
        "--drop-tokens 0": f"CheckpointError: {last} belongs to another run: its drop_tokens is 0.1, here it is 0.0",
        "--preset small": "CheckpointError: another model: ",
        "--experts 4": f"CheckpointError: {last} belongs to another run: its moe is None, here it is ",
        f"--checkpoints {shared}": f"CheckpointError: {shared}: anyone may write to it, so no checkpoint in it could",
        f"{cp3} --elastic --no-document-masks": "ValueError: 4 ranks are not a multiple of the 3 that dp2,cp3 has",
        "--layout dp8 --batch 8": "ValueError: layout dp8: dp 8 x pp 1 x cp 1 x tp 1 = 8 ranks, and there are 4: ",
    }
    of_ranks = ranks(refused, [[*argv, "--layout", "dp2,tp2", *line.split()] for line in cases])
    for (line, expected), found in zip(cases.items(), zip(*of_ranks, strict=True), strict=True):
        assert all(each.startswith(expected) and "\n" not in each for each in found), (line, found)
        assert len(set(found)) == 1, (line, found)
    assert (snapshot(folder), snapshot(tmp_path)) == before


def restarted(argv: list[str]) -> str:
    """On a rank: what a run prints that torchrun has started again."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        return trained(argv)[1]


def test_a_restart_without_a_checkpoint_says_that_it_starts_again(ranks, tmp_path):
    argv = [*SMALL, "--steps", "1", "--layout", "dp4"]
    assert "starts at step 1 again: no --checkpoints folder\n" in ranks(restarted, argv)[0]
    argv += ["--checkpoints", str(tmp_path / "c")]
    assert f"starts at step 1 again: no checkpoint in {tmp_path / 'c'}\n" in ranks(restarted, argv)[0]
    assert "again" not in ranks(restarted, argv)[0], "it continues after step 1"


def test_a_run_whose_steps_are_all_done(ranks, saved):
    folder, argv = saved
    before = checkpoints_in(folder / "c"), records(folder / "log.jsonl")
    found = ranks(trained, [*argv, "--layout", "dp2,tp2"])
    assert all(each == [] for each, _ in found) and "continues after step 8, from " in found[0][1]
    assert "nothing left to do: 8 steps are done, steps is 8" in found[0][1]
    assert "step     " not in found[0][1]
    assert (checkpoints_in(folder / "c"), records(folder / "log.jsonl")) == before


def test_a_run_is_told_of_settings_that_change_its_numbers(ranks, saved):
    _, argv = saved
    text = ranks(trained, [*argv, "--layout", "dp2,tp2", "--max-norm", "0.5", "--dtype", "bf16"])[0][1]
    assert re.search("max_norm:? 0.5.* 1.0\n", text) and re.search("dtype:? bf16.* fp32\n", text)


@pytest.mark.parametrize("layout", ["dp2,pp2", "dp4,zero3"])
def test_a_run_goes_on_in_another_layout(layout, ranks, saved, tmp_path):
    """As if it had been in the first one all the time."""
    folder, argv = saved
    shutil.copytree(folder, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy/c/step-000000008")
    argv = [word.replace(str(folder), str(tmp_path / "copy")) for word in argv]
    (found, text), *_ = ranks(trained, [*argv, "--layout", layout])
    assert "continues after step 4, from " in text and "written in dp2,tp2" in text
    assert [record["step"] for record in found] == [5, 6, 7, 8]
    expected = losses(records(folder / "log.jsonl"))
    assert losses(found) == {step: pytest.approx(expected[step], rel=1e-5) for step in (5, 6, 7, 8)}
    assert describe(tmp_path / "copy/c/step-000000008")["layout"] == layout


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_taken(ranks, tmp_path):
    argv = [*SMALL, "--layout", "dp2,tp2,zero1", "--save-every", "4", "--checkpoints", str(tmp_path / "c"), "--steps"]
    smooth = ranks(trained, [*argv, "8"])[0][0]
    file = next((tmp_path / "c" / "step-000000008").glob("__1_*"))
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    found, text = ranks(trained, [*argv, "8"])[0]
    assert [each["loss"] for each in found] == [each["loss"] for each in smooth[4:]]
    said_lines = text.splitlines()[:2]
    assert said_lines[0].endswith("other bytes than written; it is renamed step-000000008.damaged")
    assert said_lines[1].startswith("continues after step 4, from ")
    assert list(complete(tmp_path / "c")) == [4, 8] and (tmp_path / "c" / "step-000000008.damaged").is_dir()
    assert "continues with steps 9 instead of 8\n" in ranks(trained, [*argv, "9"])[0][1]


BAD = float("inf"), float("nan")


def saved_steps(folder: Path) -> tuple[list[int], list[str], str]:
    """On a rank: which steps are saved, of which some have no finite loss or norm; what is said; and the error that the
    third such step in a row ends in.
    """
    layout = Layout.parse("dp4")
    mesh, tokens = build_mesh(layout), torch.arange(1000) % 256
    parallel = parallelize(single_gpu.PRESETS["debug"], layout, mesh, lr=1e-3)
    batches = TokenBatches(tokens, 1, 8, mesh.dp.rank(), 4)
    run = SavedRun(parallel, batches, folder, every=2, keep=9, same={}, plan={}, bad_steps=3)
    inf, nan = BAD
    steps = [(2.5, 1.0), (nan, 1.0), (2.4, inf), (2.3, 1.0), (2.3, 1.0), (inf, inf), (2.3, 1.0), (2.3, 1.0), (2.2, nan)]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        for step, (loss, norm) in enumerate(steps, start=1):
            run.after(step, loss, norm)
        for step in (10, 11):
            error = said(lambda: run.after(step, 2.1, inf, last=step == 11))
    return list(complete(folder)), out.getvalue().splitlines(), error


def test_a_bad_step_waits_with_its_save_and_the_third_in_a_row_stops_the_run(ranks, tmp_path):
    """Every second one is saved: not 2, nor 3, but 4; not 6, but 7 in its place; and 8, which is set aside at the end:
    no finite step has followed it.
    """
    first, *others = ranks(saved_steps, tmp_path / "c")
    complete_steps, lines, error = first
    assert complete_steps == [4, 7] and (tmp_path / "c" / "step-000000008.unproven").is_dir()
    assert all((steps, line) == (complete_steps, error) for steps, _, line in others)
    assert [line.split(":")[0] for line in lines] == [f"step {n} skipped" for n in (2, 3, 6, 9, 10, 11)]
    assert lines[1] == "step 3 skipped: loss 2.4, norm inf (2 skipped in this run)"
    assert error == (
        "CheckpointError: stopped: 3 steps in a row skipped; the weights come from step 8; "
        "no finite step has followed "
        "step-000000008: it is renamed step-000000008.unproven; the last good checkpoint is step-000000007"
    )
    assert not any(line for _, line, _ in others), "one rank says it"


def explodes(argv: list[str]) -> tuple[str, str]:
    """On a rank: what a run prints, and the error it ends in."""
    with contextlib.redirect_stdout(io.StringIO()) as out, short_text():
        error = said(lambda: main(argv))
    return error, out.getvalue()


def test_a_run_that_explodes_stops_and_no_later_run_goes_on_without_a_word(ranks, tmp_path):
    folder = tmp_path / "c"
    argv = [*SMALL, "--layout", "dp2,tp2,zero1", "--save-every", "1", "--checkpoints", str(folder)]
    ranks(trained, [*argv, "--steps", "2"])
    before = checkpoints_in(folder)
    bad = [*argv, "--lr", "1e38", "--steps", "9", "--keep", "9"]  # the step after the first has no finite loss
    error, text = ranks(explodes, bad)[0]
    skipped = "CheckpointError: stopped: 3 steps in a row skipped; the weights come from step 3"
    assert error.startswith(skipped), error
    assert text.count(" skipped: ") == 3 and list(complete(folder)) == [1, 2]
    after = checkpoints_in(folder)
    assert all(after[path] == before[path] for path in before if path.is_file()), "the good ones are as they were"
    assert error.endswith("step-000000003.unproven; the last good checkpoint is step-000000002"), error
    again, _ = ranks(explodes, bad)[0]
    assert again == error and list(complete(folder)) == [1, 2], "the same once more, and no older one is lost"
    found, text = ranks(trained, [*argv, "--lr", "1e-3", "--steps", "4"])[0]
    assert "continues after step 2, from " in text
    assert [record["step"] for record in found] == [3, 4] and all(math.isfinite(each["loss"]) for each in found)


@pytest.mark.parametrize("rate, saved_first", [("1e38", False), ("1e30", True)])
def test_a_run_that_ends_in_bad_steps_leaves_no_checkpoint_that_begins_with_nan(two, tmp_path, rate, saved_first):
    """After step 1 weights are not finite; or they are, and so large that no later step is."""
    argv = [*SMALL, "--layout", "dp2,zero1", "--save-every", "1", "--checkpoints", str(tmp_path / "c"), "--steps", "3"]
    (error, text), (other, _) = two(explodes, [*argv, "--lr", rate])
    aside = "no finite step has followed step-000000001: it is renamed step-000000001.unproven; "
    assert (
        error
        == other
        == (
            "CheckpointError: ended: 2 steps in a row skipped; the weights come from step 1; "
            f"{aside if saved_first else ''}there is no good checkpoint"
        )
    )
    assert saved_first != (" is not finite; there is no earlier one" in text)
    assert text.count(" skipped: ") == 2 and not complete(tmp_path / "c")
    found, text = two(trained, argv)[0]
    assert [record["step"] for record in found] == [1, 2, 3] and "continues after" not in text
    assert ("starts at step 1: no finite step followed step-000000001.unproven; " in text) == saved_first
    assert all(math.isfinite(record["loss"]) for record in found) and list(complete(tmp_path / "c")) == [2, 3]


def poisoned(folder: Path, value: float, state: bool) -> tuple[str, str, list[int]]:
    """On a rank: how a run ends whose last rank has a weight or a moment that is not finite after a finite step."""
    layout = Layout.parse("dp2,zero1")
    mesh, tokens = build_mesh(layout), torch.arange(1000) % 256
    parallel = parallelize(single_gpu.PRESETS["debug"], layout, mesh, lr=1e-3)
    batches = TokenBatches(tokens, 1, 8, mesh.dp.rank(), 2)
    run = SavedRun(parallel, batches, folder, every=1, keep=9, same={}, plan={})
    parallel.step(*next(batches))
    with contextlib.redirect_stdout(io.StringIO()) as out:
        run.after(1, 2.5, 1.0)
        shard = parallel.sharding.shards[0].shard
        values = parallel.sharding.optimizer.state[shard]["exp_avg"] if state else shard.data
        if mesh.dp.rank() == 1:
            values[0] = value
        run.after(2, 2.5, 1.0)
        error = said(lambda: run.after(3, 2.5, 1.0, last=True))
    return error, out.getvalue(), list(complete(folder))


@pytest.mark.parametrize("value, state", [(math.nan, False), (math.inf, True)])
def test_no_value_that_is_not_finite_is_saved(two, tmp_path, value, state):
    (error, text, saves), (other, _, _) = two(poisoned, tmp_path / "c", value, state)
    assert error == other and "\n" not in error and saves == [1]
    assert re.fullmatch(
        r"CheckpointError: ended without a checkpoint of its last step: \S+ is not finite; "
        "the last good checkpoint is step-000000001",
        error,
    )
    assert ("/exp_avg is not finite" in error) == state
    assert text.count("checkpoint of step 2 failed: ") == 1 and "the last good one is step-000000001" in text
