"""Estimates of a layout's memory and time before it is run, and a search for the best of all layouts.

    estimate(config, CLUSTERS["H100"], Layout.parse("dp4,tp8,sp,zero1"), batch=256).tokens_per_s    per GPU
    search(config, CLUSTERS["H100"], gpus=1024, batch=1024).best(5)

`step_time` and `step_memory` have the formulas, `clusters` and `software` the constants, and `calibration` fits them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from course_lib.best_config.clusters import Cluster
from course_lib.best_config.job_checks import check_job
from course_lib.best_config.layouts import (
    SETTINGS,
    check_settings,
    degree_rules,
    degrees,
    divisors,
    first_reason,
    groups_of_nodes,
    setting_rules,
    with_settings,
)
from course_lib.best_config.planned_config import model_flops
from course_lib.best_config.stage_loads import fills_stages
from course_lib.best_config.step_memory import head_in_layers, step_memory
from course_lib.best_config.step_time import host_time, layer_times, step_time
from course_lib.best_config.tables import Layouts, LayoutTable, joined
from course_lib.five_d.layouts import Layout
from course_lib.single_gpu.config import ModelConfig

RISK = 0.1  # the largest risk of running out of memory that a recommended layout may have


@dataclass(frozen=True)
class Estimate:
    """Time and memory of one layout, or of n layouts: then each value is an array [n]."""

    memory: dict[str, np.ndarray]  # bytes on the fullest GPU, by part
    time: dict[str, np.ndarray]  # seconds of a step, by part; they add up to step_s
    tokens: int  # per step
    gpus: np.ndarray
    flops: float  # of the model per token, with attention in full (`model_flops`)
    causal_flops: float  # the same with half of the scores, as the causal mask leaves
    usable_bytes: float  # of a GPU's memory
    memory_spread: float  # standard deviation of the logarithm of needed_bytes
    peak_flops: float
    runs: np.ndarray  # True if the pipeline has enough layers and micro-batches

    @property
    def step_s(self) -> np.ndarray:
        """Seconds of a step."""
        return add_up(self.time)

    @property
    def peak_bytes(self) -> np.ndarray:
        """Bytes at the peak. When memory is nearly full, the allocator waits for buffers to be freed, so a run that
        barely fits has fewer of them than it asked for.
        """
        without = self.needed_bytes - self.memory["buffers"]
        return np.minimum(self.needed_bytes, np.maximum(without, 0.95 * self.usable_bytes))

    @property
    def needed_bytes(self) -> np.ndarray:
        """Bytes at the peak if memory had no limit."""
        return add_up(self.memory)

    @property
    def fits(self) -> np.ndarray:
        """True for layouts that run within a GPU's memory."""
        return self.runs & (self.needed_bytes < self.usable_bytes)

    @property
    def risk(self) -> np.ndarray:
        """Probability of running out of memory, 0 to 1: a logistic curve about the usable bytes, as wide as the errors
        on measured runs; 1 for layouts that do not run.
        """
        margin = np.clip(np.log(self.usable_bytes / self.needed_bytes) / self.memory_spread, -700, 700)
        return np.where(self.runs, 1 / (1 + np.exp(margin)), 1.0)

    @property
    def tokens_per_s(self) -> np.ndarray:
        """Tokens/s per GPU."""
        return self.tokens / self.step_s / self.gpus

    @property
    def mfu(self) -> np.ndarray:
        """Model FLOPs utilization, 0 to 1, with attention in full, as without a causal mask (PaLM, appendix B)."""
        return self.tokens_per_s * self.flops / self.peak_flops

    @property
    def causal_mfu(self) -> np.ndarray:
        """Model FLOPs utilization, 0 to 1, with the half of the scores that causal kernels compute."""
        return self.tokens_per_s * self.causal_flops / self.peak_flops


def add_up(parts: dict[str, np.ndarray]) -> np.ndarray:
    """Return the sum of the parts of a step's time or memory."""
    return sum(parts.values(), np.asarray(0))


