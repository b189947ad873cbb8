"""course_lib.best_config.calibrate on runs of one model on one cluster, 512 sequences of 8,192 tokens: what it was made
with is found again and predicted, what the runs do not tell is named and stays, and bad input is one line.
"""

import dataclasses
import math

import numpy as np
import pytest

from course_lib.best_config.calibration import calibrate, constants_of, fit, loss, nearest_accepted, slopes
from course_lib.best_config.clusters import CLUSTERS, Cluster
from course_lib.best_config.fit_reports import Calibration, Constant, facts_of
from course_lib.best_config.informative import informative
from course_lib.best_config.planner import estimate
from course_lib.best_config.runs import MeasuredRun, predict
from course_lib.five_d.layouts import Layout
from course_lib.single_gpu.model import PRESETS

CONFIG, BATCH, SEQ = PRESETS["llama3-8B"], 512, 8192
H100 = CLUSTERS["H100"]
TRUTH = H100.with_software(
    matmul_efficiency=0.6, layer_traffic=500.0, nvlink_efficiency=0.6, network_efficiency=0.7, ring_step_s=50e-6,
    kept_ffn=3.0, logit_bytes=(8.0, 8.0),
)  # fmt: skip
CHANGED = ("matmul_efficiency", "layer_traffic", "nvlink_efficiency", "network_efficiency", "ring_step_s", "kept_ffn")


def runs_of(layouts: list[Layout], cluster: Cluster = TRUTH, noise: float = 0.0) -> list[MeasuredRun]:
    """Runs with the times and peaks that a cluster predicts, nearly."""
    chance = np.random.default_rng(1)
    runs = [
        MeasuredRun("8B", CONFIG, math.ceil(layout.ranks / 8), layout, BATCH, SEQ, True, math.nan, math.nan)
        for layout in layouts
    ]
    found = predict(runs, cluster)
    off = np.exp(noise * chance.standard_normal((2, len(runs))))
    return [
        dataclasses.replace(run, step_s=float(step_s), peak_bytes=float(peak))
        for run, step_s, peak in zip(runs, found.step_s * off[0], found.peak_bytes * off[1], strict=True)
    ]


@pytest.fixture(scope="module")
def layouts() -> list[Layout]:
    """Of 16 GPUs: the 20 that tell most, and 40 more."""
    return informative(CONFIG, H100, 16, BATCH, SEQ, 60)


@pytest.fixture(scope="module")
def found(layouts):
    return calibrate(runs_of(layouts[:20], noise=0.01), H100)


def test_what_runs_were_made_with_is_found_again(layouts):
    """Of 512 x 8,192 tokens, which other code took for 256 x 4,096; without noise to the third digit."""
    runs = runs_of(layouts[:20])
    cluster = fit(runs, H100)
    for name in CHANGED:
        assert getattr(cluster.software, name) == pytest.approx(getattr(TRUTH.software, name), rel=1e-3), name
    one = estimate(CONFIG, cluster, layouts[30], BATCH, SEQ)
    assert float(one.step_s) == pytest.approx(float(estimate(CONFIG, TRUTH, layouts[30], BATCH, SEQ).step_s), rel=1e-3)


def test_other_layouts_are_predicted(layouts, found):
    others = runs_of(layouts[20:])
    said, before = predict(others, found.cluster), predict(others, H100)
    step_s, peak = (np.array([getattr(run, name) for run in others]) for name in ("step_s", "peak_bytes"))
    assert np.median(np.abs(said.step_s / step_s - 1)) < 0.01 < 0.02 < np.median(np.abs(before.step_s / step_s - 1))
    off = np.abs(said.step_s / step_s - 1)  # nine in ten layouts within 10%, all within 30%
    assert np.quantile(off, 0.9) < 0.1 and off.max() < 0.3 and np.abs(said.peak_bytes / peak - 1).max() < 0.03


def test_intervals_hold_what_is_true(found):
    truth = constants_of(TRUTH, "step_s") | constants_of(TRUTH, "peak_bytes")
    told = [each for each in found.constants if not each.why]
    inside = [each.low <= truth[each.name] <= each.high for each in told]
    assert len(told) >= 10 and np.mean(inside) >= 0.75
    narrow = [each for each in told if each.high < 1.5 * each.low]
    assert len(narrow) >= 5, "and they say something"


