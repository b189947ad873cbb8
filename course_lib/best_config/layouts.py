"""All layouts of a number of GPUs, and why most of them cannot be.

First the four degrees: every way to write the GPUs as dp x pp x cp x tp. Then the settings, each time only for what is
left. A rule is an array of booleans over the table: `check_layout` of notebook 10 for a million layouts at once.
"""

from __future__ import annotations

import itertools

import numpy as np

from course_lib.best_config.stage_loads import is_schedule
from course_lib.best_config.tables import LayoutTable
from course_lib.five_d.layouts import Layout
from course_lib.single_gpu.model import ModelConfig

SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe")


# exercise 11.7
def degrees(gpus: int) -> LayoutTable:
    """Return every (dp, pp, cp, tp) whose product is the number of GPUs, each once."""
    sizes = [n for n in range(1, gpus + 1) if gpus % n == 0]
    found = [
        (gpus // (pp * cp * tp), pp, cp, tp)
        for pp, cp, tp in itertools.product(sizes, repeat=3)
        if gpus % (pp * cp * tp) == 0
    ]
    dp, pp, cp, tp = np.array(found).T
    return LayoutTable(len(found), dp=dp, pp=pp, cp=cp, tp=tp)


# exercise 11.7
def first_reason(rules: dict[str, np.ndarray], reasons: list[str]) -> np.ndarray:
    """Return for each row the place in `reasons` of the first rule that holds, and 0, which is no reason, if none does.

    rules: by reason, an array of booleans. Appends to `reasons` those that it lacks; others call with the same list.
    """
    found = 0
    for reason, holds in reversed(rules.items()):
        if reason not in reasons:
            reasons.append(reason)
        found = np.where(holds, reasons.index(reason), found)
    return found


def degree_rules(config: ModelConfig, table, batch: int, seq: int) -> dict[str, np.ndarray]:
    """Why degrees cannot be, whatever the settings: reason, and where it holds."""
    tp, cp = table.tp, table.cp
    kv = config.kv_heads
    return {
        "degrees: tp does not divide the heads, or the MLP's width": (config.heads % tp > 0)
        | (config.ffn_hidden % tp > 0),
        "degrees: tp and the number of K/V heads do not divide each other": (kv % tp > 0) & (tp % kv > 0),
        "degrees: tp leaves a rank without vocabulary": (tp - 1) * -(-config.vocab // tp) >= config.vocab,
        "degrees: pp has more stages than there are layers": table.pp > config.layers + 2,
        "degrees: cp cuts a sequence into pieces that do not come out": seq % np.where(cp > 1, 2 * cp, 1) > 0,
        "degrees: dp does not divide the batch": batch % table.dp > 0,
    }


def setting_rules(config: ModelConfig, table, batch: int, seq: int, moe: dict | None = None) -> dict[str, np.ndarray]:
    """Why settings cannot be, where the degrees can: reason, and where it holds."""
    m, rest = np.divmod(batch, table.dp * table.micro_batch)
    chunks = np.where(is_schedule(table, "interleaved"), table.virtual, 1)
    chunks = np.where(is_schedule(table, "zb-v"), 2, chunks)
    two, even = is_schedule(table, "interleaved"), is_schedule(table, "dualpipe")
    width = (moe or {}).get("ffn_hidden") or config.ffn_hidden
    zero = table.zero_stage
    cut = np.lcm(np.where(table.cp > 1, 2 * table.cp, 1), table.cp * np.where(table.sequence_parallel, table.tp, 1))
    return {
        "mb does not divide a rank's share of the batch": rest > 0,
        "sp cuts a sequence into pieces that do not come out": seq % cut > 0,
        "the schedule has more stages than there are layers": table.pp * chunks > config.layers + 2,
        "interleaved wants micro-batches in runs of pp": two & (table.virtual > 1) & (m % table.pp > 0),
        "dualpipe wants an even pp, and 2 pp micro-batches or more": even
        & ((table.pp % 2 > 0) | (m % 2 > 0) | (m < 2 * table.pp)),
        "dualpipe has a stage on two ranks, zero3 on none whole": even & (zero == 3),
        "zero2 sums a tied embedding too early for interleaved": two & (zero == 2) & config.tied,
        "ep does not divide dp, or the experts": (table.dp % table.ep > 0)
        | ((moe or {"experts": 1})["experts"] % table.ep > 0),
        "tp does not divide the experts' width": (moe is not None) & (width % table.tp > 0),
        "replicas are of zero3's pieces, and divide dp": (table.replicate > 1)
        & ((zero != 3) | (table.dp % table.replicate > 0)),
        "recompute selective drops scores, and cp keeps none": (np.asarray(table.recompute) == "selective")
        & (table.cp > 1),
    }


def with_settings(table: LayoutTable, batch: int, settings: dict[str, tuple]) -> LayoutTable:
    """Each row with each combination of settings. A setting that makes no difference to a row keeps its default."""
    for name, values in settings.items():
        table = table.times(name, values)
        column, first = getattr(table, name), getattr(table, name) == values[0]
        matters = {
            "sequence_parallel": table.tp > 1,
            "schedule": table.pp > 1,
            "virtual": is_schedule(table, "interleaved"),
            "zero_stage": table.dp * table.cp > 1,
            "replicate": table.zero_stage == 3,
        }.get(name, np.ones(len(table), bool))
        settled = np.where(matters, column, getattr(Layout(), name))
        most = {"micro_batch": batch // table.dp, "ep": table.dp, "replicate": table.dp}
        possible = settled <= most[name] if name in most else True
        table = LayoutTable(len(table), **{**vars(table), name: settled}).where((matters | first) & possible)
    keep = (table.zero_stage == 3) & (table.pp > 1)
    return LayoutTable(len(table), **{**vars(table), "keep_gathered": keep})
