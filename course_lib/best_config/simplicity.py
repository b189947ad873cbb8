"""The order of the layouts in an answer: among layouts that are about as fast, the simplest is first.

    first_layout(question, ranking)       the first layout of an answer
    answer_rows(question, ranking, 5)     the first layout, and the fastest layouts of other kinds

The planner's error is larger than 3% (notebook 11, section 9), so a lead of 3% on paper is no reason to run something
unusual. Among all layouts within 3% of the fastest one, the order prefers the fewest uncommon choices
(`uncommon_choices`), then the fewest techniques (`techniques_used`), then layouts that measured runs back (`tested`),
then speed. Layouts whose times and memory agree within 0.1% are ties; `simplest` picks one of them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from course_lib.best_config.planner import Ranking
from course_lib.best_config.question import Question
from course_lib.best_config.stage_loads import is_schedule
from course_lib.best_config.tables import LayoutTable

SAME = 1e-3  # ties: relative difference of times and of bytes
NEAR = 0.03  # relative to the fastest step: within it, simplicity decides
SLOW = 1.5  # relative to the first layout's step: slower layouts are no alternative
LEANER = 0.9  # share of the bytes at which a slower layout with more techniques is still listed
SHORT = 4096  # tokens of a sequence per rank: with fewer, no published run uses cp (NeMo: cp 2 at 8,192 tokens)


def techniques_used(table: LayoutTable) -> dict[str, np.ndarray]:
    """Return the layouts that use each technique, as boolean arrays [n] by name. sp is part of tp; ZeRO-3 that gathers
    once per step counts as ZeRO.
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
    """Return True for powers of two; numbers: integers of 1 or more."""
    return numbers & (numbers - 1) == 0


