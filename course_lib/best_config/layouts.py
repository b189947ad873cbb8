"""All layouts of a number of GPUs, and the reasons why most of them are impossible.

The four degrees come first: every way to write the GPUs as dp x pp x cp x tp. The settings follow, only for the degrees
that are left. A rule is a boolean array over the table: it is `check_layout` of notebook 10 for a million layouts at
once.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from course_lib.best_config.stage_loads import is_schedule
from course_lib.best_config.tables import LayoutTable
from course_lib.five_d.layouts import Layout, check_named_settings
from course_lib.single_gpu.config import ModelConfig

SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe")
SETTINGS: dict[str, tuple] = {
    "micro_batch": (),  # divisors of the batch
    "ep": (),  # divisors of the number of experts
    "sequence_parallel": (False, True),
    "schedule": SCHEDULES,
    "virtual": (2, 4, 8),
    "zero_stage": (0, 1, 2, 3),
    "replicate": (),  # 1, and ZeRO-3 groups of 1, 2, 4 and 8 nodes that hold the same shards (HSDP)
    "recompute": ("none", "full"),  # a flash core keeps no scores, so "selective" would save nothing
}


def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors of a number, ascending."""
    return tuple(n for n in range(1, number + 1) if number % n == 0)


def check_settings(settings: dict[str, tuple]) -> None:
    """Raise ValueError for an unknown setting, or a value that it cannot have."""
    if unknown := set(settings) - set(SETTINGS):
        raise ValueError(f"settings: {', '.join(sorted(unknown))} is none of {', '.join(SETTINGS)}")
    for name, values in settings.items():
        if not values:
            raise ValueError(f"settings: {name} has no values to try")
        for value in values:
            layout = dataclasses.replace(Layout(), **{name: value})
            check_named_settings(layout)
            if name in ("micro_batch", "ep", "virtual", "replicate") and value < 1 or layout.zero_stage not in range(4):
                known = "0 to 3" if name == "zero_stage" else "1 or more"
                raise ValueError(f"settings: {name} {value}: it must be {known}")


