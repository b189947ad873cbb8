"""course_lib.best_config.simplicity: of layouts that are about as fast, the simplest leads. CPU."""

import dataclasses
import itertools

import numpy as np
import pytest

from course_lib.best_config.clusters import CLUSTERS
from course_lib.best_config.question import Question
from course_lib.best_config.simplicity import (
    NEAR,
    SAME,
    SLOW,
    answer_rows,
    complexity,
    count_techniques,
    count_uncommon,
    distinct_kinds,
    faster_but_risky,
    first_layout,
    simplest,
    techniques_used,
    uncommon_choices,
)
from course_lib.best_config.tables import LayoutTable
from course_lib.best_config.tested import is_tested
from course_lib.five_d.layouts import Layout
from course_lib.single_gpu.model import PRESETS

EIGHT = Question("llama3-8B", PRESETS["llama3-8B"], CLUSTERS["H100"], 8, 64)
UNEVEN = Question("llama3-8B", PRESETS["llama3-8B"], CLUSTERS["A100"], 24, 1000)
MIXTURE = Question("llama3.2-1B", PRESETS["llama3.2-1B"], CLUSTERS["H100"], 16, 64, moe={"experts": 8, "top_k": 2})
LARGE = Question("llama3-405B", PRESETS["llama3-405B"], CLUSTERS["H100"], 16384, 2048, 8192)
QUESTIONS = {"8": EIGHT, "uneven": UNEVEN, "experts": MIXTURE, "large": LARGE}


def table_of(*layouts: str) -> LayoutTable:
    """The table of some layouts."""
    return LayoutTable.of(map(Layout.parse, layouts))


@pytest.fixture(scope="module")
def rankings():
    """The search of each question."""
    return {name: question.search() for name, question in QUESTIONS.items()}


@pytest.mark.parametrize(
    "simple, other",
    [
        ("dp64,zero3,mb2", "dp32,cp2,zero3,mb4"),  # fewer techniques
        ("dp2,tp4", "dp4,cp2,zero3"),  # also where the degrees are larger
        ("dp8,tp2,zero3", "dp4,tp4,zero3"),  # smaller degrees
        ("dp8,zero1", "dp8,zero2"),  # a lower stage
        ("dp8,tp2", "dp8,tp2,sp"),
        ("dp8,zero1,mb2", "dp8,zero1,mb4"),
        ("dp4,pp2,zero1", "dp4,pp2,zero3,keep"),
    ],
)
def test_the_simplest_of_ties(simple, other):
    assert simplest(table_of(other, simple)) == 1 and simplest(table_of(simple, other)) == 0


@pytest.mark.parametrize(
    "layout, seq, names",
    [
        ("dp128,pp16,tp8,sp,zero1,interleaved,v8", 8192, []),
        ("dp64,zero3,rep8", 4096, []),
        ("dp8,pp16,cp16,tp8,sp,zero1", 131072, []),  # Llama 3 405B's long context
        ("dp8,cp2,zero3", 8192, []),
        ("dp8,cp2,zero3", 4096, ["cp on a short sequence"]),
        ("dp16,pp64,cp4,tp4,zb-v", 65536, ["zero-bubble schedule", "fewer than two layers per rank"]),
        ("dp2,pp8,dualpipe", 4096, ["DualPipe"]),
        ("dp2,tp16,sp", 4096, ["tp beyond a node"]),
        ("dp2,tp3,mb5", 4096, ["tp or cp that is no power of two", "micro-batch that is no power of two"]),
        ("dp8,zb-v", 4096, []),  # without a pipeline the schedule does not matter
    ],
)
def test_choices_that_hardly_anybody_makes(layout, seq, names):
    question, table = dataclasses.replace(LARGE, seq=seq), table_of(layout)
    assert [name for name, holds in uncommon_choices(question, table).items() if holds[0]] == names
    assert complexity(question, table)[0] == 100 * len(names) + count_techniques(table)[0]


def test_techniques_that_are_on():
    on = {
        name
        for name, holds in techniques_used(table_of("dp128,pp16,tp8,sp,zero1,interleaved,v8,full")).items()
        if holds[0]
    }
    assert on == {"pp", "tp", "ZeRO", "interleaved", "recompute"}
    found = [
        count_techniques(table_of(layout))[0] for layout in ("dp8", "dp8,zero2", "dp8,zero3,rep2", "dp4,pp2,zero3,keep")
    ]
    assert found == [0, 1, 2, 2]
    assert (
        techniques_used(table_of("dp4,pp2,zero3,keep"))["ZeRO"][0] and techniques_used(table_of("dp4,zero3"))["FSDP"][0]
    )


@pytest.mark.parametrize("case", QUESTIONS)
def test_the_first_is_the_simplest_within_3_percent(rankings, case):
    question, found = QUESTIONS[case], rankings[case]
    first, step_s = first_layout(question, found), found.estimate.step_s
    assert step_s[first] <= (1 + NEAR) * step_s[found.order[0]]
    near = found.order[step_s[found.order] <= (1 + NEAR) * step_s[found.order[0]]]
    score = complexity(question, found.table.where(near))
    mine = complexity(question, found.table.where(np.array([first])))[0]
    assert mine == score.min()
    equal = near[score == mine]
    sizes = question.config, question.cluster, found.table.where(equal), question.seq, question.moe, question.batch
    backed = equal[is_tested(*sizes)]
    assert len(backed) == 0 or first in backed  # of equally simple ones, one that runs cover
    assert step_s[first] <= (1 + SAME) * step_s[backed if len(backed) else equal].min()  # and of these the fastest


