"""Time constants of programs, fitted to published runs, and tested on the sources that a fit left out.

    runs = load_published("data/published_throughput.csv") + load_published("data/fsdp_runs_llm_foundry.csv")
    result = fit_program([run for run in runs if run.program == "llm-foundry"])
    result.software, result.intervals           the constants of `SOFTWARE`, and the 90% interval of each
    cross_validate_programs(runs)               all programs: the fits, and the errors on each source left out

The logarithm of predicted over measured step time is fitted by least squares in which an outlier counts less and less
(Cauchy's loss). A source counts as the square root of its number of runs, so that a source with many runs does not
decide alone. Each constant starts at PRIOR and is known to a factor of 3 (90%) before the fit. No share of a peak may
exceed the share that a large matmul reached on an H200 (benchmarks/results/fp8_h200.json). Features of a program, such
as hidden transfers, are in `SOFTWARE` and not fitted.

The factors of an A100 are fitted with llm-foundry's constants: it is the only program with runs on both GPUs at full
power. The fits of other programs use these factors.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from course_kit.planning.published_runs import PublishedRun, cluster_of
from course_lib.best_config.clusters import FACTORS
from course_lib.best_config.software import SOFTWARE, Software
from course_lib.best_config.step_time import step_time

FITTED = {
    "llm-foundry": (
        "matmul_efficiency", "fp8_efficiency", "attention_efficiency", "layer_traffic", "head_efficiency", "half_rows",
        "sharded_overlap", "network_efficiency", "gradient_step_s",
    ),
    "Megatron-LM": (
        "matmul_efficiency", "attention_efficiency", "layer_traffic", "logit_traffic", "network_efficiency",
    ),
    "Megatron-Core": (
        "matmul_efficiency", "fp8_efficiency", "layer_traffic", "logit_traffic", "tp_overlap", "network_efficiency",
    ),
    "torchtitan": ("matmul_efficiency", "fp8_efficiency", "layer_traffic", "network_efficiency"),
    "DeepSpeed 2021": ("network_efficiency", "gradient_step_s"),
}  # fmt: skip
PRIOR: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(Software)}  # of nanotron's runs
PRIOR |= {"fp8_efficiency": 0.6, "tp_overlap": 0.4, "logit_traffic": 100.0, "network_efficiency": 0.7}
PRIOR_FACTORS = {"matmul_factor": 1.0, "attention_factor": 1.0}
PRIOR_OF = {
    # Counted: attention in separate kernels moves 32 bytes per score, forward and backward, and computes all scores.
    "Megatron-LM": {"attention_efficiency": 0.063},
    # Counted: about 1,200 tensors are gathered twice and reduced once, in 3,600 rings of microseconds per rank.
    "DeepSpeed 2021": {"network_efficiency": 0.2, "gradient_step_s": 0.02},
}
A100_MOST = 0.9  # largest share of an A100's peak in matmuls, matmul_factor included
MOST = {"matmul_efficiency": 0.79, "fp8_efficiency": 0.73, "head_efficiency": 0.79, "attention_efficiency": 0.79}
MOST |= {"tp_overlap": 1.0, "network_efficiency": 0.95, "sharded_overlap": 1.5}
SCALE = 0.05  # of Cauchy's loss
KNOWN = math.log(3) / 1.645  # standard deviation of a constant's logarithm before the fit


@dataclass(frozen=True)
class ProgramFit:
    """A program's software as fitted, the factors of an A100, and the interval of each constant."""

    software: Software
    factors: dict[str, float]
    intervals: dict[str, tuple[float, float]]  # 90%, of each fitted constant


def on_a100(software: Software, factors: dict[str, float]) -> Software:
    """Return the software with the shares of the peak that it reaches on an A100, without a cluster's limit on them: at
    a limit, a fit would see no slope.
    """
    matmul, attention = factors["matmul_factor"], factors["attention_factor"]
    return dataclasses.replace(
        software,
        matmul_efficiency=software.matmul_efficiency * matmul,
        head_efficiency=software.head_efficiency * matmul,
        attention_efficiency=software.attention_efficiency * attention,
    )


def predicted_s(runs: Iterable[PublishedRun], software: Software, factors: dict[str, float]) -> np.ndarray:
    """Return the predicted seconds of a step of each run, with this software and these factors of an A100: [n]."""
    clusters, seconds = {}, []
    for run in runs:
        kind = (run.gpu, run.dtype == "fp8")
        if kind not in clusters:
            on_gpu = on_a100(software, factors) if run.gpu.startswith("A100") else software
            clusters[kind] = dataclasses.replace(cluster_of(run, on_gpu), matmul_factor=1.0, attention_factor=1.0)
        m = run.batch / (run.layout.dp * run.layout.micro_batch)
        seconds.append(float(sum(step_time(run.config, clusters[kind], run.layout, m, run.seq).values())))
    return np.array(seconds)


def log_ratios(runs: list[PublishedRun], software: Software, factors: dict[str, float]) -> np.ndarray:
    """Return log(predicted / measured) of each run: [n]."""
    return np.log(predicted_s(runs, software, factors) / [run.step_s for run in runs])


def most_of(runs: list[PublishedRun], factors: dict[str, float] | None) -> dict[str, float]:
    """Return the upper bounds of a fit's constants by name: MOST, or A100_MOST of an A100's peak for runs on A100s."""
    if factors is None or not all(run.gpu.startswith("A100") for run in runs):
        return MOST
    return MOST | {"matmul_efficiency": A100_MOST / factors["matmul_factor"]}


