"""What a layout would take and cost, before it is run; and the best of all layouts.

    estimate(config, CLUSTERS["H100"], Layout.parse("dp4,tp8,sp,zero1"), batch=256).tokens_per_s    per GPU
    search(config, CLUSTERS["H100"], gpus=1024, batch=1024).best(5)

The step's parts are in `step_time` and `step_memory`, the constants in `clusters`, where they came from in
`calibration`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from numbers import Integral

import numpy as np

from course_lib.best_config.clusters import Cluster
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
from course_lib.best_config.planned_config import count_parameters, model_flops
from course_lib.best_config.stage_loads import fills_stages
from course_lib.best_config.step_memory import head_in_layers, step_memory
from course_lib.best_config.step_time import host_time, layer_times, step_time
from course_lib.best_config.tables import LayoutTable, joined
from course_lib.expert_parallel.router import Routing
from course_lib.five_d.layouts import Layout
from course_lib.single_gpu.model import ModelConfig

RISK = 0.1  # of running out of memory, that a recommended layout may have


@dataclass(frozen=True)
class Estimate:
    """Of one layout, or of n: each number is then an array [n]."""

    memory: dict[str, np.ndarray]  # bytes on the fullest GPU, by part
    time: dict[str, np.ndarray]  # seconds of a step, by part; they add up to step_s
    tokens: int  # of a step
    gpus: np.ndarray
    flops: float  # of the model per token, attention in full (`model_flops`)
    causal_flops: float  # the same with half of the scores, as the causal mask leaves
    usable_bytes: float  # of a GPU's memory
    memory_spread: float  # of the logarithm of needed_bytes
    peak_flops: float
    runs: np.ndarray  # whether the pipeline has enough layers and micro-batches

    @property
    def step_s(self) -> np.ndarray:
        """Seconds of a step."""
        return sum(self.time.values())

    @property
    def peak_bytes(self) -> np.ndarray:
        """Bytes at the peak. Near the end of its memory the allocator waits for buffers, so a run that fits barely
        has fewer of them than it asked for.
        """
        without = self.needed_bytes - self.memory["buffers"]
        return np.minimum(self.needed_bytes, np.maximum(without, 0.95 * self.usable_bytes))

    @property
    def needed_bytes(self) -> np.ndarray:
        """Bytes at the peak, were there no end of memory."""
        return sum(self.memory.values())

    @property
    def fits(self) -> np.ndarray:
        """Whether it runs, and within a GPU's memory."""
        return self.runs & (self.needed_bytes < self.usable_bytes)

    @property
    def risk(self) -> np.ndarray:
        """Probability that it runs out of memory, 0 to 1, by a logistic curve about the usable bytes, as wide as the
        errors on measured runs are; 1 where it does not run.
        """
        margin = np.clip(np.log(self.usable_bytes / self.needed_bytes) / self.memory_spread, -700, 700)
        return np.where(self.runs, 1 / (1 + np.exp(margin)), 1.0)

    @property
    def tokens_per_s(self) -> np.ndarray:
        """Tokens/s per GPU."""
        return self.tokens / self.step_s / self.gpus

    @property
    def mfu(self) -> np.ndarray:
        """Model FLOPs utilization, 0 to 1, with attention in full, as if there were no causal mask (PaLM, appendix
        B).
        """
        return self.tokens_per_s * self.flops / self.peak_flops

    @property
    def causal_mfu(self) -> np.ndarray:
        """Model FLOPs utilization, 0 to 1, with the half of the scores that causal kernels compute."""
        return self.tokens_per_s * self.causal_flops / self.peak_flops


LARGEST = 10**8  # GPUs, or sequences of a batch: trying their divisors takes seconds
MOST_PARAMETERS = 10**15  # beyond them bytes overflow 64-bit integers
MOE_SIZES = {"ffn_hidden": 1, "shared": 0, "seed": 0}  # arguments of apply_moe beside Routing's, and the least of each


def is_size(value, least: int) -> bool:
    """Whether it is a whole number, and large enough."""
    return isinstance(value, Integral) and value >= least


