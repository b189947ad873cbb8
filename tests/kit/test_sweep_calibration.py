"""course_kit.sweep --calibrate, without a process: the runs' rows are there already, made with other constants than the
cluster's, and the cluster that it saves has these.
"""

import dataclasses
import math
from pathlib import Path

import pytest

from course_kit.sweep import program as sweep
from course_kit.sweep.rows import Rows
from course_kit.sweep.runs import Run, refused, settings
from course_lib.best_config.clusters import Cluster
from course_lib.best_config.hardware import load_cluster
from course_lib.best_config.planner import estimate
from course_lib.best_config.sweep_files import of_program, read_sweep
from course_lib.five_d.layouts import Layout
from course_lib.single_gpu.model import PRESETS

CPU = Path(__file__).parents[2] / "data" / "clusters" / "cpu.toml"
LINE = f"--preset debug --ranks 2 --batch 32 --seq 128 --runs 16 --cluster {CPU}"
CHANGED = {"matmul_efficiency": 0.5, "nvlink_efficiency": 0.3, "kept_ffn": 6.0}


def made_with(cluster: Cluster, runs: list[Run]) -> list[dict]:
    """Rows with the times and peaks that a cluster predicts."""
    found = []
    for run in runs:
        said = estimate(PRESETS[run.preset], cluster, run.layout, run.batch, run.seq)
        measured = {"ok": 1, "step_s": float(said.step_s), "peak_mem_gb": float(said.peak_bytes) / 2**30}
        found.append(settings(run) | measured | {"seconds": 1.0})
    return found


@pytest.fixture
def truth() -> Cluster:
    """The CPU, by the course's program in float32; large enough for a step that its host is not waited for."""
    found = of_program(load_cluster(CPU), "fp32")
    return found.with_software(**CHANGED)


def test_the_saved_cluster_predicts_the_runs(tmp_path, capsys, truth):
    csv, toml = tmp_path / "a.csv", tmp_path / "ours.toml"
    line = [*LINE.split(), "--csv", str(csv), "--calibrate", str(toml)]
    _, runs = sweep.options(line)
    assert len(runs) == 16 and not csv.exists() and not toml.exists()
    with Rows(csv) as rows:
        for row in made_with(truth, runs[1:]):
            rows.add(row)
        rows.add(refused(runs[0], "a crash", "2026-01-01"))
    sweep.main(line)
    said, saved = capsys.readouterr().out, load_cluster(toml)
    assert said.count("(there already)") == 16 and "fitted to 15 runs" in said
    assert said.endswith(f"saved to {toml}\n") and "tokens/s off by 0.0%, before by" in said
    for run in runs:
        one, other = (estimate(PRESETS["debug"], each, run.layout, 32, 128) for each in (saved, truth))
        assert float(one.step_s) == pytest.approx(float(other.step_s), rel=0.01)
        assert float(one.peak_bytes) == pytest.approx(float(other.peak_bytes), rel=0.01)
    assert saved.software.optimizer_bytes == 8 and saved.peak_flops == load_cluster(CPU).peak_flops


def test_jobs_of_slurm_are_fitted_when_they_are_collected(tmp_path, monkeypatch, capsys, truth):
    """--slurm writes the jobs of the same layouts, with as many GPUs a node as the cluster has."""
    (tmp_path / "two.toml").write_text(CPU.read_text() + "network_gb_s = 1\n")
    line = f"{LINE} --ranks 4 --csv {tmp_path}/a.csv --calibrate {tmp_path}/ours.toml --cluster {tmp_path}/two.toml"
    _, runs = sweep.options([*line.split(), "--slurm", str(tmp_path / "jobs")])
    assert {run.nodes for run in runs} == {2} and {run.layout.ranks for run in runs} == {4}
    truth = dataclasses.replace(truth, network=1e9)
    monkeypatch.setattr(sweep, "collect", lambda folder, csv: made_with(truth, runs))
    sweep.main([*line.split(), "--collect", str(tmp_path / "jobs")])
    saved = load_cluster(tmp_path / "ours.toml")
    for run in runs:
        one, other = (estimate(PRESETS["debug"], each, run.layout, 32, 128) for each in (saved, truth))
        assert float(one.step_s) == pytest.approx(float(other.step_s), rel=0.03)


@pytest.mark.parametrize(
    "line, status, words",
    [
        ("--calibrate a.toml --cluster T9000", 2, "--cluster T9000: No such file or directory, and it is none of H100"),
        ("--calibrate missing/a.toml", 2, "there is no folder missing"),
        ("--calibrate a.toml --runs 0", 2, "are above 0"),
        ("--calibrate a.toml --preset llama3-405B --ranks 2", 2, "no layout leaves a fifth of the memory free"),
    ],
)
def test_a_bad_option_gets_one_error(line, status, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        sweep.main(line.split())
    assert ended.value.code == status and words in capsys.readouterr().err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_too_few_runs_end_the_program_and_save_nothing(tmp_path):
    line = f"--layouts dp16 --csv {tmp_path}/a.csv --calibrate {tmp_path}/a.toml --cluster {CPU}"
    with pytest.raises(SystemExit, match="sweep: fit: none of 1 runs was ok"):
        sweep.main(line.split())
    assert not (tmp_path / "a.toml").exists()


def test_a_sweeps_csv_is_read_back(tmp_path, truth):
    """With the dtype and the experts of its options; of a run that was tried again, the later row."""
    options = tuple("--dtype bf16 --experts 4 --expert-hidden 8".split())
    runs = [Run("debug", Layout.parse(words), 32, 128, 6) for words in ("dp2,zero1", "tp2,sp")]
    runs[1] = dataclasses.replace(runs[1], options=options)
    csv = tmp_path / "a.csv"
    with Rows(csv) as rows:
        rows.add(refused(runs[0], "a crash", "2026-01-01"))
        for row in made_with(truth, runs):
            rows.add(row)
    first, second = read_sweep(csv)
    assert (first.config, first.layout, first.nodes) == (PRESETS["debug"], runs[0].layout, 1)
    assert (first.batch, first.seq, first.ok, first.moe) == (32, 128, True, None)
    assert first.step_s == pytest.approx(made_with(truth, runs)[0]["step_s"]) and first.peak_bytes > 2**20
    assert second.dtype == "bf16" and second.moe == {"experts": 4, "top_k": 2, "ffn_hidden": 8}
    with Rows(csv) as rows:
        rows.add(refused(dataclasses.replace(runs[0], steps=7), "a crash", "2026-01-01"))
    failed = read_sweep(csv)[-1]
    assert not failed.ok and math.isnan(failed.step_s) and math.isnan(failed.peak_bytes)
