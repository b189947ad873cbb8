"""The order in which an answer names layouts: of those that are about as fast, the simplest first.

    leading(question, found)       the first layout of an answer
    ranked(question, found, 5)     it, and the fastest layouts of other kinds

The planner's error is larger than 3% (notebook 11, section 9), so a lead of 3% on paper is no reason to run something
unusual. Of all layouts within 3% of the fastest one, those with the fewest uncommon choices (`uncommon`) are first; of
these the ones with the fewest techniques (`techniques_used`); of these the fastest that measured runs cover (`tested`),
or else the fastest. Layouts whose times and memory are the same within 0.1% are ties; `simplest` chooses among those.
"""

from __future__ import annotations

import numpy as np

from course_lib.best_config.planner import Ranking
from course_lib.best_config.question import Question
from course_lib.best_config.stage_loads import is_schedule
from course_lib.best_config.tables import LayoutTable
from course_lib.best_config.tested import is_tested

SAME = 1e-3  # ties: relative difference of times and of bytes
NEAR = 0.03  # relative to the fastest step: within it, simplicity decides
SLOW = 1.5  # relative to the first layout's step: slower layouts are no alternative
LEANER = 0.9  # of the bytes: what a slower layout with more techniques must save to be listed
SHORT = 4096  # tokens of a sequence per rank: with fewer, no published run uses cp (NeMo: cp 2 at 8,192 tokens)


def techniques_used(table: LayoutTable) -> dict[str, np.ndarray]:
    """Return the layouts that use each technique, as boolean arrays [n] by its name. sp is part of tp; ZeRO-3 that
    gathers once per step is ZeRO.
    """
    gathers = (table.zero_stage == 3) & ~table.gather_once
    return {
        "pp": table.pp > 1,
        "cp": table.cp > 1,
        "tp": table.tp > 1,
        "ep": table.ep > 1,
        "ZeRO": (table.zero_stage > 0) & ~gathers,
        "FSDP": gathers,
        "HSDP": table.replicate > 1,
        "recompute": table.recompute != "none",
        "interleaved": is_schedule(table, "interleaved"),
        "zero bubble": is_schedule(table, "zb-h1", "zb-h2", "zb-v", "dualpipe"),
    }


def is_power_of_two(numbers: np.ndarray) -> np.ndarray:
    """Return where whole numbers of 1 or more are powers of two."""
    return numbers & (numbers - 1) == 0


def uncommon(question: Question, table: LayoutTable) -> dict[str, np.ndarray]:
    """Return the layouts that make each uncommon choice, as boolean arrays [n] by its name: choices that hardly any
    published run makes, and that few training programs support.
    """
    shape = table.tp * table.cp
    return {
        "zero-bubble schedule": is_schedule(table, "zb-h1", "zb-h2", "zb-v"),
        "DualPipe": is_schedule(table, "dualpipe"),
        "tp beyond a node": table.tp > question.cluster.gpus_per_node,
        "cp on a short sequence": (table.cp > 1) & (question.seq < SHORT * table.cp),
        "fewer than two layers per rank": (table.pp > 1) & (question.config.layers < 2 * table.pp),
        "tp or cp that is no power of two": ~is_power_of_two(shape),
        "micro-batch that is no power of two": ~is_power_of_two(table.micro_batch),
    }


def count_uncommon(question: Question, table: LayoutTable) -> np.ndarray:
    """Return how many uncommon choices each layout makes."""
    return sum(1 * holds for holds in uncommon(question, table).values())


def count_techniques(table: LayoutTable) -> np.ndarray:
    """Return how many techniques each layout uses."""
    return sum(1 * on for on in techniques_used(table).values())


def complexity(question: Question, table: LayoutTable) -> np.ndarray:
    """Return a number per layout, smaller for simpler layouts: 100 for each uncommon choice, 1 for each technique."""
    return 100 * count_uncommon(question, table) + count_techniques(table)


def simplest(table: LayoutTable) -> int:
    """Return the row of the simplest of some ties: the fewest techniques, then the smallest pp x cp x tp, the lowest
    ZeRO stage, no sp, the smallest micro-batch.
    """
    degrees = table.pp * table.cp * table.tp
    keys = table.micro_batch, table.sequence_parallel, table.zero_stage, degrees, count_techniques(table)
    return int(np.lexsort(keys)[0])


def simplest_tie(found: Ranking, rows: np.ndarray, row: int) -> tuple[int, int]:
    """Return the simplest layout among `rows` whose time and memory are the same as those of `row`, and how many others
    have the same.
    """
    step_s, needed = found.estimate.step_s, found.estimate.needed_bytes
    same = (np.abs(step_s[rows] / step_s[row] - 1) <= SAME) & (np.abs(needed[rows] / needed[row] - 1) <= SAME)
    same = rows[same]
    return int(same[simplest(found.table.where(same))]), len(same) - 1