def test_what_runs_cover_leads_among_equals(rankings, monkeypatch):
    found = rankings["8"]
    monkeypatch.setattr(Question, "is_tested", lambda question, table: table.zero_stage == 3)
    assert found.table[first_layout(EIGHT, found)].zero_stage == 3
    monkeypatch.setattr(Question, "is_tested", lambda question, table: np.zeros(len(table), bool))
    rows = answer_rows(EIGHT, found, 5)
    assert rows[0][0] == first_layout(EIGHT, found) and len(rows) == 5


def test_a_plain_layout_leads_where_an_unusual_one_is_a_little_faster():
    """24 GPUs, batch 1,000: pp3 with cp4, zb-h1 and mb5 is 1% faster than pp3 with 1F1B."""
    question = dataclasses.replace(UNEVEN, schedules=("1f1b", "zb-h1"))
    found = question.search()
    rows = [row for row, _ in answer_rows(question, found, 5)]
    first, fastest = found.table[rows[0]], found.table[rows[1]]
    assert first.schedule == "1f1b" and first.cp == 1 and first.micro_batch in (1, 2, 4)
    assert fastest.schedule != "1f1b" and 0 < found.estimate.step_s[rows[0]] / found.estimate.step_s[rows[1]] - 1 < NEAR


@pytest.mark.parametrize("case", QUESTIONS)
def test_the_layouts_of_an_answer_are_of_different_kinds(rankings, case):
    question, found = QUESTIONS[case], rankings[case]
    rows = [row for row, _ in answer_rows(question, found, 5)]
    table, step_s = found.table.where(np.array(rows)), found.estimate.step_s[rows]
    made = count_uncommon(question, table)
    odd = made > made[0]
    sets = list(zip(*techniques_used(table).values(), odd, made == 0, strict=True))
    assert len(rows) == 5 == len(set(rows)) == len(set(sets)) and rows[0] == first_layout(question, found)
    assert (np.diff(step_s[1:]) >= 0).all() and step_s.max() < SLOW * step_s[0]
    assert (step_s[odd] < step_s[0]).all() and odd.sum() <= 1  # an unusual one is there for what it would gain
    assert (made == 0).any()  # 405B on 16,384 GPUs: nothing plain is within 3%, and the fastest plain one is named


SHARDED = Question("llama3-70B", PRESETS["llama3-70B"], CLUSTERS["H100"], 512, 512, 8192)


@pytest.mark.parametrize("case", [*QUESTIONS, "sharded"])
def test_more_techniques_gain_speed_or_memory(rankings, case):
    """Of 70B on 512 GPUs: dp512,zero3,full is listed, and dp512,zero3,full,rep8, which is 0.1% slower, is not."""
    question = QUESTIONS.get(case, SHARDED)
    found = rankings[case] if case in rankings else question.search()
    e, first = found.estimate, first_layout(question, found)
    for chosen in (
        answer_rows(question, found, 5),
        distinct_kinds(question, found, faster_but_risky(question, found, first), 3),
    ):
        rows = [row for row, _ in chosen]
        sets = [
            {name for name, holds in techniques_used(found.table.where(np.array([row]))).items() if holds[0]}
            for row in rows
        ]
        for (a, on), (b, more) in itertools.permutations(zip(rows, sets, strict=True), 2):
            if on < more and not (more - on) & {"pp", "tp", "ep"}:
                faster, leaner = e.step_s[b] < e.step_s[a], e.needed_bytes[b] < 0.9 * (1 + SAME) * e.needed_bytes[a]
                assert faster or leaner, (found.table[a], found.table[b])
    if case == "sharded":
        assert str(found.table[first]) == "dp512,zero3,full"


@pytest.mark.parametrize("case", QUESTIONS)
def test_a_risk_is_named_where_it_gains_something(rankings, case):
    question, found = QUESTIONS[case], rankings[case]
    first = first_layout(question, found)
    rows, step_s = faster_but_risky(question, found, first), found.estimate.step_s
    for row in found.risky[:200]:
        made = [count_uncommon(question, found.table.where(np.array([each])))[0] for each in (first, row)]
        gain = step_s[first] / step_s[row] - 1
        assert (row in rows) == (gain > (NEAR if made[1] > made[0] else 0))


def test_ties_are_counted_once(rankings):
    found = rankings["8"]
    step_s, needed = found.estimate.step_s, found.estimate.needed_bytes
    for row, others in answer_rows(EIGHT, found, 12):
        same = np.abs(step_s[found.order] / step_s[row] - 1) <= 2 * SAME
        same &= np.abs(needed[found.order] / needed[row] - 1) <= 2 * SAME
        assert others < same.sum()
    more = answer_rows(EIGHT, found, 30)
    assert 20 < len({row for row, _ in more}) == len(more) <= 30 and more[0] == answer_rows(EIGHT, found, 12)[0]
    assert answer_rows(EIGHT, dataclasses.replace(found, order=found.order[:0]), 3) == []
    assert distinct_kinds(EIGHT, found, found.order[:0], 3) == []


def test_no_layout_is_listed_twice():
    """Other degrees of the same techniques may tie with a layout that is listed already."""
    question = Question("bench-80B", PRESETS["bench-80B"], CLUSTERS["H100"], 128, 1024, 32768, None, 0.01, 1, ("1f1b",))
    rows = [row for row, _ in answer_rows(question, question.search(), 8)]
    assert len(set(rows)) == len(rows) > 4
