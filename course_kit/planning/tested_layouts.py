"""The table of tested layouts that the installed planner reads, generated from the files of measured runs.

    python -m course_kit.planning.tested_layouts        writes course_lib/data/tested_layouts.csv

The table has the runs that the planner is fitted to or compared with, and the mixtures. DeepSpeed's runs with ZeRO-3
(Narayanan et al. 2021) are left out: with 144 TFLOP/s on 384 GPUs and 44 on 1,536, their program waits for its gathers,
and backs no estimate of a program that hides them, as FSDP does.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from course_kit.planning.published_runs import PublishedRun, load_published
from course_kit.planning.questions import mixture_jobs
from course_lib.best_config.planned_config import count_parameters
from course_lib.best_config.runs import MeasuredRun, load_runs
from course_lib.best_config.tested import DEGREES, MeasuredLayouts

DATA = Path(__file__).parents[2] / "data"
FILE = Path(__file__).parents[2] / "course_lib" / "data" / "tested_layouts.csv"
PUBLISHED = ("published_throughput.csv", "fsdp_runs_llm_foundry.csv")


def measured_rows(data: Path = DATA) -> Iterator[dict]:
    """Yield the runs that ended as rows of the table."""
    for measured in load_runs(data / "layout_runs_h100.csv"):
        if measured.ok:
            yield row_of("nanotron", "The Ultra-Scale Playbook", "H100", measured)
    for file in PUBLISHED:
        for run in load_published(data / file):
            if "DeepSpeed" not in run.source:
                yield row_of(run.program, run.source, run.gpu, run)
    for job in mixture_jobs(data / PUBLISHED[0]):
        yield row_of(job.run.program, job.run.source, job.run.gpu, job.run, job.moe)


def row_of(program: str, source: str, gpu: str, run: MeasuredRun | PublishedRun, moe: dict | None = None) -> dict:
    """Return a run as a row of the table. moe: of a mixture, arguments of apply_moe."""
    return {
        "program": program,
        "gpu": gpu,
        "model": "mixture" if moe else "dense",
        "params_b": float(f"{count_parameters(run.config, moe)[0] / 1e9:.2g}"),
        "seq": run.seq,
        "micro_batches": run.batch // (run.layout.dp * run.layout.micro_batch),
        "matmuls": "fp8" if run.dtype == "fp8" else "bf16",
        "gpus": run.layout.ranks,
        "layout": str(run.layout),
        "source": source,
    }


def largest_rows(rows: list[dict]) -> list[dict]:
    """Return the rows that no row of the same program, GPU and techniques covers, which is as large in every size."""
    runs = MeasuredLayouts.of([{name: str(value) for name, value in row.items()} for row in rows])
    used = np.array(list(runs.techniques.values()))
    columns = [runs.table.ranks, runs.params_b, runs.seq, *(getattr(runs.table, name) for name in DEGREES)]
    columns += [np.where(runs.table.zero_stage >= 2, runs.micro_batches, 0)]
    sizes, kinds = np.array(columns).T, dict[tuple, list[int]]()
    for i, row in enumerate(rows):
        kinds.setdefault((row["program"], row["gpu"], *used[:, i]), []).append(i)
    largest = []
    for same in kinds.values():
        for i in same:
            as_large = [j for j in same if np.all(sizes[j] >= sizes[i])]
            largest += [i] if not any(j < i or np.any(sizes[j] > sizes[i]) for j in as_large) else []
    return [rows[i] for i in largest]


def write_table(file: Path) -> None:
    """Write the table as CSV."""
    rows = largest_rows(list(measured_rows()))
    with open(file, "w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    write_table(Path(sys.argv[1]) if len(sys.argv) > 1 else FILE)
