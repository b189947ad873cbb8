"""benchmarks/gpu.py: what goes wrong costs its own job alone, a run goes on where it ended; and all of it on a CPU."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from course_kit.gpu.ablations import STEPS

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="here it runs on the GPU: make gpu")
WRONG = {"crash": "crashed", "hang": "timed out", "wrong": "failed", "a crash beside": "crashed"}


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return __import__("gpu")


def run(out: Path, *words: str, jobs: str = "planted_jobs") -> subprocess.CompletedProcess:
    """gpu.py in a process of its own, from another folder."""
    command = [sys.executable, str(ROOT / "benchmarks/gpu.py"), "--out", str(out), "--device", "cpu", "--jobs", jobs]
    paths = {"PYTHONPATH": str(ROOT / "tests" / "benchmarks"), "OMP_NUM_THREADS": "1", "MEETING": str(out / "meeting")}
    return subprocess.run(
        [*command, *words], cwd=out.parent, env=os.environ | paths, capture_output=True, text=True, timeout=600
    )


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """A folder after a run of the planted jobs, and what the run said."""
    out = tmp_path_factory.mktemp("planted") / "run"
    (out / "meeting").mkdir(parents=True)
    return out, run(out, "--processes", "3")


def test_what_goes_wrong_costs_its_own_job_alone(planted, gpu):
    out, done = planted
    known = gpu.read(out)
    assert done.returncode == 1, done.stderr
    assert {name: job["outcome"] for name, job in known.items() if job["outcome"] in WRONG.values()} == WRONG
    assert known["missing"]["outcome"] == "skipped" and known["missing"]["error"] == "no such tool"
    assert "SIGSEGV" in known["crash"]["error"] and "our results are off by" in known["wrong"]["error"]
    assert known["crash"]["rows"] == [{"before": 1}], "what was measured before the crash is there"
    assert "4 jobs did not pass" in done.stdout and "Traceback" in (out / "log.txt").read_text()
    assert "Traceback" not in done.stdout + done.stderr


def test_a_failed_job_and_one_alone_have_a_process_of_their_own(planted, gpu):
    known = gpu.read(planted[0])
    after = ["first", *(f"after the {name}" for name in ("crash", "hang", "wrong one")), "alone", "last"]
    pids = [known[name]["rows"][0]["pid"] for name in after]
    assert len(set(pids)) == len(pids)
    assert len({known[f"beside {number}"]["rows"][0]["pid"] for number in range(3)} - set(pids)) == 3
    assert known["after the missing one"]["rows"] == known["after the wrong one"]["rows"], "nothing was wrong there"


def test_no_process_is_left_behind(planted, gpu):
    child, deadline = gpu.read(planted[0])["hang"]["rows"][0]["child"], time.monotonic() + 20
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    state = Path(f"/proc/{child}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_a_second_run_does_what_is_left_and_what_is_named(planted, gpu):
    out, done = planted
    assert "no time was left for 1 jobs" in done.stdout and "'long'" in done.stdout
    lines = (out / "results.jsonl").read_text().count("\n")
    again = run(out)
    assert (out / "results.jsonl").read_text().count("\n") == lines and again.returncode == 1
    named = run(out, "--only", "after the c")
    assert named.returncode == 0 and "nothing that ran is wrong" in named.stdout
    assert (out / "results.jsonl").read_text().count("\n") == lines + 3
    unknown = run(out, "--only", "nothing like it")
    assert unknown.returncode == 1 and len(unknown.stderr.splitlines()) == 1
    assert run(out, "--record").stdout == "15 jobs\n"


def test_what_the_budget_cuts_off_is_begun_again(tmp_path, gpu, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "benchmarks"))
    chosen = gpu.options(["--out", str(tmp_path), "--budget", "3", "--jobs", "planted_jobs", "--device", "cpu"])
    known = gpu.run_all(chosen, {"hang": gpu.Job("hang", None, 0)}, {})
    assert "outcome" not in known["hang"]


def test_a_row_cut_off_in_the_file_is_not_in_the_way(tmp_path, gpu):
    lines = [{"job": "a", "begin": "x"}, {"job": "a", "row": {"n": 1}}, {"job": "a", "outcome": "passed", "seconds": 1}]
    again = [{"job": "a", "begin": "y"}, {"job": "a", "row": {"n": 2}}]
    (tmp_path / "results.jsonl").write_text("\n".join(map(json.dumps, lines + again)) + '\n{"job": "a", "ro')
    assert gpu.read(tmp_path) == {"a": {"rows": [{"n": 1}], "outcome": "passed", "seconds": 1}}, "the run that passed"
    ended = {"job": "a", "outcome": "failed", "error": "", "seconds": 1}
    (tmp_path / "results.jsonl").write_text("\n".join(map(json.dumps, [*lines, *again, ended])))
    assert gpu.read(tmp_path)["a"] == {"rows": [{"n": 2}], "outcome": "failed", "error": "", "seconds": 1}


def test_without_a_gpu_one_line_says_so_and_the_plan_prints(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks/gpu.py"), "--out", str(tmp_path / "none")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 1 and not (tmp_path / "none").exists()
    done = subprocess.run([*command, "--plan", "--processes", "1"], capture_output=True, text=True)
    *plan, total = done.stdout.splitlines()
    names = [line[10:].strip() for line in plan]
    assert done.returncode == 0 and names[0] == "machine" and len(names) > 80
    seconds = sum(float(line[:6]) for line in plan)
    assert seconds == pytest.approx(float(total[:6]), abs=len(plan))
    done = subprocess.run([*command, "--plan", "--processes", "12"], capture_output=True, text=True)
    assert float(done.stdout.splitlines()[-1][:6]) < 2400, "forty minutes on a machine with a GPU"
    first = ["right: softmax 300 x 1,000", "tests: test_timing", "ready: kernels: rope 65,536 x 4,096"]
    then = ["fp8: linear 8,192 x 8,192 x 8,192", "ready: kernels: rope 16,384 x 1,024", "kernels: rope 16,384 x 1,024"]
    order = [names.index(name) for name in first + then]
    assert order == sorted(order), "is it right; the sizes that count; the rest"


# All of it, interpreted.


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """What is known of each job after a run on the CPU."""
    out = tmp_path_factory.mktemp("everything") / "run"
    done = run(out, "--budget", "100000", jobs="gpu_jobs")
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        known = __import__("gpu").read(out)
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    assert done.returncode == 0, done.stdout + (out / "log.txt").read_text()[-3000:]
    return known


def rows_of(everything, start: str, table: str) -> list[dict]:
    found = [row for name, job in everything.items() if name.startswith(start) for row in job["rows"]]
    return [row for row in found if row["table"] == table]


@pytest.mark.nightly
def test_all_jobs_run_on_a_cpu(everything):
    skipped = {name for name, job in everything.items() if job["outcome"] == "skipped"}
    assert {job["outcome"] for job in everything.values()} <= {"passed", "skipped"}
    assert {name.partition(":")[0] for name in skipped} <= {"step", "sectors", "sanitizer", "tests"}  # of a GPU
    ranks = {name: job["rows"][0] for name, job in everything.items() if name.startswith("ranks: ")}
    assert ranks and all(max(row["losses apart"], row["weights apart"]) < 1e-4 for row in ranks.values())
    steps = [job["rows"][0] for name, job in everything.items() if name.startswith("step: ") and name not in skipped]
    ways = {row["way"]: row["losses"] for row in steps}
    assert len(ways) == 6 and all(losses == pytest.approx(ways["eager"], abs=0.05) for losses in ways.values())
    pairs = {row["pair"]: row["ratio"] for row in everything["in turns: FP8, blocks"]["rows"]}
    assert pairs.keys() == {"FP8, blocks against kernels", "kernels against itself"} and min(pairs.values()) > 0


@pytest.mark.nightly
def test_every_kernel_runs_agrees_and_gets_a_row(everything):
    rows = rows_of(everything, "kernels: ", "rows")
    assert {row["kernel"] for row in rows} == {
        "softmax", "rms_norm", "add + rms_norm", "swiglu", "elu", "rope", "linear_cross_entropy", "adamw_step",
        "adamw, one launch", "matmul",
    }  # fmt: skip
    for row in rows:
        if row["pass"] != "peak":
            rival = "PyTorch" if row["kernel"] == "adamw, one launch" else "eager"
            assert row["ms"].keys() >= {"ours", rival} and max(row["errors"].values()) < 1e-3
    (peak,) = [row for row in rows if row["pass"] == "peak"]
    assert peak["mib"].keys() >= {"ours", "eager"}


@pytest.mark.nightly
def test_every_attention_runs_agrees_and_gets_rows(everything):
    rows = rows_of(everything, "attention: ", "rows")
    kinds = ("attention", "attention, 2/1", "attention, documents")
    assert {(row["kernel"], row["pass"]) for row in rows} == {
        (kind, name) for kind in kinds for name in ("forward", "backward", "peak")
    }
    for row in rows:
        rivals = {"padded"} if row["kernel"] == "attention, documents" else {"flash", "math"}
        figures = [row["mib"]] if row["pass"] == "peak" else [row["ms"], row["rates"], row["errors"]]
        assert all(each.keys() == {"ours"} | rivals for each in figures)
        assert all(value > 0 for each in figures for value in each.values())
        if row["pass"] != "peak":
            assert max(row["errors"].values()) < 1e-5 and row["unit"] == "TFLOP/s"
    (rung,) = rows_of(everything, "attention: ", "rungs")
    there = {"first", *STEPS, "ours", "hopper", "hopper, overlapped", "flash"}
    assert rung["ms"].keys() == rung["rates"].keys() == rung["errors"].keys() == there
    assert max(rung["errors"].values()) < 1e-5 and rung["pass"] == "forward"


@pytest.mark.nightly
def test_every_product_runs_agrees_and_gets_a_row(everything):
    """Ours are right to float32's rounding; who quantizes otherwise, or not, is some percent away."""
    rows = rows_of(everything, "fp8: ", "products")
    assert len(rows) == 4
    for row in rows:
        of_blocks = "128" in row["kernel"]
        rivals = {"scaled_mm", "fast", "BF16"}
        assert row["ms"].keys() == {"ours", *rivals} | ({"plain"} if of_blocks else set())  # blockwise is for Hopper
        assert row["errors"]["ours"] < 1e-6 and row["errors"].get("plain", 0) < 1e-6
        assert 0.01 < row["errors"]["BF16"] < 0.1
        assert (row["errors"]["scaled_mm"] > 0.01) == (row["kernel"] != "product, tensor")  # a scale a matrix on CPUs