# exercise 11.7
def degrees(gpus: int) -> LayoutTable:
    """Return every (dp, pp, cp, tp) whose product is the number of GPUs, each once."""
    sizes = [n for n in range(1, gpus + 1) if gpus % n == 0]
    combinations = [
        (gpus // (pp * cp * tp), pp, cp, tp)
        for pp, cp, tp in itertools.product(sizes, repeat=3)
        if gpus % (pp * cp * tp) == 0
    ]
    dp, pp, cp, tp = np.array(combinations).T
    return LayoutTable(len(combinations), dp=dp, pp=pp, cp=cp, tp=tp)


# exercise 11.7
def first_reason(rules: dict[str, np.ndarray], reasons: list[str]) -> np.ndarray:
    """Return for each row the index in `reasons` of the first rule that applies, and 0, which is no reason, if none.

    rules: by reason, an array of booleans. Appends the missing reasons to `reasons`; later calls use the same list.
    """
    index = np.asarray(0)
    for reason, holds in reversed(rules.items()):
        if reason not in reasons:
            reasons.append(reason)
        index = np.where(holds, reasons.index(reason), index)
    return index


def degree_rules(config: ModelConfig, table: LayoutTable, batch: int, seq: int) -> dict[str, np.ndarray]:
    """Return, by reason, the layouts [n] whose degrees are impossible with any settings."""
    tp, cp, kv = table.tp, table.cp, config.kv_heads
    return {
        "degrees: tp does not divide the heads, or the MLP's width": (config.heads % tp > 0)
        | (config.ffn_hidden % tp > 0),
        "degrees: tp and the number of K/V heads do not divide each other": (kv % tp > 0) & (tp % kv > 0),
        "degrees: tp is too large for the vocabulary": (tp - 1) * -(-config.vocab // tp) >= config.vocab,
        "degrees: pp is larger than the number of layers": table.pp > config.layers + 2,
        "degrees: 2 cp does not divide the sequence length": seq % np.where(cp > 1, 2 * cp, 1) > 0,
        "degrees: dp does not divide the batch": batch % table.dp > 0,
    }


def setting_rules(
    config: ModelConfig, table: LayoutTable, batch: int, seq: int, moe: dict | None = None
) -> dict[str, np.ndarray]:
    """Return, by reason, the layouts [n] with possible degrees whose settings are impossible."""
    m, rest = np.divmod(batch, table.dp * table.micro_batch)
    interleaved, dualpipe = is_schedule(table, "interleaved"), is_schedule(table, "dualpipe")
    chunks = np.where(interleaved, table.virtual, 1)
    chunks = np.where(is_schedule(table, "zb-v"), 2, chunks)
    width = (moe or {}).get("ffn_hidden") or config.ffn_hidden
    zero = table.zero_stage
    cut = np.lcm(np.where(table.cp > 1, 2 * table.cp, 1), table.cp * np.where(table.sequence_parallel, table.tp, 1))
    return {
        "mb does not divide a rank's share of the batch": rest > 0,
        "sp: cp x tp does not divide the sequence length": seq % cut > 0,
        "the schedule has more stages than the model has layers": table.pp * chunks > config.layers + 2,
        "interleaved needs a number of micro-batches that pp divides": interleaved
        & (table.virtual > 1)
        & (m % table.pp > 0),
        "dualpipe needs an even pp, and an even number of micro-batches, 2 pp or more": dualpipe
        & ((table.pp % 2 > 0) | (m % 2 > 0) | (m < 2 * table.pp)),
        "dualpipe keeps each stage on two ranks, which zero3 would shard": dualpipe & (zero == 3),
        "zero2 reduces a tied embedding too early for interleaved": interleaved & (zero == 2) & config.tied,
        "ep does not divide dp, or the experts": (table.dp % table.ep > 0)
        | ((moe or {"experts": 1})["experts"] % table.ep > 0),
        "tp does not divide the experts' width": (moe is not None) & (width % table.tp > 0),
        "rep needs zero3, and must divide dp": (table.replicate > 1) & ((zero != 3) | (table.dp % table.replicate > 0)),
        "recompute selective saves nothing with cp": (np.asarray(table.recompute) == "selective") & (table.cp > 1),
    }


def groups_of_nodes(gpus: int, node: int) -> tuple[int, ...]:
    """Return the numbers of HSDP groups to try, 1 included: each group has 1, 2, 4 or 8 nodes of `node` GPUs."""
    sizes = [node * nodes for nodes in (1, 2, 4, 8)]
    return 1, *(gpus // size for size in reversed(sizes) if gpus % size == 0 and gpus > size)


def with_settings(table: LayoutTable, batch: int, settings: dict[str, tuple]) -> LayoutTable:
    """Return each row with each combination of settings. A setting that makes no difference to a row keeps its
    default.
    """
    for name, choices in settings.items():
        values = np.asarray(choices)
        matters = {
            "sequence_parallel": table.tp > 1,
            "schedule": table.pp > 1,
            "virtual": is_schedule(table, "interleaved"),
            "zero_stage": table.dp * table.cp > 1,
            "replicate": table.zero_stage == 3,
        }.get(name, np.ones(len(table), bool))
        column = np.where(matters[:, None], values, getattr(Layout(), name))  # [rows, values]
        valid = matters[:, None] | (values == values[0])
        most = {"micro_batch": batch // table.dp, "ep": table.dp, "replicate": table.dp}
        if name in most:
            valid = valid & (column <= most[name][:, None])
        table = table.where(np.nonzero(valid)[0])
        table = LayoutTable(len(table), **{**vars(table), name: column[valid]})
    gather_once = (table.zero_stage == 3) & (table.pp > 1)
    return LayoutTable(len(table), **{**vars(table), "gather_once": gather_once})
