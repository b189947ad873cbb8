"""Check of exercise 11.6: the runs that each fit sees, the constants it starts from, the order of predictions."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np

from course_lib.best_config import calibration
from course_lib.best_config.clusters import CLUSTERS, Cluster
from course_lib.best_config.runs import MeasuredRun, cells, load_runs, predict

RUNS = Path(__file__).resolve().parents[3] / "data" / "layout_runs_h100.csv"
CELLS = ("1B", 1), ("1B", 16), ("8B", 16)  # two cells have the same model, two the same number of nodes


def runs_of(cell: tuple[str, int], runs: list[MeasuredRun]) -> int:
    """Return how many of the runs are of a cell."""
    return sum((run.model, run.nodes) == cell for run in runs)


def check() -> None:
    """Run it on some runs of three cells and of two, from other constants."""
    some = [run for run in load_runs(RUNS) if (run.model, run.nodes) in CELLS][::5]
    some = some[::2] + some[1::2]  # the runs of a cell are not adjacent
    check_fits(some, CLUSTERS["H100, EFA"])
    check_fits([run for run in some if run.model == "1B"], CLUSTERS["H100"])


def check_fits(some: list[MeasuredRun], given: Cluster) -> None:
    """Assert what each fit is given, with a fit that only records its arguments and marks the cluster."""
    seen: list[tuple[list[MeasuredRun], Cluster]] = []

    def fit(runs: list[MeasuredRun], cluster: Cluster) -> Cluster:
        seen.append((runs, cluster))
        return cluster.with_software(step_host_s=float(len(seen)))

    with mock.patch.object(calibration, "fit", fit):
        predicted = calibration.cross_validate(some, given)
    number_of_cells = len({(run.model, run.nodes) for run in some})
    assert len(seen) == number_of_cells, (
        f"{number_of_cells} cells, and {len(seen)} fits: each cell needs its own, fit(others, cluster)"
    )
    for position, (cell, rows) in enumerate(cells(some).items()):
        number = next((n for n, (runs, _) in enumerate(seen) if not runs_of(cell, runs)), position)
        runs, start = seen[number]
        leaked = runs_of(cell, runs)
        assert leaked == 0, f"cell {cell}: its fit has seen {leaked} of its runs"
        had, others = len(runs), len(some) - len(rows)
        assert had == others, (
            f"cell {cell}: fitted to {had} runs, not to all {others} of the other cells: leave out the runs of this "
            "model on this number of nodes, and no others; runs that failed count, for they tell where memory ends"
        )
        assert start == given, (
            f"cell {cell}: the fit starts from constants that another fit has left, and that one knew this cell"
        )
        wanted = predict([some[i] for i in rows], given.with_software(step_host_s=float(number + 1)))
        for name in ("step_s", "peak_bytes", "risk"):
            assert np.array_equal(getattr(predicted, name)[rows], getattr(wanted, name)), (
                f"cell {cell}: {name} is not what its own fit predicts, in the order of `runs`, failed ones too"
            )
