"""One layout in numbers: its cost, why a search rejects it, and the smallest changes that would make it work.

judge_layout(question, question.search())     question.layout beside the best layouts of the same job
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from course_lib.best_config.clusters import CLUSTERS, GIB, Cluster
from course_lib.best_config.planner import RISKY, Estimate, Ranking, judge_layouts, why_not
from course_lib.best_config.question import Question
from course_lib.best_config.simplicity import SAME, first_layout, uncommon_choices
from course_lib.best_config.software import SOFTWARE
from course_lib.best_config.tables import LayoutTable
from course_lib.five_d.layouts import Layout

Numbers = dict[str, Any]  # plain numbers and strings by name, which JSON can hold


def layout_summary(
    question: Question, ranking: Ranking, row: int, ties: int = 0, tokens: float | None = None
) -> Numbers:
    """Return a layout of the ranking in numbers. ties: the number of layouts that are equal to it; tokens: of the full
    training, to count days.
    """
    e, layout = ranking.estimate, ranking.table[row]
    choices = uncommon_choices(question, ranking.table.where(np.array([row])))
    numbers: Numbers = {
        "layout": str(layout),
        "ties": ties,
        "step_s": float(e.step_s[row]),
        "tokens_per_s_per_gpu": float(e.tokens_per_s[row]),
        "tokens_per_s": float(e.tokens_per_s[row]) * layout.ranks,
        "mfu": float(e.mfu[row]),
        "causal_mfu": float(e.causal_mfu[row]),
        "risk": float(e.risk[row]),
        "peak_gib": float(e.peak_bytes[row]) / GIB,
        "usable_gib": e.usable_bytes / GIB,
        "uncommon": [name for name, holds in choices.items() if holds[0]],
    }
    return numbers | ({"days": tokens / numbers["tokens_per_s"] / 86400} if tokens else {})


def time_differences(ranking: Ranking, first: int, other: int) -> dict[str, float]:
    """Return the parts of a step in which `other` differs from `first`, as shares of the first's step: parts of 0.1% or
    more, the largest loss first.
    """
    e = ranking.estimate
    shares = {name: float((part[other] - part[first]) / e.step_s[first]) for name, part in e.time.items()}
    return {name: share for name, share in sorted(shares.items(), key=lambda each: -each[1]) if abs(share) >= SAME}


def estimate_layouts(question: Question, layouts: list[Layout], cluster: Cluster | None = None) -> Ranking:
    """Return a ranking of these layouts alone, of any numbers of GPUs; its rows are in their order."""
    table, cluster = LayoutTable.of(layouts), cluster or question.cluster
    job = question.batch, question.seq, question.moe
    e, reasons = judge_layouts(question.config, cluster, table, *job, question.risk)
    order = np.flatnonzero([not reason for reason in reasons])
    return Ranking(table, e, order, np.zeros(0, int), {})


COMPARED_SETTINGS = ("zero_stage", "schedule", "virtual", "recompute", "replicate", "ep")  # each counts 1 in `distance`


def distance(table: LayoutTable, layout: Layout) -> np.ndarray:
    """Return how far each layout of a table is from `layout`: 1 for each setting that differs, for each factor of 2
    that moves from one degree to another, and for each factor of 2 in the micro-batch; half for sp.
    """
    degrees = sum(np.abs(np.log2(getattr(table, name) / getattr(layout, name))) for name in ("dp", "pp", "cp", "tp"))
    settings = sum(1.0 * (getattr(table, name) != getattr(layout, name)) for name in COMPARED_SETTINGS)
    batches = np.abs(np.log2(table.micro_batch / layout.micro_batch))
    return degrees / 2 + settings + batches + (table.sequence_parallel != layout.sequence_parallel) / 2


def changed_settings(layout: Layout, other: Layout) -> list[str]:
    """Return the settings of `other` that differ from `layout`'s, such as "tp 8"."""
    short = {"micro_batch": "mb", "zero_stage": "zero", "virtual": "v", "replicate": "rep"}
    fields = ("dp", "pp", "cp", "tp", *COMPARED_SETTINGS, "micro_batch")
    names = [name for name in fields if getattr(layout, name) != getattr(other, name)]
    changed = [f"{short.get(name, name)} {getattr(other, name)}" for name in names]
    if other.sequence_parallel != layout.sequence_parallel:
        changed.append("sp" if other.sequence_parallel else "no sp")
    return changed


def nearest_allowed(question: Question, ranking: Ranking, layout: Layout, n: int = 3) -> list[Numbers]:
    """Return the n layouts of the ranking that differ the least from `layout`, equally near layouts by speed. A layout
    that has all changes of a nearer one and more is left out.
    """
    far = distance(ranking.table.where(ranking.order), layout)
    nearest = ranking.order[np.lexsort((ranking.estimate.step_s[ranking.order], far))[: 100 * n]]
    row_of: dict[tuple[str, ...], int] = {}  # by changed settings
    for row in nearest.tolist():
        changed = changed_settings(layout, ranking.table[row])
        if len(row_of) < n and not any(set(fewer) <= set(changed) for fewer in row_of):
            row_of[tuple(changed)] = row
    return [{"change": f"with {', '.join(names)}"} | layout_summary(question, ranking, row)
            for names, row in row_of.items()]  # fmt: skip


