"""Measured runs from the CSV of a sweep (`python -m course_kit.sweep`), which runs the course's own program.

runs = read_sweep("sweep.csv")
calibrate(runs, of_program(CLUSTERS["H100"], runs[0].dtype))
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from course_lib.best_config.calibration import MEMORY, TIME
from course_lib.best_config.clusters import Cluster
from course_lib.best_config.run_files import OUT_OF_MEMORY
from course_lib.best_config.runs import MeasuredRun, numbered_rows
from course_lib.best_config.software import SOFTWARE
from course_lib.expert_parallel.sizes import moe_options
from course_lib.five_d.layouts import Layout
from course_lib.single_gpu.config import PRESETS

COLUMNS = {"model", "nodes", "layout", "global_batch_seqs", "seq", "steps", "options", "ok", "why", "step_s"}
COLUMNS |= {"peak_mem_gb"}
KEY = ("model", "nodes", "layout", "global_batch_seqs", "seq", "steps", "options")  # identifies a run
BYTES: dict[str, dict[str, Any]] = {  # per parameter, of the course's program by dtype
    "bf16": {"weight_bytes": 2, "gradient_bytes": 4, "optimizer_bytes": 12},
    "fp32": {"weight_bytes": 4, "gradient_bytes": 4, "optimizer_bytes": 8},
}
RATES = (  # constants that may start from another program's: of the machine, and those that a calibration fits
    *TIME, *MEMORY, "logit_bytes", "attention_efficiency", "expert_spread", "longest_ring", "stall_nodes",
    "held_nodes", "unusable_bytes", "memory_spread",
)  # fmt: skip


def of_program(cluster: Cluster, dtype: str) -> Cluster:
    """Return the cluster with the course's program in this dtype, "bf16" or "fp32", and the RATES of the cluster."""
    rates = {name: getattr(cluster.software, name) for name in RATES}
    return replace(cluster, software=replace(SOFTWARE["course"], **BYTES[dtype], **rates))


def dtype_and_experts(options: Iterable[str]) -> tuple[str, dict | None]:
    """Return the dtype of a run with these options of the training program, and its experts: arguments of apply_moe, or
    None. Raises ValueError for options that contradict each other.
    """
    parser = argparse.ArgumentParser(prog="sweep", add_help=False, allow_abbrev=False)
    parser.add_argument("--dtype", choices=list(BYTES))
    for name in ("--experts", "--top-k", "--expert-hidden", "--shared"):
        parser.add_argument(name, type=int)
    args, _ = parser.parse_known_args([*options])  # the program checks the others
    return args.dtype or default_dtype(), moe_options(args)


def default_dtype() -> str:
    """Return the dtype of the training program's matmuls on this machine."""
    import torch

    return "bf16" if torch.cuda.is_available() else "fp32"


def measured_run(row: dict, where: str = "") -> MeasuredRun:
    """Return the run in a row, whose values may be text. Raises ValueError for a model that is no preset, and for
    impossible values.
    """
    if row["model"] not in PRESETS:
        raise ValueError(f"model {row['model']!r} is none of {', '.join(PRESETS)}")
    dtype, moe = dtype_and_experts(row["options"].split())
    ok = bool(int(row["ok"]))
    step_s, peak = (float(row[name]) if ok else math.nan for name in ("step_s", "peak_mem_gb"))
    failure = "" if ok else "oom" if OUT_OF_MEMORY.search(row["why"]) else "other"
    sizes = int(row["global_batch_seqs"]), int(row["seq"])
    name, nodes, layout = row["model"], int(row["nodes"]), Layout.parse(row["layout"])
    return MeasuredRun(name, PRESETS[name], nodes, layout, *sizes, ok, step_s, peak * 2**30, dtype, moe, failure, where)


def read_sweep(file: Path | str) -> list[MeasuredRun]:
    """Read the runs of a sweep's CSV; if a run was tried again, its later row. Raises ValueError, with file and line,
    for an impossible value, and for a file without rows.
    """
    runs = {}
    for where, row in numbered_rows(file):
        try:
            runs[tuple(row[name] for name in KEY)] = measured_run(row, where)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    return list(runs.values())
