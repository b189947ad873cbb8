"""course_kit.planning.tested_layouts: the table of tested layouts is made from the files of runs and covers all."""

import dataclasses

import numpy as np
import pytest

from course_kit.planning.published_runs import load_published
from course_kit.planning.tested_layouts import DATA, FILE, PUBLISHED, largest_rows, measured_rows, write_table
from course_lib.best_config.clusters import CLUSTERS
from course_lib.best_config.runs import alike, load_runs
from course_lib.best_config.tables import LayoutTable
from course_lib.best_config.tested import is_tested, untested
from course_lib.five_d.layouts import Layout
from course_lib.single_gpu.devices import read_table


def test_the_table_is_what_the_files_of_runs_make(tmp_path):
    write_table(tmp_path / "table.csv")
    remedy = "run python -m course_kit.planning.tested_layouts"
    assert (tmp_path / "table.csv").read_text() == FILE.read_text(), remedy


def test_each_run_of_the_playbook_is_tested():
    runs = [run for run in load_runs(DATA / "layout_runs_h100.csv") if run.ok]
    assert len(runs) > 800
    for rows in alike(runs):
        run, table = runs[rows[0]], LayoutTable.of(runs[i].layout for i in rows)
        assert np.all(is_tested(run.config, CLUSTERS["H100, EFA"], table, run.seq, run.moe, run.batch))


@pytest.mark.parametrize("file, least", zip(PUBLISHED, (80, 200), strict=True))
def test_each_published_run_is_tested_but_those_of_deepspeed(file, least):
    runs = load_published(DATA / file)
    assert len(runs) >= least
    for run in runs:
        cluster = CLUSTERS[run.gpu].with_software(matmul_dtype="fp8" if run.dtype == "fp8" else "bf16")
        found = untested(run.config, cluster, run.layout, run.seq, batch=run.batch)
        if "DeepSpeed" in run.source and run.gpus > 2 * 512:
            assert found[0] == "ZeRO-3 on more than 512 GPUs"
        else:
            assert found == (), run


def test_each_row_of_the_table_is_a_layout_of_its_gpus():
    for row in read_table("tested_layouts.csv"):
        layout = Layout.parse(row["layout"])
        assert layout.ranks == int(row["gpus"]) and row["gpu"] in CLUSTERS and row["source"]
        assert str(layout) == row["layout"]


def test_only_rows_that_another_covers_are_left_out():
    row = next(iter(measured_rows())) | {"layout": "dp8,zero1", "gpus": 8}
    wider = row | {"layout": "dp16,zero1", "gpus": 16}
    others = [
        row | change for change in ({"seq": 8192}, {"gpu": "A100"}, {"layout": "dp8,zero1,full"}, {"program": "x"})
    ]
    assert largest_rows([row, wider, row, *others]) == [wider, *others]
    assert largest_rows([row, row]) == [row]
    zero2 = row | {"layout": "dp8,zero2"}
    assert len(largest_rows([row, row | {"micro_batches": 999}])) == 1
    assert len(largest_rows([zero2, zero2 | {"gpus": 8, "micro_batches": 999}])) == 1
    longer = dataclasses.replace(Layout.parse("dp8,zero2"), micro_batch=2)
    assert len(largest_rows([zero2 | {"micro_batches": 999}, zero2 | {"layout": str(longer), "seq": 10**6}])) == 2
