"""Errors of the planner on published runs.

errors_by("source", runs)       {source: (runs, median of predicted / measured, median error)}
refused_by_program(runs)        {program: (runs that the planner refuses as out of memory, all its runs)}
time_ratios(runs)               {program: (predicted / measured time of each run by the course's constants, by its own)}

All runs completed, so each refused run is an error of the memory constants.
"""

from __future__ import annotations

import dataclasses
import statistics

from course_kit.planning.published_runs import PublishedRun, predicted_step


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


def time_ratios(runs: list[PublishedRun]) -> dict[str, tuple[list[float], list[float]]]:
    """Return predicted over measured step time of each run, by program: with the course's constants, and with
    those of the program.
    """
    ratios: dict[str, tuple[list[float], list[float]]] = {}
    for run in runs:
        course, fitted = ratios.setdefault(run.program, ([], []))
        course.append(float(predicted_step(dataclasses.replace(run, program="course")).step_s) / run.step_s)
        fitted.append(float(predicted_step(run).step_s) / run.step_s)
    return ratios