def uncommon_choices(question: Question, table: LayoutTable) -> dict[str, np.ndarray]:
    """Return the layouts that make each uncommon choice, as boolean arrays [n] by name: choices that hardly any
    published run makes and few training programs support.
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
    """Return the number of uncommon choices of each layout."""
    return np.sum(list(uncommon_choices(question, table).values()), axis=0)


def count_techniques(table: LayoutTable) -> np.ndarray:
    """Return the number of techniques of each layout."""
    return np.sum(list(techniques_used(table).values()), axis=0)


def complexity(question: Question, table: LayoutTable) -> np.ndarray:
    """Return a score per layout, lower for simpler layouts: 100 per uncommon choice, 1 per technique."""
    return 100 * count_uncommon(question, table) + count_techniques(table)


def simplest(table: LayoutTable) -> int:
    """Return the row of the simplest layout: the fewest techniques, then the smallest pp x cp x tp, the lowest ZeRO
    stage, no sp, the smallest micro-batch.
    """
    degrees = table.pp * table.cp * table.tp
    keys = table.micro_batch, table.sequence_parallel, table.zero_stage, degrees, count_techniques(table)
    return int(np.lexsort(keys)[0])


def simplest_tie(ranking: Ranking, rows: np.ndarray, row: int) -> tuple[int, int]:
    """Return the simplest layout among `rows` whose time and memory equal `row`'s, and the number of other
    layouts that tie with it.
    """
    step_s, needed = ranking.estimate.step_s, ranking.estimate.needed_bytes
    same = (np.abs(step_s[rows] / step_s[row] - 1) <= SAME) & (np.abs(needed[rows] / needed[row] - 1) <= SAME)
    ties = rows[same]
    return int(ties[simplest(ranking.table.where(ties))]), len(ties) - 1


def first_layout(question: Question, ranking: Ranking) -> int:
    """Return the row of an answer's first layout: the simplest layout within 3% of the fastest; among equally simple
    layouts the fastest that measured runs back, or else the fastest.
    """
    step_s = ranking.estimate.step_s[ranking.order]
    rows = ranking.order[step_s <= (1 + NEAR) * step_s[0]]
    score = complexity(question, ranking.table.where(rows))
    rows = rows[score == score.min()]
    tested = rows[question.is_tested(ranking.table.where(rows))]
    rows = tested if len(tested) else rows
    return simplest_tie(ranking, rows, rows[0])[0]


def first_of_each(*columns: np.ndarray) -> list[int]:
    """Return the positions at which a combination of values first appears, ascending."""
    _, first = np.unique(np.stack([np.asarray(each).astype(np.int64) for each in columns]), axis=1, return_index=True)
    return sorted(first.tolist())


def worth_listing(question: Question, ranking: Ranking, rows: np.ndarray) -> np.ndarray:
    """Return a mask [n] of the rows whose techniques and uncommon choices pay: no row with the same use of pp, tp and
    ep that uses only some of its other techniques is as fast and needs at most 1/LEANER times its memory.
    """
    table, e = ranking.table.where(rows), ranking.estimate
    uses = techniques_used(table) | {"uncommon": count_uncommon(question, table) > 0}
    split = np.sum([2**bit * uses.pop(name) for bit, name in enumerate(("pp", "tp", "ep"))], axis=0)
    others, step_s, needed = np.stack([*uses.values()]), e.step_s[rows], e.needed_bytes[rows]
    fewer = np.all(others[:, :, None] <= others[:, None, :], axis=0)
    fewer &= np.any(others[:, :, None] < others[:, None, :], axis=0) & (split[:, None] == split)
    no_worse = (step_s[:, None] <= (1 + SAME) * step_s) & (LEANER * needed[:, None] <= needed)
    return ~np.any(fewer & no_worse, axis=0)


class Kinds(NamedTuple):
    """The kinds of some rows of a ranking. A kind is a set of techniques, with or without uncommon choices."""

    uses: np.ndarray  # [techniques + 2, rows]: also more uncommon choices than the first row, and none
    kind: np.ndarray  # [rows], a number per kind
    odd: np.ndarray  # [rows], more uncommon choices than the first row
    first_of_kind: list[int]  # the fastest row of each kind that is worth listing
    first_of_degrees: list[int]  # of these kinds, the fastest row of each combination of degrees
    plain: list[int]  # the fastest row without uncommon choices if the first row has any, or else empty


def kinds_of(question: Question, ranking: Ranking, rows: np.ndarray) -> Kinds:
    """Return the kinds of one or more rows, in which the first row is compared with the others. Rows much slower than
    the first one are left out, and so are slower rows with more uncommon choices.
    """
    table, step_s = ranking.table.where(rows), ranking.estimate.step_s[rows]
    uncommon = count_uncommon(question, table)
    odd = uncommon > uncommon[0]
    uses = np.stack([*techniques_used(table).values(), odd, uncommon == 0])
    kind = (2 ** np.arange(len(uses))) @ uses
    fast = np.flatnonzero((step_s < SLOW * step_s[0]) & (~odd | (step_s < (1 - SAME) * step_s[0])))
    first_of_kind = fast[first_of_each(kind[fast])]
    first_of_kind = first_of_kind[worth_listing(question, ranking, rows[first_of_kind])]
    listed = fast[np.isin(kind[fast], kind[first_of_kind])]
    degrees = (column[listed] for column in (kind, table.pp, table.cp, table.tp, table.ep))
    plain = listed[uncommon[listed] == 0][: 1 if uncommon[0] else 0]
    return Kinds(uses, kind, odd, first_of_kind.tolist(), listed[first_of_each(*degrees)].tolist(), plain.tolist())


def distinct_kinds(question: Question, ranking: Ranking, rows: np.ndarray, n: int) -> list[tuple[int, int]]:
    """Return up to n of `rows` of different kinds, each with the number of layouts that tie with it: the first row,
    then the first row of each other kind.

    Kinds that use a technique for the first time, or are the first to do without one, are preferred; if there are
    fewer kinds than n, other degrees of the same techniques count too. Layouts with more uncommon choices than the
    first row are listed only if they are faster, and one at most. If the first row has uncommon choices, the first row
    without any is listed. A kind that is neither faster nor at least 10% leaner than one with fewer techniques
    (`worth_listing`) is not listed.
    """
    if not len(rows):
        return []
    kinds = kinds_of(question, ranking, rows)
    uses, odd = kinds.uses, kinds.odd

    def tie_of(at: int) -> tuple[int, int]:
        return simplest_tie(ranking, rows[kinds.kind == kinds.kind[at]], rows[at])

    ties = {at: tie_of(at) for at in [0, *kinds.plain][:n]}
    odd_left, always, ever = 1, uses[:, 0], uses[:, 0]  # techniques of all listed rows, and of any
    by_kind = kinds.first_of_kind
    for new_only, candidates in ((True, by_kind), (False, by_kind), (False, kinds.first_of_degrees)):
        for at in candidates:
            new = np.any(uses[:, at] & ~ever) or np.any(always & ~uses[:, at])
            if len(ties) < n and at not in ties and (odd_left or not odd[at]) and (new or not new_only):
                tie = tie_of(at)
                if tie in ties.values():  # other degrees, with the same times and memory
                    continue
                ties[at] = tie
                odd_left -= int(odd[at])
                always, ever = always & uses[:, at], ever | uses[:, at]
    return [ties[at] for at in sorted(ties)]


def answer_rows(question: Question, ranking: Ranking, n: int) -> list[tuple[int, int]]:
    """Return the rows of an answer's n layouts, each with the number of layouts that tie with it: `first_layout`, then
    the fastest of other kinds (`distinct_kinds`).
    """
    if not len(ranking.order):
        return []
    first = first_layout(question, ranking)
    others = ranking.order[ranking.order != first]
    (_, ties), *rest = distinct_kinds(question, ranking, np.append(first, others), n)
    return [(first, ties), *rest]


def faster_but_risky(question: Question, ranking: Ranking, first: int) -> np.ndarray:
    """Return the risky rows that are faster than an answer's first layout; rows with more uncommon choices only if
    they are faster by more than 3%.
    """
    step_s, rows = ranking.estimate.step_s, ranking.risky
    uncommon = count_uncommon(question, ranking.table.where(np.append(first, rows)))
    limit = np.where(uncommon[1:] > uncommon[0], step_s[first] / (1 + NEAR), step_s[first])
    return rows[step_s[rows] < limit]
