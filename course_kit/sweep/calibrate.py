"""The planner's constants from a sweep of this machine: `python -m course_kit.sweep --calibrate ours.toml`.

The layouts are those whose runs tell most (`informative`), of those that the planner says fit. Their rows are in the
sweep's CSV, so a calibration that was stopped goes on where it was. Under Slurm it is done in two: --calibrate with
--slurm FOLDER writes the jobs, --calibrate with --collect FOLDER fits to what they have done. The constants are of the
course's own program on this cluster: other programs' runs are read by `course_lib.best_config.run_files`.

A machine that no data sheet describes, such as a CPU, has a TOML file of its own: the peak is then that of one rank's
matrix products in the program's dtype, as measured. What it says is a scale for the constants that are fitted, no more.
"""

import math
from collections.abc import Iterable
from pathlib import Path

from course_kit.sweep.rows import Rows
from course_lib.best_config.calibration import calibrate
from course_lib.best_config.clusters import CLUSTERS, SOFTWARE, Cluster
from course_lib.best_config.fit_reports import Calibration
from course_lib.best_config.hardware import load_cluster
from course_lib.best_config.runs import MeasuredRun
from course_lib.checkpoint import program as five_d
from course_lib.expert_parallel.mixture import moe_options
from course_lib.five_d.layouts import Layout
from course_lib.single_gpu.model import PRESETS

BYTES = {  # of the course's program, by dtype; of a parameter: weights, gradients, Adam's states and FP32 weights
    "bf16": {"weight_bytes": 2, "gradient_bytes": 4, "optimizer_bytes": 12},
    "fp32": {"weight_bytes": 4, "gradient_bytes": 4, "optimizer_bytes": 8},
}

PROGRAM = ("order", "split", "gathers_again", "needs_full_pipeline", "held", "sharded_overlap", "products")


def named_cluster(name: str) -> Cluster:
    """A cluster by its name, or from a TOML file. Raises ValueError where it is neither."""
    if name in CLUSTERS:
        return CLUSTERS[name]
    if not Path(name).is_file():
        raise ValueError(f"--cluster {name}: no file, and none of {'; '.join(CLUSTERS)}")
    return load_cluster(name)


def of_program(cluster: Cluster, dtype: str) -> Cluster:
    """The cluster with what the course's program keeps and does; its rates are the cluster's."""
    return cluster.with_software(**BYTES[dtype], **{name: getattr(SOFTWARE["course"], name) for name in PROGRAM})


def said_by(preset: str, options: Iterable[str]) -> tuple[str, dict | None]:
    """The dtype of a run with these options of five_d, and its experts: arguments of apply_moe."""
    chosen = five_d.program_parser().parse_args(["--preset", preset, *options])
    return chosen.dtype, moe_options(chosen)


def measured_run(row: dict) -> MeasuredRun:
    """A row of a sweep."""
    dtype, moe = said_by(row["model"], row["options"].split())
    peak = row["peak_mem_gb"] * 2**30 if row["ok"] else math.nan
    return MeasuredRun(
        model=row["model"],
        config=PRESETS[row["model"]],
        nodes=row["nodes"],
        layout=Layout.parse(row["layout"]),
        batch=row["global_batch_seqs"],
        seq=row["seq"],
        ok=bool(row["ok"]),
        step_s=row["step_s"] if row["ok"] else math.nan,
        peak_bytes=peak,
        dtype=dtype,
        moe=moe,
    )


def load_sweep(csv: Path | str) -> list[MeasuredRun]:
    """The runs of a sweep's CSV; of one that was tried again, the later. Raises ValueError for another file, and where
    there are none.
    """
    if not Path(csv).is_file():
        raise ValueError(f"{csv}: there is no such file")
    with Rows(Path(csv)) as rows:
        found = [measured_run(row) for row in rows.found.values()]
    if not found:
        raise ValueError(f"{csv} has no rows")
    return found


def calibrate_rows(rows: Iterable[dict], cluster: Cluster) -> Calibration:
    """The cluster's constants, fitted to rows of a sweep that ran the course's program in one dtype."""
    runs = [measured_run(row) for row in rows]
    return calibrate(runs, of_program(cluster, runs[0].dtype))