def leading(question: Question, found: Ranking) -> int:
    """Return the row of an answer's first layout: of those within 3% of the fastest, the simplest; of equally simple
    ones the fastest that measured runs cover, or else the fastest.
    """
    step_s = found.estimate.step_s[found.order]
    rows = found.order[step_s <= (1 + NEAR) * step_s[0]]
    score = complexity(question, found.table.where(rows))
    rows = rows[score == score.min()]
    sizes = question.seq, question.moe, question.batch
    tested = rows[is_tested(question.config, question.cluster, found.table.where(rows), *sizes)]
    rows = tested if len(tested) else rows
    return simplest_tie(found, rows, rows[0])[0]


def first_of_each(*columns: np.ndarray) -> list[int]:
    """Return the positions at which a combination of values appears for the first time, ascending."""
    _, first = np.unique(np.stack([np.asarray(each).astype(np.int64) for each in columns]), axis=1, return_index=True)
    return sorted(first.tolist())


def pays(question: Question, found: Ranking, rows: np.ndarray) -> np.ndarray:
    """Return where a layout's techniques and uncommon choices pay: no row with the same of pp, tp and ep that uses only
    some of its other techniques is as fast and needs at most 1/LEANER times its memory. Booleans [n].
    """
    on = techniques_used(found.table.where(rows)) | {"uncommon": count_uncommon(question, found.table.where(rows)) > 0}
    split = sum(2**bit * on.pop(name) for bit, name in enumerate(("pp", "tp", "ep")))
    on, step_s, needed = np.stack([*on.values()]), found.estimate.step_s[rows], found.estimate.needed_bytes[rows]
    fewer = np.all(on[:, :, None] <= on[:, None, :], axis=0) & np.any(on[:, :, None] < on[:, None, :], axis=0)
    fewer &= split[:, None] == split
    no_worse = (step_s[:, None] <= (1 + SAME) * step_s) & (LEANER * needed[:, None] <= needed)
    return ~np.any(fewer & no_worse, axis=0)


def kinds(question: Question, found: Ranking, rows: np.ndarray, n: int) -> list[tuple[int, int]]:
    """Return up to n of `rows` that are of different kinds, and how many others tie with each: the first row, and then
    the first one of each other kind. A kind is a set of techniques, with or without uncommon choices.

    Kinds that use a technique for the first time, or are the first to do without one, are preferred; where there are
    fewer kinds than n, other degrees of the same techniques count too. Layouts with more uncommon choices than the
    first row are listed only if they are faster, and one at most. If the first row has uncommon choices,
    the first row without any is listed. A kind that is neither faster nor at least 10% leaner than one with fewer
    techniques (`pays`) is not listed.
    """
    if not len(rows):
        return []
    table, step_s = found.table.where(rows), found.estimate.step_s[rows]
    made = count_uncommon(question, table)
    odd = made > made[0]
    on = np.stack([*techniques_used(table).values(), odd, made == 0])
    kind = (2 ** np.arange(len(on))) @ on
    able = np.flatnonzero((step_s < SLOW * step_s[0]) & (~odd | (step_s < (1 - SAME) * step_s[0])))
    of_kind = able[first_of_each(kind[able])]
    of_kind = of_kind[pays(question, found, rows[of_kind])]
    able = able[np.isin(kind[able], kind[of_kind])]
    of_degrees = able[first_of_each(*(each[able] for each in (kind, table.pp, table.cp, table.tp, table.ep)))].tolist()
    plain = able[made[able] == 0][: 1 if made[0] else 0].tolist()  # the fastest, beside an uncommon first one
    chosen, left, always, ever = [0, *plain][:n], 1, on[:, 0], on[:, 0]
    ties = {at: simplest_tie(found, rows[kind == kind[at]], rows[at]) for at in chosen}
    for new_only, candidates in ((True, of_kind.tolist()), (False, of_kind.tolist()), (False, of_degrees)):
        for at in candidates:
            new = np.any(on[:, at] & ~ever) or np.any(always & ~on[:, at])
            if len(ties) < n and at not in ties and (left or not odd[at]) and (new or not new_only):
                tie = simplest_tie(found, rows[kind == kind[at]], rows[at])
                if tie in ties.values():  # other degrees, with the same times and memory
                    continue
                ties[at] = tie
                left -= int(odd[at])
                always, ever = always & on[:, at], ever | on[:, at]
    return [ties[at] for at in sorted(ties)]


def ranked(question: Question, found: Ranking, n: int) -> list[tuple[int, int]]:
    """Return the n layouts of an answer, and how many others tie with each: `leading`, then the fastest of other
    `kinds`.
    """
    if not len(found.order):
        return []
    first = leading(question, found)
    (_, ties), *others = kinds(question, found, np.append(first, found.order[found.order != first]), n)
    return [(first, ties), *others]


def worth_a_risk(question: Question, found: Ranking, first: int) -> np.ndarray:
    """Return the risky rows that are faster than an answer's first layout; those with more uncommon choices only if
    they are faster by more than 3%.
    """
    step_s, rows = found.estimate.step_s, found.risky
    table = found.table.where(np.append(first, rows))
    made = count_uncommon(question, table)
    limit = np.where(made[1:] > made[0], step_s[first] / (1 + NEAR), step_s[first])
    return rows[step_s[rows] < limit]