def check_moe_sizes(moe: dict) -> None:
    """Raise ValueError where a mixture's numbers are none of `apply_moe`, or do not fit together."""
    known = [*MOE_SIZES, *(field.name for field in dataclasses.fields(Routing))]
    if unknown := [name for name in moe if name not in known]:
        raise ValueError(f"moe: {', '.join(map(str, unknown))} is none of {', '.join(known)}")
    for name, least in ({"experts": 1, "top_k": 1} | MOE_SIZES).items():
        if name not in moe and name in MOE_SIZES or name == "ffn_hidden" and moe[name] is None:
            continue
        if not is_size(moe.get(name), least):
            raise ValueError(f"moe: {name} {moe.get(name)!r}: a whole number, {least} or more")
    try:
        Routing(**{name: value for name, value in moe.items() if name not in MOE_SIZES})
    except TypeError as error:  # a string in place of a number
        raise ValueError(f"moe: {error}") from None


def check_job(config: ModelConfig, cluster: Cluster, gpus: int, batch: int, seq: int, moe: dict | None = None) -> None:
    """Raise ValueError, in one line, where there is nothing to plan: numbers below 1 or not whole (of GPUs, of a batch,
    of a model; ModelConfig has seen to heads), numbers above LARGEST, more than MOST_PARAMETERS, a mixture that is
    none, or more GPUs than a cluster without a network has in a node.
    """
    if not all(is_size(number, 1) for number in (gpus, batch, seq)):
        raise ValueError(f"gpus {gpus}, batch {batch}, seq {seq}: each is 1 or more, and whole")
    if max(gpus, batch, seq) > LARGEST:
        raise ValueError(f"gpus {gpus}, batch {batch}, seq {seq}: each is {LARGEST:,} or less")
    for name in ("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab", "head_dim"):
        if not is_size(getattr(config, name), 1):
            raise ValueError(f"model: {name} {getattr(config, name)!r}: a whole number, 1 or more")
    if moe is not None:
        check_moe_sizes(moe)
    if (parameters := count_parameters(config, moe)[0]) > MOST_PARAMETERS:
        raise ValueError(f"model: {parameters:.0e} parameters: the planner counts {MOST_PARAMETERS:.0e} or fewer")
    if gpus > cluster.gpus_per_node and not cluster.network:
        raise ValueError(
            f"{cluster.name}: {gpus} GPUs are more than a node's {cluster.gpus_per_node}, and it has no network"
        )


def runs_ahead(config: ModelConfig, cluster: Cluster, layout, seq: int, moe: dict | None = None) -> np.ndarray:
    """Whether the host runs ahead of the GPU, so that buffers wait for it. Not where it waits itself: for the network,
    in large jobs and rings over many nodes, or, in a pipeline of two stages, for kernels to be launched.
    """
    pp, nodes = np.asarray(layout.pp), np.asarray(layout.ranks) / cluster.gpus_per_node
    launched = sum(layer_times(config, cluster, layout, seq, moe).values()) > host_time(cluster, layout)
    near = np.asarray(layout.tp) <= 2 * cluster.gpus_per_node
    return near & ((pp == 1) | ((nodes < cluster.software.held_nodes) & ((pp > 2) | launched)))


