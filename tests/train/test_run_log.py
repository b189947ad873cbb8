"""The log of a run: a line, a point and a row for each step, also after a restart; and what it says where it cannot
write. CPU; TensorBoard and Weights & Biases by modules of the test where they are not installed.
"""

import json
import math
import sys
import types
from pathlib import Path

import pytest

from calls import said
from course_lib.train.run_log import RunLog, check_logging, has_package
from course_lib.train.sections import Logging, Settings
from course_lib.train.settings import as_toml

WANDB = '''
"""As Weights & Biases: a run by id, which ignores steps before its last one; a step may be logged in parts."""
ROWS, CONFIGS, FINISHED = {}, {}, []

class Run:
    def __init__(self, id):
        self.id = id
        self.starting_step = max(ROWS[id], default=-1) + 1

    def log(self, values, step):
        assert step >= max(ROWS[self.id], default=0), "it ignores these, and prints a warning for each"
        ROWS[self.id].setdefault(step, []).append(values)

    def finish(self):
        FINISHED.append(self.id)

def init(project, config, id, resume):
    assert (resume == "allow") == (id is not None)
    id = id or f"{project}-{len(ROWS)}"
    ROWS.setdefault(id, {}), CONFIGS.setdefault(id, config)
    return Run(id)
'''


def record(step: int, loss: float = 2.0, layout: str = "dp2") -> dict:
    values = {"step": step, "loss": loss, "norm": 1.0, "lr": 1e-3, "batch": 4, "tokens": 64 * step, "step_s": 0.1}
    return values | {"tokens_per_s": 320.0, "mfu": None, "peak_memory": 2**30, "fullest_rank": 1, "layout": layout}


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_step_has_one_line_with_its_evaluation_also_after_a_restart(tmp_path):
    """The restart does steps 4 and 5 again, and finds half a line; a new run begins anew."""
    file = tmp_path / "new folder" / "log.jsonl"
    log = RunLog(Logging(out=str(file)), 0, "")
    log.add([record(n) for n in (1, 2, 3)])
    assert lines(file) == [record(n) for n in (1, 2, 3)], "on the disk before the evaluation"
    log.evaluation(3, 2.5)
    log.add([record(4), record(5, math.inf)])
    log.evaluation(5, 2.25)
    with open(file, "a") as opened:
        opened.write('{"step": 6, "lo')
    log = RunLog(Logging(out=str(file)), 3, "")
    evaluated = record(3) | {"eval_loss": 2.5}
    assert lines(file) == [record(1), record(2), evaluated]
    log.add([record(4, 1.5), record(5, 1.25)])
    log.evaluation(5, 2.0)
    log.add([record(6)])
    log.close()
    again = record(5, 1.25) | {"eval_loss": 2.0}
    assert lines(file) == [record(1), record(2), evaluated, record(4, 1.5), again, record(6)]
    RunLog(Logging(out=str(file)), 0, "").close()
    assert file.read_text() == ""


def test_a_full_disk_is_one_line_and_the_run_goes_on(tmp_path, capsys):
    (tmp_path / "full").symlink_to("/dev/full")
    (tmp_path / "file").touch()
    for out in (tmp_path / "full", tmp_path / "file" / "log.jsonl"):
        log = RunLog(Logging(out=str(out)), 0, "")
        log.add([record(n) for n in (1, 2)])
        log.evaluation(2, 2.5)
        log.close()
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"--out {tmp_path / 'full'}: No space left on device; nothing more is written to it"
    assert second.startswith("--out: ") and second.endswith("nothing more is written to it")


class Writer:
    """As torch's SummaryWriter, with the calls that it has got."""

    made: list["Writer"] = []

    def __init__(self, folder: str, purge_step: int):
        self.folder, self.purge_step, self.points, self.flushed = folder, purge_step, [], 0
        self.made.append(self)

    def add_text(self, name: str, text: str, step: int) -> None:
        self.config = text

    def add_scalar(self, name: str, value: float, step: int) -> None:
        if self.folder.endswith("full"):
            raise OSError(28, "No space left on device")
        self.points.append((name, value, step))

    def flush(self) -> None:
        self.flushed = len(self.points)

    def close(self) -> None:
        self.closed = True