def host_runs_ahead(
    config: ModelConfig, cluster: Cluster, layout: Layouts, seq: int, moe: dict | None = None
) -> np.ndarray:
    """Return the layouts in which the host runs ahead of the GPU, so that buffers wait for the GPU. The host waits
    itself for the network, in large jobs and rings over many nodes, and in a pipeline of two stages for its own
    launches.
    """
    pp, nodes = np.asarray(layout.pp), np.asarray(layout.ranks) / cluster.gpus_per_node
    launches_in_time = add_up(layer_times(config, cluster, layout, seq, moe)) > host_time(cluster, layout)
    near = np.asarray(layout.tp) <= 2 * cluster.gpus_per_node
    return near & ((pp == 1) | ((nodes < cluster.software.held_nodes) & ((pp > 2) | launches_in_time)))


def estimate(
    config: ModelConfig, cluster: Cluster, layout: Layouts, batch: int, seq: int = 4096, moe: dict | None = None
) -> Estimate:
    """Return the memory and time of a step of `batch` sequences. layout: a Layout or a LayoutTable, which is not
    checked; `check_layout` and `search` reject impossible ones. moe: arguments of apply_moe. Raises ValueError as
    `check_job` does.
    """
    check_job(config, cluster, int(np.max(layout.ranks, initial=1)), batch, seq, moe)
    m = batch / (np.asarray(layout.dp) * layout.micro_batch)
    host_ahead = host_runs_ahead(config, cluster, layout, seq, moe)
    pp, software = np.asarray(layout.pp), cluster.software
    flops, causal_flops = model_flops(config, moe, seq)
    runs = fills_stages(config, pp, software.split, head_in_layers(config))
    return Estimate(
        memory=step_memory(config, cluster, layout, m, seq, moe, host_ahead),
        time=step_time(config, cluster, layout, m, seq, moe),
        tokens=batch * seq,
        gpus=np.asarray(layout.ranks),
        flops=flops,
        causal_flops=causal_flops,
        usable_bytes=cluster.memory_bytes - cluster.software.unusable_bytes,
        memory_spread=software.memory_spread,
        peak_flops=cluster.peak_flops,
        runs=runs & (m >= 1) & (m == np.floor(m)) & ((m >= pp - 1) | (not software.needs_full_pipeline)),
    )


CHUNK = 2**17  # layouts per estimate, to limit the memory that it needs


def estimate_all(
    config: ModelConfig, cluster: Cluster, table: LayoutTable, batch: int, seq: int, moe: dict | None = None
) -> Estimate:
    """Return `estimate` of a table of any size."""
    chunks = table.chunks(CHUNK)
    estimates = [estimate(config, cluster, chunk, batch, seq, moe) for chunk in chunks]
    return dataclasses.replace(
        estimates[0],
        memory=joined([each.memory for each in estimates], chunks),
        time=joined([each.time for each in estimates], chunks),
        gpus=table.ranks,
        runs=np.concatenate([each.runs for each in estimates]),
    )


PIPELINE_STARVES = "the pipeline has an empty stage, or fewer micro-batches than it needs"
OUT_OF_MEMORY = "out of memory"
TP_LIMIT = "degrees: tp is above the limit of the question"
CP_LIMIT = "degrees: cp is above the limit of the question"
RISKY = "more likely to run out of memory than is allowed"


def estimate_rules(e: Estimate, risk: float) -> dict[str, np.ndarray]:
    """Return, by reason, the possible layouts [n] that a search rejects by their estimate."""
    return {PIPELINE_STARVES: ~e.runs, OUT_OF_MEMORY: ~e.fits, RISKY: e.risk > risk}


@dataclass(frozen=True)
class Ranking:
    """The layouts of a search: the ones that run, fastest first, and the reasons that reject the others."""

    table: LayoutTable  # the possible layouts
    estimate: Estimate
    order: np.ndarray  # rows of the layouts that fit and are not too risky, the fastest first
    risky: np.ndarray  # rows of the layouts that fit by the estimate but are too risky, the fastest first
    rejected: dict[str, int]  # number of layouts by reason

    def best(self, n: int = 10) -> list[tuple[Layout, float, float, float]]:
        """Return the first n layouts, each with tokens/s per GPU, MFU, and GiB at the peak."""
        e = self.estimate
        return [
            (self.table[row], e.tokens_per_s[row].item(), e.mfu[row].item(), e.peak_bytes[row].item() / 2**30)
            for row in self.order[:n]
        ]


