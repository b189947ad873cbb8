"""The planner against runs that were measured: what it gets wrong, on clusters that it was fitted to and on others.

    python benchmarks/planner.py        # writes benchmarks/results/planner.json; about two minutes

The constants are fitted to all runs of data/layout_runs_h100.csv ("in sample"), and, for each (model, nodes), to those
of the others ("cross-validated": a cluster size that was never measured). A run is of the slow mode where its step
took more than twice what is predicted, for a reason that its layout does not tell: figures are given with these runs
and without. A favourite: the layout that the planner likes best in a cell, of those whose risk of running out of memory
is 10% or less. Regret: the share of the cell's fastest speed that it lacks; 100% where it failed, or there is none.

Then runs that others have published, to which nothing is fitted, and the seconds of a search: the median of SEARCHES.
Last, a dry run of the same size, in bytes: these depend on no machine.
"""

import datetime
import json
import statistics
from pathlib import Path

import measure
import numpy as np
import torch

from course_kit.planning.published_runs import errors_by_source, left_out, load_published
from course_lib.best_config.calibration import MEMORY, MEMORY_PAIRS, TIME, cross_validate, fit
from course_lib.best_config.clusters import CLUSTERS, Cluster
from course_lib.best_config.dry_runs import dry_run
from course_lib.best_config.planner import search
from course_lib.best_config.runs import MeasuredRun, Predicted, accuracy, cells, load_runs, loss_of_picks, predict
from course_lib.five_d.layouts import Layout
from course_lib.single_gpu.model import PRESETS

DATA = Path(__file__).parent.parent / "data"
RESULT = Path(__file__).parent / "results" / "planner.json"
SEARCHES = 7
SEARCHED = {"model": "llama3-405B", "gpus": 16384, "batch": 2048, "seq": 8192}
DRY_RUN = "dp128,pp16,tp8,sp,zero1,full"  # Llama 3's degrees, for SEARCHED
SIZES = {"up to 32 nodes": range(1, 33), "64 nodes": range(64, 65)}
GOALS = {"tokens/s": 0.05, "peak memory": 0.04, "ok or out of memory": 0.95, "failed favourites": 0.05, "regret": 0.06}
AT_64_NODES = {"tokens/s": 0.08}  # the others as for up to 32


# What is measured.


def constants(cluster: Cluster) -> dict:
    """The constants of a cluster's software that `fit` sets."""
    names = (*TIME, *MEMORY, *MEMORY_PAIRS, "unusable_bytes", "memory_spread")
    return {name: getattr(cluster.software, name) for name in names}


def part(runs: list[MeasuredRun], predicted: Predicted, rows: list[int]) -> tuple[list[MeasuredRun], Predicted]:
    """Some of the runs, and what was predicted of them."""
    found = Predicted(predicted.step_s[rows], predicted.peak_bytes[rows], predicted.risk[rows])
    return [runs[row] for row in rows], found


def slow_mode(runs: list[MeasuredRun], predicted: Predicted) -> np.ndarray:
    """Which runs took more than twice what is predicted: booleans [n]."""
    return np.array([run.step_s for run in runs]) > 2 * predicted.step_s  # false where a run failed


def figures(runs: list[MeasuredRun], predicted: Predicted) -> dict[str, float]:
    """Errors, the share of favourites that failed, and the mean regret of all."""
    losses = list(loss_of_picks(runs, predicted).values())
    picks = {"failed favourites": statistics.mean(loss == 1 for loss in losses), "regret": statistics.mean(losses)}
    return accuracy(runs, predicted) | picks | {"regret, median": statistics.median(losses)}


def by_size(runs: list[MeasuredRun], predicted: Predicted) -> dict[str, dict]:
    """The figures for SIZES, with the slow mode and without."""
    slow, found = slow_mode(runs, predicted), {}
    for size, nodes in SIZES.items():
        rows = [row for row, run in enumerate(runs) if run.nodes in nodes]
        usual = [row for row in rows if not slow[row]]
        found[size] = {
            "runs of the slow mode": len(rows) - len(usual),
            "all": figures(*part(runs, predicted, rows)),
            "without the slow mode": figures(*part(runs, predicted, usual)),
        }
    return found


def by_cell(runs: list[MeasuredRun], predicted: Predicted) -> list[dict]:
    """The errors of each (model, nodes), and the loss of its pick, with the slow mode and without."""
    slow = slow_mode(runs, predicted)
    usual = part(runs, predicted, np.flatnonzero(~slow).tolist())
    losses, usual_losses = loss_of_picks(runs, predicted), loss_of_picks(*usual)
    return [
        {"model": model, "nodes": nodes, "slow mode": int(slow[rows].sum())}
        | accuracy(*part(runs, predicted, rows))
        | {"regret": losses[model, nodes], "regret, without the slow mode": usual_losses[model, nodes]}
        for (model, nodes), rows in cells(runs).items()
    ]


def compact(predicted: Predicted) -> dict[str, list]:
    """The predictions, in the order of load_runs."""
    return {
        "step_s": [four_digits(each) for each in predicted.step_s.tolist()],
        "peak_bytes": [four_digits(each) for each in predicted.peak_bytes.tolist()],
        "risk": [four_digits(each) for each in predicted.risk.tolist()],
    }


