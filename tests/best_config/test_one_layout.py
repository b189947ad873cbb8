"""course_lib.best_config.one_layout: what a layout takes, why not, what would have to change, and its rank. CPU."""

import dataclasses
import json
import math

import numpy as np
import pytest

from course_lib.best_config.answer import answer
from course_lib.best_config.answer_text import as_text
from course_lib.best_config.clusters import CLUSTERS, GIB
from course_lib.best_config.one_layout import changed_settings, judge_layout, nearest_allowed, other_programs
from course_lib.best_config.planner import RISKY, estimate, why_not
from course_lib.best_config.question import Question, check_question
from course_lib.best_config.simplicity import first_layout
from course_lib.five_d.layouts import Layout, check_layout
from course_lib.single_gpu.model import PRESETS

H100 = CLUSTERS["H100"]
JOB = Question("llama3-70B", PRESETS["llama3-70B"], H100, 64, 256)
CLUSTERS_OF = {"course": H100, "nanotron": CLUSTERS["H100, EFA"], "fitted": H100.with_software(half_rows=300.0)}
MIXTURE = Question("llama3.2-1B", PRESETS["llama3.2-1B"], H100, 16, 64, moe={"experts": 8, "top_k": 2})


@pytest.fixture(scope="module")
def found():
    """The search of the job."""
    return JOB.search()


def ask(layout: str, **changes) -> Question:
    """The job with a layout to judge."""
    return dataclasses.replace(JOB, layout=Layout.parse(layout), **changes)


def test_a_layout_of_the_ranking_has_its_rank(found):
    at = 40
    row, e = found.order[at], found.estimate
    said = judge_layout(ask(str(found.table[row])), found)
    faster = np.count_nonzero(e.step_s[found.order] < (1 - 1e-9) * e.step_s[row])
    assert (said["why_not"], said["rank"], said["among"]) == ("", faster + 1, len(found.order)) and faster <= at
    assert said["step_s"] == pytest.approx(e.step_s[row]) and sum(said["time"].values()) == pytest.approx(e.step_s[row])
    assert sum(said["memory"].values()) == pytest.approx(e.needed_bytes[row] / GIB) == pytest.approx(said["needed_gib"])
    first = first_layout(JOB, found)
    assert said["first"] == str(found.table[first])
    assert said["slower"] == pytest.approx(e.step_s[row] / e.step_s[first] - 1)
    assert sum(said["differences"].values()) == pytest.approx(said["slower"], abs=1e-3 * len(e.time))
    gib = (e.needed_bytes[row] - e.needed_bytes[first]) / GIB
    assert sum(said["memory_differences"].values()) == pytest.approx(gib, abs=0.05 * len(e.memory))


def test_a_layout_that_the_search_does_not_try_is_ranked_too(found):
    said = judge_layout(ask("dp8,tp8,sp,zero3,rep2,mb2,full,ulysses"), found)
    assert said["why_not"] == "" and 1 < said["rank"] <= said["among"]


@pytest.mark.parametrize(
    "question",
    [
        ask("dp8,tp8,sp,zero1"),  # out of memory
        ask("dp8,pp8,zero1,zb-v"),
        ask("dp8,cp8,zero1"),
        ask("dp64,zero3,rep8"),
        ask("dp32,pp2,dualpipe,zero1,mb2"),
        ask("dp16,pp2,tp2,zero1,interleaved,v8", max_tp=2, schedules=("interleaved",)),
        dataclasses.replace(MIXTURE, layout=Layout.parse("dp16,ep8,mb4")),
    ],
    ids=lambda question: str(question.layout),
)
def test_each_change_of_a_rejected_layout_is_allowed(question):
    check_question(question)
    said = answer(question)
    asked = said["asked"]
    assert asked["why_not"] == why_not(question.config, H100, question.layout, question.batch, 4096, question.moe) != ""
    there = [change for change in asked["changes"] if "layout" in change]
    assert there and "rank" not in asked and json.loads(json.dumps(asked)) == asked
    for change in there:
        layout = Layout.parse(change["layout"])
        check_layout(question.config, layout, layout.ranks, question.batch, 4096, question.moe)
        cluster = other_programs(question).get(change["change"], H100)
        assert why_not(question.config, cluster, layout, question.batch, 4096, question.moe) == "", change["change"]
        assert layout.tp <= (question.max_tp or layout.tp) and change["risk"] <= question.risk
        assert layout.ranks == (2 * question.gpus if "twice" in change["change"] else question.gpus)
    text = as_text(said)
    verdict = "not recommended" if asked["fits"] else "not allowed"
    assert f"{verdict}: {asked['why_not']}\n  {there[0]['change']}: fits at " in text


