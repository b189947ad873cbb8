"""A sweep: run many layouts on this machine, one after the other, and record the result of each.

    python -m course_kit.sweep --preset debug --ranks 2 4 --batch 8 --seq 64 --steps 6 --time-limit 60 --csv sweep.csv
    python -m course_kit.sweep --preset llama3-8B --ranks 8 16 --gpus-per-node 8 --slurm runs/sweep … -- --dtype bf16
    python -m course_kit.sweep --preset llama3-8B --ranks 8 --batch 64 --seq 4096 --cluster H100 --calibrate ours.toml

Many layouts of a large sweep fail: 43% of the playbook's published runs did, by memory, time or a crash. A failure is
therefore a result, in a row like any other, with its reason; a run that hangs costs its time limit and no more; no
process of a run outlives the run (`enclosed`); and a sweep that was stopped resumes. A CSV is for one machine.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from course_kit.sweep.calibrate import calibrate_rows
from course_kit.sweep.enclosed import now
from course_kit.sweep.rows import Rows
from course_kit.sweep.runs import PROGRAM, WARM_UP_STEPS, Run, layouts_of, measure, refusal, refused, row_of
from course_kit.sweep.slurm import collect, write_arrays
from course_lib.best_config.clusters import CLUSTERS
from course_lib.best_config.hardware import save_cluster
from course_lib.best_config.informative import informative
from course_lib.best_config.program import read_cluster
from course_lib.best_config.sweep_files import dtype_and_experts, of_program
from course_lib.five_d.layouts import Layout
from course_lib.single_gpu.model import PRESETS
from course_lib.single_gpu.training import out_file
from course_lib.train.settings import read_settings, settings_parser


def describe(row: dict) -> str:
    """Return a row as one line of text."""
    ranks = row["dp"] * row["tp"] * row["pp"] * row["cp"]
    start = f"{row['model']}, {ranks} ranks, {row['layout']}:"
    if not row["ok"]:
        return f"{start} failed after {row['seconds']:.1f} s: {row['why']}"
    share = f"MFU {row['mfu_pct']:.1f}% | " if row["mfu_pct"] == row["mfu_pct"] else ""
    speed = f"{row['tokens_per_s_per_gpu']:,.0f} tokens/s per rank | {share}{row['peak_mem_gb']:.2f} GB at the peak"
    return f"{start} {speed} | {row['seconds']:.1f} s in total"


def fresh_folder(parent: Path, name: str) -> Path:
    """Return an empty folder for a run, without the files of an earlier attempt."""
    folder = parent / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def settled(before: dict | None, why: str, retry_failed: bool) -> bool:
    """Return True if a run need not be run (again). before: its row, if any; why: the reason that refuses it now."""
    return bool(before and (before["ok"] or not retry_failed or before["why"] == why))


def unsettled(runs: Sequence[Run], csv: Path, retry_failed: bool) -> list[Run]:
    """Return the runs that have no settled row in the CSV; adds no row."""
    if not csv.exists():
        return list(runs)
    with Rows(csv) as rows:
        return [run for run in runs if not settled(rows.of(run), refusal(run), retry_failed)]


def sweep(
    runs: Sequence[Run],
    csv: Path,
    time_limit_s: float,
    retry_failed: bool = False,
    say: Callable[[str], None] = print,
    program: Sequence[str] = PROGRAM,
) -> list[dict]:
    """Run one after the other on this machine, each for time_limit_s seconds at most; return the rows of all runs.

    Runs that have a row are not run again; retry_failed: unless they failed. Logs are written to a folder next to the
    CSV, with its name. program: what torchrun starts on each rank. Raises ValueError before anything is started.
    """
    if not time_limit_s > 0:
        raise ValueError(f"a time limit of {time_limit_s:g} s: make it more than 0")
    if several := [run for run in runs if run.nodes > 1]:
        raise ValueError(f"{several[0].layout} on {several[0].nodes} nodes: this machine is one; see sweep.slurm")
    with Rows(csv) as rows:
        for number, run in enumerate(runs, 1):
            before, why = rows.of(run), refusal(run)
            if before and settled(before, why, retry_failed):
                say(f"{number} of {len(runs)}: (there already) {describe(before)}")
                continue
            if why:
                row = refused(run, why, now())
            else:
                folder = fresh_folder(csv.with_name(csv.name + ".runs"), run.name)
                measure(run, folder, time_limit_s, program)
                row = row_of(run, folder, time_limit_s)
            say(f"{number} of {len(runs)}: {describe(rows.add(row))}")
        return [known for run in runs if (known := rows.of(run))]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the program's options."""
    parser = argparse.ArgumentParser(
        prog="sweep",
        usage="%(prog)s [options] [-- options of the training program]",
        description="Run layouts one after the other, or write them as Slurm arrays; the results go to a CSV.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--preset", default="debug", choices=list(PRESETS), help="the model's sizes")
    add("--layouts", nargs="+", help="such as dp2 tp2,sp; all that fit by default")
    add("--ranks", type=int, nargs="+", default=[2], help="numbers of ranks, for --layouts left out")
    add("--zero", type=int, nargs="+", default=[0, 1], choices=[0, 1, 2, 3], help="stages, for --layouts left out")
    add("--micro-batches", type=int, nargs="+", default=[1], help="sequences, for --layouts left out")
    add("--batch", type=int, default=8, help="sequences per step, on all ranks together")
    add("--seq", type=int, default=64, help="tokens per sequence")
    add("--steps", type=int, default=6, help=f"the first {WARM_UP_STEPS} are not counted")
    add("--time-limit", type=float, default=60.0, help="seconds per run, its start and end included")
    add("--csv", type=Path, default=Path("sweep.csv"))
    add("--retry-failed", action="store_true", help="run failed runs again")
    add("--plot", type=Path, help="file for a picture of the best layout by model and ranks, such as sweep.png")
    add(
        "--slurm",
        type=Path,
        metavar="FOLDER",
        help="run nothing here; write array jobs for the runs that the CSV does not have to a new folder",
    )
    add("--gpus-per-node", type=int, default=8, help="for --slurm: ranks per node")
    add("--at-once", type=int, default=4, help="for --slurm: runs of an array at the same time")
    add("--collect", type=Path, metavar="FOLDER", help="run nothing; add the results of such jobs so far to the CSV")
    add(
        "--calibrate",
        type=out_file,
        metavar="TOML",
        help="run the layouts that determine --cluster's constants best, fit them, and save the cluster",
    )
    add("--cluster", default="H100", help=f"for --calibrate: a TOML file of a cluster, or one of {'; '.join(CLUSTERS)}")
    add("--runs", type=int, default=20, help="for --calibrate: number of layouts")
    return parser