def test_what_runs_do_not_tell_stays_and_is_named(found):
    """Nobody can tell h from f on one model."""
    why = {each.name: each.why for each in found.constants if each.why}
    assert why["kept_hidden"] == "these runs do not tell it from kept_ffn" and not set(why) & set(CHANGED)
    assert all(getattr(found.cluster.software, name) == getattr(H100.software, name) for name in why)
    assert set(found.determined) | set(why) == {each.name for each in found.constants}


def test_runs_without_tensor_parallelism_say_nothing_of_nvlink():
    """The reason names what all runs have in common."""
    layouts = [Layout.parse(f"pp{pp},mb{mb},{how}") for pp in (4, 8) for mb in (1, 2, 4) for how in ("1f1b", "full")]
    found = calibrate(runs_of([dataclasses.replace(layout, dp=8 // layout.pp) for layout in layouts]), TRUTH)
    why = {each.name: each.why for each in found.constants}
    assert why["network_efficiency"].startswith("these runs do not show it: all have cp 1, tp 1, ep 1, nodes 1, seq")
    assert found.outside(CONFIG, Layout.parse("dp4,tp2"), BATCH, SEQ)[:1] == ["dp 4: fitted on 1 to 2"]


def test_a_constant_behind_which_nothing_shows_is_an_end(layouts):
    """A host that is never waited for may be as slow as it was said to be, until it would be waited for."""
    runs = runs_of(layouts[:20], H100.with_software(layer_host_s=1e-4))
    here, limit = H100.with_software(layer_host_s=1e-6), 1e-6
    found = nearest_accepted(runs, here, "layer_host_s", 0.1, limit, "step_s", 0.07)
    assert 1e-4 < found.software.layer_host_s < 0.1 and loss(runs, found, "step_s", 0.07) <= limit
    more = found.with_software(layer_host_s=found.software.layer_host_s * 2)
    assert loss(runs, more, "step_s", 0.07) > limit
    told = Constant("layer_host_s", 0.1, found.software.layer_host_s, 0.0, 1e300)
    assert str(Calibration(found, (told,), 20, {}, {})).endswith("   or less")


def test_what_lies_outside(found):
    small = PRESETS["debug"]
    said = found.outside(small, Layout.parse("dp2,tp16,sp,zero1,mb2"), 64, 4096)
    assert "nodes 4: fitted on 2" in said and "seq 4096: fitted on 8192" in said
    assert f"hidden {small.hidden}: fitted on {CONFIG.hidden}" in said and "layers 2: fitted on 32" in said
    assert any(each.startswith("tp 16: fitted on 1 to ") for each in said) or found.ranges["tp"][-1] == 16
    runs = runs_of([Layout.parse(f"dp{dp},tp{16 // dp},sp,zero1") for dp in (2, 4, 8)])
    few = dataclasses.replace(found, ranges=facts_of(runs))
    assert few.outside(CONFIG, Layout.parse("dp4,tp4,sp,zero1"), BATCH, SEQ) == []
    assert few.outside(CONFIG, Layout.parse("tp16,sp,mb2,full"), BATCH, SEQ) == [
        "dp 1: fitted on 2 to 8", "tp 16: fitted on 2 to 8", "mb 2: fitted on 1", "zero 0: fitted on zero 1",
        "recompute full: fitted on recompute none",
    ]  # fmt: skip
    assert few.outside(CONFIG, Layout.parse("dp4,pp4,zero1,zb-h1"), BATCH, SEQ) == [
        "pp 4: fitted on 1", "tp 1: fitted on 2 to 8", "schedule zb-h1: fitted on schedule 1f1b",
    ]  # fmt: skip


def test_the_table(found):
    table, *worst = str(found).split("\n\n")
    first, _, *lines = table.splitlines()
    assert first.startswith("fitted to 20 runs (median errors: tokens/s off by 0.")
    rows = [line for line in lines if not line.startswith(" ")]  # others go on with a reason
    assert [line.split()[0] for line in rows] == [each.name for each in found.constants]
    told = next(line for line in lines if line.startswith("matmul_efficiency"))
    assert told.split()[:2] == ["matmul_efficiency", f"{H100.software.matmul_efficiency:.4g}"] and " to " in told
    assert any(line.startswith("kept_hidden") and "as before   these runs do not tell it" in line for line in lines)
    titles = [each.partition("  ")[0] for each in worst]
    assert titles == ["worst runs in step time, s", "worst runs in peak memory, GiB"]


def test_the_worst_runs_are_listed(layouts):
    """The seventh run stalled. Five lines for times, and none for memory where no run has a peak."""
    runs = [dataclasses.replace(run, peak_bytes=math.nan) for run in runs_of(layouts[:20], noise=0.01)]
    runs[6] = dataclasses.replace(runs[6], step_s=runs[6].step_s * 40, where="ours.csv, line 8")
    found = calibrate(runs, H100)
    worst = found.worst["step_s"]
    assert len(worst) == 5 and found.worst["peak_bytes"] == ()
    assert all(row.where.startswith("run ") for row in worst[1:])
    assert (worst[0].where, worst[0].layout, worst[0].measured) == ("ours.csv, line 8", layouts[6], runs[6].step_s)
    said = estimate(CONFIG, found.cluster, layouts[6], BATCH, SEQ)
    assert worst[0].factor == pytest.approx(runs[6].step_s / float(said.step_s)) and worst[0].factor > 30
    _, table = str(found).split("\n\n")
    assert table.splitlines()[1].startswith("ours.csv, line 8 ") and str(layouts[6]) in table.splitlines()[1]
    assert len(table.splitlines()) == 7 and "a factor above 20 is a run that stalled" in table.splitlines()[-1]


def test_too_few_or_too_alike_runs_are_refused(layouts):
    runs = runs_of(layouts[:20])
    failed = [dataclasses.replace(run, ok=False) for run in runs]
    for some, words in (
        (runs[:4], r"fit: 4 runs that were ok; (\d+) constants of time show in them, so make it \1 different or more"),
        (runs[:4] * 5, r"fit: 20 runs that were ok, 4 different; "),
        (failed, "fit: none of 20 runs was ok"),
        ([], "fit: none of 0 runs was ok"),
        ([*runs, dataclasses.replace(runs[0], dtype="fp32")], "fit: runs in bf16 and fp32"),
    ):
        with pytest.raises(ValueError, match=words) as error:
            fit(some, H100)
        assert "\n" not in str(error.value)


def test_runs_without_peaks_fit_times_alone(layouts):
    runs = [dataclasses.replace(run, peak_bytes=math.nan) for run in runs_of(layouts[:20])]
    found = calibrate(runs, H100)
    assert "peak memory" not in str(found).splitlines()[0]
    assert found.cluster.software.kept_ffn == H100.software.kept_ffn != TRUTH.software.kept_ffn
    assert found.cluster.software.nvlink_efficiency == pytest.approx(0.6, rel=1e-3)
    assert {each.why for each in found.constants if each.name in ("held[0]", "kept_ffn")} == {
        "0 runs have a peak: too few"
    }


def test_what_is_0_stays_so():
    """A program that reserves nothing had no logarithm."""
    assert "reserved_bytes" not in constants_of(H100.with_software(reserved_bytes=0.0), "peak_bytes")
    assert "reserved_bytes" in constants_of(H100, "peak_bytes")


# The layouts that tell most.


def test_the_layouts_that_tell_most_tell_more_than_others(layouts):
    """The determinant of the information about the constants of time, against layouts by chance."""
    names = list(constants_of(H100, "step_s"))

    def information(chosen: list[Layout]) -> float:
        slope = slopes(runs_of(chosen, H100), H100, names, "step_s") / 0.07
        return np.linalg.slogdet(np.eye(len(names)) + slope.T @ slope)[1]

    by_chance = np.random.default_rng(0).permutation(len(layouts))
    several = [information([layouts[i] for i in by_chance[start : start + 20]]) for start in (0, 20, 40)]
    assert information(layouts[:20]) > max(several)


def test_they_fit_with_room_and_are_all_different(layouts):
    assert len(set(layouts)) == len(layouts) == 60 and {layout.ranks for layout in layouts} == {16}
    for layout in layouts:
        said = estimate(CONFIG, H100, layout, BATCH, SEQ)
        assert said.runs and said.needed_bytes < 0.8 * said.usable_bytes


def test_several_numbers_of_gpus():
    each = [informative(PRESETS["bench-1B"], H100, gpus, 4, 2048, 500) for gpus in (1, 2)]
    both = informative(PRESETS["bench-1B"], H100, (1, 2), 4, 2048, 500)
    assert len(both) < 500 and sorted(map(str, both)) == sorted(map(str, [*each[0], *each[1]]))


def test_a_model_without_room_is_refused():
    with pytest.raises(ValueError, match="batch 8, seq 8192 on 2 GPUs: no layout leaves a fifth of the memory free"):
        informative(PRESETS["llama3-405B"], H100, 2, 8, 8192)
