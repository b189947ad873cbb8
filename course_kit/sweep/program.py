"""Which layout is fastest here? Run them all, one after the other, and keep what came of each.

    python -m course_kit.sweep --preset debug --ranks 2 4 --batch 8 --seq 64 --steps 6 --time-limit 60 --csv sweep.csv
    python -m course_kit.sweep --preset llama3-8B --ranks 8 16 --gpus-per-node 8 --slurm runs/sweep … -- --dtype bf16
    python -m course_kit.sweep --preset llama3-8B --ranks 8 --batch 64 --seq 4096 --cluster H100 --calibrate ours.toml

Many layouts of a large sweep fail: of the playbook's published runs 43% did, by memory, time or a crash. So a failure
is a result, in a row like any other, with its reason; a run that hangs costs its time limit and no more; no process of
a run lives longer than the run (`enclosed`); and a sweep that was stopped goes on where it was. A CSV is of one
machine.
"""

import argparse
import math
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from course_kit.pictures.heatmaps import heatmap
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
from course_lib.checkpoint import program as five_d
from course_lib.five_d.layouts import Layout
from course_lib.single_gpu.model import PRESETS
from course_lib.single_gpu.training import out_file


def describe(row: dict) -> str:
    """One line of a row."""
    ranks = row["dp"] * row["tp"] * row["pp"] * row["cp"]
    start = f"{row['model']}, {ranks} ranks, {row['layout']}:"
    if not row["ok"]:
        return f"{start} failed after {row['seconds']:.1f} s: {row['why']}"
    share = f"MFU {row['mfu_pct']:.1f}% | " if row["mfu_pct"] == row["mfu_pct"] else ""
    speed = f"{row['tokens_per_s_per_gpu']:,.0f} tokens/s a rank | {share}{row['peak_mem_gb']:.2f} GB at the peak"
    return f"{start} {speed} | {row['seconds']:.1f} s in all"


def fresh_folder(parent: Path, name: str) -> Path:
    """An empty folder for a run; what an earlier attempt has left in it goes."""
    folder = parent / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def settled(before: dict | None, why: str, retry_failed: bool) -> bool:
    """Whether a run need not be run (again). before: its row, if there is one; why: what keeps it from running now."""
    return bool(before and (before["ok"] or not retry_failed or before["why"] == why))


def unsettled(runs: Sequence[Run], csv: Path, retry_failed: bool) -> list[Run]:
    """The runs that are to be run, in view of what the CSV has; it gets no row."""
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
    """Run one after the other on this machine, each for time_limit_s seconds at most; the rows of all, old ones too.

    Runs that have a row are not run again; retry_failed: unless they failed. Logs go to a folder beside the CSV, named
    like it. program: what torchrun starts on each rank. Raises ValueError before anything is started.
    """
    if not time_limit_s > 0:
        raise ValueError(f"a time limit of {time_limit_s:g} s: make it more than 0")
    if several := [run for run in runs if run.nodes > 1]:
        raise ValueError(f"{several[0].layout} on {several[0].nodes} nodes: this machine is one; see sweep.slurm")
    with Rows(csv) as rows:
        for number, run in enumerate(runs, 1):
            before, why = rows.of(run), refusal(run)
            if settled(before, why, retry_failed):
                say(f"{number} of {len(runs)}: (there already) {describe(before)}")
                continue
            if why:
                row = refused(run, why, now())
            else:
                folder = fresh_folder(csv.with_name(csv.name + ".runs"), run.name)
                measure(run, folder, time_limit_s, program)
                row = row_of(run, folder, time_limit_s)
            say(f"{number} of {len(runs)}: {describe(rows.add(row))}")
        return [rows.of(run) for run in runs]


