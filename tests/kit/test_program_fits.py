"""course_kit.planning.program_fits: constants that made the step times are found again, a source that was left out is
predicted from the others, and course_lib has what the published runs give. Needs no GPU.
"""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from course_kit.planning.program_fits import (
    FITTED,
    MOST,
    cross_validate_programs,
    family,
    fit_program,
    fitted_as,
    log_ratios,
    predicted_s,
)
from course_kit.planning.published_runs import load_published, predicted_step
from course_lib.best_config.clusters import CLUSTERS, FACTORS
from course_lib.best_config.software import SOFTWARE

DATA = Path(__file__).parents[2] / "data"
RUNS = load_published(DATA / "published_throughput.csv")
FSDP_RUNS = load_published(DATA / "fsdp_runs_llm_foundry.csv")
A100 = {name: getattr(CLUSTERS["A100"], name) for name in FACTORS}
SOME = ("torchtitan", "DeepSpeed 2021")  # with few runs, so that a fit takes a quarter of a second


def of_program(program: str) -> list:
    return [run for run in [*RUNS, *FSDP_RUNS] if fitted_as(run) == program]


def test_predictions_are_the_planners():
    for run in [*RUNS[::9], *FSDP_RUNS[::30]]:
        (found,) = predicted_s([run], SOFTWARE[run.program], A100)
        assert found == pytest.approx(float(predicted_step(run).step_s), rel=1e-12)


def test_factors_are_of_a100s_alone():
    runs = [next(run for run in FSDP_RUNS if run.gpu == gpu) for gpu in ("A100", "A100-40GB", "H100")]
    software = SOFTWARE["llm-foundry"]
    plain, faster = (predicted_s(runs, software, dict.fromkeys(FACTORS, factor)) for factor in (1.0, 2.0))
    assert (plain / faster)[:2].min() > 1.5 and plain[2] == faster[2]


def test_constants_that_made_the_times_are_found_again():
    """As far as the runs tell them: the traffic of other kernels and the matmuls make up for each other."""
    made = {"matmul_efficiency": 0.5, "layer_traffic": 400.0, "network_efficiency": 0.6}
    software = dataclasses.replace(SOFTWARE["torchtitan"], **made)
    runs = of_program("torchtitan")
    runs = [
        dataclasses.replace(run, step_s=float(step_s))
        for run, step_s in zip(runs, predicted_s(runs, software, A100), strict=True)
    ]
    found = fit_program(runs, A100)
    for name, value in made.items():
        tolerance = 0.3 if name == "layer_traffic" else 0.05
        assert getattr(found.software, name) == pytest.approx(value, rel=tolerance), name
    assert np.abs(log_ratios(runs, found.software, A100)).max() < 0.01
    assert found.factors == A100 and set(found.intervals) == set(FITTED["torchtitan"])


def test_an_outlier_hardly_counts():
    runs = of_program("DeepSpeed 2021")
    slow = [dataclasses.replace(runs[0], step_s=3 * runs[0].step_s), *runs[1:]]
    plain, found = (fit_program(some, A100).software for some in (runs, slow))
    for name in FITTED["DeepSpeed 2021"]:
        assert getattr(found, name) == pytest.approx(getattr(plain, name), rel=0.25)


def test_no_share_exceeds_what_was_measured():
    fast = [dataclasses.replace(run, step_s=run.step_s / 3) for run in of_program("torchtitan")]
    found = fit_program(fast, A100)
    for name in FITTED["torchtitan"]:
        assert getattr(found.software, name) <= MOST.get(name, math.inf) * 1.0001


@pytest.mark.parametrize("program", SOME)
def test_course_lib_has_the_constants_of_the_fit(program):
    found = fit_program(of_program(program), A100).software
    for name in FITTED[program]:
        assert getattr(SOFTWARE[program], name) == pytest.approx(getattr(found, name), rel=0.03), name


def test_sources_left_out_are_predicted_by_the_others():
    h100 = "torchtitan, Llama 3.1 405B on H100"
    runs = [run for run in of_program("torchtitan") if family(run) in (h100, "torchtitan, Llama 2 13B on A100")]
    fits, rows = cross_validate_programs(runs)
    assert list(fits) == ["torchtitan"] and rows[-1]["source"] == "all" and rows[-1]["runs"] == len(runs) == 6
    others, left = ([run for run in runs if (family(run) == h100) == out] for out in (False, True))
    assert len(left) == 3, "FP8 runs of the same models are left out together"
    expected = np.exp(log_ratios(left, fit_program(others).software, {}))[[run.source == h100 for run in left]]
    assert {row["source"]: row["left out"] for row in rows}[h100] == pytest.approx(abs(expected[0] - 1))


def test_one_source_cannot_be_left_out():
    _, rows = cross_validate_programs(of_program("DeepSpeed 2021"))
    assert [row["left out"] for row in rows] == [None, None]


def test_bad_input_is_one_line():
    for runs, programs in (([], 0), (RUNS, len({fitted_as(run) for run in RUNS}))):
        with pytest.raises(ValueError, match=f"^fit_program: runs of {programs} programs, but"):
            fit_program(runs)
