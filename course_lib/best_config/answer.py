"""An answer that can be launched: a job's best layouts, their time and memory, why the next one loses, and the command.

    answer(Question("llama3-8B", PRESETS["llama3-8B"], CLUSTERS["H100"], gpus=64, batch=1024))

The first layout is the simplest one within 3% of the fastest (`simplicity`). `answer` returns plain numbers and
strings, which --json prints; `answer_text.as_text` turns them into lines.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from course_lib.best_config.clusters import GIB
from course_lib.best_config.launch import launch
from course_lib.best_config.one_layout import (
    Numbers,
    estimate_layouts,
    judge_layout,
    layout_summary,
    time_differences,
)
from course_lib.best_config.planner import Ranking
from course_lib.best_config.program_features import MISSING, supports
from course_lib.best_config.question import Question, program_title
from course_lib.best_config.simplicity import (
    answer_rows,
    count_uncommon,
    distinct_kinds,
    faster_but_risky,
    first_layout,
)
from course_lib.best_config.software import SOFTWARE, Software
from course_lib.best_config.tables import LayoutTable
from course_lib.five_d.layouts import Layout

QUICK = {"micro_batch": (1, 2, 4, 8), "schedule": ("1f1b", "interleaved")}  # of searches other than the question's
LEAST_GAIN = 0.1  # in speed: the smallest gain from fused kernels that an answer mentions


def first_answer(question: Question) -> Numbers | None:
    """Return the first layout of a quick search, in the numbers of `layout_summary`; None if no layout fits."""
    ranking = question.search(**QUICK)
    return layout_summary(question, ranking, first_layout(question, ranking)) if len(ranking.order) else None


def similar_jobs(question: Question, speed: float) -> list[Numbers]:
    """Return similar jobs with at least 2% more tokens/s per GPU than `speed`: whole nodes within an eighth, and
    batches within 6% that the GPUs divide. Each number of GPUs appears once, with its best batch; the largest gain
    first. The search tries few settings and no uncommon choices, so the real gain may be larger.
    """
    gpus, batch, jobs = question.gpus, question.batch, []
    step = question.cluster.gpus_per_node * max(1, gpus // (16 * question.cluster.gpus_per_node))
    for count in {gpus, *range(step * -(-7 * gpus // (8 * step)), 9 * gpus // 8 + 1, step)}:
        sizes = [count * 2**power // 8 for power in range(7) if count * 2**power % 8 == 0]
        batches = {batch, *(size * round(batch / size) for size in sizes)} - {0}
        of_count = []
        for size in (b for b in batches if abs(b / batch - 1) <= 0.06 and (count, b) != (gpus, batch)):
            ranking = replace(question, gpus=count, batch=size).search(**QUICK)
            common = count_uncommon(question, ranking.table.where(ranking.order)) == 0
            ranking = replace(ranking, order=ranking.order[common])
            if len(ranking.order):
                layout = layout_summary(question, ranking, first_layout(question, ranking))
                gain = layout["tokens_per_s_per_gpu"] / speed - 1
                of_count.append({"gpus": count, "batch": size, "gain": gain} | layout)
        jobs += sorted(of_count, key=lambda job: -job["tokens_per_s_per_gpu"])[:1]
    return sorted((job for job in jobs if job["gain"] >= 0.02), key=lambda job: -job["gain"])


def with_kernels(question: Question, first: Numbers) -> Numbers | None:
    """Return the first answer of the course's program with fused kernels, in the numbers of `layout_summary`; None if
    it is less than 10% faster than `first`, or the question is about another program or other constants.
    """
    if question.cluster.software != Software():
        return None
    cluster = replace(question.cluster, software=SOFTWARE["course, kernels"])
    best = first_answer(replace(question, cluster=cluster))
    return best if best and first["step_s"] > (1 + LEAST_GAIN) * best["step_s"] else None


def without_overlap(question: Question, layouts: list[Layout]) -> Numbers:
    """Return the seconds of the first layout's step if backward hid no traffic of data parallelism ("step_s"), and the
    layout that would then be the fastest ("fastest", "fastest_s").
    """
    cluster = question.cluster.with_software(overlap=0.0, sharded_overlap=0.0)
    step_s = estimate_layouts(question, layouts, cluster).estimate.step_s
    row = int(np.argmin(step_s))
    return {"step_s": float(step_s[0]), "fastest": str(layouts[row]), "fastest_s": float(step_s[row])}


def notes_of(question: Question) -> list[str]:
    """Return an answer's approximations: of the model, and of a layout that the program does not have."""
    software, notes = question.cluster.software, list(getattr(question.config, "notes", ()))
    missing = question.layout is not None and not supports(software.program, LayoutTable.of([question.layout]))[0]
    return notes + ([f"{question.layout}: {MISSING}; it is judged as if the program had it"] if missing else [])