def other_programs(question: Question) -> dict[str, Cluster]:
    """Return the question's cluster with software that needs less memory, by the option that selects it."""
    cluster = question.cluster
    clusters = {"with the loss without logits (--fused-loss)": cluster.with_software(fused_loss=True)}
    if cluster.software == SOFTWARE["course"]:
        clusters["with fused kernels (--kernels)"] = replace(cluster, software=SOFTWARE["course, kernels"])
    return clusters


def larger_memory(question: Question, needed: float, e: Estimate) -> Numbers | None:
    """Return the preset with the smallest memory in which so many bytes have an allowed risk; None if no preset has
    enough.
    """
    margin = math.log((1 - question.risk) / question.risk) if question.risk < 1 else 0
    least = needed * math.exp(e.memory_spread * margin) + question.cluster.software.unusable_bytes
    enough = [(each.memory_bytes, name) for name, each in CLUSTERS.items() if each.memory_bytes >= least]
    if not enough:
        return None
    return {"change": f"fits on GPUs with {min(enough)[0] / GIB:.0f} GiB ({min(enough)[1]})"}


def suggested_changes(
    question: Question, layout: Layout, ranking: Ranking, e: Estimate, no_memory: bool
) -> list[Numbers]:
    """Return the changes that would make a rejected layout work: the nearest layouts of the ranking and, if memory is
    short, other software, twice the GPUs, and GPUs with more memory. All but the last have the numbers of
    `layout_summary`. e: of the layout alone.
    """
    suggestions = nearest_allowed(question, ranking, layout)
    if not no_memory:
        return suggestions
    for option, cluster in other_programs(question).items():
        elsewhere = estimate_layouts(question, [layout], cluster)
        suggestions += [{"change": option} | layout_summary(question, elsewhere, row) for row in elsewhere.order]
    twice = estimate_layouts(question, [replace(layout, dp=2 * layout.dp)])
    suggestions += [{"change": "on twice the GPUs"} | layout_summary(question, twice, row) for row in twice.order]
    larger = larger_memory(question, float(e.needed_bytes[0]), e)
    return suggestions + ([larger] if larger else [])


def judge_layout(question: Question, ranking: Ranking, tokens: float | None = None) -> Numbers:
    """Return the question's layout in the numbers of `layout_summary`, with seconds and GiB by part ("time", "memory",
    "needed_gib"), whether it fits by estimate ("fits"), why a search rejects it ("why_not", "" if it does not), what
    would have to change ("changes"), and what no run has tested about it ("untested").

    Compared with the search's layouts: its "rank" by time if it is allowed, out of how many ("among"), the share by
    which its step is longer than the first answer's ("slower"), and the parts that make it so ("differences" in shares
    of the first's step, "memory_differences" in GiB). tokens: of the full training, to count days. Raises ValueError
    for a question without a layout.
    """
    if (layout := question.layout) is None:
        raise ValueError("the question has no layout to judge")
    first = first_layout(question, ranking) if len(ranking.order) else None
    alone = estimate_layouts(question, [layout, *([] if first is None else [ranking.table[first]])])
    e, job = alone.estimate, (question.batch, question.seq, question.moe)
    reason = why_not(question.config, question.cluster, layout, *job, question.risk)
    result: Numbers = {"why_not": reason}
    result |= layout_summary(question, alone, 0, 0, tokens) | {"needed_gib": float(e.needed_bytes[0]) / GIB}
    result |= {"fits": reason == "" or reason.startswith(RISKY), "untested": question.untested(layout)}
    result["time"] = {name: float(part[0]) for name, part in e.time.items()}
    result["memory"] = {name: float(part[0]) / GIB for name, part in e.memory.items()}
    if reason:
        no_memory = bool(e.runs[0] and e.risk[0] > question.risk)
        result["changes"] = suggested_changes(question, layout, ranking, e, no_memory)
    else:
        faster = ranking.estimate.step_s[ranking.order] < (1 - 1e-9) * e.step_s[0]
        rank = int(faster.sum()) + 1
        result |= {"rank": rank, "among": max(rank, len(ranking.order))}
    if first is not None:
        result |= {"first": str(ranking.table[first]), "slower": float(e.step_s[0] / e.step_s[1] - 1)}
        result["differences"] = time_differences(alone, 1, 0)
        gib = {name: float(part[0] - part[1]) / GIB for name, part in e.memory.items()}
        result["memory_differences"] = {name: each for name, each in gib.items() if abs(each) >= 0.05}
    return result
