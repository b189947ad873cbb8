"""The playbook's three-step recipe as an algorithm, with the planner in place of test runs.

    1. fit one step in memory          the first candidate for the size that fits; full recomputation before giving up
    2. reach the global batch          dp as far as possible, then micro-batches
    3. raise the throughput            one change at a time, as long as one helps

A recipe looks at a few dozen layouts where `search` looks at all. (The Ultra-Scale Playbook, 2025, chapter 9.)
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from course_lib.best_config.clusters import Cluster
from course_lib.best_config.planner import RISK, judge_layouts
from course_lib.best_config.tables import LayoutTable
from course_lib.five_d.layouts import Layout
from course_lib.single_gpu.config import ModelConfig
from course_lib.single_gpu.memory import param_count


@dataclass(frozen=True)
class Step:
    """A layout that the recipe reached, and why."""

    why: str
    layout: Layout
    tokens_per_s: float  # per GPU
    mfu: float


def candidates(config: ModelConfig, gpus: int, node: int) -> list[tuple[str, Layout]]:
    """Return the layouts that the recipe tries first, by model size and number of GPUs; dp is left at 1."""
    tp = min(node, gpus)
    billions = param_count(config) / 1e9
    pipelines = [2**n for n in range(1, 8) if tp * 2**n <= gpus]
    sharded = ("ZeRO-3 alone", Layout(zero_stage=3))
    split = ("TP in the node, ZeRO-3", Layout(tp=tp, sequence_parallel=tp > 1, zero_stage=3))
    zero = 2 if gpus >= 1024 else 1
    piped = [
        (f"TP in the node, PP {pp}, ZeRO-{zero}", Layout(tp=tp, sequence_parallel=tp > 1, pp=pp, zero_stage=zero))
        for pp in pipelines
    ]
    if gpus >= 1024:  # TP 8, DP with ZeRO-2, PP
        return [*piped, split, sharded]
    if gpus >= 512:  # DP alone waits for its traffic
        return [split, *piped, sharded]
    if billions < 10:  # one technique is enough
        return [("data parallelism", Layout()), ("ZeRO-1", Layout(zero_stage=1)), sharded, split, *piped]
    return [*piped, split, sharded]


# exercise 11.8
def changes(layout: Layout) -> dict[str, Layout]:
    """Return the layouts that step 3 tries, by texts with the new values; each on the same GPUs, and consistent.

    A factor of 2 from one degree to another, half or twice the micro-batch, each ZeRO stage, recomputation none or
    full, schedule 1f1b, interleaved or zb-h1. Sequence parallelism goes with tp > 1, `gather_once` with ZeRO-3 under
    a pipeline, and 1f1b with no pipeline.
    """
    degrees, layouts = ("dp", "pp", "cp", "tp"), {}
    for lowered in degrees:
        for raised in degrees:
            if lowered != raised and getattr(layout, lowered) % 2 == 0:
                moved = {lowered: getattr(layout, lowered) // 2, raised: getattr(layout, raised) * 2}
                layouts[f"{raised} {moved[raised]}, {lowered} {moved[lowered]}"] = dataclasses.replace(layout, **moved)
    for size in {layout.micro_batch * 2, max(1, layout.micro_batch // 2)}:
        layouts[f"micro-batch {size}"] = dataclasses.replace(layout, micro_batch=size)
    for zero in range(4):
        layouts[f"ZeRO-{zero}"] = dataclasses.replace(layout, zero_stage=zero)
    for recompute in ("none", "full"):
        layouts[f"recompute {recompute}"] = dataclasses.replace(layout, recompute=recompute)
    for schedule in ("1f1b", "interleaved", "zb-h1"):
        layouts[f"schedule {schedule}"] = dataclasses.replace(layout, schedule=schedule)
    return {
        why: dataclasses.replace(
            one, sequence_parallel=one.tp > 1, gather_once=one.zero_stage == 3 and one.pp > 1,
            schedule=one.schedule if one.pp > 1 else "1f1b",
        )
        for why, one in layouts.items()
    }  # fmt: skip


def allowed_steps(
    config: ModelConfig, cluster: Cluster, named: list[tuple[str, Layout]], batch: int, seq: int
) -> list[Step]:
    """Return the layouts that a search allows, as steps."""
    table = LayoutTable.of(layout for _, layout in named)
    e, reasons = judge_layouts(config, cluster, table, batch, seq, None, RISK)
    allowed = [i for i, reason in enumerate(reasons) if not reason]
    return [Step(*named[i], e.tokens_per_s[i].item(), e.mfu[i].item()) for i in allowed]


def fit_in_memory(config: ModelConfig, cluster: Cluster, gpus: int, batch: int, seq: int) -> Step | None:
    """Return the layout of steps 1 and 2: the first candidate that fits with one sequence per micro-batch. dp uses the
    GPUs that are left, so micro-batches make up the batch; if dp would be larger than the batch, or nothing fits,
    sequences are split (CP).
    """
    for cp in (2**n for n in range(8)):
        for recompute in ("none", "full"):
            named = []
            for why, layout in candidates(config, gpus, cluster.gpus_per_node):
                inner = layout.pp * cp * layout.tp
                if gpus % inner == 0:
                    extra = f", CP {cp}" * (cp > 1) + ", full recomputation" * (recompute == "full")
                    keep = layout.zero_stage == 3 and layout.pp > 1
                    changed = {"dp": gpus // inner, "cp": cp, "recompute": recompute, "gather_once": keep}
                    named.append((why + extra, dataclasses.replace(layout, **changed)))
            if fitting := allowed_steps(config, cluster, named, batch, seq) if named else []:
                return fitting[0]
    return None


def recipe(config: ModelConfig, cluster: Cluster, gpus: int, batch: int, seq: int = 4096) -> list[Step]:
    """Return the recipe's steps, of which the last one is its answer; [] if nothing fits. Raises ValueError for a
    number below 1.
    """
    if min(gpus, batch, seq) < 1:
        raise ValueError(f"gpus {gpus}, batch {batch}, seq {seq}: each is 1 or more")
    first = fit_in_memory(config, cluster, gpus, batch, seq)
    steps = [first] if first else []
    while steps:
        allowed = allowed_steps(config, cluster, list(changes(steps[-1].layout).items()), batch, seq)
        best = max(allowed, key=lambda step: step.tokens_per_s, default=steps[-1])
        if best.tokens_per_s <= 1.001 * steps[-1].tokens_per_s:
            break
        steps.append(best)
    return steps
