"""course_lib.best_config.run_files and predict: runs from any CSV, with their own batch and length; an error names its
line.
"""

import csv
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from course_lib.best_config.clusters import CLUSTERS
from course_lib.best_config.planner import estimate
from course_lib.best_config.run_files import read_runs
from course_lib.best_config.runs import MeasuredRun, predict
from course_lib.five_d.layouts import Layout
from course_lib.single_gpu.model import PRESETS, ModelConfig

COLUMNS = {
    "model": "preset", "nodes": "hosts", "layout": "layout", "batch": "sequences", "seq": 8192,
    "step_s": {"column": "ms", "factor": 1e-3}, "peak_bytes": {"column": "gib", "factor": 2**30},
}  # fmt: skip
ROW = {"preset": "llama3-8B", "hosts": "2", "layout": "dp8,tp2,sp,zero1", "sequences": "512", "ms": "9000", "gib": "40"}
SIZES = {"layers": 4, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn_hidden": 128, "vocab": 512}


def file_of(tmp_path: Path, *rows: dict) -> Path:
    """A CSV of these rows."""
    file = tmp_path / "ours.csv"
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return file


def run_from(tmp_path: Path, columns: dict, **changes) -> MeasuredRun:
    """The run of ROW with changes, by COLUMNS with others."""
    columns = {name: place for name, place in (COLUMNS | columns).items() if place is not None}
    return read_runs(file_of(tmp_path, ROW | changes), columns)[0]


def test_a_row_by_a_map_of_its_columns(tmp_path):
    layout = Layout(dp=8, tp=2, sequence_parallel=True, zero_stage=1)
    expected = MeasuredRun("llama3-8B", PRESETS["llama3-8B"], 2, layout, 512, 8192, True, 9.0, 40 * 2**30)
    assert run_from(tmp_path, {}) == expected


def test_the_map_can_be_a_toml_file(tmp_path):
    words = "\n".join(
        f'{name} = "{place}"' if isinstance(place, str) else f"{name} = {place}" for name, place in COLUMNS.items()
    )
    toml = tmp_path / "columns.toml"
    toml.write_text(words.replace("': ", "' = "))  # {'column' = 'ms', 'factor' = 0.001}
    assert read_runs(file_of(tmp_path, ROW), toml) == read_runs(file_of(tmp_path, ROW), COLUMNS)


@pytest.mark.parametrize(
    "columns, changes, step_s",
    [
        ({"step_s": None, "tokens_per_s": "speed"}, {"speed": "512000"}, 512 * 8192 / 512000),
        ({"step_s": None, "tokens_per_s_per_gpu": "speed"}, {"speed": "32000"}, 512 * 8192 / 512000),
        ({"step_s": "ms"}, {}, 9000),
    ],
)
def test_times_in_any_unit(tmp_path, columns, changes, step_s):
    assert run_from(tmp_path, columns, **changes).step_s == pytest.approx(step_s)


def test_layouts_by_their_fields(tmp_path):
    degrees = {"layout": None, "gpus": "gpus", "tp": "tp", "pp": "pp", "zero_stage": "zero", "sequence_parallel": "sp"}
    row = {"gpus": "32", "tp": "4", "pp": "2", "zero": "0", "sp": "True", "recompute": "full"}
    found = run_from(tmp_path, degrees | {"recompute": "recompute", "micro_batch": 2}, **row)
    assert found.layout == Layout(dp=4, pp=2, tp=4, sequence_parallel=True, micro_batch=2, recompute="full")
    assert run_from(tmp_path, degrees, **row | {"tp": "1"}).layout == Layout(dp=16, pp=2), "sp has nothing to split"


def test_models_by_their_sizes_or_by_name(tmp_path):
    config = ModelConfig(*SIZES.values(), tied=True)
    assert run_from(tmp_path, SIZES | {"tied": True, "model": None}).config == config
    assert read_runs(file_of(tmp_path, ROW | {"preset": "ours"}), COLUMNS, {"ours": config})[0].config == config


def test_mixtures_dtypes_and_nodes(tmp_path):
    experts = {"experts": 8, "top_k": 2, "expert_hidden": 1024, "dtype": {"value": "fp16"}}
    found = run_from(tmp_path, experts | {"nodes": None, "gpus_per_node": 4})
    assert (found.moe, found.dtype, found.nodes) == ({"experts": 8, "top_k": 2, "ffn_hidden": 1024}, "fp16", 4)
    assert predict([found], CLUSTERS["H100"]).step_s[0] != predict([run_from(tmp_path, {})], CLUSTERS["H100"]).step_s[0]


@pytest.mark.parametrize(
    "columns, changes", [({"ok": "ok"}, {"ok": "0"}), ({"ok": "ok"}, {"ok": ""}), ({}, {"ms": ""})]
)
def test_failed_runs_have_no_numbers(tmp_path, columns, changes):
    found = run_from(tmp_path, columns, **changes)
    assert not found.ok and np.isnan(found.step_s) and np.isnan(found.peak_bytes)


@pytest.mark.parametrize(
    "words, failures",
    [
        ("0 0", ["", ""]),  # the file does not tell
        ("failed OOM", ["other", "oom"]),
        ("CUDA_out_of_memory Failed_(NCCL)", ["oom", "other"]),
        ("Timeout failed", ["other", ""]),
        ("TIMED_OUT RuntimeError:_mushroom", ["other", "other"]),
        ("completed torch.OutOfMemoryError", ["ok", "oom"]),
    ],
)
def test_how_a_run_failed(tmp_path, words, failures):
    """In words of a status column; "failed" alone is something else where other rows say "out of memory"."""
    rows = [ROW | {"status": word.replace("_", " ")} for word in words.split()]
    found = read_runs(file_of(tmp_path, *rows), COLUMNS | {"ok": "status"})
    assert [run.failure if not run.ok else "ok" for run in found] == failures


@pytest.mark.parametrize("why, failure", [("CUDA out of memory", "oom"), ("rank 3 was lost", "other"), ("", "")])
def test_why_a_run_failed(tmp_path, why, failure):
    found = run_from(tmp_path, {"ok": "ok", "why": "reason"}, ok="0", reason=why)
    assert not found.ok and found.failure == failure
    assert run_from(tmp_path, {"why": "reason"}, ms="", reason=why).failure == failure, "without a column ok"
    assert run_from(tmp_path, {"why": "reason"}, reason=why).failure == "" and found.where.endswith("ours.csv, line 2")


def test_a_peak_may_be_missing(tmp_path):
    found = run_from(tmp_path, {"peak_bytes": None})
    assert found.ok and np.isnan(found.peak_bytes)


@pytest.mark.parametrize(
    "columns, changes, words",
    [
        ({"step_s": "seconds"}, {}, "no column 'seconds', where step_s should be; the columns are 'preset', 'hosts'"),
        ({}, {"layout": "dp16,ep8"}, "layout dp16,ep8 has ep 8: name the columns of experts and top_k, or make ep 1"),
        ({"ok": 1}, {"ms": "n/a"}, "step_s is 'n/a', which is no number"),
        ({}, {"ms": "-5"}, "step_s is '-5': it is more than 0"),
        ({}, {"ms": "nan"}, "step_s is 'nan': it is more than 0"),
        ({"ok": 1}, {"ms": ""}, "step_s is '', which is no number"),
        ({"ok": "ok"}, {"ok": "maybe"}, "ok is 'maybe': make it one of 1, true"),
        ({}, {"sequences": "51.5"}, "batch is '51.5': it is a whole number"),
        ({}, {"sequences": "500"}, "batch 500 is not a multiple of dp 8 x mb 1: make it 504"),
        ({}, {"layout": "dp8,tp2,warp"}, "'warp' is not one of"),
        ({"gpus": 32}, {}, "= 16 ranks, and there are 32: make dp 16"),
        ({"layout": None, "gpus": 10, "tp": 4}, {}, "= 8 ranks, and there are 10"),
        ({"layout": None, "gpus": 10, "schedule": {"value": "2f2b"}}, {}, "schedule '2f2b': make it one of"),
        ({}, {"preset": "ours"}, "model 'ours' is none of"),
    ],
)
def test_a_row_that_cannot_be_is_one_line(tmp_path, columns, changes, words):
    columns = {name: place for name, place in (COLUMNS | columns).items() if place is not None}
    file = file_of(tmp_path, ROW | {"ok": "1"}, ROW | {"ok": "1"} | changes)
    with pytest.raises(ValueError) as error:
        read_runs(file, columns)
    assert words in str(error.value) and "\n" not in str(error.value)
    assert str(error.value).startswith(f"{file}, line {3 if changes else 2}: ")


@pytest.mark.parametrize(
    "columns, words",
    [
        ({"sp": "sp"}, "columns: sp is none of layers"),
        ({"batch": None}, "columns: batch is missing"),
        ({"step_s": None}, "columns: step_s or tokens_per_s or tokens_per_s_per_gpu is missing"),
        ({"nodes": None}, "columns: nodes or gpus_per_node is missing"),
        ({"step_s": ["ms"]}, "columns: step_s is ['ms']: a column's name"),
        ({"step_s": {"column": "ms", "factor": "1e-3"}}, "columns: step_s is {'column': 'ms', 'factor': '1e-3'}"),
        ({"step_s": {"columns": "ms"}}, "columns: step_s is {'columns': 'ms'}"),
    ],
)
def test_a_map_that_cannot_be_is_one_line(tmp_path, columns, words):
    with pytest.raises(ValueError) as error:
        run_from(tmp_path, columns)
    assert str(error.value).startswith(words) and "\n" not in str(error.value)


def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path):
    """Spreadsheets write one."""
    file = file_of(tmp_path, ROW)
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert read_runs(file, COLUMNS)[0].model == "llama3-8B"