def test_a_layout_that_fits_but_is_risky_is_not_out_of_memory():
    layout = "dp64,zero3,mb4,full"
    e = estimate(JOB.config, H100, Layout.parse(layout), 256)
    assert e.fits and e.risk > JOB.risk
    said = answer(ask(layout))
    assert said["asked"]["fits"] and f"risk of {e.risk:.0%}, and the limit (--risk) is 10%" in said["asked"]["why_not"]
    fits = f"fits by estimate, {e.needed_bytes / GIB:.0f} GiB of "
    assert f"not recommended: {RISKY}: {fits}" in as_text(said)
    assert not answer(ask("dp8,tp8,sp,zero1"))["asked"]["fits"]


@pytest.mark.parametrize("layout, reasons", [("dp64,zero3,rep4,full", ["HSDP"]), ("dp64,zero3,full", [])])
def test_what_no_run_has_tested_about_it_is_named(layout, reasons):
    result = answer(ask(layout))
    line = f"no run has tested this: {'; '.join(reasons)}"
    assert result["asked"]["untested"] == reasons and (line in as_text(result).splitlines()) == bool(reasons)


def test_memory_of_other_gpus_is_named():
    """93 GiB are too much for 80, and fit where there are 141."""
    asked = answer(ask("dp8,tp8,sp,zero1"))["asked"]
    assert asked["why_not"].startswith("out of memory: ")
    last = asked["changes"][-1]["change"]
    name = last.split("(")[1][:-1]
    there = estimate(JOB.config, CLUSTERS[name], Layout.parse("dp8,tp8,sp,zero1"), 256)
    assert f"{CLUSTERS[name].memory_bytes / GIB:.0f} GiB" in last and there.risk <= JOB.risk
    smaller = [each for each in CLUSTERS.values() if each.memory_bytes < CLUSTERS[name].memory_bytes]
    usable = max(each.memory_bytes for each in smaller) - H100.software.unusable_bytes
    e = estimate(JOB.config, H100, Layout.parse("dp8,tp8,sp,zero1"), 256)
    assert float(dataclasses.replace(e, usable_bytes=usable).risk) > JOB.risk


def test_only_options_that_the_question_can_take_are_named():
    """A cluster with fitted constants has no --kernels: those of another program would replace them."""
    words = {name: set(other_programs(ask("dp8", cluster=cluster))) for name, cluster in CLUSTERS_OF.items()}
    assert words["course"] == {"with the loss without logits (--fused-loss)", "with fused kernels (--kernels)"}
    assert words["fitted"] == words["nanotron"] == {"with the loss without logits (--fused-loss)"}


def test_rules_are_reasons_and_changes_mend_them():
    asked = answer(ask("dp8,tp8,sp,zero3,mb3,full"))["asked"]
    assert asked["why_not"] == "mb does not divide a rank's share of the batch"
    assert not any("GPUs" in change["change"] for change in asked["changes"])  # no question of memory
    assert asked["changes"][0]["change"] in ("with mb 2", "with mb 4")


def test_an_allowed_layout_has_the_command(found):
    said = answer(ask("dp8,tp8,sp,zero3,full"))
    assert "--layout dp8,tp8,zero3,sp,full " in said["launch"]["command"] and said["near"] == []
    text = as_text(said)
    assert f"allowed: number {said['asked']['rank']:,} of {len(found.order):,} layouts by speed" in text
    assert f"compared with the first answer, {said['asked']['first']}, it takes " in text
    assert "the best layouts of this job:" in text


def slow_distance(one: Layout, other: Layout) -> float:
    """Field by field, as the docstring says it."""
    far = sum(abs(math.log2(getattr(one, name) / getattr(other, name))) / 2 for name in ("dp", "pp", "cp", "tp"))
    far += abs(math.log2(one.micro_batch / other.micro_batch))
    settings = ("zero_stage", "schedule", "virtual", "recompute", "replicate", "ep")
    far += sum(getattr(one, name) != getattr(other, name) for name in settings)
    return far + 0.5 * (one.sequence_parallel != other.sequence_parallel)


def test_the_nearest_layouts_are_the_nearest(found):
    layout = Layout.parse("dp8,tp8,sp,zero1")
    near = [Layout.parse(one["layout"]) for one in nearest_allowed(JOB, found, layout, 5)]
    far = [slow_distance(found.table[row], layout) for row in found.order]
    assert [slow_distance(one, layout) for one in near[:1]] == pytest.approx([min(far)])
    assert len(near) == 5 and sorted(near, key=lambda one: slow_distance(one, layout)) == near
    changed = [set(changed_settings(layout, one)) for one in near]
    assert not any(one < other for one in changed for other in changed)
    assert slow_distance(Layout.parse("dp4,pp2,tp8,sp,zero1,mb2"), layout) == 2
    other = Layout.parse("dp4,pp2,tp8,zero3,mb2,keep,full")
    assert changed_settings(layout, other) == ["dp 4", "pp 2", "zero 3", "recompute full", "mb 2", "no sp"]
