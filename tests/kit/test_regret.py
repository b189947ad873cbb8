"""course_kit.planning.regret: the parts of hand-made cells, and of the playbook's runs with perfect predictions."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from course_kit.planning.regret import (
    failed_with_memory_to_spare,
    log_ratios,
    loss_by_scatter,
    median_of_comparable,
    most_bytes,
    needs_no_less,
    scatter_of_equals,
    split_regret,
    unexplained,
)
from course_lib.best_config.clusters import CLUSTERS
from course_lib.best_config.planner import estimate
from course_lib.best_config.runs import MeasuredRun, Predicted, load_runs, loss_of_picks
from course_lib.best_config.tables import LayoutTable
from course_lib.five_d.layouts import Layout
from course_lib.single_gpu.model import PRESETS

CLUSTER = CLUSTERS["H100, EFA"]
CONFIG = PRESETS["bench-1B"]
GIB = 2**30
RUNS = load_runs(Path(__file__).parents[2] / "data" / "layout_runs_h100.csv")


def a_run(step_s: float | None, layout: str = "dp8", peak: float = 20 * GIB, config=CONFIG, nodes=1) -> MeasuredRun:
    """Return a run of the 1B model that took so long, or failed if None."""
    ok = step_s is not None
    times = (step_s, peak) if ok else (math.nan, math.nan)
    return MeasuredRun("1B", config, nodes, Layout.parse(layout), 256, 4096, ok, *times)


def split(runs: list[MeasuredRun], step_s: list[float], risk: list[float] | None = None):
    """Return the split of the only cell, given predictions."""
    risks = np.zeros(len(runs)) if risk is None else np.array(risk)
    predicted = Predicted(np.array(step_s), np.ones(len(runs)), risks)
    found = split_regret(runs, predicted, CLUSTER)
    assert {cell: each.regret for cell, each in found.items()} == pytest.approx(loss_of_picks(runs, predicted))
    return found["1B", 1]


# Runs with other degrees than "dp8", far from the fastest, so that a cell has comparable ones: as predicted.
USUAL = [a_run(9.0, f"dp8,zero1,mb{size}") for size in (1, 2, 4)]


def test_a_bad_prediction_is_avoidable():
    """The planner prefers a run that it predicts at 1 second, and that takes 5, each time it is measured."""
    runs = [a_run(5.0, f"dp4,tp2,sp,mb{size}") for size in (1, 2, 4, 8)] + [a_run(4.0)]
    found = split(runs, [1.0, 1.1, 1.2, 1.3, 3.9])
    assert found.avoidable == pytest.approx(1 - 4 / 5) and found.unavoidable == found.caution == 0
    assert (found.pick, found.fastest, found.reason) == (0, 4, "predicted badly")


def test_a_pick_that_was_slow_by_chance():
    """Comparable runs took what was predicted; this took four times as much. Next the planner picks the second best."""
    runs = [a_run(4.0, "dp8"), *USUAL, a_run(2.0, "dp4,tp2,sp")]
    found = split(runs, [1.0, 9.0, 9.0, 9.0, 2.2])
    assert found.unexplained == pytest.approx(0.5) and found.avoidable == 0
    assert found.reason == "the pick was slow by chance"


def test_a_run_that_was_fast_by_chance():
    runs = [a_run(2.0, "dp8"), *USUAL, a_run(5.0, "dp4,tp2,sp")]
    found = split(runs, [8.0, 9.0, 9.0, 9.0, 5.0])
    assert (found.pick, found.fastest) == (4, 0)
    assert found.unexplained == pytest.approx(1 - 2 / 5) and found.avoidable == 0
    assert found.reason == "the fastest was fast by chance"


def test_a_slow_pick_beside_a_fast_run():
    others = [a_run(9.0, f"dp4,tp2,sp,mb{size}") for size in (2, 4, 8)]
    runs = [a_run(4.0, "dp8"), *USUAL, a_run(2.0, "dp4,tp2,sp"), *others]
    found = split(runs, [1.0, 9.0, 9.0, 9.0, 8.0, 9.0, 9.0, 9.0])
    assert found.unexplained == found.regret == 0.5
    assert found.reason == "by chance a slow pick, a fast fastest"


@pytest.mark.parametrize(
    "others, chance",
    [((9.0, 9.0, 9.0), True), ((9.0, 9.0), False), ((2.3, 2.2, 9.0), False)],
    ids=["as predicted", "too few", "as fast themselves"],
)
def test_chance_needs_enough_comparable_runs_that_say_otherwise(others, chance):
    runs = [a_run(2.0), *(a_run(s, f"dp8,zero1,mb{2**i}") for i, s in enumerate(others)), a_run(9.0, "dp4,tp2,sp")]
    predicted = Predicted(np.full(len(runs), 9.0), np.ones(len(runs)), np.zeros(len(runs)))
    assert unexplained(runs, predicted, 60 * GIB).tolist() == [chance] + [False] * (len(runs) - 1)
    usual = median_of_comparable(runs, log_ratios(runs, predicted))
    assert np.isnan(usual[-1]), "nothing has the degrees of the last"
    assert np.isnan(usual[0]) == (len(others) < 3)


def test_a_prediction_that_is_right_is_no_chance():
    """Comparable runs were all slow; the planner's prediction and the run agree."""
    runs = [a_run(2.0), *(a_run(30.0, f"dp8,zero1,mb{size}") for size in (1, 2, 4))]
    predicted = Predicted(np.full(4, 2.0), np.ones(4), np.zeros(4))
    assert not unexplained(runs, predicted, 60 * GIB).any()


