"""Calibration as a program: it reads measured runs from a CSV and writes a cluster for the planner.

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
    """Return the parser of the program's options."""
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
    add("--column", action="append", default=[], metavar="NAME=COLUMN",
        help="also NAME=COLUMN*FACTOR, or NAME=VALUE for one value in all rows; may be repeated")  # fmt: skip
    add("--cluster", default="H100", help=f"to start from: one of {'; '.join(CLUSTERS)}, or a TOML file; default: H100")
    add("--software", choices=list(SOFTWARE), help="the program of the runs, to start from; default: the cluster's")
    add("--force", action="store_true", help="overwrite the file of --out")
    return parser


def parse_column(text: str, header: list[str]) -> dict:
    """Return the column of an option, with or without a factor, or a value for all rows, in the form of `read_runs`."""
    if text in header:
        return {"column": text}
    column, _, factor = text.rpartition("*")
    if column not in header:
        return {"value": text}
    try:
        return {"column": column, "factor": float(factor)}
    except ValueError:
        raise ValueError(f"--column: {factor!r} of {text} is not a number") from None


def columns_of(args: argparse.Namespace, header: list[str]) -> dict:
    """Return the source of each value: from --columns, or else the header's names, then overridden by --column."""
    from_options = {}
    for option in args.column:
        name, equals, text = option.partition("=")
        if not equals:
            raise ValueError(f"--column {option}: make it NAME=COLUMN, NAME=COLUMN*FACTOR or NAME=VALUE")
        from_options[name.strip()] = parse_column(text.strip(), header)
    columns = read_columns(args.columns) if args.columns else {name: name for name in header if name in KNOWN}
    if set(from_options) & set(TIMES):
        columns = {name: source for name, source in columns.items() if name not in TIMES}
    return columns | from_options


def read_input(args: argparse.Namespace) -> tuple[list[MeasuredRun], Cluster]:
    """Return the runs, and the cluster to start from. Raises ValueError, in one line, for unreadable input."""
    cluster = read_cluster(args.cluster)
    if args.software:
        cluster = replace(cluster, software=SOFTWARE[args.software])
    header = list(numbered_rows(args.runs)[0][1])
    if set(header) >= SWEEP and not args.columns and not args.column:
        runs = read_sweep(args.runs)
        return runs, of_program(cluster, runs[0].dtype)
    columns = columns_of(args, header)
    try:
        check_columns(columns)
    except ValueError as error:
        raise ValueError(f"{error}; {args.runs} has {', '.join(header)}") from None
    return read_runs(args.runs, columns), cluster


def check_out(args: argparse.Namespace) -> None:
    """Raise ValueError if the file of --out cannot be written, or would replace another one."""
    out = args.out
    if out.suffix != ".toml" or out == args.columns:
        raise ValueError(f"--out {out}: name a new file that ends in .toml")
    if not out.parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.parent}")
    if out.exists() and not (args.force and out.is_file()):
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
    """Calibrate as the options say, print the calibration and save its cluster. Bad input ends the program with one
    line and status 2, and writes nothing.
    """
    parser = calibrate_parser()
    args = parser.parse_args(argv)
    try:
        check_out(args)
        runs, cluster = read_input(args)
        calibration = calibrate(runs, cluster)
        write(replace(calibration.cluster, name=args.out.stem), args.out)
    except ValueError as error:
        parser.error(str(error))
    except ModuleNotFoundError as error:
        parser.error(f"{error}; a fit needs SciPy: pip install scipy")
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror}")
    print(calibration)
    print(f"\nsaved to {args.out}; to plan with it:\n{next_command(runs, args.out)}")
    return calibration
