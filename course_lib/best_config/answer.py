"""An answer that can be launched: a job's best layouts, what they take, why the next one loses, and the command.

    answer(Question("llama3-8B", PRESETS["llama3-8B"], CLUSTERS["H100"], gpus=64, batch=1024))

The first layout is the simplest of those that are within 3% of the fastest (`simplicity`). `answer` returns plain
numbers and strings, which --json prints; `answer_text.as_text` turns them into lines.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from course_lib.best_config.clusters import GIB
from course_lib.best_config.launch import launch
from course_lib.best_config.one_layout import described, differences, estimated, judged
from course_lib.best_config.planner import Ranking
from course_lib.best_config.program_features import MISSING, has
from course_lib.best_config.question import TITLES, Question, program_of
from course_lib.best_config.simplicity import count_uncommon, kinds, leading, ranked, worth_a_risk
from course_lib.best_config.software import SOFTWARE, Software
from course_lib.best_config.tables import LayoutTable
from course_lib.best_config.tested import is_tested, untested
from course_lib.five_d.layouts import Layout

QUICK = {"micro_batch": (1, 2, 4, 8), "schedule": ("1f1b", "interleaved")}  # of searches beside the question's
LEAST_GAIN = 0.1  # of the speed: the smallest gain from fused kernels that an answer mentions
SPLIT_HEAD = (  # Liger-Kernel: pull request 674
    "a loss without logits is counted, but notebook 12b's needs a full head, without tp and zero3; Liger-Kernel's "
    "works under FSDP (zero3)"
)


def near(question: Question, speed: float) -> list[dict]:
    """Return jobs like this one with at least 2% more tokens/s per GPU than `speed`: whole nodes within an eighth, and
    batches within 6% that the GPUs divide. Each number of GPUs appears once, with its best batch; the largest gain
    first. The search tries few settings and no uncommon choices, so the real gain may be larger.
    """
    gpus, batch, found = question.gpus, question.batch, []
    step = question.cluster.gpus_per_node * max(1, gpus // (16 * question.cluster.gpus_per_node))
    for count in {gpus, *range(step * -(-7 * gpus // (8 * step)), 9 * gpus // 8 + 1, step)}:
        sizes = [count * 2**power // 8 for power in range(7) if count * 2**power % 8 == 0]
        tried = {batch, *(size * round(batch / size) for size in sizes)} - {0}
        best = []
        for each in (b for b in tried if abs(b / batch - 1) <= 0.06 and (count, b) != (gpus, batch)):
            ranking = replace(question, gpus=count, batch=each).search(**QUICK)
            common = count_uncommon(question, ranking.table.where(ranking.order)) == 0
            ranking = replace(ranking, order=ranking.order[common])
            if len(ranking.order):
                best.append((each, described(question, ranking, leading(question, ranking))))
        for each, layout in sorted(best, key=lambda one: -one[1]["tokens_per_s_per_gpu"])[:1]:
            found.append({"gpus": count, "batch": each, "gain": layout["tokens_per_s_per_gpu"] / speed - 1} | layout)
    return sorted((one for one in found if one["gain"] >= 0.02), key=lambda one: -one["gain"])


def with_kernels(question: Question, first: dict) -> dict | None:
    """Return the first answer of the course's program with fused kernels, in the numbers of `described`; None where it
    is less than 10% faster than `first`, or the question's program is another one or has its own constants.
    """
    if question.cluster.software != Software():
        return None
    cluster = replace(question.cluster, software=SOFTWARE["course, kernels"])
    asked = replace(question, cluster=cluster)
    found = asked.search(**QUICK)
    best = described(asked, found, leading(asked, found)) if len(found.order) else None
    return best if best and first["step_s"] > (1 + LEAST_GAIN) * best["step_s"] else None


def exposed(question: Question, layouts: list[Layout]) -> dict:
    """Return the seconds of the first layout's step if none of the traffic of data parallelism were hidden behind it
    ("step_s"), and which of the layouts would then be the fastest ("fastest", "fastest_s").
    """
    cluster = question.cluster.with_software(overlap=0.0, sharded_overlap=0.0)
    step_s = estimated(question, layouts, cluster).estimate.step_s
    row = int(np.argmin(step_s))
    return {"step_s": float(step_s[0]), "fastest": str(layouts[row]), "fastest_s": float(step_s[row])}


def notes_of(question: Question, layout: Layout | None) -> list[str]:
    """Return what an answer approximates: of the model, and of the course's program in this layout."""
    software, notes = question.cluster.software, list(getattr(question.config, "notes", ()))
    split = layout is not None and (layout.tp > 1 or layout.zero_stage == 3)
    notes += [SPLIT_HEAD] if split and software.fused_loss and software.program in TITLES else []
    missing = question.layout is not None and not has(software.program, LayoutTable.of([question.layout]))[0]
    return notes + ([f"{question.layout}: {MISSING}; it is judged as if the program had it"] if missing else [])


