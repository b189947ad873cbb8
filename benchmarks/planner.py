"""The planner compared with measured runs: its errors, on clusters that it was fitted to and on others.

    python benchmarks/planner.py        # writes benchmarks/results/planner.json; about four minutes

The constants are fitted to all runs of data/layout_runs_h100.csv ("in sample"), and, for each (model, nodes), to the
runs of the other cells ("cross-validated": a cluster size that was never measured). A run is in the slow mode if its
step took more than twice the predicted time, for a reason that its layout does not explain: figures are given with and
without these runs. A favorite is the planner's best layout in a cell among those whose risk of running out of memory is
10% or less. Regret is the share of the cell's fastest speed by which the favorite is slower; 100% if it failed, or
there is none. It is split into parts that a planner could and could not avoid (course_kit.planning.regret).

Then published runs: the constants of their programs, fitted to them, and the error on each source that a fit left out;
large published jobs as questions, with the planner's first answer and the published layout; and the seconds of a
search: the median of SEARCHES. Last, a dry run of the same size, in bytes, which depend on no machine.
"""

from __future__ import annotations

import datetime
import json
import statistics
from pathlib import Path

import measure
import numpy as np
import planner_tables
import torch
from planner_tables import GOALS, REGRET_PARTS, four_digits

from course_kit.planning.program_fits import ProgramFit, cross_validate_programs
from course_kit.planning.published_errors import errors_by, refused_by_program
from course_kit.planning.published_runs import left_out, load_published
from course_kit.planning.questions import ask, published_jobs
from course_kit.planning.regret import RegretSplit, scatter_of_equals, split_regret
from course_lib.best_config.calibration import MEMORY, MEMORY_PAIRS, TIME, cross_validate, fit
from course_lib.best_config.clusters import CLUSTERS, FACTORS, Cluster
from course_lib.best_config.dry_runs import dry_run
from course_lib.best_config.planner import search
from course_lib.best_config.runs import MeasuredRun, Predicted, accuracy, cells, load_runs, loss_of_picks, predict
from course_lib.best_config.software import SOFTWARE
from course_lib.five_d.layouts import Layout
from course_lib.single_gpu.model import PRESETS

DATA = Path(__file__).parent.parent / "data"
RESULT = Path(__file__).parent / "results" / "planner.json"
SEARCHES = 7
SEARCHED = {"model": "llama3-405B", "gpus": 16384, "batch": 2048, "seq": 8192}
DRY_RUN = "dp128,pp16,tp8,sp,zero1,full"  # Llama 3's degrees, for SEARCHED
SIZES = {"up to 32 nodes": range(1, 33), "64 nodes": range(64, 65)}
RISKS = (0.05, 0.1, 0.2, 0.3, 0.5)  # limits of the favorites' risk to compare
AT_64_NODES = {"tokens/s": 0.08}  # the other goals as for up to 32


def constants(cluster: Cluster) -> dict:
    """Return the constants of a cluster's software that `fit` sets."""
    names = (*TIME, *MEMORY, *MEMORY_PAIRS, "unusable_bytes", "memory_spread")
    return {name: getattr(cluster.software, name) for name in names}


def part(runs: list[MeasuredRun], predicted: Predicted, rows: list[int]) -> tuple[list[MeasuredRun], Predicted]:
    """Return some of the runs, and their predictions."""
    of_rows = Predicted(predicted.step_s[rows], predicted.peak_bytes[rows], predicted.risk[rows])
    return [runs[row] for row in rows], of_rows


def slow_mode(runs: list[MeasuredRun], predicted: Predicted) -> np.ndarray:
    """Return a mask [n] of the runs that took more than twice the predicted time."""
    return np.array([run.step_s for run in runs]) > 2 * predicted.step_s  # False for a failed run