def estimate(
    config: ModelConfig,
    cluster: Cluster,
    layout: Layout | LayoutTable,
    batch: int,
    seq: int = 4096,
    moe: dict | None = None,
) -> Estimate:
    """Memory and time of a step of `batch` sequences. layout: a Layout or a LayoutTable, which are taken as they are;
    `check_layout` and `search` say which cannot be. moe: arguments of apply_moe. Raises ValueError where `check_job`
    does.
    """
    check_job(config, cluster, int(np.max(layout.ranks, initial=1)), batch, seq, moe)
    m = batch / (np.asarray(layout.dp) * layout.micro_batch)
    ahead = runs_ahead(config, cluster, layout, seq, moe)
    pp, software = np.asarray(layout.pp), cluster.software
    flops, causal_flops = model_flops(config, moe, seq)
    runs = fills_stages(config, pp, software.split, head_in_layers(config))
    return Estimate(
        memory=step_memory(config, cluster, layout, m, seq, moe, ahead),
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


CHUNK = 2**17  # layouts that are estimated at a time, to need less memory


def estimate_all(config: ModelConfig, cluster: Cluster, table: LayoutTable, *job) -> Estimate:
    """Return `estimate` of a table of any size. job: batch, seq and moe."""
    cuts = table.chunks(CHUNK)
    found = [estimate(config, cluster, cut, *job) for cut in cuts]
    parts = {part: joined([getattr(each, part) for each in found], cuts) for part in ("memory", "time")}
    runs = np.concatenate([each.runs for each in found])
    return dataclasses.replace(found[0], **parts, gpus=table.ranks, runs=runs)


PIPELINE_STARVES = "the pipeline has an empty stage, or fewer micro-batches than it needs"
OUT_OF_MEMORY = "out of memory"
TP_LIMIT = "degrees: tp is above the limit of the question"
RISKY = "more likely to run out of memory than is allowed"


@dataclass(frozen=True)
class Ranking:
    """All layouts of a search: those that run, the fastest first, and why the others do not."""

    table: LayoutTable  # of those whose numbers come out
    estimate: Estimate
    order: np.ndarray  # rows of those that fit and are not too risky, the fastest first
    risky: np.ndarray  # rows of those that fit by the estimate, but are too risky, the fastest first
    rejected: dict[str, int]  # reason: how many layouts

    def best(self, n: int = 10) -> list[tuple[Layout, float, float, float]]:
        """The first n: layout, tokens/s per GPU, MFU, GiB at the peak."""
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
) -> Ranking:
    """Rank every layout of `gpus` GPUs for a global batch of sequences by tokens/s. settings: values to try of each, in
    place of SETTINGS; context parallelism is a zig-zag ring. risk: the largest `Estimate.risk` of a layout in the
    order; layouts that need less than is usable but are riskier are in `risky`. max_tp: the largest tp to try. Raises
    ValueError where `check_job` does, for a risk that is no probability above 0, and for an unknown setting or value.
    """
    check_job(config, cluster, gpus, batch, seq, moe)
    if not 0 < risk <= 1:
        raise ValueError(f"risk {risk}: it must be a probability above 0")
    chosen = SETTINGS | (settings or {})
    chosen["micro_batch"] = chosen["micro_batch"] or divisors(batch)
    chosen["ep"] = chosen["ep"] or divisors(moe["experts"] if moe else 1)
    chosen["replicate"] = chosen["replicate"] or groups_of_nodes(gpus, cluster.gpus_per_node)
    check_settings(chosen)
    reasons = ["fits"]
    table = degrees(gpus)
    rules = degree_rules(config, table, batch, seq) | ({TP_LIMIT: table.tp > max_tp} if max_tp else {})
    reason = first_reason(rules, reasons)
    numbers = [reason]
    table = with_settings(table.where(reason == 0), batch, chosen)
    reason = first_reason(setting_rules(config, table, batch, seq, moe), reasons)
    numbers.append(reason)
    table = table.where(reason == 0)
    found = estimate_all(config, cluster, table, batch, seq, moe)
    rules = {PIPELINE_STARVES: ~found.runs, OUT_OF_MEMORY: ~found.fits, RISKY: found.risk > risk}
    reason = first_reason(rules, reasons)
    numbers.append(reason)
    counts = np.bincount(np.concatenate(numbers), minlength=len(reasons))
    by_time = np.argsort(found.step_s, kind="stable")
    order, risky = (by_time[reason[by_time] == which] for which in (0, reasons.index(RISKY)))
    return Ranking(table, found, order, risky, {r: int(c) for r, c in zip(reasons[1:], counts[1:], strict=True) if c})


def why_not(
    config: ModelConfig,
    cluster: Cluster,
    layout: Layout,
    batch: int,
    seq: int = 4096,
    moe: dict | None = None,
    risk: float = RISK,
) -> str:
    """Return the reason for which a search with this `risk` rejects a layout; "" if it does not. Raises as `search`."""
    check_job(config, cluster, layout.ranks, batch, seq, moe)
    table, reasons = LayoutTable.of([layout]), [""]
    rules = degree_rules(config, table, batch, seq) | setting_rules(config, table, batch, seq, moe)
    if number := first_reason(rules, reasons)[0]:
        return reasons[number]
    found = estimate(config, cluster, layout, batch, seq, moe)
    if not found.runs:
        return PIPELINE_STARVES
    needs, usable = found.needed_bytes / 2**30, found.usable_bytes / 2**30
    if not found.fits:
        return f"{OUT_OF_MEMORY}: {needs:.0f} GiB of {usable:.0f}"
    by_estimate = f"fits by estimate, {needs:.0f} GiB of {usable:.0f}, with a risk of {found.risk:.0%}"
    return f"{RISKY}: {by_estimate}, and the limit (--risk) is {risk:.0%}" if found.risk > risk else ""
