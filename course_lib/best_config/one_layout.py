"""One layout in numbers: what it takes, why a search rejects it, and the smallest changes that would make it work.

judged(question, question.search())     of question.layout, beside the best layouts of the same job
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from course_lib.best_config.clusters import CLUSTERS, GIB, Cluster
from course_lib.best_config.layouts import degree_rules, first_reason, setting_rules
from course_lib.best_config.planner import RISKY, Estimate, Ranking, estimate, why_not
from course_lib.best_config.question import Question
from course_lib.best_config.simplicity import SAME, leading, uncommon
from course_lib.best_config.software import SOFTWARE
from course_lib.best_config.tables import LayoutTable
from course_lib.best_config.tested import untested
from course_lib.five_d.layouts import Layout


def described(question: Question, found: Ranking, row: int, ties: int = 0, tokens: float | None = None) -> dict:
    """Return a layout of the ranking in numbers; ties: layouts that are equal to it; tokens: of the full training, for
    days.
    """
    e, layout = found.estimate, found.table[row]
    speed, step_s = float(e.tokens_per_s[row]), float(e.step_s[row])
    choices = uncommon(question, found.table.where(np.array([row])))
    numbers = {"layout": str(layout), "ties": ties, "step_s": step_s, "tokens_per_s_per_gpu": speed}
    numbers |= {"tokens_per_s": speed * layout.ranks, "mfu": float(e.mfu[row]), "causal_mfu": float(e.causal_mfu[row])}
    numbers |= {"risk": float(e.risk[row]), "peak_gib": float(e.peak_bytes[row]) / GIB}
    numbers |= {"usable_gib": e.usable_bytes / GIB, "uncommon": [name for name, holds in choices.items() if holds[0]]}
    return numbers | ({"days": tokens / numbers["tokens_per_s"] / 86400} if tokens else {})


def differences(found: Ranking, first: int, other: int) -> dict[str, float]:
    """Return the parts of a step in which `other` differs from `first`, as shares of the first's step: those of 0.1%
    or more, the largest loss first.
    """
    e = found.estimate
    more = {name: float((part[other] - part[first]) / e.step_s[first]) for name, part in e.time.items()}
    return {name: share for name, share in sorted(more.items(), key=lambda each: -each[1]) if abs(share) >= SAME}


def estimated(question: Question, layouts: list[Layout], cluster: Cluster | None = None) -> Ranking:
    """Return a ranking of these layouts alone, of any numbers of GPUs; its rows are in their order."""
    table, cluster = LayoutTable.of(layouts), cluster or question.cluster
    found = estimate(question.config, cluster, table, question.batch, question.seq, question.moe)
    sizes = question.batch, question.seq
    rules = degree_rules(question.config, table, *sizes) | setting_rules(question.config, table, *sizes, question.moe)
    able = (first_reason(rules, [""]) == 0) & found.runs & (found.risk <= question.risk)
    return Ranking(table, found, np.flatnonzero(able), np.zeros(0, int), {})


COMPARED_SETTINGS = ("zero_stage", "schedule", "virtual", "recompute", "replicate", "ep")  # in `distance` each counts 1


def distance(table: LayoutTable, layout: Layout) -> np.ndarray:
    """Return how far each layout of a table is from `layout`: 1 for each setting that differs, for each factor of 2
    that moves from one degree to another, and for each factor of 2 in the micro-batch; half for sp.
    """
    degrees = sum(np.abs(np.log2(getattr(table, name) / getattr(layout, name))) for name in ("dp", "pp", "cp", "tp"))
    settings = sum(1.0 * (getattr(table, name) != getattr(layout, name)) for name in COMPARED_SETTINGS)
    batches = np.abs(np.log2(table.micro_batch / layout.micro_batch))
    return degrees / 2 + settings + batches + (table.sequence_parallel != layout.sequence_parallel) / 2


def difference(layout: Layout, other: Layout) -> list[str]:
    """Return the settings of `other` that differ from those of `layout`, such as "tp 8"."""
    short = {"micro_batch": "mb", "zero_stage": "zero", "virtual": "v", "replicate": "rep"}
    fields = ("dp", "pp", "cp", "tp", *COMPARED_SETTINGS, "micro_batch")
    names = [name for name in fields if getattr(layout, name) != getattr(other, name)]
    found = [f"{short.get(name, name)} {getattr(other, name)}" for name in names]
    if other.sequence_parallel != layout.sequence_parallel:
        found.append("sp" if other.sequence_parallel else "no sp")
    return found


def nearest_allowed(question: Question, found: Ranking, layout: Layout, n: int = 3) -> list[dict]:
    """Return the n layouts of the ranking that differ the least from `layout`, of equally near ones the fastest first;
    none that has all changes of a nearer one and more.
    """
    far = distance(found.table.where(found.order), layout)
    nearest, chosen = found.order[np.lexsort((found.estimate.step_s[found.order], far))[: 100 * n]], {}
    for row in nearest.tolist():
        changed = difference(layout, found.table[row])
        if len(chosen) < n and not any(set(fewer) <= set(changed) for fewer in chosen):
            chosen[tuple(changed)] = row
    return [{"change": f"with {', '.join(names)}"} | described(question, found, row) for names, row in chosen.items()]


def other_programs(question: Question) -> dict[str, Cluster]:
    """Return the question's cluster with software that needs less memory, by the option that asks for it."""
    cluster = question.cluster
    found = {"with the loss without logits (--fused-loss)": cluster.with_software(fused_loss=True)}
    if cluster.software == SOFTWARE["course"]:
        found["with fused kernels (--kernels)"] = replace(cluster, software=SOFTWARE["course, kernels"])
    return found