def figures(runs: list[MeasuredRun], predicted: Predicted) -> dict[str, float]:
    """Return errors, the share of favorites that failed, and the mean regret of all."""
    losses = list(loss_of_picks(runs, predicted).values())
    picks = {"failed favorites": statistics.mean(loss == 1 for loss in losses), "regret": statistics.mean(losses)}
    return accuracy(runs, predicted) | picks | {"regret, median": statistics.median(losses)}


def by_size(runs: list[MeasuredRun], predicted: Predicted) -> dict[str, dict]:
    """Return the figures for SIZES, with and without the slow mode."""
    slow, result = slow_mode(runs, predicted), {}
    for size, nodes in SIZES.items():
        rows = [row for row, run in enumerate(runs) if run.nodes in nodes]
        usual = [row for row in rows if not slow[row]]
        result[size] = {
            "runs of the slow mode": len(rows) - len(usual),
            "all": figures(*part(runs, predicted, rows)),
            "without the slow mode": figures(*part(runs, predicted, usual)),
        }
    return result


def by_cell(runs: list[MeasuredRun], predicted: Predicted) -> list[dict]:
    """Return the errors of each (model, nodes), and the loss of its pick, with and without the slow mode."""
    slow = slow_mode(runs, predicted)
    usual = part(runs, predicted, np.flatnonzero(~slow).tolist())
    losses, usual_losses = loss_of_picks(runs, predicted), loss_of_picks(*usual)
    return [
        {"model": model, "nodes": nodes, "slow mode": int(slow[rows].sum())}
        | accuracy(*part(runs, predicted, rows))
        | {"regret": losses[model, nodes], "regret, without the slow mode": usual_losses[model, nodes]}
        for (model, nodes), rows in cells(runs).items()
    ]


def regret_of_cells(runs: list[MeasuredRun], split: dict[tuple[str, int], RegretSplit]) -> list[dict]:
    """Return the regret of each (model, nodes) by part, with the layouts of the pick and of the fastest run."""
    return [
        {
            "model": model,
            "nodes": nodes,
            "pick": "none" if each.pick is None else str(runs[each.pick].layout),
            "fastest": str(runs[each.fastest].layout),
            "comparable runs differ by": each.differ,
            "unavoidable": each.unavoidable,
            "reason": each.reason,
        }
        | {name: getattr(each, name) for name in REGRET_PARTS}
        for (model, nodes), each in split.items()
    ]


def regret_by_size(split: dict[tuple[str, int], RegretSplit]) -> dict[str, dict[str, float]]:
    """Return the mean of each part over the cells of each of SIZES."""
    return {
        size: {
            name: statistics.mean(getattr(each, name) for (_, in_cell), each in split.items() if in_cell in nodes)
            for name in (*REGRET_PARTS, "unavoidable")
        }
        for size, nodes in SIZES.items()
    }


def regret_by_risk(runs: list[MeasuredRun], predicted: Predicted) -> dict[str, dict[str, float]]:
    """Return the mean regret of all cells and the share of failed favorites, for each of RISKS as the limit."""
    result = {}
    for risk in RISKS:
        losses = list(loss_of_picks(runs, predicted, risk).values())
        failed = statistics.mean(loss == 1 for loss in losses)
        result[f"{risk:.0%}"] = {"regret": statistics.mean(losses), "failed favorites": failed}
    return result


def regret_figures(runs: list[MeasuredRun], predicted: Predicted, cluster: Cluster) -> dict:
    """Return the regret by cell, by size and by limit on the risk, and the scatter of equal runs."""
    split = split_regret(runs, predicted, cluster)
    return {
        "equal runs scatter by": scatter_of_equals(runs),
        "means": regret_by_size(split),
        "cells": regret_of_cells(runs, split),
        "limits on risk": regret_by_risk(runs, predicted),
    }


def compact(predicted: Predicted) -> dict[str, list]:
    """Return the predictions, in the order of load_runs."""
    return {
        "step_s": [four_digits(each) for each in predicted.step_s.tolist()],
        "peak_bytes": [four_digits(each) for each in predicted.peak_bytes.tolist()],
        "risk": [four_digits(each) for each in predicted.risk.tolist()],
    }