def parser() -> argparse.ArgumentParser:
    """The program's options."""
    parser = argparse.ArgumentParser(
        prog="sweep",
        usage="%(prog)s [options] [-- options of five_d]",
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
    add("--batch", type=int, default=8, help="sequences a step, of all ranks together")
    add("--seq", type=int, default=64, help="tokens a sequence")
    add("--steps", type=int, default=6, help=f"the first {WARM_UP_STEPS} are not counted")
    add("--time-limit", type=float, default=60.0, help="seconds a run, its start and end included")
    add("--csv", type=Path, default=Path("sweep.csv"))
    add("--retry-failed", action="store_true", help="run again what has failed")
    add("--plot", type=Path, help="a picture of the best layout by model and ranks, such as sweep.png")
    add(
        "--slurm",
        type=Path,
        metavar="FOLDER",
        help="run nothing here; write array jobs, of the runs that the CSV does not have, to a new folder",
    )
    add("--gpus-per-node", type=int, default=8, help="for --slurm: how many nodes the ranks need")
    add("--at-once", type=int, default=4, help="for --slurm: how many runs of an array go on at once")
    add("--collect", type=Path, metavar="FOLDER", help="run nothing; bring what such jobs have done so far to the CSV")
    add(
        "--calibrate",
        type=out_file,
        metavar="TOML",
        help="run the layouts that tell most of --cluster's constants, fit these, and save the cluster",
    )
    add("--cluster", default="H100", help=f"for --calibrate: a TOML file of a cluster, or one of {'; '.join(CLUSTERS)}")
    add("--runs", type=int, default=20, help="for --calibrate: how many layouts")
    return parser


def runs_of(chosen: argparse.Namespace, options: Sequence[str]) -> list[Run]:
    """The runs that the options name. Raises ValueError where there is none."""
    if chosen.layouts:
        layouts = [Layout.parse(text) for text in chosen.layouts]
    elif chosen.calibrate:
        dtype, moe = dtype_and_experts(chosen.preset, options)
        cluster, config = of_program(chosen.cluster, dtype), PRESETS[chosen.preset]
        layouts = informative(config, cluster, chosen.ranks, chosen.batch, chosen.seq, chosen.runs, moe)
    else:
        sizes = (chosen.preset, chosen.batch, chosen.seq, chosen.zero, chosen.micro_batches)
        layouts = [layout for ranks in chosen.ranks for layout in layouts_of(ranks, *sizes)]
    if not layouts:
        raise ValueError(f"no layout of {chosen.ranks} ranks fits {chosen.preset}, --batch and --seq")
    sizes, found = (chosen.batch, chosen.seq, chosen.steps), []
    for layout in layouts:
        nodes = math.ceil(layout.ranks / chosen.gpus_per_node) if chosen.slurm else 1
        found.append(Run(chosen.preset, layout, *sizes, nodes, tuple(options)))
    return found


def options(argv: list[str] | None = None) -> tuple[argparse.Namespace, list[Run]]:
    """The program's options, and the runs. Touches nothing; a bad one ends the program with status 2."""
    argv = sys.argv[1:] if argv is None else list(argv)
    ours, more = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    own = parser()
    chosen = own.parse_args(ours)
    try:
        numbers = [chosen.batch, chosen.seq, chosen.gpus_per_node, chosen.at_once, chosen.runs]
        if min(*numbers, *chosen.ranks, *chosen.micro_batches) < 1 or not chosen.time_limit > 0:
            raise ValueError("numbers of ranks, sequences, tokens, GPUs, runs, and the time limit are above 0")
        if chosen.calibrate:
            chosen.cluster = read_cluster(chosen.cluster)
            chosen.gpus_per_node = chosen.cluster.gpus_per_node
        runs = [] if chosen.collect else runs_of(chosen, more)
    except ValueError as error:
        own.error(str(error))
    for run in runs[:1]:  # an option that five_d does not know would fail every run
        five_d.program_parser().parse_args(run.arguments())
    return chosen, runs


def save_calibration(rows: Sequence[dict], chosen: argparse.Namespace) -> None:
    """Fit the cluster's constants to the rows, print what came of it, and save the cluster."""
    try:
        found = calibrate_rows(rows, chosen.cluster)
    except ValueError as error:
        sys.exit(f"sweep: {error}")
    print(found)
    save_cluster(found.cluster, chosen.calibrate)
    print(f"saved to {chosen.calibrate}")


def main(argv: list[str] | None = None) -> list[dict]:
    """Sweep as the options say, one line a run; the rows."""
    chosen, runs = options(argv)
    try:
        if chosen.slurm:
            left = unsettled(runs, chosen.csv, chosen.retry_failed)
            if len(left) < len(runs):
                print(f"{len(runs) - len(left)} of {len(runs)} runs have their rows in {chosen.csv} already")
            scripts = write_arrays(left, chosen.slurm, chosen.time_limit, chosen.at_once) if left else []
            for script in scripts:
                print(f"sbatch {script}")
            return []
        if chosen.collect:
            rows = collect(chosen.collect, chosen.csv)
        else:
            rows = sweep(runs, chosen.csv, chosen.time_limit, chosen.retry_failed)
    except ValueError as error:
        sys.exit(f"sweep: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    if chosen.calibrate:
        save_calibration(rows, chosen)
    if chosen.plot:
        heatmap(rows, chosen.csv.name, across="ranks").savefig(chosen.plot, dpi=150)
    return rows


if __name__ == "__main__":
    main()