def larger_memory(question: Question, needed: float, e: Estimate) -> dict | None:
    """Return the preset with the smallest memory in which so many bytes have a risk that is low enough; None where no
    preset has it.
    """
    margin = math.log((1 - question.risk) / question.risk) if question.risk < 1 else 0
    least = needed * math.exp(e.memory_spread * margin) + question.cluster.software.unusable_bytes
    enough = [(each.memory_bytes, name) for name, each in CLUSTERS.items() if each.memory_bytes >= least]
    if not enough:
        return None
    return {"change": f"fits on GPUs with {min(enough)[0] / GIB:.0f} GiB ({min(enough)[1]})"}


def changes(question: Question, ranking: Ranking, e: Estimate, no_memory: bool) -> list[dict]:
    """Return what would make a rejected layout work: the nearest layouts of the ranking; where memory is short, other
    software, twice the GPUs, and GPUs with more memory, too. Each with the numbers of `described`, but for the last.
    """
    layout = question.layout
    found = nearest_allowed(question, ranking, layout)
    for option, cluster in other_programs(question).items() if no_memory else ():
        there = estimated(question, [layout], cluster)
        found += [{"change": option} | described(question, there, row) for row in there.order]
    if no_memory:
        twice = estimated(question, [replace(layout, dp=2 * layout.dp)])
        found += [{"change": "on twice the GPUs"} | described(question, twice, row) for row in twice.order]
        found += [more for more in [larger_memory(question, float(e.needed_bytes), e)] if more]
    return found


def judged(question: Question, found: Ranking, tokens: float | None = None) -> dict:
    """Return the question's layout in the numbers of `described`, with seconds and GiB by part ("time", "memory",
    "needed_gib"), whether it fits by estimate ("fits"), why a search rejects it ("why_not", "" where it does not), what
    would have to change ("changes"), and what no run has tested about it ("untested").

    Beside the search's layouts: its "rank" by time if it is allowed, of how many ("among"), by which share its step is
    longer than the first answer's ("slower"), and by which parts ("differences" in shares of the first's step,
    "memory_differences" in GiB). tokens: of the full training, for days.
    """
    layout, sizes = question.layout, (question.batch, question.seq, question.moe)
    first = leading(question, found) if len(found.order) else None
    alone = estimated(question, [layout, *([] if first is None else [found.table[first]])])
    e = alone.estimate
    result = {"why_not": why_not(question.config, question.cluster, layout, *sizes, question.risk)}
    result |= described(question, alone, 0, 0, tokens) | {"needed_gib": float(e.needed_bytes[0]) / GIB}
    result["fits"] = result["why_not"] == "" or result["why_not"].startswith(RISKY)
    reasons = untested(question.config, question.cluster, layout, question.seq, question.moe, question.batch)
    result["untested"] = list(reasons)
    result["time"] = {name: float(part[0]) for name, part in e.time.items()}
    result["memory"] = {name: float(part[0]) / GIB for name, part in e.memory.items()}
    if result["why_not"]:
        one = estimate(question.config, question.cluster, layout, *sizes)
        no_memory = bool(one.runs) and one.risk > question.risk
        result["changes"] = changes(question, found, one, no_memory)
    else:
        faster = found.estimate.step_s[found.order] < (1 - 1e-9) * e.step_s[0]
        rank = int(faster.sum()) + 1
        result |= {"rank": rank, "among": max(rank, len(found.order))}
    if first is not None:
        result |= {"first": str(found.table[first]), "slower": float(e.step_s[0] / e.step_s[1] - 1)}
        result["differences"] = differences(alone, 1, 0)
        more = {name: float(part[0] - part[1]) / GIB for name, part in e.memory.items()}
        result["memory_differences"] = {name: gib for name, gib in more.items() if abs(gib) >= 0.05}
    return result