def program_constants(fits: dict[str, ProgramFit]) -> dict[str, dict]:
    """Return the fitted constants of each program, with their 90% intervals, and the constants of course_lib."""
    return {
        program: {
            name: [getattr(fit.software, name, fit.factors.get(name)), *ends, in_course_lib(program, name)]
            for name, ends in fit.intervals.items()
        }
        for program, fit in fits.items()
    }


def in_course_lib(program: str, name: str) -> float:
    """Return a constant of a program in course_lib, or a factor of an A100."""
    return getattr(CLUSTERS["A100"] if name in FACTORS else SOFTWARE[program], name)


def search_seconds() -> dict:
    """Return the time of a search of all layouts, and their number."""
    config, gpus, batch, seq = PRESETS[SEARCHED["model"]], *(SEARCHED[name] for name in ("gpus", "batch", "seq"))
    rankings: list = []
    run = lambda: rankings.append(search(config, CLUSTERS["H100"], gpus, batch, seq))  # noqa: E731
    times = [measure.seconds(run) for _ in range(SEARCHES)]
    ranking = rankings[0]
    fitting, rejected = len(ranking.order), sum(ranking.rejected.values())
    best, tokens_per_s, mfu, gib = ranking.best(1)[0]
    return SEARCHED | {
        "seconds": statistics.median(times),
        "layouts": fitting + rejected,
        "that fit": fitting,
        "best": {"layout": str(best), "tokens/s": tokens_per_s, "mfu": mfu, "GiB": gib},
    }


def dry_run_bytes() -> dict:
    """Return the bytes of a step of DRY_RUN on rank 0."""
    dry = dry_run(PRESETS[SEARCHED["model"]], Layout.parse(DRY_RUN), SEARCHED["batch"], SEARCHED["seq"])
    traffic = [[axes, collective, size] for (axes, collective), size in dry.bytes_sent.items()]
    return {"layout": DRY_RUN, "between steps": dry.between_steps, "peak": dry.peak, "bytes sent": traffic}


def write(result: dict) -> None:
    """Write RESULT, one line for each of its parts."""
    about = {
        "date": datetime.date.today().isoformat(),
        "machine": measure.processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    lines = [f" {json.dumps(name)}: {json.dumps(four_digits(each))}" for name, each in (about | result).items()]
    RESULT.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main() -> None:
    """Fit, predict and search; print the figures and write them to RESULT."""
    torch.set_num_threads(1)
    runs, cluster = load_runs(DATA / "layout_runs_h100.csv"), CLUSTERS["H100, EFA"]
    fitted, held_out = fit(runs, cluster), cross_validate(runs, cluster)
    files = [DATA / "published_throughput.csv", DATA / "fsdp_runs_llm_foundry.csv"]
    published = [run for file in files for run in load_published(file)]
    programs, errors = cross_validate_programs(published)
    result = {
        "goals": {"up to 32 nodes": GOALS, "64 nodes": GOALS | AT_64_NODES},
        "constants": constants(fitted),
        "course": constants(cluster),
        "in sample": by_size(runs, predict(runs, fitted)),
        "cross-validated": by_size(runs, held_out),
        "cells": by_cell(runs, held_out),
        "regret": regret_figures(runs, held_out, fitted),
        "published": errors_by("source", published),
        "published, left out": left_out(files[0]) | left_out(files[1]),
        "programs": errors,
        "constants of programs": program_constants(programs),
        "published, refused as out of memory": refused_by_program(published),
        "questions": [ask(job) for job in published_jobs(files[0])],
        "search": search_seconds(),
        "dry run": dry_run_bytes(),
        "predictions": compact(held_out),
    }
    write(result)
    planner_tables.show(result)


if __name__ == "__main__":
    main()