@pytest.mark.nightly
def test_every_cast_is_that_of_pytorch_to_the_bit(everything):
    rows = rows_of(everything, "fp8: ", "casts")
    assert len(rows) == 10
    assert all(row["errors"] == {"ours": 0.0, "eager": 0.0} and row["unit"] == "GB/s" for row in rows)


@pytest.mark.nightly
def test_every_layer_runs_and_is_near_bf16s(everything):
    rows = rows_of(everything, "fp8: ", "layers")
    assert [row["pass"] for row in rows] == ["forward", "backward", "forward and backward", "peak"]
    there = {"ours", "kept", "blocks", "BF16"} | ({"torchao"} if importlib.util.find_spec("torchao") else set())
    for row in rows[:3]:
        assert row["ms"].keys() == there
        assert all(0.01 < row["errors"][column] < 0.1 for column in there - {"BF16"})


@pytest.mark.nightly
def test_figures_are_written_with_what_misses_its_aim(everything, monkeypatch):
    """From rows of this run, as if a GPU had made them."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    gpu_jobs, saved = __import__("gpu_jobs"), {}
    monkeypatch.setattr(gpu_jobs, "save", lambda name, figures, where: saved.update({f"{name}_{where}": figures}))
    assert len(list(gpu_jobs.record(everything))) == 1 and not saved, "a CPU's times are not written down"
    (row,) = everything["machine"]["rows"]
    of_gpu = everything | {"machine": {"rows": [row | {"machine": "NVIDIA H200", "date": "2026-01-31", "threads": 7}]}}
    said = list(gpu_jobs.record(of_gpu))
    assert saved.keys() == {"kernels_h200", "attention_h200", "fp8_h200", "steps_h200"}
    assert saved["attention_h200"]["rungs"] and saved["fp8_h200"]["casts"] and saved["steps_h200"]["machine"]
    assert any(line.startswith("missed: a step with the kernels") for line in said), "interpreted, they are slow"
    assert {(figures["date"], figures["threads"]) for figures in saved.values()} == {("2026-01-31", 7)}, "the run's own"


def test_an_fp8_step_is_recorded_and_shown_beside_a_bf16_step_of_the_same_run(monkeypatch):
    """README's FP8 row once divided a time of one session by that of another."""
    file_tables = pytest.importorskip("measured", exc_type=ImportError).file_tables  # it needs Sphinx
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    gpu_jobs, saved = __import__("gpu_jobs"), {}
    monkeypatch.setattr(gpu_jobs, "save", lambda name, figures, where: saved.update({name: figures}))
    ratio = {"ours_ms": 98.0, "rival_ms": 100.0, "ratio": 0.98, "ratio_min": 0.91, "ratio_max": 1.07}
    pairs = "FP8, blocks against kernels", "kernels against itself"
    rows = {
        "machine": [{"machine": "NVIDIA H200"}],
        "step: kernels": [{"way": "kernels", "step_s": 0.1}],
        "in turns: FP8, blocks": [{"pair": pair, **ratio} for pair in pairs],
    }
    list(gpu_jobs.record({name: {"rows": each, "outcome": "passed"} for name, each in rows.items()}))
    assert saved["steps"]["in turns"] == dict.fromkeys(pairs, ratio)
    (line,) = [line for line in "\n".join(file_tables(saved["steps"])).splitlines() if "FP8, blocks" in line]
    cells = [cell.strip() for cell in line.split("|")[1:-1]]
    assert cells[1] == "FP8, blocks against kernels" and cells[4] == "0.98" and "0.91" in cells[6], "with its noise"