def leanest(question: Question, found: Ranking) -> dict | None:
    """Return the layout that needs the least memory of all that run; None where none runs."""
    rows = np.flatnonzero(found.estimate.runs)
    if not len(rows):
        return None
    row = rows[np.argmin(found.estimate.needed_bytes[rows])]
    return described(question, found, row) | {"needed_gib": float(found.estimate.needed_bytes[row]) / GIB}


def enough_gpus(question: Question) -> dict | None:
    """Return the first answer on the smallest number of GPUs, 2 to 64 times the question's in powers of 2, on which any
    layout fits, in the numbers of `described` and "gpus"; None where none does.
    """
    node, network = question.cluster.gpus_per_node, question.cluster.network
    for gpus in (question.gpus * 2**power for power in range(1, 7)):
        if gpus > node and not network:
            return None
        asked = replace(question, gpus=gpus, layout=None)
        found = asked.search(**QUICK)
        if len(found.order):
            return {"gpus": gpus} | described(asked, found, leading(asked, found))
    return None


def fastest_tested(question: Question, found: Ranking) -> dict | None:
    """Return the fastest layout that measured runs cover; None where they cover none."""
    sizes = question.seq, question.moe, question.batch
    tested = found.order[is_tested(question.config, question.cluster, found.table.where(found.order), *sizes)]
    return described(question, found, int(tested[0])) if len(tested) else None


def first_in_detail(
    question: Question, found: Ranking, rows: list[int], layouts: list[dict], tokens: float | None
) -> dict:
    """Return what `answer` returns about its first layout, from "time" to "launch". rows, layouts: those of the answer,
    in the ranking and in the numbers of `described`.
    """
    e, row, first = found.estimate, rows[0], found.table[rows[0]]
    result = {"time": {name: float(part[row]) for name, part in e.time.items()}}
    result["memory"] = {name: float(part[row]) / GIB for name, part in e.memory.items()}
    reasons = untested(question.config, question.cluster, first, question.seq, question.moe, question.batch)
    result |= {"untested": list(reasons), "tested": fastest_tested(question, found) if reasons else None}
    result["second"] = differences(found, row, rows[1]) if len(rows) > 1 else {}
    result["exposed"] = exposed(question, [found.table[each] for each in rows])
    result["near"] = near(question, layouts[0]["tokens_per_s_per_gpu"]) if question.layout is None else []
    result["kernels"] = with_kernels(question, layouts[0]) if question.layout is None else None
    return result | {"launch": launch(question, first, tokens)}


def answer(question: Question, top: int = 5, tokens: float | None = None) -> dict:
    """Return the `top` best kinds of layout ("layouts"), seconds and GiB by part of the first ("time", "memory"), its
    step without overlap ("exposed"), why no run has tested it and the fastest one that runs have tested ("untested",
    "tested"), where the second differs ("second"), faster layouts that are too risky ("risky"), better jobs like this
    one ("near"), the first answer with fused kernels if it is much faster ("kernels"), how many layouts each rule
    rejects ("rejected"), and the command ("launch"). Where nothing fits: the layout that needs the least memory
    ("leanest") and a first answer on more GPUs ("enough"). Where the question has a layout: what `judged` returns
    ("asked"). Plain numbers and strings. Raises ValueError where `search` does.
    """
    found = question.search()
    rows = ranked(question, found, top)
    layouts = [described(question, found, *row, tokens) for row in rows]
    program = program_of(question.cluster.software)
    result = {"model": question.name, "cluster": question.cluster.name, "program": program}
    result |= {name: getattr(question, name) for name in ("moe", "risk", "gpus", "batch", "seq")}
    layout = question.layout or (found.table[rows[0][0]] if rows else None)
    result |= {"notes": notes_of(question, layout), "question": question.as_json(), "layouts": layouts}
    risky = found.risky
    if layouts:
        risky = worth_a_risk(question, found, rows[0][0])
        result |= first_in_detail(question, found, [row for row, _ in rows], layouts, tokens)
    else:
        result |= {"leanest": leanest(question, found), "enough": enough_gpus(question)}
    if question.layout is not None:
        result["asked"] = judged(question, found, tokens)
        if not result["asked"]["why_not"]:
            result["launch"] = launch(question, question.layout, tokens)
    result["risky"] = [described(question, found, *row, tokens) for row in kinds(question, found, risky, 3)]
    return result | {"rejected": dict(sorted(found.rejected.items(), key=lambda each: -each[1]))}