def test_no_rows_are_an_error(tmp_path):
    file = tmp_path / "ours.csv"
    file.write_text(",".join(ROW) + "\n")
    with pytest.raises(ValueError, match="has no rows"):
        read_runs(file, COLUMNS)


def test_predictions_are_of_each_runs_own_batch_and_length(tmp_path):
    """Runs that differ in one of these, in an order that mixes them."""
    first = run_from(tmp_path, {})
    changes = [{}, {"batch": 1024}, {"seq": 4096}, {"batch": 256, "seq": 2048}, {"config": PRESETS["bench-8B"]}]
    changes.append({"moe": {"experts": 8, "top_k": 2}})
    runs = [dataclasses.replace(first, **each) for each in [*changes, *reversed(changes)]]
    found = predict(runs, CLUSTERS["H100"])
    for i, run in enumerate(runs):
        one = estimate(run.config, CLUSTERS["H100"], run.layout, run.batch, run.seq, run.moe)
        assert (found.step_s[i], found.peak_bytes[i]) == pytest.approx((float(one.step_s), float(one.peak_bytes)))
    assert len(set(found.step_s)) == len(changes)


def test_two_columns_of_one_name_are_refused(tmp_path):
    """Which of the two is read would be chance."""
    file = tmp_path / "ours.csv"
    file.write_text("preset,hosts,sequences,ms,layout,ms\nllama3-8B,1,8,900,dp8,1\n")
    with pytest.raises(ValueError, match="ours.csv: two columns have the name 'ms': rename one"):
        read_runs(file, {name: place for name, place in COLUMNS.items() if name != "peak_bytes"})


def test_rows_of_empty_cells_are_skipped(tmp_path):
    file = file_of(tmp_path, ROW, dict.fromkeys(ROW, ""), ROW)
    assert [run.where for run in read_runs(file, COLUMNS)] == [f"{file}, line {line}" for line in (2, 4)]