def runs_of(args: argparse.Namespace, options: Sequence[str]) -> list[Run]:
    """Return the runs of the options. Raises ValueError if there are none."""
    if args.layouts:
        layouts = [Layout.parse(text) for text in args.layouts]
    elif args.calibrate:
        dtype, moe = dtype_and_experts(options)
        cluster, config = of_program(args.cluster, dtype), PRESETS[args.preset]
        layouts = informative(config, cluster, args.ranks, args.batch, args.seq, args.runs, moe)
    else:
        job = (args.preset, args.batch, args.seq, args.zero, args.micro_batches)
        layouts = [layout for ranks in args.ranks for layout in layouts_of(ranks, *job)]
    if not layouts:
        raise ValueError(f"no layout of {args.ranks} ranks fits {args.preset}, --batch and --seq")
    runs = []
    for layout in layouts:
        nodes = math.ceil(layout.ranks / args.gpus_per_node) if args.slurm else 1
        runs.append(Run(args.preset, layout, args.batch, args.seq, args.steps, nodes, tuple(options)))
    return runs


def options(argv: list[str] | None = None) -> tuple[argparse.Namespace, list[Run]]:
    """Return the program's options, and the runs. Changes nothing; a bad option ends the program with status 2."""
    argv = sys.argv[1:] if argv is None else list(argv)
    ours, for_program = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    our_parser = parser()
    args = our_parser.parse_args(ours)
    try:
        numbers = [args.batch, args.seq, args.gpus_per_node, args.at_once, args.runs]
        if min(*numbers, *args.ranks, *args.micro_batches) < 1 or not args.time_limit > 0:
            raise ValueError("numbers of ranks, sequences, tokens, GPUs, runs, and the time limit are above 0")
        if args.calibrate:
            args.cluster = read_cluster(args.cluster)
            args.gpus_per_node = args.cluster.gpus_per_node
        runs = [] if args.collect else runs_of(args, for_program)
        for run in runs[:1]:  # what the training program does not know would fail every run
            if file := settings_parser().parse_args(run.arguments()).file:
                raise ValueError(f"{file} is not for a sweep: give options")
            read_settings(run.arguments())
    except ValueError as error:
        our_parser.error(str(error))
    return args, runs


def save_calibration(rows: Sequence[dict], args: argparse.Namespace) -> None:
    """Fit the cluster's constants to the rows, print the calibration, and save the cluster."""
    try:
        calibration = calibrate_rows(rows, args.cluster)
    except ValueError as error:
        sys.exit(f"sweep: {error}")
    print(calibration)
    save_cluster(calibration.cluster, args.calibrate)
    print(f"saved to {args.calibrate}")


def main(argv: list[str] | None = None) -> list[dict]:
    """Sweep as the options say, with one line per run; return the rows."""
    args, runs = options(argv)
    try:
        if args.slurm:
            left = unsettled(runs, args.csv, args.retry_failed)
            if len(left) < len(runs):
                print(f"{len(runs) - len(left)} of {len(runs)} runs have their rows in {args.csv} already")
            scripts = write_arrays(left, args.slurm, args.time_limit, args.at_once) if left else []
            for script in scripts:
                print(f"sbatch {script}")
            return []
        if args.collect:
            rows = collect(args.collect, args.csv)
        else:
            rows = sweep(runs, args.csv, args.time_limit, args.retry_failed)
    except ValueError as error:
        sys.exit(f"sweep: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    if args.calibrate:
        save_calibration(rows, args)
    if args.plot:
        from course_kit.figures.best_config import heatmap

        heatmap(rows, args.csv.name, across="ranks").savefig(args.plot, dpi=150)
    return rows


if __name__ == "__main__":
    main()
