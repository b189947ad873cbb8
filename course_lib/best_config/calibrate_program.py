"""Calibration as a program: measured runs from a CSV in, a cluster for the planner out.

python -m course_lib.best_config calibrate runs.csv --out mine.toml
python -m course_lib.best_config calibrate runs.csv --out mine.toml --column "step_s=iter_ms*1e-3" --column seq=4096
python -m course_lib.best_config --cluster mine.toml --preset llama3-8B --gpus 64
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
from dataclasses import replace
from pathlib import Path

from course_lib.best_config.calibration import calibrate
from course_lib.best_config.clusters import CLUSTERS, Cluster
from course_lib.best_config.fit_reports import Calibration
from course_lib.best_config.hardware import save_cluster
from course_lib.best_config.program import read_cluster
from course_lib.best_config.run_files import KNOWN, TIMES, check_columns, read_columns, read_runs
from course_lib.best_config.runs import MeasuredRun, numbered_rows
from course_lib.best_config.software import SOFTWARE
from course_lib.best_config.sweep_files import COLUMNS as SWEEP
from course_lib.best_config.sweep_files import of_program, read_sweep
from course_lib.single_gpu.config import PRESETS


def calibrate_parser() -> argparse.ArgumentParser:
    """The program's options."""
    parser = argparse.ArgumentParser(
        prog="best_config calibrate",
        usage="python -m course_lib.best_config calibrate RUNS.csv --out CLUSTER.toml [options]; --help lists them",
        description="Fit the planner's constants to measured runs, and save the cluster.",
        epilog=f"Names of columns: {', '.join(KNOWN)}. read_runs in course_lib/best_config/run_files.py explains them.",
    )
    add = parser.add_argument
    add("runs", type=Path, metavar="RUNS.csv", help="a row per run; the CSV of course_kit.sweep is read as it is")
    add("--out", type=Path, required=True, metavar="CLUSTER.toml", help="file to write")
    add("--columns", type=Path, metavar="MAP.toml",
        help="TOML file that says where each value is; default: columns with the planner's names")  # fmt: skip
    add("--column", action="append", default=[], metavar="NAME=COLUMN", dest="more",
        help="also NAME=COLUMN*FACTOR, or NAME=VALUE for one value in all rows; may be repeated")  # fmt: skip
    add("--cluster", default="H100", help=f"to start from: one of {'; '.join(CLUSTERS)}, or a TOML file; default: H100")
    add("--software", choices=list(SOFTWARE), help="program that ran, to start from; default: the cluster's")
    add("--force", action="store_true", help="overwrite the file of --out")
    return parser


def place_of(text: str, header: list[str]) -> dict:
    """Return an option's column, with or without a factor, or a value for all rows, as `read_runs` takes it."""
    if text in header:
        return {"column": text}
    column, _, factor = text.rpartition("*")
    if column not in header:
        return {"value": text}
    try:
        return {"column": column, "factor": float(factor)}
    except ValueError:
        raise ValueError(f"--column: {factor!r} of {text} is not a number") from None


def columns_of(chosen: argparse.Namespace, header: list[str]) -> dict:
    """Return where each value is: by the map, or by the header's names; and by the options, which come first."""
    more = {}
    for option in chosen.more:
        name, equals, text = option.partition("=")
        if not equals:
            raise ValueError(f"--column {option}: make it NAME=COLUMN, NAME=COLUMN*FACTOR or NAME=VALUE")
        more[name.strip()] = place_of(text.strip(), header)
    columns = read_columns(chosen.columns) if chosen.columns else {name: name for name in header if name in KNOWN}
    if set(more) & set(TIMES):
        columns = {name: place for name, place in columns.items() if name not in TIMES}
    return columns | more


def read_input(chosen: argparse.Namespace) -> tuple[list[MeasuredRun], Cluster]:
    """Return the runs, and the cluster to start from. Raises ValueError, in one line, where one can't be read."""
    cluster = read_cluster(chosen.cluster)
    if chosen.software:
        cluster = replace(cluster, software=SOFTWARE[chosen.software])
    header = list(numbered_rows(chosen.runs)[0][1])
    if set(header) >= SWEEP and not chosen.columns and not chosen.more:
        runs = read_sweep(chosen.runs)
        return runs, of_program(cluster, runs[0].dtype)
    columns = columns_of(chosen, header)
    try:
        check_columns(columns)
    except ValueError as error:
        raise ValueError(f"{error}; {chosen.runs} has {', '.join(header)}") from None
    return read_runs(chosen.runs, columns), cluster


def check_out(chosen: argparse.Namespace) -> None:
    """Raise ValueError where the file of --out can't be written, or would replace another one."""
    out = chosen.out
    if out.suffix != ".toml" or out == chosen.columns:
        raise ValueError(f"--out {out}: name a new file that ends in .toml")
    if not out.parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.parent}")
    if out.exists() and not (chosen.force and out.is_file()):
        raise ValueError(f"--out {out}: it exists; name another file, or overwrite it with --force")


def write(cluster: Cluster, out: Path) -> None:
    """Write the cluster's file, complete or not at all."""
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        save_cluster(cluster, partial)
        partial.replace(out)
    finally:
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()


def next_command(runs: list[MeasuredRun], out: Path) -> str:
    """Return the planner's command for the job of the largest run."""
    run = max(runs, key=lambda run: run.layout.ranks)
    model = ["--preset", run.model] if run.model in PRESETS else ["--config", "CONFIG.json"]
    sizes = {"--gpus": run.layout.ranks, "--batch": run.batch, "--seq": run.seq}
    options = [text for name, value in sizes.items() for text in (name, str(value))]
    return shlex.join(["python", "-m", "course_lib.best_config", "--cluster", str(out), *model, *options])


def main(argv: list[str] | None = None) -> Calibration:
    """Calibrate as the options say, print the calibration and save its cluster. A bad input ends the program with one
    line and status 2, and writes nothing.
    """
    parser = calibrate_parser()
    chosen = parser.parse_args(argv)
    try:
        check_out(chosen)
        runs, cluster = read_input(chosen)
        found = calibrate(runs, cluster)
        write(replace(found.cluster, name=chosen.out.stem), chosen.out)
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror}")
    print(found)
    print(f"\nsaved to {chosen.out}; to plan with it:\n{next_command(runs, chosen.out)}")
    return found
