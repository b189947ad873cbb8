"""python -m course_lib.best_config calibrate: from a CSV to a file that the planner takes; bad input is one line, and
writes nothing.
"""

import csv
import dataclasses
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from course_lib.best_config.calibrate_program import calibrate_parser, main, read_input, write
from course_lib.best_config.calibration import MEMORY, MEMORY_PAIRS, TIME
from course_lib.best_config.clusters import CLUSTERS
from course_lib.best_config.hardware import load_cluster, save_cluster
from course_lib.best_config.planner import estimate
from course_lib.best_config.program import options, program_parser
from course_lib.best_config.software import SOFTWARE
from course_lib.best_config.sweep_files import of_program
from course_lib.five_d.layouts import Layout
from course_lib.single_gpu.model import PRESETS

H100 = CLUSTERS["H100"]
CHANGED = {"matmul_efficiency": 0.55, "head_efficiency": 0.45, "network_efficiency": 0.35, "kept_ffn": 3.0}
LAYOUTS = "dp{n},zero1 dp{n},zero3 dp{n2},tp2,sp,zero1 dp{n4},pp4,zero1 dp{n8},tp8,sp,zero1,mb2 dp{n8},pp2,tp4,sp,zero1"
SWEEP = "model,nodes,layout,global_batch_seqs,seq,steps,options,ok,why,step_s,peak_mem_gb"
OURS = ["--column", "model=preset", "--column", "batch=sequences", "--column", "seq=4096"]
OURS += ["--column", "step_s=iter_ms*1e-3", "--column", "peak_bytes=peak_gib*1073741824"]
MAP = """\
model = "preset"
nodes = "nodes"
layout = "layout"
batch = "sequences"
seq = 4096
step_s = {column = "iter_ms", factor = 1e-3}
peak_bytes = {column = "peak_gib", factor = 1073741824}
ok = "ok"
"""


