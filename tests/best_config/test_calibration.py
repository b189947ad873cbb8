"""course_lib.best_config.calibration: constants are recovered from runs made with them, outliers or not; the committed
ones are those of the data. Needs SciPy; a CPU.
"""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from course_lib.best_config import calibration
from course_lib.best_config.calibration import (
    MEMORY,
    MEMORY_PAIRS,
    TIME,
    constants_of,
    cross_validate,
    fit,
    fit_limit,
    solve,
)
from course_lib.best_config.clusters import CLUSTERS, Cluster
from course_lib.best_config.runs import MeasuredRun, accuracy, cells, load_runs, predict
from course_lib.best_config.software import NANOTRON, Software
from course_lib.single_gpu.model import PRESETS

RUNS = load_runs(Path(__file__).parents[2] / "data" / "layout_runs_h100.csv")
SOME = [run for run in RUNS if run.config in (PRESETS["bench-1B"], PRESETS["bench-8B"])]  # a third of a fit's time
EFA = CLUSTERS["H100, EFA"]
OTHER = {
    "matmul_efficiency": 0.55, "half_rows": 600.0, "layer_traffic": 500.0, "head_efficiency": 0.4,
    "network_efficiency": 0.4, "ring_step_s": 120e-6, "gradient_step_s": 700e-6, "layer_host_s": 6e-3,
    "stall_s": 0.3, "kept_hidden": 14.0, "kept_ffn": 3.5,
}  # fmt: skip


def made_with(cluster: Cluster, every: int, seed: int = 0, slow: float = 0.0, noise: float = 0.0) -> list[MeasuredRun]:
    """Every n-th of SOME with the times and peaks that a cluster predicts; slow: the part that is 5 times as slow."""
    some, chance = SOME[::every], np.random.default_rng(seed)
    found = predict(some, cluster)
    times = found.step_s * np.where(chance.random(len(some)) < slow, 5.0, 1.0)
    times *= np.exp(noise * chance.standard_normal(len(some)))
    return [
        dataclasses.replace(run, ok=True, step_s=float(step_s), peak_bytes=float(peak))
        for run, step_s, peak in zip(some, times, found.peak_bytes, strict=True)
    ]


def differences(found: Software, expected: Software, names) -> dict[str, float]:
    """By how much each constant is off, as a part of it; pairs as one, the worse."""
    pairs = {name: (np.atleast_1d(getattr(found, name)), np.atleast_1d(getattr(expected, name))) for name in names}
    return {name: float(np.max(np.abs(a / b - 1))) for name, (a, b) in pairs.items()}


def test_the_constants_of_synthetic_runs_are_recovered():
    """Fitted from the committed values, on runs made with others."""
    truth = EFA.with_software(**OTHER)
    found = fit(made_with(truth, 5), EFA).software
    off = differences(found, truth.software, TIME + MEMORY + MEMORY_PAIRS)
    assert max(off.values()) < 0.02, off
    assert min(differences(EFA.software, truth.software, OTHER).values()) > 0.1, "which they were not before"


def test_outliers_do_not_move_them_much():
    """A fifth of the runs is 5 times as slow, as where a network stalls; least squares alone would follow them."""
    truth = EFA.with_software(**OTHER)
    found = fit(made_with(truth, 2, slow=0.2, noise=0.02), EFA)
    off = differences(found.software, truth.software, OTHER)
    assert max(off.values()) < 0.15, off
    clean = made_with(truth, 5)
    error = np.abs(predict(clean, found).step_s / [run.step_s for run in clean] - 1)
    assert np.median(error) < 0.02


def test_runs_in_fp8_tell_the_efficiency_of_fp8():
    fp8 = EFA.with_software(matmul_dtype="fp8")
    named = {name: {*constants_of(each, "step_s")} for name, each in (("bf16", EFA), ("fp8", fp8))}
    assert named["bf16"] - named["fp8"] == {"matmul_efficiency"} and named["fp8"] - named["bf16"] == {"fp8_efficiency"}
    truth = fp8.with_software(fp8_efficiency=0.6)
    runs = [dataclasses.replace(run, dtype="fp8") for run in made_with(truth, 24)]
    found = solve(runs, fp8, ["fp8_efficiency"], "step_s", 0.07)
    assert found.software.fp8_efficiency == pytest.approx(0.6, rel=0.02)


def test_fitting_changes_the_fitted_constants_alone():
    before = dataclasses.asdict(EFA.software)
    found = fit(made_with(EFA.with_software(**OTHER), 24), EFA)
    after = dataclasses.asdict(found.software)
    assert {name for name in after if after[name] != before[name]} <= {*TIME, *MEMORY, *MEMORY_PAIRS}
    assert dataclasses.replace(found, software=NANOTRON) == EFA and dataclasses.asdict(EFA.software) == before