# The failed run is "dp8,zero1,mb2": does the other one show that there was memory to spare?
@pytest.mark.parametrize(
    "other, shows",
    [
        (a_run(1.0, "dp8,zero1,mb2"), True),
        (a_run(1.0, "dp8,zero1,mb4"), True),
        (a_run(1.0, "dp64,mb2", nodes=8), True),  # ZeRO stage 0 shards nothing, however large dp is
        (a_run(1.0, "dp4,zero1,mb2"), True),
        (a_run(1.0, "dp16,zero1,mb2", nodes=2), False),  # sharded over more
        (a_run(1.0, "dp8,zero1,mb1"), False),
        (a_run(1.0, "dp8,zero2,mb2"), False),
        (a_run(1.0, "dp8,zero1,mb2,full"), False),
        (a_run(1.0, "dp8,mb2", peak=70 * GIB), False),  # near the end of its memory
        (a_run(1.0, "dp8,mb2", config=PRESETS["bench-3B"]), False),
        (a_run(None, "dp8,mb2"), False),
    ],
    ids=lambda each: str(each.layout) if isinstance(each, MeasuredRun) else str(each),
)
def test_memory_to_spare(other, shows):
    failed = a_run(None, "dp8,zero1,mb2")
    assert failed_with_memory_to_spare([failed, other], 60 * GIB).tolist() == [shows, False]


def test_stage_3_gathers_weights_so_other_stages_show_nothing():
    failed, other = a_run(None, "dp8,zero3,mb2"), a_run(1.0, "dp8,mb2")
    assert failed_with_memory_to_spare([failed, other], 60 * GIB).tolist() == [False, False]
    same = a_run(1.0, "dp8,zero3,mb4")
    assert failed_with_memory_to_spare([failed, same], 60 * GIB).tolist() == [True, False]


def test_memory_to_spare_of_a_pipeline():
    """With fewer micro-batches in flight, the other run may have needed less."""
    failed = a_run(None, "dp2,pp4,mb2")
    few, many = a_run(1.0, "dp2,pp4,mb64"), a_run(1.0, "dp2,pp4,mb4")
    assert failed_with_memory_to_spare([failed, few], 60 * GIB).tolist() == [False, False]
    assert failed_with_memory_to_spare([failed, many], 60 * GIB).tolist() == [True, False]


def test_what_is_needed_no_less_is_what_the_formula_says():
    """Among the playbook's layouts of one model, "needs no less" agrees with the planner's memory formula."""
    runs = [run for run in RUNS if run.config == PRESETS["bench-8B"] and run.nodes <= 16][::3]
    needed = estimate(runs[0].config, CLUSTER, LayoutTable.of(run.layout for run in runs), 256, 4096).needed_bytes
    pairs = [
        (i, j)
        for i, one in enumerate(runs)
        for j, other in enumerate(runs)
        if i != j and (one.layout.tp, one.layout.pp) == (other.layout.tp, other.layout.pp) and needs_no_less(one, other)
    ]
    assert len(pairs) > 50
    assert all(needed[i] >= 0.999 * needed[j] for i, j in pairs)


def test_a_pick_that_failed_with_memory_to_spare():
    runs = [a_run(None, "dp8,zero1,mb2"), a_run(2.0, "dp8,mb2"), a_run(2.5, "dp4,tp2,sp")]
    found = split(runs, [1.0, 2.0, 2.5])
    assert found.unexplained == 1 and found.avoidable == 0 and found.reason == "the pick failed with memory to spare"


def test_a_pick_that_failed_for_its_memory_is_avoidable():
    found = split([a_run(None, "dp8,zero1,mb2"), a_run(2.0, "dp4,tp2,sp")], [1.0, 2.0])
    assert found.avoidable == 1 and found.reason == "predicted badly"


def test_the_price_of_the_limit_on_risk():
    """The fastest run filled its memory, and was refused; with less in it, refusing it was the planner's fault."""
    runs = [a_run(2.0, peak=70 * GIB), a_run(4.0, "dp4,tp2,sp")]
    found = split(runs, [2.0, 4.0], [0.5, 0.0])
    assert found.caution == pytest.approx(0.5) and found.unavoidable == 0 and found.avoidable == 0
    assert found.reason == "the fastest left little memory"
    found = split([dataclasses.replace(runs[0], peak_bytes=30 * GIB), runs[1]], [2.0, 4.0], [0.5, 0.0])
    assert found.caution == 0 and found.avoidable == pytest.approx(0.5)
    found = split(runs, [2.0, 4.0], [0.5, 0.3])
    assert found.pick is None and found.regret == 1 and found.reason == "the limit on risk refuses every layout"