def rows_of(cluster, sizes=(8, 16, 64)) -> list[dict]:
    """Runs with what a cluster predicts, by the planner's names."""
    found = []
    for gpus in sizes:
        for layout in LAYOUTS.format(n=gpus, n2=gpus // 2, n4=gpus // 4, n8=gpus // 8).split():
            said = estimate(PRESETS["llama3.2-1B"], cluster, Layout.parse(layout), 256, 4096)
            row = {"model": "llama3.2-1B", "nodes": gpus // 8, "layout": layout, "batch": 256, "seq": 4096, "ok": 1}
            found.append(row | {"step_s": float(said.step_s), "peak_bytes": float(said.peak_bytes)})
    return found


def file_of(file: Path, rows: list[dict]) -> Path:
    """A CSV of these rows."""
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return file


def renamed(row: dict) -> dict:
    """A row in other units, by other names, without the length."""
    kept = {name: row[name] for name in ("nodes", "layout", "ok")}
    measured = {"iter_ms": 1e3 * row["step_s"], "peak_gib": row["peak_bytes"] / 2**30}
    return kept | {"preset": row["model"], "sequences": row["batch"]} | measured


@pytest.fixture(scope="module")
def truth():
    return H100.with_software(**CHANGED)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_from_runs_to_a_plan(folder, monkeypatch, capsys, truth):
    """By the command line, with the planner's names; the saved cluster has the constants that the runs were made with,
    and the command that is printed asks the planner with it.
    """
    file_of(folder / "runs.csv", rows_of(truth))
    monkeypatch.setattr(sys, "argv", "best_config calibrate runs.csv --out mine.toml".split())
    runpy.run_module("course_lib.best_config", run_name="__main__")
    printed = capsys.readouterr().out
    saved = load_cluster("mine.toml")
    for name, value in CHANGED.items():  # which the runs tell: not NVLink's, for one
        assert getattr(saved.software, name) == pytest.approx(value, rel=0.01), name
    assert (saved.name, saved.peak_flops) == ("mine", H100.peak_flops)
    assert printed.startswith("fitted to 18 runs (median errors: tokens/s off by 0.") and "runs.csv, line " in printed
    *_, saved_to, command = printed.splitlines()
    assert saved_to == "saved to mine.toml; to plan with it:"
    python, flag, module, *words = shlex.split(command)
    question = options(words).question
    assert (python, flag, module) == ("python", "-m", "course_lib.best_config") and question.cluster == saved
    assert (question.name, question.gpus, question.batch, question.seq) == ("llama3.2-1B", 64, 256, 4096)
    assert sorted(file.name for file in folder.iterdir()) == ["mine.toml", "runs.csv"]


def test_by_a_map_and_by_options(folder, truth):
    """The same runs as by the planner's names, and another start and program."""
    file_of(folder / "runs.csv", rows_of(truth))
    file_of(folder / "theirs.csv", [renamed(row) for row in rows_of(truth)])
    save_cluster(dataclasses.replace(H100, name="start", network=25e9), "start.toml")
    (folder / "map.toml").write_text(MAP)
    start = ["--out", "a.toml", "--cluster", "start.toml", "--software", "Megatron-LM"]
    expected, cluster = read_input(calibrate_parser().parse_args(["runs.csv", *start]))
    assert (cluster.name, cluster.network, cluster.software) == ("start", 25e9, SOFTWARE["Megatron-LM"])
    for more in (OURS, ["--columns", "map.toml"], ["--columns", "map.toml", "--column", "step_s=iter_ms*0.001"]):
        runs, _ = read_input(calibrate_parser().parse_args(["theirs.csv", *start, *more]))
        assert [run.step_s for run in runs] == pytest.approx([run.step_s for run in expected])
        same = {"step_s": 1.0, "peak_bytes": 1.0}
        assert [dataclasses.replace(run, **same) for run in runs] == [
            dataclasses.replace(run, **same) for run in expected
        ]
        assert [run.peak_bytes for run in runs] == pytest.approx([run.peak_bytes for run in expected])


@pytest.mark.parametrize("name", SOFTWARE)
def test_a_sweep_starts_from_the_rates_of_another_program_alone(name):
    """A sweep runs the course's program, so what another one sends, hides and keeps does not count."""
    found = of_program(dataclasses.replace(H100, software=SOFTWARE[name]), "bf16").software
    fitted = {*TIME, *MEMORY, *MEMORY_PAIRS}
    differing = {name for name, value in vars(SOFTWARE["course"]).items() if getattr(found, name) != value}
    assert differing <= fitted - {"held"} | {"attention_efficiency", "unusable_bytes", "longest_ring"}
    assert found.matmul_efficiency == SOFTWARE[name].matmul_efficiency


def test_a_sweep_is_read_as_it_is(folder, capsys):
    """With the dtype of its options, the later row of a run that was tried again, and why a run failed."""
    truth = of_program(H100, "fp32").with_software(matmul_efficiency=0.4)
    rows = []
    for row in rows_of(truth):
        about = {"model": row["model"], "nodes": row["nodes"], "layout": row["layout"], "global_batch_seqs": 256}
        about |= {"seq": 4096, "steps": 8, "options": "--dtype fp32", "ok": 1, "why": ""}
        rows.append(about | {"step_s": row["step_s"], "peak_mem_gb": row["peak_bytes"] / 2**30})
    failed = rows[0] | {"ok": 0, "why": "rank 3 was lost", "step_s": "", "peak_mem_gb": ""}
    oom = failed | {"why": "OutOfMemoryError: CUDA out of memory", "seq": 8192}
    assert list(failed) == SWEEP.split(",")
    file_of(folder / "sweep.csv", [failed, *rows, oom])
    found = main(["sweep.csv", "--out", "mine.toml"])
    assert (found.runs, found.failures) == (18, {"oom": 1}) and "1 ran out of memory" in capsys.readouterr().out
    software = load_cluster("mine.toml").software
    assert software.optimizer_bytes == 8 and software.matmul_efficiency == pytest.approx(0.4, rel=0.01)


def in_ms(rows: list[dict]) -> list[dict]:
    return [row | {"step_s": row["step_s"] * 1e3} for row in rows]


BAD = {
    "none.csv --out a.toml": "none.csv: No such file or directory",
    "runs.csv": "the following arguments are required: --out",
    "runs.csv --out a.csv": "--out a.csv: name a new file that ends in .toml",
    "runs.csv --out none/a.toml": "--out none/a.toml: there is no folder none",
    "runs.csv --out old.toml": "--out old.toml: it exists; name another file, or overwrite it with --force",
    "runs.csv --out . --force": "--out .: name a new file",
    "runs.csv --out map.toml --columns map.toml --force": "--out map.toml: name a new file that ends in .toml",
    "runs.csv --out a.toml --cluster T9000": "--cluster T9000: No such file or directory, and it is none of",
    "runs.csv --out a.toml --software T9000": "argument --software: invalid choice: 'T9000'",
    "runs.csv --out a.toml --cluster bad.toml": "bad.toml: bf16_tflops, memory_gib, memory_tb_s, node_link_gb_s,",
    "runs.csv --out a.toml --columns none.toml": "none.toml: No such file or directory",
    "runs.csv --out a.toml --columns runs.csv": "runs.csv: Expected '=' after a key",
    "runs.csv --out a.toml --columns map.toml": "columns: speed is none of layers",
    "runs.csv --out a.toml --column seq": "--column seq: make it NAME=COLUMN, NAME=COLUMN*FACTOR or NAME=VALUE",
    "runs.csv --out a.toml --column step_s=step_s*ms": "--column: 'ms' of step_s*ms is not a number",
    "runs.csv --out a.toml --column step_s=itr_ms": "runs.csv, line 2: step_s is 'itr_ms', which is no number",
    "runs.csv --out a.toml --column speed=step_s": "columns: speed is none of layers",
    "runs.csv --out a.toml --column tokens_per_s=step_s": "step_s: the median run takes",
    "theirs.csv --out a.toml": "columns: model or layers is missing: name its column, or one value for all rows; the",
    "ms.csv --out a.toml": "step_s looks like milliseconds: the median run takes 1,000 times longer than predicted",
    "few.csv --out a.toml": "fit: 3 runs that were ok; ",
    "empty.csv --out a.toml": "empty.csv has no rows",
    "latin.csv --out a.toml": "latin.csv: not a CSV in UTF-8: ",
    "long.csv --out a.toml": "long.csv: not a CSV in UTF-8: field larger than field limit",
    "nul.csv --out a.toml": "nul.csv, line 2: model 'a\\x00' is none of",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_input_is_one_line(folder, capsys, line):
    rows = rows_of(H100)
    file_of(folder / "runs.csv", rows)
    file_of(folder / "theirs.csv", [renamed(row) for row in rows])
    file_of(folder / "ms.csv", in_ms(rows))
    file_of(folder / "few.csv", rows[:3])
    file_of(folder / "nul.csv", [rows[0] | {"model": "a\0"}])
    (folder / "latin.csv").write_bytes(b"mod\xe8le,nodes\n1,2\n")
    (folder / "long.csv").write_text(f"model\n{'a' * 2**18}\n")
    (folder / "empty.csv").write_text("model,nodes\n")
    (folder / "old.toml").write_text("old")
    (folder / "map.toml").write_text('speed = "step_s"\n')
    (folder / "bad.toml").write_text('name = "bad"\n')
    before = {file: file.read_bytes() for file in folder.iterdir()}
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(line))
    *_, last = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and last.startswith(f"best_config calibrate: error: {BAD[line]}")
    assert {file: file.read_bytes() for file in folder.iterdir()} == before


def test_a_write_that_fails_leaves_what_was_there(folder, monkeypatch):
    """The disk is full in the middle of it."""
    (folder / "old.toml").write_text("old")

    def full(cluster, file):
        Path(file).write_text("half of")
        raise OSError(28, "No space left on device", str(file))

    monkeypatch.setattr("course_lib.best_config.calibrate_program.save_cluster", full)
    with pytest.raises(OSError):
        write(H100, Path("old.toml"))
    assert (folder / "old.toml").read_text() == "old" and len(list(folder.iterdir())) == 1


def test_the_planners_help_mentions_it():
    assert "python -m course_lib.best_config calibrate --help" in program_parser().format_help().replace("\n", " ")


def test_a_model_by_its_sizes_and_an_old_file_that_is_overwritten(folder, capsys, truth):
    config = PRESETS["llama3.2-1B"]
    sizes = ("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab")
    more = {name: getattr(config, name) for name in sizes} | {"tied": config.tied}
    file_of(folder / "runs.csv", [row | {"model": "ours"} | more for row in rows_of(truth)])
    (folder / "old.toml").write_text("old")
    main("runs.csv --out old.toml --force".split())
    assert load_cluster("old.toml").software.network_efficiency == pytest.approx(0.35, rel=0.01)
    assert "--cluster old.toml --config CONFIG.json --gpus 64" in capsys.readouterr().out.splitlines()[-1]