def test_tensorboard_hides_the_steps_that_are_done_again(monkeypatch, tmp_path, capsys):
    """Only numbers are points; all of them are on the disk after each call."""
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer))
    monkeypatch.setattr(Writer, "made", [])
    log = RunLog(Logging(tensorboard=str(tmp_path), out=str(tmp_path / "log")), 7, "[run]\nsteps = 9\n")
    log.add([record(8, math.nan)])
    log.evaluation(8, 2.5)
    (writer,) = Writer.made
    assert (writer.folder, writer.purge_step) == (str(tmp_path), 8) and "steps = 9" in writer.config
    names = [name for name, _, step in writer.points if step == 8]
    assert sorted(names) == sorted({*record(8), "eval_loss"} - {"step", "mfu", "layout"})
    assert writer.flushed == len(writer.points) and math.isnan(writer.points[0][1])
    log.close()
    assert writer.closed
    log = RunLog(Logging(tensorboard="full", out=str(tmp_path / "log")), 0, "")
    log.add([record(1)])
    log.add([record(2)])
    assert capsys.readouterr().out.splitlines() == [
        f"--out {tmp_path / 'log'}: the log of an earlier run is now log.old",
        "--tensorboard: [Errno 28] No space left on device; nothing more is written to it",
    ]
    assert (len(lines(tmp_path / "log")), len(lines(tmp_path / "log.old"))) == (2, 1)


def test_tensorboard_s_own_reader_sees_each_step_once(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for step, loss in ((0, 3.0), (2, 2.0)):
        log = RunLog(Logging(tensorboard=str(tmp_path)), step, "")
        log.add([record(n, loss) for n in range(step + 1, step + 5)])
        log.close()
    reader = accumulator.EventAccumulator(str(tmp_path))
    reader.Reload()
    assert [(each.step, each.value) for each in reader.Scalars("loss")] == [
        (1, 3),
        (2, 3),
        (3, 2),
        (4, 2),
        (5, 2),
        (6, 2),
    ]


def test_a_run_of_weights_and_biases_continues_with_its_checkpoints(monkeypatch, tmp_path):
    """A row for each step, an evaluation in its step's row; a new run gets a new id."""
    (tmp_path / "modules" / "wandb").mkdir(parents=True)
    (tmp_path / "modules" / "wandb" / "__init__.py").write_text(WANDB)
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    import wandb

    settings = Settings()
    settings.checkpoints.checkpoints, settings.logging.wandb = str(tmp_path / "checkpoints"), "project"
    check_logging(settings)
    for step in (0, 3):
        log = RunLog(settings.logging, step, as_toml(settings))
        log.add([record(n, 3.0 - step) for n in range(step + 1, step + 6)])
        log.evaluation(step + 5, 2.5)
        log.close()
    (rows,) = wandb.ROWS.values()
    assert [*rows] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert rows[5][0]["loss"] == 3 and rows[6][0]["loss"] == 0 and "step" not in rows[6][0]
    assert rows[5][1] == rows[8][1] == {"eval_loss": 2.5}
    assert wandb.CONFIGS["project-0"]["optimizer"]["lr"] == settings.optimizer.lr and len(wandb.FINISHED) == 2
    RunLog(settings.logging, 0, as_toml(settings)).close()
    assert len(wandb.ROWS) == 2 and (tmp_path / "checkpoints" / "wandb-run-id").read_text() == "project-1"


def test_weights_and_biases_without_a_login_is_one_line(monkeypatch, capsys):
    def init(**options):
        raise RuntimeError("no API key:\n  run wandb login")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    RunLog(Logging(wandb="project"), 0, "").add([record(1)])
    assert capsys.readouterr().out == "--wandb: no API key: run wandb login; nothing more is written to it\n"


def checked(**logging) -> str:
    settings = Settings()
    vars(settings.logging).update({name: str(value) for name, value in logging.items()})
    return said(lambda: check_logging(settings))


def test_what_can_not_be_written_gets_one_line_before_the_run(monkeypatch, tmp_path):
    """And nothing is made."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "ours").write_text('{"step": 1, "loss": 2.0}\n')
    before = sorted(tmp_path.rglob("*"))
    assert checked(out=tmp_path / "ours") == checked(out=tmp_path / "a" / "b.jsonl") == "nothing"
    assert checked(summary=tmp_path / "a" / "b") == "nothing"
    file = tmp_path / "file"
    expected = {
        (("out", file),): "out: {} is not a log of this program: name another file, or remove it",
        (("out", tmp_path),): f"out: {tmp_path} is a folder; name a file in it",
        (("out", file / "log"),): "out is {}, and {} is not a folder",
        (("summary", file / "a"),): "summary is {}/a, and {} is not a folder",
    }
    for logging, line in expected.items():
        assert checked(**dict(logging)) == f"SettingsError: {line.format(file, file)}"
    for name, package in (("summary", "matplotlib"), ("tensorboard", "tensorboard"), ("wandb", "wandb")):
        monkeypatch.setitem(sys.modules, package, None)
        line = f"SettingsError: {name} needs the package {package}: pip install {package}"
        assert checked(**{name: tmp_path / "a"}) == line
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_of_data_is_no_package(monkeypatch, tmp_path):
    (tmp_path / "data_of_runs").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not has_package("data_of_runs") and has_package("json")