def test_failed_runs_are_not_fitted():
    runs = made_with(EFA, 10)
    failed = [dataclasses.replace(run, ok=False, step_s=np.nan, peak_bytes=np.nan) for run in runs[:5]]
    assert fit([*failed, *runs], EFA) == fit(runs, EFA)


def test_crashes_do_not_move_the_limit_of_memory():
    """As many crashes as half of the runs that were ok. If they are known as such, the limit stays; otherwise it moves
    by more than a GiB, although the fit has a share of other failures.
    """
    crashed = [dataclasses.replace(run, ok=False) for run in RUNS[::2] if run.ok]
    limit = fit_limit(RUNS, EFA).software
    known = [dataclasses.replace(run, failure="other") for run in crashed]
    assert fit_limit([*RUNS, *known], EFA).software == limit
    assert abs(fit_limit([*RUNS, *crashed], EFA).software.unusable_bytes - limit.unusable_bytes) > 2**30


def test_a_cell_is_never_predicted_by_what_was_fitted_to_it(monkeypatch):
    seen = []

    def recording(runs: list[MeasuredRun], cluster: Cluster) -> Cluster:
        seen.append(runs)
        return cluster.with_software(step_host_s=float(len(seen)))  # tells which fit a prediction came from

    monkeypatch.setattr(calibration, "fit", recording)
    runs = RUNS[::2]
    found = cross_validate(runs, EFA)
    assert len(seen) == len(cells(runs))
    for number, ((model, nodes), rows) in enumerate(cells(runs).items(), 1):
        fitted_to = seen[number - 1]
        assert not any((run.model, run.nodes) == (model, nodes) for run in fitted_to)
        assert len(fitted_to) + len(rows) == len(runs) and {id(run) for run in fitted_to} <= {id(run) for run in runs}
        expected = predict([runs[i] for i in rows], EFA.with_software(step_host_s=float(number)))
        for name in ("step_s", "peak_bytes", "risk"):
            np.testing.assert_array_equal(getattr(found, name)[rows], getattr(expected, name))


OF_NANOTRON = ("busy_step_s", "stall_s", "held")  # 0 in the defaults


@pytest.fixture(scope="module")
def fresh() -> Cluster:
    """Fitted to all measured runs, from the committed constants."""
    return fit(RUNS, EFA)


@pytest.fixture(scope="module")
def from_afar() -> Cluster:
    """Fitted to some of them, from constants that are a fifth off."""
    start = {name: getattr(NANOTRON, name) * 1.2 for name in TIME}
    return fit(SOME[::4], EFA.with_software(**start, **{name: getattr(NANOTRON, name) * 0.8 for name in MEMORY}))


def test_the_committed_constants_are_those_of_the_data(fresh):
    off = differences(fresh.software, NANOTRON, TIME + MEMORY + MEMORY_PAIRS)
    assert max(off.values()) < 0.02, off
    of_all = [name for name in TIME + MEMORY + MEMORY_PAIRS if name not in OF_NANOTRON]
    assert all(getattr(Software(), name) == getattr(NANOTRON, name) for name in of_all)


def test_where_the_fit_begins_matters_little(from_afar):
    """The constants of a layer's own work are known together rather than one by one (fewer rows, or a lower peak):
    what they predict is nearly the same.
    """
    near_by = fit(SOME[::4], EFA)
    far, near = predict(RUNS, from_afar), predict(RUNS, near_by)
    for name in ("step_s", "peak_bytes"):
        assert np.median(np.abs(getattr(far, name) / getattr(near, name) - 1)) < 0.05, name
    assert np.mean(far.fits == near.fits) > 0.99


def test_the_fit_is_physical_and_no_worse_than_what_is_committed(fresh, from_afar):
    committed = accuracy(RUNS, predict(RUNS, EFA))
    for cluster in (fresh, from_afar):
        for name in ("matmul_efficiency", "head_efficiency", "nvlink_efficiency", "network_efficiency"):
            assert 0 < getattr(cluster.software, name) < 1, name
        found = accuracy(RUNS, predict(RUNS, cluster))
        assert all(found[name] == pytest.approx(committed[name], abs=0.02) for name in ("tokens/s", "peak memory"))


@pytest.mark.filterwarnings("ignore:divide by zero")
def test_software_that_never_stalls_can_be_fitted():
    found = fit(made_with(CLUSTERS["H100"], 20), CLUSTERS["H100"])
    assert found.software.stall_s == 0


def test_a_peak_that_no_run_has_is_not_fitted():
    """In these 40 runs no pipeline is fullest at its last stage, so the loss's bytes there change no prediction. Seven
    times as many would change some.
    """
    some = [run for run in RUNS if run.ok and run.model == "8B" and run.nodes <= 16][:120:3]
    software = fit(some, EFA).software
    assert software.logit_bytes[1] == EFA.software.logit_bytes[1]
    assert software.logit_bytes[0] != EFA.software.logit_bytes[0]