def search(
    config: ModelConfig,
    cluster: Cluster,
    gpus: int,
    batch: int,
    seq: int = 4096,
    moe: dict | None = None,
    settings: dict[str, tuple] | None = None,
    risk: float = RISK,
    max_tp: int | None = None,
    max_cp: int | None = None,
) -> Ranking:
    """Rank every layout of `gpus` GPUs for a global batch of sequences by tokens/s. settings: values to try of each
    setting, in place of SETTINGS; context parallelism is a zig-zag ring. risk: the largest `Estimate.risk` of a layout
    in the order; riskier layouts that need less than the usable memory are in `risky`. max_tp, max_cp: the largest tp
    and cp to try.
    Raises ValueError as `check_job` does, for a risk that is no probability above 0, and for an unknown setting or
    value.
    """
    check_job(config, cluster, gpus, batch, seq, moe)
    if not 0 < risk <= 1:
        raise ValueError(f"risk {risk}: it must be a probability above 0")
    values = values_to_try(cluster, gpus, batch, moe, settings or {})
    reasons, table = ["fits"], degrees(gpus)
    rules = degree_rules(config, table, batch, seq) | ({TP_LIMIT: table.tp > max_tp} if max_tp else {})
    rules |= {CP_LIMIT: table.cp > max_cp} if max_cp else {}
    of_degrees = first_reason(rules, reasons)
    table = with_settings(table.where(of_degrees == 0), batch, values)
    of_settings = first_reason(setting_rules(config, table, batch, seq, moe), reasons)
    table = table.where(of_settings == 0)
    e = estimate_all(config, cluster, table, batch, seq, moe)
    of_estimate = first_reason(estimate_rules(e, risk), reasons)
    counts = np.bincount(np.concatenate([of_degrees, of_settings, of_estimate]), minlength=len(reasons))
    rejected = {reason: int(count) for reason, count in zip(reasons[1:], counts[1:], strict=True) if count}
    by_time = np.argsort(e.step_s, kind="stable")
    order, risky = (by_time[of_estimate[by_time] == which] for which in (0, reasons.index(RISKY)))
    return Ranking(table, e, order, risky, rejected)


def values_to_try(cluster: Cluster, gpus: int, batch: int, moe: dict | None, settings: dict) -> dict[str, tuple]:
    """Return the values that a search tries for each of SETTINGS, the values in `settings` first. Raises ValueError for
    an unknown setting or value.
    """
    values = SETTINGS | settings
    values["micro_batch"] = values["micro_batch"] or divisors(batch)
    values["ep"] = values["ep"] or divisors(moe["experts"] if moe else 1)
    values["replicate"] = values["replicate"] or groups_of_nodes(gpus, cluster.gpus_per_node)
    check_settings(values)
    return values


def judge_layouts(
    config: ModelConfig, cluster: Cluster, table: LayoutTable, batch: int, seq: int, moe: dict | None, risk: float
) -> tuple[Estimate, list[str]]:
    """Return the estimate of a few layouts, and the reason why a search with this `risk` rejects each, "" for a layout
    that it ranks. Raises ValueError as `check_job` does.
    """
    e, reasons = estimate(config, cluster, table, batch, seq, moe), [""]
    rules = degree_rules(config, table, batch, seq) | setting_rules(config, table, batch, seq, moe)
    return e, [reasons[index] for index in first_reason(rules | estimate_rules(e, risk), reasons)]


def why_not(
    config: ModelConfig,
    cluster: Cluster,
    layout: Layout,
    batch: int,
    seq: int = 4096,
    moe: dict | None = None,
    risk: float = RISK,
) -> str:
    """Return the reason why a search with this `risk` rejects a layout, "" if it does not. Raises as `search`."""
    e, (reason,) = judge_layouts(config, cluster, LayoutTable.of([layout]), batch, seq, moe, risk)
    bytes_needed = f"{e.needed_bytes[0] / 2**30:.0f} GiB of {e.usable_bytes / 2**30:.0f}"
    if reason == OUT_OF_MEMORY:
        return f"{reason}: {bytes_needed}"
    if reason == RISKY:
        by_estimate = f"fits by estimate, {bytes_needed}, with a risk of {e.risk[0]:.0%}"
        return f"{reason}: {by_estimate}, and the limit (--risk) is {risk:.0%}"
    return reason
