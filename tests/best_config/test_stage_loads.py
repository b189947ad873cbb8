"""course_lib.best_config.stage_loads: closed forms against notebook 09's simulator, cuts against a replay. No ranks."""

from fractions import Fraction

import numpy as np
import pytest

from course_lib.best_config.stage_loads import (
    bubble_share,
    fills_stages,
    in_flight,
    is_schedule,
    rank_layers,
    stage_layers,
)
from course_lib.best_config.step_memory import head_in_layers
from course_lib.best_config.tables import LayoutTable
from course_lib.five_d.layouts import Layout
from course_lib.pipeline.actions import validate
from course_lib.pipeline.schedules import schedule_by_name
from course_lib.pipeline.simulation import simulate
from course_lib.pipeline.stages import split_layers
from course_lib.single_gpu.model import PRESETS, ModelConfig

PLAIN = ("naive", "afab", "1f1b", "zb-h1", "zb-h2", "zb-v", "dualpipe")
SIZES = [(p, m) for p in (2, 3, 4, 6, 8) for m in (1, 2, 3, 4, 5, 7, 8, 11, 12, 15, 16, 24)]


def cases():
    """(layout, m, schedule, time of an action) of everything that notebook 09 defines for these sizes."""
    for name, v in [(name, 2) for name in PLAIN] + [("interleaved", v) for v in (1, 2, 3, 4)]:
        unit = {"interleaved": Fraction(1, v), "zb-v": Fraction(1, 2)}.get(name, Fraction(1))
        for p, m in SIZES:
            try:
                schedule = schedule_by_name(name, p, m, v)
            except ValueError:
                continue
            yield Layout(pp=p, schedule=name, virtual=v), m, schedule, unit


CASES = list(cases())


def test_all_schedules_are_among_the_cases():
    assert {layout.schedule for layout, *_ in CASES} == {*PLAIN, "interleaved"} and len(CASES) > 400


def test_the_bubble_is_what_the_simulator_plays():
    """From the first rank's start to the last one's end, above the work of a rank; any number of micro-batches."""
    for layout, m, schedule, unit in CASES:
        played = simulate(schedule, unit, unit, unit)
        bubble = float(played.makespan - max(played.busy)) / (3 * (layout.pp - 1))
        few = layout.schedule == "zb-v" and layout.pp > 6 and m < 2 * layout.pp - 1
        half_an_action = 0.5 / (3 * (layout.pp - 1))  # that the closed form of ZB-V leaves out with few micro-batches
        tolerance = half_an_action + 1e-12 if few else 1e-12
        assert float(bubble_share(layout, m)) == pytest.approx(bubble, rel=0, abs=tolerance), (str(layout), m)


def test_a_ranks_own_span_is_shorter_with_zero_bubble():
    """What Qi et al. 2023 count: nothing for ZB-H2 and ZB-V with enough micro-batches. A step ends later."""
    for layout, m, schedule, unit in CASES:
        if layout.schedule in ("zb-h2", "zb-v") and m >= 2 * layout.pp - 1:
            assert simulate(schedule, unit, unit, unit).bubble == 0 < bubble_share(layout, m)


def test_the_first_rank_holds_what_validate_counts():
    for layout, m, schedule, unit in CASES:
        if (layout.schedule, layout.virtual) != ("interleaved", 1):
            assert float(in_flight(layout, m)) == pytest.approx(float(max(validate(schedule)) * unit)), (layout, m)


def test_interleaved_with_one_stage_a_rank_is_1f1b():
    for layout, m, schedule, _ in CASES:
        if (layout.schedule, layout.virtual) == ("interleaved", 1):
            assert in_flight(layout, m) == max(validate(schedule)), (layout, m)


def test_arrays_are_row_by_row_the_same():
    table = LayoutTable.of(layout for layout, *_ in CASES)
    m = np.array([m for _, m, *_ in CASES])
    for formula in (bubble_share, in_flight):
        assert formula(table, m).tolist() == [float(formula(layout, m)) for layout, m, *_ in CASES]


def test_a_pipeline_of_one_has_no_schedule():
    for name in (*PLAIN, "interleaved"):
        one = Layout(schedule=name)
        assert not is_schedule(one, name) and is_schedule(Layout(pp=2, schedule=name), "other", name)
        assert in_flight(one, 8) == 1


# Where the layers go.


