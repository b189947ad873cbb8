"""`layout = "auto"`: the planner's choice for the settings of a run.

    layout, line = choose_layout(settings, config, moe, gpus=64, gpus_per_node=8, device_name="NVIDIA H100 80GB HBM3")

The planner ranks the layouts that the training program can run with these settings. Its first answer is the simplest
one within 3% of the fastest. Every rank comes to the same layout: nothing is measured, and nothing depends on the rank.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np

from course_lib.best_config.answer import enough_gpus, leanest
from course_lib.best_config.answer_text import no_layout_line
from course_lib.best_config.clusters import CLUSTERS, Cluster
from course_lib.best_config.layouts import SCHEDULES, degree_rules, divisors, setting_rules
from course_lib.best_config.one_layout import layout_summary
from course_lib.best_config.planner import Ranking
from course_lib.best_config.program import read_cluster
from course_lib.best_config.question import TITLES, Question
from course_lib.best_config.simplicity import first_layout
from course_lib.best_config.software import SOFTWARE, Software
from course_lib.five_d.layouts import Layout, check_layout
from course_lib.five_d.plan import batch_at
from course_lib.single_gpu.config import ModelConfig
from course_lib.single_gpu.devices import model_of
from course_lib.train.sections import Settings

RACK = "GB200 NVL72"  # NVLink joins more GPUs than a machine has


def batches_of(settings: Settings) -> list[int]:
    """Return the sizes that the batch has during the run, ascending."""
    run = settings.run
    start = run.start_batch or run.batch
    return sorted({batch_at(step, start, run.batch, run.ramp) for step in range(1, run.ramp + 2)})


def preset_of(device_name: str) -> str | None:
    """Return the cluster preset of a GPU, by the name that PyTorch reports; None for a GPU without a preset."""

    def words(name: str) -> set[str]:
        return set(re.findall(r"[\w.]+", name.upper()))

    same = [name for name in CLUSTERS if model_of(name.split(" NVL")[0]) == model_of(device_name)]
    return max(same, key=lambda name: len(words(name) & words(device_name)), default=None)  # A100-40GB: its memory too


def cluster_of(settings: Settings, gpus_per_node: int, device_name: str) -> Cluster:
    """Return the cluster to plan for, with the constants of the program that the settings make: that of `cluster`, or
    nodes of this GPU. Raises ValueError, in one line, for a GPU or a cluster that the planner does not know.
    """
    if settings.layout.cluster:
        cluster = read_cluster(settings.layout.cluster)
    elif name := preset_of(device_name):
        cluster = CLUSTERS[name]
        if name != RACK:
            cluster = dataclasses.replace(cluster, gpus_per_node=gpus_per_node)
    else:
        known = "; ".join(CLUSTERS)
        raise ValueError(
            f"layout auto: the planner does not know {device_name}: set cluster to a TOML file, or {known}"
        )
    software = cluster.software
    if software == Software() or software.program not in TITLES:  # others are fitted to runs of this program
        software = SOFTWARE["course, kernels" if settings.kernels.kernels else "course"]
    fp8 = settings.precision.fp8 != "none" and cluster.fp8_flops is not None
    changes: dict[str, Any] = {"fused_loss": settings.kernels.chunked_loss, "matmul_dtype": "fp8" if fp8 else "bf16"}
    return dataclasses.replace(cluster, software=dataclasses.replace(software, **changes))


def choices_of(settings: Settings) -> dict[str, tuple]:
    """Return the values that a search may try, by setting, where this run has fewer than the planner knows."""
    choices: dict[str, tuple] = {}
    if settings.precision.fp8 != "none":
        choices["sequence_parallel"] = (False,)
    if settings.precision.fp8_gather:
        choices["zero_stage"] = (3,)
    if settings.compile.compile:  # zero-bubble schedules split the backward of a layer
        choices["schedule"] = tuple(name for name in SCHEDULES if not name.startswith("zb"))
    if settings.recomputation.recompute:
        choices["recompute"] = (settings.recomputation.recompute,)
    return choices


def for_all_batches(ranking: Ranking, question: Question, batches: list[int]) -> Ranking:
    """Return the ranking of the layouts that can divide each of several batches."""
    table, size = ranking.table, (question.seq, question.moe)
    rules = [rule for batch in batches for rule in degree_rules(question.config, table, batch, question.seq).values()]
    rules += [rule for batch in batches for rule in setting_rules(question.config, table, batch, *size).values()]
    possible = ~np.any(np.broadcast_arrays(*rules), axis=0)
    order, risky = (rows[possible[rows]] for rows in (ranking.order, ranking.risky))
    return dataclasses.replace(ranking, order=order, risky=risky)


def on_cpu(settings: Settings, config: ModelConfig, moe: dict | None, ranks: int) -> tuple[Layout, str]:
    """Return the layout for ranks on CPUs, and a line about it: ZeRO-1 over as many ranks as divide the batch, and
    tensor parallelism over the rest. Raises ValueError, in one line, if it does not fit the model.
    """
    batches = batches_of(settings)
    reason = ""
    for dp in reversed(divisors(ranks)):
        layout = Layout(dp=dp, tp=ranks // dp, zero_stage=1 if dp > 1 else 0)
        try:
            for batch in batches:
                check_layout(config, layout, ranks, batch, settings.run.seq, moe)
        except ValueError as error:
            reason = reason or str(error)
            continue
        return layout, f"layout auto: {layout}; the planner knows GPUs only, and this is a CPU: set layout to choose"
    raise ValueError(f"layout auto: neither data nor tensor parallelism fits {ranks} ranks: {reason}")


def choose_layout(
    settings: Settings, config: ModelConfig, moe: dict | None, gpus: int, gpus_per_node: int, device_name: str | None
) -> tuple[Layout, str]:
    """Return the best layout for a run, and a line about it with the planner's estimate. moe: arguments of apply_moe;
    device_name: as torch.cuda.get_device_name reports it, None on a CPU.

    Raises ValueError, in one line, if no layout fits, or the planner knows neither the GPU nor the cluster.
    """
    if device_name is None and settings.layout.cluster is None:
        return on_cpu(settings, config, moe, gpus)
    run, model = settings.run, settings.model
    name = model.preset or model.hf_config or model.from_hf or "small"
    max_cp = 1 if settings.data.document_masks else None  # ranks would share a document
    cluster = cluster_of(settings, gpus_per_node, device_name or "")
    question = Question(name, config, cluster, gpus, run.batch, run.seq, moe, max_cp=max_cp)
    ranking = for_all_batches(question.search(**choices_of(settings)), question, batches_of(settings))
    if not len(ranking.order):
        lean = leanest(question, ranking)
        line = no_layout_line({"leanest": lean, "enough": enough_gpus(question) if lean else None})
        raise ValueError(f"layout auto: {line}")
    best = layout_summary(question, ranking, first_layout(question, ranking))
    estimate = "{step_s:.3g} s per step, {tokens_per_s_per_gpu:,.0f} tokens/s per GPU".format(**best)
    memory = "{peak_gib:.1f} of {usable_gib:.0f} GiB, {risk:.0%} risk of running out".format(**best)
    how = "estimated for BF16" if settings.precision.dtype == "fp32" else "estimated"
    line = f"layout auto: {best['layout']}, on {gpus:,} x {cluster.name}: {estimate}, {memory}, {how}"
    return Layout.parse(best["layout"]), line