def test_recorded_files_are_those_of_the_recorded_run(tmp_path, gpu, monkeypatch):
    gpu_jobs, saved, results = __import__("gpu_jobs"), {}, ROOT / "benchmarks/results"
    monkeypatch.setattr(gpu_jobs, "save", lambda name, figures, where: saved.update({f"{name}_{where}": figures}))
    shutil.copy(results / "gpu_run_h200.jsonl", tmp_path / "results.jsonl")
    missed = [line for line in gpu_jobs.record(gpu.read(tmp_path)) if line.startswith("missed: ")]
    ends = "(notebook 13)", "training uses cuBLAS's", "bytes take", "not measured again", "the reason is not known"
    assert all(line.endswith(ends) for line in missed)
    assert "barriers that Triton does not offer" in next(line for line in missed if "cuDNN" in line)
    assert saved.keys() == {"kernels_h200", "attention_h200", "fp8_h200", "steps_h200"}
    for name, figures in saved.items():
        kept = json.loads((results / f"{name}.json").read_text())
        assert {key: kept[key] for key in figures} == figures, name


def test_failed_tests_are_named(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    file = tmp_path / "test_two.py"
    file.write_text("def test_right():\n    pass\n\n\ndef test_off():\n    assert 1 == 2\n")
    rows = __import__("gpu_jobs").tests("not gpu", str(file))
    assert next(rows) == {"file": str(file), "failed": 1, "passed": 1, "failures": ["test_off - assert 1 == 2"]}
    with pytest.raises(AssertionError, match="1 failed, 1 passed"):
        next(rows)


KERNEL = "hopper_block_matmul_kernel"
SANITIZER = """#!{python}
import subprocess, sys
subprocess.run(sys.argv[sys.argv.index("20") + 1 :], check=True)
for line in range({line}, {line} + {found}):
    print("========= Error: Race reported between Read access at", f"{kernel}+0x130 in hopper.py:{{line}}")
    print("=========     and Write access at {kernel}+0x60f0 in hopper.py:112 [20 hazards]")
print("========= RACECHECK SUMMARY: {found} hazards displayed ({found} errors, 0 warnings)")
"""


@pytest.mark.parametrize("found, passes", [(1, True), (2, False)])
def test_reads_of_tritons_dispatch_are_told_from_races(tmp_path, monkeypatch, found, passes):
    """A stand-in for racecheck: one of its hazards is at a kernel's first line."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    gpu_jobs, program = __import__("gpu_jobs"), tmp_path / "compute-sanitizer"
    lines = (ROOT / "course_lib/fp8/hopper.py").read_text().splitlines()
    (line,) = [number for number, text in enumerate(lines, 1) if text.startswith(f"def {KERNEL}(")]
    program.write_text(SANITIZER.format(python=sys.executable, kernel=KERNEL, line=line, found=found))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    rows = gpu_jobs.sanitized("racecheck", "cpu", ["memory"])
    assert next(rows) == {"tool": "racecheck", "kernels": 1, "found": found - 1, "of Triton's dispatch": 1}
    if passes:
        assert not list(rows)
    else:
        with pytest.raises(AssertionError, match="1 errors; 1 of 1 passed"):
            next(rows)