def test_the_limit_in_bytes_is_that_of_the_risk():
    parts = estimate(CONFIG, CLUSTER, Layout.parse("dp8,mb2"), 256, 4096)
    needed, limit = float(parts.needed_bytes), most_bytes(CLUSTER, float(parts.risk))
    assert needed == pytest.approx(limit)


def test_another_variant_of_the_model():
    variant = dataclasses.replace(CONFIG, kv_heads=8)
    runs = [a_run(4.0), a_run(1.0, "dp4,tp2,sp", config=variant), a_run(3.0, "dp2,tp4,sp")]
    found = split(runs, [2.0, 3.0, 4.0])
    assert found.other_model == pytest.approx((1 - 1 / 4) - (1 - 3 / 4)) and found.avoidable == pytest.approx(1 / 4)
    assert found.reason == "the fastest is of another variant"


def test_scatter_of_equal_runs_by_hand():
    """Two that differ by 10% have a standard deviation of 0.1 / sqrt(2); one that ran once tells nothing."""
    pair = [a_run(1.0), a_run(math.exp(0.1)), a_run(5.0, "dp4,tp2,sp"), a_run(None)]
    assert scatter_of_equals(pair) == pytest.approx(0.1 / math.sqrt(2))
    assert math.isnan(scatter_of_equals(pair[1:]))
    assert scatter_of_equals([*pair, a_run(1.0, "dp8,mb2"), a_run(1.0, "dp8,mb2")]) == pytest.approx(0.05)


def test_loss_by_scatter():
    """Of two equal layouts nothing is lost. Of two that differ by d, the worse is picked as often as a normal error of
    the difference, sqrt(2) x scatter wide, exceeds d.
    """
    assert loss_by_scatter(np.array([3.0, 3.0]), 0.1) == 0
    assert loss_by_scatter(np.array([3.0]), 0.1) == loss_by_scatter(np.array([]), 0.1) == 0
    assert loss_by_scatter(np.array([1.0, 2.0]), math.nan) == 0
    often = 0.5 * math.erfc(0.1 / 0.1 / 2)
    assert loss_by_scatter(np.array([math.exp(0.1), 1.0]), 0.1) == pytest.approx((1 - math.exp(-0.1)) * often, rel=0.1)
    assert loss_by_scatter(np.array([1.0, 1e6]), 0.1) == 0


def test_scatter_explains_small_differences():
    """Equal runs differ by 20%. Of two layouts that differ by 5%, the worse is often faster; not if by 60%."""
    pair = [a_run(8.0, "dp2,tp4,sp"), a_run(8.0 * math.exp(0.2), "dp2,tp4,sp")]
    near = split([a_run(1.05), a_run(1.0, "dp4,tp2,sp"), *pair], [1.0, 1.1, 8.0, 8.0])
    often = 0.5 * math.erfc(math.log(1.05) / 0.2 / math.sqrt(2))
    assert near.scatter == pytest.approx(often * near.regret, rel=0.1)
    far = split([a_run(1.6), a_run(1.0, "dp4,tp2,sp"), *pair], [1.0, 1.1, 8.0, 8.0])
    assert far.scatter < 0.01 and far.avoidable > 0.3 and far.reason == "predicted badly"


def test_a_planner_is_not_blamed_beyond_its_regret():
    """Ten equal layouts of which the second best is picked: scatter explains all of it."""
    pair = [a_run(1.0, "dp2,tp4,sp"), a_run(math.exp(0.2), "dp2,tp4,sp")]
    others = [a_run(1.0 + i / 100, f"dp8,mb{2**i}") for i in range(6)]
    found = split([*others, *pair], [2.0, 1.0, *[3.0] * 6])
    assert found.regret == pytest.approx(1 - 1 / 1.01) and found.scatter == pytest.approx(found.regret)
    assert found.avoidable == 0 and found.reason == "within the scatter of equal runs"


def test_perfect_predictions_have_no_regret():
    step_s, peak, ok = (np.array([getattr(run, name) for run in RUNS]) for name in ("step_s", "peak_bytes", "ok"))
    found = split_regret(RUNS, Predicted(step_s, peak, np.where(ok, 0.0, 1.0)), CLUSTER)
    assert len(found) == 18 and all(each.regret == 0 and each.reason == "" for each in found.values())


def test_a_planner_that_knows_nothing_is_mostly_to_blame():
    """Random predictions: most of the regret is avoidable, so the split does not excuse a bad planner."""
    rng = np.random.default_rng(0)
    step_s = np.exp(rng.normal(size=len(RUNS)))
    found = split_regret(RUNS, Predicted(step_s, np.ones(len(RUNS)), np.zeros(len(RUNS))), CLUSTER)
    parts = {name: np.mean([getattr(each, name) for each in found.values()]) for name in ("regret", "avoidable")}
    assert parts["regret"] > 0.7 and parts["avoidable"] > 0.8 * parts["regret"]
