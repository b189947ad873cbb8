"""Fit of the limit of a GPU's memory to which runs were ok and which failed."""

from __future__ import annotations

import math

import numpy as np

from course_lib.best_config.clusters import Cluster
from course_lib.best_config.runs import MeasuredRun, predict


def fit_limit(runs: list[MeasuredRun], cluster: Cluster) -> Cluster:
    """Return the cluster with the most likely limit of its memory, and spread of needs about the limit, given which
    runs were ok: a logistic curve (`Estimate.risk`), and a share of runs that failed for other reasons, such as a node.

    Runs that are known to have failed for other reasons ("other") do not count. Both constants stay if fewer than ten
    runs that were ok, or that failed, need between half and twice the usable bytes.
    """
    from scipy.optimize import minimize

    runs = [run for run in runs if run.failure != "other"]
    software, ok, risk = cluster.software, np.array([run.ok for run in runs]), predict(runs, cluster).risk
    inside = (risk > 0) & (risk < 1)
    ok, odds = ok[inside], np.log(risk[inside] / (1 - risk[inside]))
    log_needed = odds * software.memory_spread  # over the usable bytes
    near = np.abs(log_needed) < math.log(2)
    if min(np.sum(ok & near), np.sum(~ok & near)) < 10:
        return cluster

    def surprise(x: np.ndarray) -> float:
        limit, spread, others = x[0], math.exp(x[1]), 1 / (1 + math.exp(-x[2]))
        fails = others + (1 - others) / (1 + np.exp(np.clip((limit - log_needed) / spread, -30, 30)))
        return -np.log(np.where(ok, 1 - fails, fails) + 1e-12).sum()

    limit, log_spread, _ = minimize(surprise, [0.0, math.log(software.memory_spread), -3.0], method="Nelder-Mead").x
    usable = (cluster.memory_bytes - software.unusable_bytes) * math.exp(limit)
    unusable = max(0.0, cluster.memory_bytes - usable)
    return cluster.with_software(unusable_bytes=unusable, memory_spread=math.exp(log_spread))
