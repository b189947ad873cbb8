"""course_lib.best_config.recipe: every step can be and is faster than the one before; its answer is near the best.
Plain numpy.
"""

import functools

import pytest

from course_lib.best_config.clusters import CLUSTERS
from course_lib.best_config.planner import RISK, estimate, search
from course_lib.best_config.recipe import candidates, changes, recipe
from course_lib.five_d.layouts import Layout, check_layout
from course_lib.single_gpu.memory import param_count
from course_lib.single_gpu.model import PRESETS

# model, cluster, GPUs, batch
JOBS = [
    ("llama3.2-1B", "H100", 1, 32),
    ("llama3.2-1B", "H100, EFA", 64, 256),
    ("llama3-8B", "H100", 8, 64),
    ("llama3-8B", "H100", 64, 256),
    ("llama3-8B", "A100", 16, 128),
    ("bench-8B", "H100, EFA", 128, 256),
    ("llama3-70B", "H100", 64, 256),
    ("llama3-70B", "H200", 512, 1024),
    ("llama3-70B", "B200", 128, 512),
    ("llama3-405B", "H100", 1024, 1024),
    ("llama3-405B", "H100", 4096, 2048),
]


@functools.cache
def steps_of(name: str, cluster: str, gpus: int, batch: int) -> list:
    """The recipe's steps, once for all tests."""
    return recipe(PRESETS[name], CLUSTERS[cluster], gpus, batch)


@pytest.mark.parametrize("name, cluster, gpus, batch", JOBS)
def test_every_step_can_be_and_is_faster_than_the_one_before(name, cluster, gpus, batch):
    config, of = PRESETS[name], CLUSTERS[cluster]
    steps = steps_of(name, cluster, gpus, batch)
    assert steps
    for before, step in zip([None, *steps], steps, strict=False):
        check_layout(config, step.layout, gpus, batch, 4096)
        found = estimate(config, of, step.layout, batch)
        assert found.risk <= RISK and (step.tokens_per_s, step.mfu) == pytest.approx((found.tokens_per_s, found.mfu))
        if before:
            assert step.tokens_per_s > before.tokens_per_s
            assert step.layout in changes(before.layout).values() and step.why, "one change at a time"


@pytest.mark.parametrize("name, cluster, gpus, batch", JOBS)
def test_its_answer_is_near_the_best_of_all(name, cluster, gpus, batch):
    """A third is what greed may cost; it cannot be better than all layouts together."""
    best = search(PRESETS[name], CLUSTERS[cluster], gpus, batch).best(1)[0][1]
    answer = steps_of(name, cluster, gpus, batch)[-1].tokens_per_s
    assert 0.67 * best <= answer <= best * (1 + 1e-9)


def test_the_last_step_cannot_be_improved_by_one_change():
    config, cluster = PRESETS["llama3-8B"], CLUSTERS["H100"]
    last = recipe(config, cluster, 64, 256)[-1]
    for why, layout in changes(last.layout).items():
        try:
            check_layout(config, layout, 64, 256, 4096)
        except ValueError:
            continue
        found = estimate(config, cluster, layout, 256)
        assert found.risk > RISK or found.tokens_per_s <= 1.001 * last.tokens_per_s, why


def test_a_change_is_one_change_of_the_same_ranks():
    layout = Layout.parse("dp4,pp2,cp2,tp4,sp,zero1,mb2")
    for why, changed in changes(layout).items():
        assert changed.ranks == layout.ranks, why
        assert changed.sequence_parallel == (changed.tp > 1)
        assert changed.gather_once == (changed.zero_stage == 3 and changed.pp > 1)
    assert len({*changes(layout).values()}) > 20
    assert all(one.schedule == "1f1b" for one in changes(Layout(dp=8)).values() if one.pp == 1)


def test_small_models_begin_with_data_parallelism_and_large_jobs_with_pipelines():
    first = {
        gpus: [str(layout) for _, layout in candidates(PRESETS[name], gpus, 8)]
        for name, gpus in (("llama3-8B", 64), ("llama3-70B", 128), ("llama3-405B", 2048))
    }
    assert first[64][:3] == ["dp1", "zero1", "zero3"]
    assert (first[128][0], first[2048][0]) == ("pp2,tp8,zero1,sp", "pp2,tp8,zero2,sp")
    assert param_count(PRESETS["llama3-8B"]) < 10e9 < param_count(PRESETS["llama3-70B"])
    assert str(recipe(PRESETS["llama3.2-1B"], CLUSTERS["H100"], 8, 64)[0].layout) == "dp8"


def test_nothing_fits():
    assert recipe(PRESETS["llama3-405B"], CLUSTERS["H100"], 8, 64) == []
    assert recipe(PRESETS["llama3-8B"], CLUSTERS["A100"], 1, 8) == []
    assert recipe(PRESETS["llama3-8B"], CLUSTERS["H100"], 7, 8) == [], "7 divides neither the batch nor anything else"


@pytest.mark.parametrize("gpus, batch, seq", [(0, 8, 4096), (8, 0, 4096), (8, 8, -1)])
def test_bad_numbers_are_one_line(gpus, batch, seq):
    with pytest.raises(ValueError, match=f"gpus {gpus}, batch {batch}, seq {seq}: each is 1 or more") as error:
        recipe(PRESETS["llama3-8B"], CLUSTERS["H100"], gpus, batch, seq)
    assert "\n" not in str(error.value)