def of_layers(layers: int) -> ModelConfig:
    """A model with so many layers."""
    return ModelConfig(layers, 64, 4, 4, 128, 256)


def test_even_stages_are_those_of_notebook_09():
    for layers in range(1, 45):
        for pp in range(1, layers + 3):
            cut = [len(stage) for stage in split_layers(layers, pp)]
            found = stage_layers(of_layers(layers), pp, "ends", 0.0)
            assert found == {"first": cut[0], "second": max(cut[1:-1], default=0), "last": cut[-1]}, (layers, pp)
            assert fills_stages(of_layers(layers), pp, "ends", 0.0)
        assert not fills_stages(of_layers(layers), layers + 3, "ends", 0.0)


@pytest.mark.parametrize("schedule, v", [("zb-v", 2), ("interleaved", 2), ("interleaved", 4), ("interleaved", 8)])
def test_ranks_with_several_stages_have_the_layers_of_notebook_09(schedule, v):
    for layers in (6, 7, 16, 22, 28, 32, 36, 61, 80, 126):
        for pp in range(2, (layers + 2) // v + 1):
            cut = [len(stage) for stage in split_layers(layers, pp * v)]
            ranks = [sum(cut[rank::pp]) for rank in range(pp)]
            if schedule == "zb-v":
                ranks = [cut[rank] + cut[-1 - rank] for rank in range(pp)]
            found = rank_layers(of_layers(layers), Layout(pp=pp, schedule=schedule, virtual=v), "ends", 0.0)
            expected = {"first": ranks[0], "second": max(ranks[1:-1], default=0), "last": ranks[-1]}
            assert found == expected, (layers, pp)


def replay(layers: int, pp: int, head: Fraction) -> list[list[str]]:
    """nanotron's rule, block by block: the current stage ends as soon as all blocks so far cost its share or more."""
    blocks = [("layer", 1)] * layers + [("norm", 0), ("head", head), ("cast", 0), ("loss", 0)]
    total = sum(cost for _, cost in blocks)
    stages, so_far = [[]], 0
    for name, cost in blocks:
        if stages[-1] and len(stages) < pp and so_far * pp >= len(stages) * total:
            stages.append([])
        stages[-1].append(name)
        so_far += cost
    return stages


HEADS = [Fraction(1, 3), Fraction(1, 2), Fraction(1), Fraction(33, 20), Fraction(2), Fraction(4), Fraction(13, 2)]


def test_stages_of_equal_flops_are_those_of_the_replay():
    filled = 0
    for layers, head in ((layers, head) for layers in range(8, 50, 3) for head in HEADS):
        for pp in range(1, layers + 5):
            stages, config = replay(layers, pp, head), of_layers(layers)
            full = len(stages) == pp
            assert fills_stages(config, pp, "flops", float(head)) == full, (layers, pp, head)
            if not full:
                continue
            filled += 1
            cut = [stage.count("layer") for stage in stages]
            found = stage_layers(config, pp, "flops", float(head))
            assert (found["first"], found["last"]) == (cut[0], cut[-1]), (layers, pp, head)
            assert max(cut[1:-1], default=0) <= found["second"] <= cut[0] * (pp > 2), "no fuller than the first"
    assert filled > 1000


@pytest.mark.parametrize("name", ["bench-1B", "bench-3B", "bench-8B", "bench-80B", "llama3-70B"])
def test_the_runs_models_fill_their_pipelines_where_the_replay_does(name):
    config = PRESETS[name]
    head = Fraction(config.vocab * config.hidden, 4 * config.hidden**2 + 3 * config.hidden * config.ffn_hidden)
    assert head_in_layers(config) == pytest.approx(float(head))
    degrees = np.arange(1, config.layers + 5)
    full = [len(replay(config.layers, pp, head)) == pp for pp in degrees.tolist()]
    assert fills_stages(config, degrees, "flops", float(head)).tolist() == full
    assert True in full


def test_more_stages_than_blocks_are_never_filled():
    for layers, head in ((layers, head) for layers in (8, 16, 32) for head in HEADS):
        assert not fills_stages(of_layers(layers), layers + 5, "flops", float(head)), (layers, head)


def test_no_stage_has_more_layers_than_the_model():
    assert [stage.count("layer") for stage in replay(2, 2, Fraction(4))] == [2, 0]
    assert stage_layers(of_layers(2), 2, "flops", 4.0)["first"] == 2
