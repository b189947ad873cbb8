"""Reasons why no measured run backs a layout.

    untested(PRESETS["llama3-70B"], CLUSTERS["H100"], Layout.parse("dp256,tp8,zero3,full"), seq=8192)
                                                ("ZeRO-3 on more than 512 GPUs",)
    is_tested(config, cluster, table, seq)      the same for a LayoutTable: a boolean array, one element per layout

The runs are the rows of course_lib/data/tested_layouts.csv: the planner's constants were fitted to them, or its
estimates are compared with them. A layout is tested if there are runs, each at least half as large, with

- the number of GPUs,
- each technique of the layout (a row of `techniques`), on that number of GPUs,
- each pair of kinds of parallelism in the layout, and its schedule with its kind of model (dense or a mixture),
- each of the degrees dp, pp, cp, tp and ep,
- with ZeRO-2 or ZeRO-3, which send in every micro-batch, the number of micro-batches per step,
- the number of parameters, and the sequence length (with CP, or without),

and a run on the same kind of GPU. These may be different runs, of different programs. The estimate of a tested layout
may still be wrong. Recomputation and FP8 only change the work of each GPU, so their combinations are not checked.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import combinations, product

import numpy as np

from course_lib.best_config.clusters import CLUSTERS, Cluster
from course_lib.best_config.planned_config import count_parameters
from course_lib.best_config.tables import LayoutTable
from course_lib.five_d.layouts import NAMED_TOKENS, Layout
from course_lib.single_gpu.config import ModelConfig
from course_lib.single_gpu.devices import read_table

REACH = 2  # a run backs layouts up to twice its size
SAME_GPU = 0.1  # relative difference of peak and memory bandwidth up to which two GPUs are of the same kind
MORE_BANDWIDTH = 1.5  # times a run's: an H200 is an H100's chip with 1.43 times its memory bandwidth
RUNS_NODE = 8  # GPUs per node, in all runs
DEGREES = ("dp", "pp", "cp", "tp", "ep")
SCHEDULES = ("1f1b", *(value for field, value in NAMED_TOKENS.values() if field == "schedule"))
ZERO = ("ZeRO-0", "ZeRO-1", "ZeRO-2", "ZeRO-3")
DENSE, MIXTURE = KINDS = ("a dense model", "a mixture of experts")
PARALLELISM = (*ZERO, "HSDP", "TP", "TP between nodes", "a pipeline", "CP", MIXTURE)
PAIRS = (*combinations(PARALLELISM, 2), *product((f"schedule {name}" for name in SCHEDULES), KINDS))


def techniques(table: LayoutTable, mixture, fp8, gpus_per_node: int) -> dict[str, np.ndarray]:
    """Return the layouts that use each technique, as boolean arrays [n] by the technique's name.

    mixture, fp8: whether the model is a mixture, and whether its matmuls are in FP8: booleans, or arrays [n].
    """
    mixture, fp8 = (np.broadcast_to(each, len(table)) for each in (mixture, fp8))
    sharers = table.dp * table.cp > 1
    return {
        **{name: sharers & (table.zero_stage == stage) for stage, name in enumerate(ZERO)},
        "HSDP": (table.zero_stage == 3) & (table.replicate > 1),
        "TP": table.tp > 1,
        "TP between nodes": table.tp > gpus_per_node,
        "a pipeline": table.pp > 1,
        **{f"schedule {name}": (table.pp > 1) & (table.schedule == name) for name in SCHEDULES},
        "CP": table.cp > 1,
        "CP by Ulysses": (table.cp > 1) & (table.cp_method == "ulysses"),
        DENSE: ~mixture,
        MIXTURE: mixture,
        "selective recomputation": table.recompute == "selective",
        "full recomputation": table.recompute == "full",
        "FP8": fp8,
    }


@dataclass(frozen=True)
class MeasuredLayouts:
    """Columns of runs [n], as tested_layouts.csv has them."""

    table: LayoutTable
    gpu: np.ndarray  # a name in CLUSTERS
    params_b: np.ndarray  # billions
    seq: np.ndarray  # tokens
    micro_batches: np.ndarray  # per step
    mixture: np.ndarray  # bool
    fp8: np.ndarray  # bool

    @classmethod
    def of(cls, rows: list[dict[str, str]]) -> MeasuredLayouts:
        """Return the runs of rows of the file. Raises ValueError for words that are no layout."""
        column = {name: np.array([row[name] for row in rows]) for name in rows[0]}
        return cls(
            LayoutTable.of(map(Layout.parse, column["layout"].tolist())),
            gpu=column["gpu"],
            params_b=column["params_b"].astype(float),
            seq=column["seq"].astype(int),
            micro_batches=column["micro_batches"].astype(int),
            mixture=column["model"] == "mixture",
            fp8=column["matmuls"] == "fp8",
        )

    @property
    def techniques(self) -> dict[str, np.ndarray]:
        """The runs that use each technique."""
        return techniques(self.table, self.mixture, self.fp8, RUNS_NODE)


@functools.cache
def measured_layouts() -> MeasuredLayouts:
    """Return the runs of course_lib/data/tested_layouts.csv."""
    return MeasuredLayouts.of(read_table("tested_layouts.csv"))


@functools.cache
def most_gpus() -> dict[tuple[str, ...], int]:
    """Return the GPUs of the largest run with each technique, by (name,), and with each pair of PAIRS; 0 for none."""
    used, gpus = measured_layouts().techniques, measured_layouts().table.ranks
    every = [*((name,) for name in used), *PAIRS]
    return {names: int(np.max(gpus * np.all([used[name] for name in names], axis=0))) for names in every}


def is_gpu(cluster: Cluster, name: str) -> bool:
    """Return True if a cluster's GPUs are of a preset's kind, by peak FLOP/s and memory bandwidth. More bandwidth, up
    to MORE_BANDWIDTH, only shortens the kernels other than matmuls, by the ratio of the data sheets.
    """
    other = CLUSTERS[name]
    bandwidth = cluster.memory_bandwidth / other.memory_bandwidth
    return abs(cluster.peak_flops / other.peak_flops - 1) <= SAME_GPU and 1 - SAME_GPU <= bandwidth <= MORE_BANDWIDTH


def job_rules(config: ModelConfig, cluster: Cluster, seq: int, moe: dict | None = None) -> dict[str, bool]:
    """Return the reasons that apply to all layouts of a job: its kind of GPU, parameters, and tokens per sequence."""
    runs, kind = measured_layouts(), "mixtures" if moe else "models"
    gpus, longest, most = sorted(set(runs.gpu)), runs.seq.max(), runs.params_b[runs.mixture == bool(moe)].max()
    too_large = count_parameters(config, moe)[0] > REACH * most * 1e9
    return {
        f"GPUs other than {', '.join(gpus[:-1])} and {gpus[-1]}": not any(is_gpu(cluster, name) for name in gpus),
        f"{kind} of more than {most:,.0f} billion parameters": too_large,
        f"sequences of more than {longest:,} tokens": seq > REACH * longest,
    }


def layout_rules(
    cluster: Cluster, table: LayoutTable, seq: int, moe: dict | None = None, batch: int | None = None
) -> dict[str, np.ndarray]:
    """Return the reasons that depend on the layout, each with the layouts that it applies to: boolean arrays [n].

    A reason is left out for layouts that a more general reason covers: without runs with ZB-V, there are none with ZB-V
    and experts.
    """
    runs, gpus, most = measured_layouts(), table.ranks, most_gpus()
    every, longest = runs.table.ranks.max(), runs.seq[runs.table.cp == 1].max()
    too_many = gpus > REACH * every
    rules = {f"more than {every:,} GPUs": too_many}
    used = techniques(table, bool(moe), cluster.software.matmul_dtype == "fp8", cluster.gpus_per_node)
    beyond = {name: uses & (gpus > REACH * most[name,]) & ~too_many for name, uses in used.items()}
    rules |= {on_gpus(name, most[name,]): holds for name, holds in beyond.items()}
    for one, other in PAIRS:
        both = used[one] & used[other] & (gpus > REACH * most[one, other]) & ~too_many
        rules[on_gpus(f"{one} with {other}", most[one, other])] = both & ~beyond[one] & ~beyond[other]
    for name in DEGREES:
        largest = getattr(runs.table, name).max()
        rules[f"{name} above {largest}"] = getattr(table, name) > REACH * largest
    for name in ZERO[2:] if batch else ():
        largest = runs.micro_batches[runs.techniques[name]].max(initial=0)
        above = used[name] & ~beyond[name] & (batch > REACH * largest * table.dp * table.micro_batch)
        rules[f"{name} with more than {largest} micro-batch{'es' if largest > 1 else ''} per step"] = above
    without_cp = (table.cp == 1) & (REACH * longest < seq <= REACH * runs.seq.max())
    return rules | {f"sequences of more than {longest:,} tokens without CP": without_cp}


def on_gpus(name: str, most: int) -> str:
    """Return the reason for a technique whose largest run has `most` GPUs."""
    return f"{name} on more than {most:,} GPUs" if most else name


def untested(
    config: ModelConfig,
    cluster: Cluster,
    layout: Layout,
    seq: int,
    moe: dict | None = None,
    batch: int | None = None,
) -> tuple[str, ...]:
    """Return what no run has tested about a layout, such as ("HSDP", "ZeRO-3 on more than 512 GPUs"); empty if runs
    back all of it. The module's docstring has the rules.

    seq: tokens per sequence; moe: arguments of apply_moe; batch: sequences per step, None to ignore micro-batches.
    """
    rules = job_rules(config, cluster, seq, moe) | layout_rules(cluster, LayoutTable.of([layout]), seq, moe, batch)
    return tuple(reason for reason, holds in rules.items() if np.all(holds))


def is_tested(
    config: ModelConfig,
    cluster: Cluster,
    table: LayoutTable,
    seq: int,
    moe: dict | None = None,
    batch: int | None = None,
) -> np.ndarray:
    """Return the layouts for which `untested` returns no reason, as a boolean array [n]."""
    if any(job_rules(config, cluster, seq, moe).values()):
        return np.zeros(len(table), bool)
    return ~np.any(list(layout_rules(cluster, table, seq, moe, batch).values()), axis=0)