def leanest(question: Question, ranking: Ranking) -> Numbers | None:
    """Return the layout that needs the least memory of all that run; None if none runs."""
    rows = np.flatnonzero(ranking.estimate.runs)
    if not len(rows):
        return None
    row = int(rows[np.argmin(ranking.estimate.needed_bytes[rows])])
    needed_gib = float(ranking.estimate.needed_bytes[row]) / GIB
    return layout_summary(question, ranking, row) | {"needed_gib": needed_gib}


def enough_gpus(question: Question) -> Numbers | None:
    """Return the first answer on the smallest number of GPUs, 2 to 64 times the question's in powers of 2, on which any
    layout fits, in the numbers of `layout_summary` and "gpus"; None if no layout fits.
    """
    node, network = question.cluster.gpus_per_node, question.cluster.network
    for gpus in (question.gpus * 2**power for power in range(1, 7)):
        if gpus > node and not network:
            return None
        if best := first_answer(replace(question, gpus=gpus, layout=None)):
            return {"gpus": gpus} | best
    return None


def fastest_tested(question: Question, ranking: Ranking) -> Numbers | None:
    """Return the fastest layout that measured runs back; None if they back none."""
    tested = ranking.order[question.is_tested(ranking.table.where(ranking.order))]
    return layout_summary(question, ranking, int(tested[0])) if len(tested) else None


def first_details(
    question: Question, ranking: Ranking, rows: list[int], layouts: list[Numbers], tokens: float | None
) -> Numbers:
    """Return the parts of an answer about its first layout, from "time" to "launch". rows, layouts: the layouts of the
    answer, as rows of the ranking and in the numbers of `layout_summary`.
    """
    e, row, first = ranking.estimate, rows[0], ranking.table[rows[0]]
    reasons, speed = question.untested(first), layouts[0]["tokens_per_s_per_gpu"]
    return {
        "time": {name: float(part[row]) for name, part in e.time.items()},
        "memory": {name: float(part[row]) / GIB for name, part in e.memory.items()},
        "untested": reasons,
        "tested": fastest_tested(question, ranking) if reasons else None,
        "second": time_differences(ranking, row, rows[1]) if len(rows) > 1 else {},
        "exposed": without_overlap(question, [ranking.table[each] for each in rows]),
        "near": similar_jobs(question, speed) if question.layout is None else [],
        "kernels": with_kernels(question, layouts[0]) if question.layout is None else None,
        "launch": launch(question, first, tokens),
    }


def answer(question: Question, top: int = 5, tokens: float | None = None) -> Numbers:
    """Return the `top` best kinds of layout ("layouts"), seconds and GiB by part of the first ("time", "memory"), its
    step without overlap ("exposed"), why no run has tested it and the fastest layout that runs have tested ("untested",
    "tested"), how the second differs ("second"), faster layouts that are too risky ("risky"), better jobs of similar
    size ("near"), the first answer with fused kernels if it is much faster ("kernels"), how many layouts each rule
    rejects ("rejected"), and the command ("launch"). If nothing fits: the layout that needs the least memory
    ("leanest") and a first answer on more GPUs ("enough"). If the question has a layout: `judge_layout` of it
    ("asked"). All are plain numbers and strings. Raises ValueError as `search` does.
    """
    ranking = question.search()
    rows = answer_rows(question, ranking, top)
    layouts = [layout_summary(question, ranking, *row, tokens) for row in rows]
    result: Numbers = {"model": question.name, "cluster": question.cluster.name}
    result |= {"program": program_title(question.cluster.software)}
    result |= {name: getattr(question, name) for name in ("moe", "risk", "gpus", "batch", "seq")}
    result |= {"notes": notes_of(question), "question": question.as_json(), "layouts": layouts}
    risky = ranking.risky
    if layouts:
        risky = faster_but_risky(question, ranking, rows[0][0])
        result |= first_details(question, ranking, [row for row, _ in rows], layouts, tokens)
    else:
        result |= {"leanest": leanest(question, ranking), "enough": enough_gpus(question)}
    if question.layout is not None:
        result["asked"] = judge_layout(question, ranking, tokens)
        if not result["asked"]["why_not"]:
            result["launch"] = launch(question, question.layout, tokens)
    kinds = distinct_kinds(question, ranking, risky, 3)
    result["risky"] = [layout_summary(question, ranking, *row, tokens) for row in kinds]
    return result | {"rejected": dict(sorted(ranking.rejected.items(), key=lambda each: -each[1]))}