def source_weights(runs: list[PublishedRun]) -> np.ndarray:
    """Return the weight of each run's error, [n], 1 on average. A sum of squares weighs a source by the square root of
    its number of runs.
    """
    count = Counter(run.source for run in runs)
    weights = np.array([count[run.source] ** -0.25 for run in runs])
    return weights / weights.mean()


def fit_program(runs: list[PublishedRun], factors: dict[str, float] | None = None) -> ProgramFit:
    """Fit the constants of one program to its runs. factors: of an A100; None: fit them, too.

    Raises ValueError for no runs, or runs of several programs.
    """
    from scipy.optimize import least_squares

    programs = {fitted_as(run) for run in runs}
    if len(programs) != 1:
        raise ValueError(f"fit_program: runs of {len(programs)} programs, but it fits one program at a time")
    (program,) = programs
    names = [*FITTED[program], *(FACTORS if factors is None else ())]
    prior = PRIOR | PRIOR_FACTORS | PRIOR_OF.get(program, {})
    limits = most_of(runs, factors)
    start, most = np.log([prior[name] for name in names]), np.log([limits.get(name, math.inf) for name in names])
    weights = source_weights(runs)

    def with_values(logarithms: np.ndarray) -> tuple[Software, dict[str, float]]:
        values = dict(zip(names, np.exp(logarithms).tolist(), strict=True))
        fitted = {name: values.pop(name) for name in FITTED[program]}
        return dataclasses.replace(SOFTWARE[program], **fitted), factors or values

    def residuals(logarithms: np.ndarray) -> np.ndarray:
        errors = weights * log_ratios(runs, *with_values(logarithms))
        return np.concatenate([errors, SCALE * (logarithms - start) / KNOWN])

    bounds = (start - 4, np.maximum(most, start + 1e-6))
    result = least_squares(
        residuals, start, bounds=bounds, loss="cauchy", f_scale=SCALE, x_scale=0.3, diff_step=1e-3, ftol=1e-4
    )
    reach = np.minimum(100, 1.645 * np.sqrt(np.diag(covariance(result.jac, result.fun))))
    ends = np.exp([result.x - reach, np.minimum(result.x + reach, most)]).T.tolist()
    return ProgramFit(*with_values(result.x), dict(zip(names, map(tuple, ends), strict=True)))


def covariance(jacobian: np.ndarray, residuals: np.ndarray) -> np.ndarray:
    """Return the covariance of a fit's parameters, [n, n], from its weighted Jacobian and its residuals."""
    spread = max(0.01, 1.4826 * float(np.median(np.abs(residuals))))
    return np.linalg.inv(jacobian.T @ jacobian) * spread**2


def fitted_as(run: PublishedRun) -> str:
    """Return the program whose constants a run is fitted with: NVIDIA's recipes for NeMo run Megatron-Core."""
    return "Megatron-Core" if run.program == "NeMo" else run.program


def family(run: PublishedRun) -> str:
    """Return the name of the runs that are left out together: a source, in BF16 and in FP8 if both have the same
    models.
    """
    return run.source.removesuffix(", FP8")


def cross_validate_programs(runs: list[PublishedRun]) -> tuple[dict[str, ProgramFit], list[dict]]:
    """Fit each program, and once more without each of its families of sources, which the second fit predicts.

    Returns the fits to all runs by program, and a row for each source and for each program ("all"): program, source,
    runs, the median of predicted over measured (of the fit to all), and the median error in sample and left out (None
    if there is no other source). The runs of both files take 90 seconds.
    """
    fits, rows, factors = {}, [], None
    for program in FITTED:
        of_program = [run for run in runs if fitted_as(run) == program]
        if not of_program:
            continue
        fits[program] = fitted = fit_program(of_program, factors)
        inside = log_ratios(of_program, fitted.software, fitted.factors)
        outside = left_out_ratios(of_program, factors)
        factors = factors or fitted.factors
        sources = [*dict.fromkeys(run.source for run in of_program), "all"]
        rows += [error_row(program, source, of_program, inside, outside) for source in sources]
    return fits, rows


def left_out_ratios(runs: list[PublishedRun], factors: dict[str, float] | None) -> np.ndarray:
    """Return log(predicted / measured) of each run of a program by a fit without the run's family of sources: [n]; nan
    if there is no other family.
    """
    ratios = np.full(len(runs), np.nan)
    for name in dict.fromkeys(map(family, runs)):
        left_out = np.array([family(run) == name for run in runs])
        if others := [run for run in runs if family(run) != name]:
            fitted = fit_program(others, factors)
            of_family = [run for run in runs if family(run) == name]
            ratios[left_out] = log_ratios(of_family, fitted.software, fitted.factors)
    return ratios


def error_row(
    program: str, source: str, runs: list[PublishedRun], inside: np.ndarray, outside: np.ndarray
) -> dict[str, object]:
    """Return the row of a source, or of "all"; inside, outside: log ratios of runs, in sample and left out: [n]."""
    which = np.array([source in (run.source, "all") for run in runs])
    return {
        "program": program,
        "source": source,
        "runs": int(which.sum()),
        "predicted / measured": float(np.exp(np.median(inside[which]))),
        "in sample": float(np.median(np.abs(np.expm1(inside[which])))),
        "left out": None if np.isnan(outside[which]).any() else float(np.median(np.abs(np.expm1(outside[which])))),
    }
