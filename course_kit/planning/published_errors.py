"""Errors of the planner on published runs.

errors_by("source", runs)       {source: (runs, median of predicted / measured, median error)}
refused_by_program(runs)        {program: (runs that the planner refuses as out of memory, all its runs)}
published_figure(runs)          predicted against measured seconds of a step, by program

All runs completed, so each refused run is an error of the memory constants.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import TYPE_CHECKING

import numpy as np

from course_kit.figures.style import BLUE, GRAY
from course_kit.planning.published_runs import PublishedRun, predicted_step

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def errors_by(what: str, runs: list[PublishedRun]) -> dict[str, tuple[int, float, float]]:
    """Return for each source or program (`what`): the number of runs, the median of predicted over measured step time,
    and the median of its distance from 1.
    """
    ratios: dict[str, list[float]] = {}
    for run in runs:
        ratios.setdefault(getattr(run, what), []).append(float(predicted_step(run).step_s) / run.step_s)
    return {
        name: (len(each), statistics.median(each), statistics.median(abs(ratio - 1) for ratio in each))
        for name, each in ratios.items()
    }


def refused_runs(runs: list[PublishedRun]) -> list[PublishedRun]:
    """Return the runs that do not fit by the planner's estimate, with the software of the program that ran them."""
    return [run for run in runs if not predicted_step(run).fits]


def refused_by_program(runs: list[PublishedRun]) -> dict[str, tuple[int, int]]:
    """Return for each program how many of its runs are refused, and how many it has."""
    refused = [run.program for run in refused_runs(runs)]
    programs = [run.program for run in runs]
    return {program: (refused.count(program), programs.count(program)) for program in dict.fromkeys(programs)}


def published_figure(runs: list[PublishedRun]) -> Figure:
    """Return a figure of predicted over measured step time, a dot per run and a row per program: above with the
    constants of the course's program, below with the constants of the run's own program.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 4.2), dpi=100, layout="constrained")
    ax = figure.add_subplot()
    names = list(dict.fromkeys(run.program for run in runs))
    for row, name in enumerate(names):
        of_program = [run for run in runs if run.program == name]
        measured = np.array([run.step_s for run in of_program])
        for shift, color, label, program in ((-0.17, GRAY, "the course's", "course"), (0.17, BLUE, "its own", name)):
            predicted = [float(predicted_step(dataclasses.replace(run, program=program)).step_s) for run in of_program]
            rows, style = np.full(len(of_program), row + shift), {"alpha": 0.5, "edgecolors": "none", "color": color}
            ax.scatter(predicted / measured, rows, 26, label=f"{label} constants", **style)  # type: ignore[arg-type]
    ax.axvline(1, color="black", linewidth=1)
    ticks = (0.2, 0.3, 0.5, 0.7, 1, 1.4, 2)
    ax.set(xscale="log", xlabel="predicted / measured time of a step", ylim=(len(names) - 0.5, -0.5))
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.set_xticks([], minor=True)
    counts = [sum(run.program == name for run in runs) for name in names]
    ax.set_yticks(range(len(names)), [f"{name}, {n} runs" for name, n in zip(names, counts, strict=True)])
    ax.spines[["top", "right"]].set_visible(False)
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles[:2], labels[:2], loc="outside upper center", ncols=2, frameon=False)
    return figure