def search_seconds() -> dict:
    """The time of a search of all layouts, and how many there are."""
    config, gpus, batch, seq = PRESETS[SEARCHED["model"]], *(SEARCHED[name] for name in ("gpus", "batch", "seq"))
    times, found = [], []
    for _ in range(SEARCHES):
        times.append(measure.seconds(lambda: found.append(search(config, CLUSTERS["H100"], gpus, batch, seq))))
    ranking = found[0]
    fitting, rejected = len(ranking.order), sum(ranking.rejected.values())
    best, tokens_per_s, mfu, gib = ranking.best(1)[0]
    return SEARCHED | {
        "seconds": statistics.median(times),
        "layouts": fitting + rejected,
        "that fit": fitting,
        "best": {"layout": str(best), "tokens/s": tokens_per_s, "mfu": mfu, "GiB": gib},
    }


def dry_run_bytes() -> dict:
    """A step of DRY_RUN on rank 0, in bytes."""
    found = dry_run(PRESETS[SEARCHED["model"]], Layout.parse(DRY_RUN), SEARCHED["batch"], SEARCHED["seq"])
    sent = [[axes, collective, size] for (axes, collective), size in found.bytes_sent.items()]
    return {"layout": DRY_RUN, "at rest": found.at_rest, "peak": found.peak, "bytes sent": sent}


# What is written and printed.


def four_digits(figure):
    """A number, or all numbers in lists and dictionaries, to four significant digits."""
    if isinstance(figure, dict):
        return {name: four_digits(each) for name, each in figure.items()}
    if isinstance(figure, list | tuple):
        return [four_digits(each) for each in figure]
    return float(f"{figure:.4g}") if isinstance(figure, float) else figure


def write(found: dict) -> None:
    """Write RESULT, a line for each of its parts."""
    about = {
        "date": datetime.date.today().isoformat(),
        "machine": measure.processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    lines = [f" {json.dumps(name)}: {json.dumps(four_digits(each))}" for name, each in (about | found).items()]
    RESULT.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def table(head: list[str], rows: list[list]) -> None:
    """Print a table, the first column to the left."""
    lines = [[f"{each:.3g}" if isinstance(each, float) else str(each) for each in row] for row in [head, *rows]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for first, *others in lines:
        print("  ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]))
    print()


def percent(share: float) -> str:
    return f"{share:.1%}"


def show_accuracy(found: dict) -> None:
    """The figures beside the goals."""
    names, rows = list(GOALS), []
    for size, goals in found["goals"].items():
        said = [f"{'>' if name == 'ok or out of memory' else '<'} {percent(goal)}" for name, goal in goals.items()]
        rows.append([f"goal, {size}", "", "", *said])
    for how in ("in sample", "cross-validated"):
        for size, those in found[how].items():
            for which in ("all", "without the slow mode"):
                count = those["runs of the slow mode"] if which == "all" else ""
                row = those[which]
                rows.append([f"{how}, {size}, {which}", row["runs"], count, *(percent(row[name]) for name in names)])
    table(["", "runs", "slow mode", *names], rows)


def show(found: dict) -> None:
    """Print all of it but the predictions."""
    rows = [
        [name, *(", ".join(f"{v:.4g}" for v in np.atleast_1d(found[which][name])) for which in ("constants", "course"))]
        for name in found["constants"]
    ]
    table(["constant", "fitted", "in course_lib"], rows)
    show_accuracy(found)
    names = ["tokens/s", "peak memory", "ok or out of memory", "regret", "regret, without the slow mode"]
    cell_rows = [
        [cell["model"], cell["nodes"], cell["runs"], cell["slow mode"], *(percent(cell[name]) for name in names)]
        for cell in found["cells"]
    ]
    table(["cross-validated", "nodes", "runs", "slow mode", *names], cell_rows)
    published = [[source, n, ratio, percent(error)] for source, (n, ratio, error) in found["published"].items()]
    table(["published by", "runs", "predicted / measured", "median error"], published)
    table(["published and left out", "runs"], [list(each) for each in found["published, left out"].items()])
    print(*(f"{name}: {each}" for name, each in four_digits(found["search"]).items()), sep=", ")


def main() -> None:
    """Fit, predict and search; print the figures and write them down."""
    torch.set_num_threads(1)
    runs, cluster = load_runs(DATA / "layout_runs_h100.csv"), CLUSTERS["H100, EFA"]
    fitted, held_out = fit(runs, cluster), cross_validate(runs, cluster)
    file = DATA / "published_throughput.csv"
    found = {
        "goals": {"up to 32 nodes": GOALS, "64 nodes": GOALS | AT_64_NODES},
        "constants": constants(fitted),
        "course": constants(cluster),
        "in sample": by_size(runs, predict(runs, fitted)),
        "cross-validated": by_size(runs, held_out),
        "cells": by_cell(runs, held_out),
        "published": errors_by_source(load_published(file)),
        "published, left out": left_out(file),
        "search": search_seconds(),
        "dry run": dry_run_bytes(),
        "predictions": compact(held_out),
    }
    write(found)
    show(found)


if __name__ == "__main__":
    main()
