"""course_lib.best_config.layouts and layout_tables: the rules refuse what notebook 10's check_layout does, one by one,
and the table has every layout once. Plain numpy, any machine.
"""

import dataclasses
import itertools

import numpy as np
import pytest

from course_lib.best_config import planner
from course_lib.best_config.clusters import CLUSTERS
from course_lib.best_config.layouts import SCHEDULES, degree_rules, degrees, first_reason, setting_rules, with_settings
from course_lib.best_config.tables import FIELDS, LayoutTable
from course_lib.five_d.layouts import Layout, check_layout
from course_lib.single_gpu.model import PRESETS, ModelConfig

ODD = ModelConfig(layers=6, hidden=48, heads=12, kv_heads=4, ffn_hidden=60, vocab=97)
TIED = dataclasses.replace(ODD, tied=True)
FEW_WORDS = ModelConfig(layers=9, hidden=64, heads=16, kv_heads=2, ffn_hidden=64, vocab=9)
EXPERTS = {"experts": 6, "top_k": 2}
SETTINGS = {
    "micro_batch": (1, 2, 3, 4), "ep": (1,), "sequence_parallel": (False, True),
    "schedule": ("1f1b", "naive", "afab", *SCHEDULES[1:]), "virtual": (2, 3), "zero_stage": (0, 1, 2, 3),
    "replicate": (1, 2, 3), "recompute": ("none", "selective", "full"),
}  # fmt: skip
# config, GPUs, batch, seq, moe
CASES = {
    "odd": (ODD, 12, 24, 24, None),
    "tied": (TIED, 12, 24, 48, None),
    "few words": (FEW_WORDS, 16, 16, 32, None),
    "many GPUs": (ODD, 48, 48, 96, None),
    "experts": (ODD, 12, 24, 24, EXPERTS),
    "wide tp, narrow experts": (ODD, 12, 24, 24, EXPERTS | {"ffn_hidden": 62}),
    "no experts, but ep": (ODD, 4, 8, 16, None),
    "odd sequences": (ODD, 16, 12, 20, None),
    "8B": (PRESETS["llama3-8B"], 16, 32, 4096, None),
    "SmolLM": (PRESETS["SmolLM-135M"], 18, 36, 72, None),
}


def table_of(gpus: int, batch: int, settings: dict[str, tuple]) -> LayoutTable:
    """All degrees with all settings, those that the degrees' rules refuse as well."""
    return with_settings(degrees(gpus), batch, settings)


def refused(config, table, batch, seq, moe) -> tuple[np.ndarray, list[str]]:
    """The number of each layout's first reason, and the reasons; 0 is none."""
    reasons = ["none"]
    rules = degree_rules(config, table, batch, seq) | setting_rules(config, table, batch, seq, moe)
    return first_reason(rules, reasons), reasons


def disagreements(config, table, batch, seq, moe) -> list[tuple]:
    """(layout, the rule that refuses it or "none", what check_layout says) where one accepts and the other does not."""
    numbers, reasons = refused(config, table, batch, seq, moe)
    found = []
    for row, number in enumerate(numbers.tolist()):
        layout, message = table[row], None
        try:
            check_layout(config, layout, layout.ranks, batch, seq, moe)
        except ValueError as error:
            message = str(error)
        if (number == 0) != (message is None):
            found.append((str(layout), reasons[number], message))
    return found


@pytest.mark.parametrize("case", CASES)
def test_the_rules_are_those_of_check_layout(case):
    """Every layout of the degrees, with a good set of settings: accepted by both, or refused by both."""
    config, gpus, batch, seq, moe = CASES[case]
    settings = SETTINGS | {"ep": (1, 2, 3, 4)} if moe or case.startswith("no experts") else SETTINGS
    table = table_of(gpus, batch, settings)
    table = table.where(np.random.default_rng(0).permutation(len(table))[:1000])
    assert disagreements(config, table, batch, seq, moe) == []
    numbers, _ = refused(config, table, batch, seq, moe)
    assert 20 < np.count_nonzero(numbers == 0) < len(table) - 20, "both kinds are there"


def test_every_rule_refuses_something():
    seen = set()
    for config, gpus, batch, seq, moe in CASES.values():
        settings = SETTINGS | {"ep": (1, 2, 4)} if moe else SETTINGS
        numbers, reasons = refused(config, table_of(gpus, batch, settings), batch, seq, moe)
        seen |= {reasons[number] for number in np.unique(numbers)}
        every = set(reasons)
    assert seen == every


def test_tp_divides_the_experts_width():
    moe = EXPERTS | {"ffn_hidden": 62}
    assert disagreements(ODD, table_of(8, 8, SETTINGS), 8, 16, moe) == []


def test_interleaved_with_one_stage_a_rank():
    table = table_of(4, 12, SETTINGS | {"schedule": ("interleaved",), "virtual": (1,)})
    assert disagreements(ODD, table, 12, 16, None) == []


# The table.


@pytest.mark.parametrize("gpus", [1, 2, 7, 12, 16, 60])
def test_degrees_are_every_product(gpus):
    table = degrees(gpus)
    found = {(row.dp, row.pp, row.cp, row.tp) for row in (table[i] for i in range(len(table)))}
    numbers = range(1, gpus + 1)
    dividing = [n for n in numbers if gpus % n == 0]
    assert len(found) == len(table)
    assert found == {each for each in itertools.product(dividing, repeat=4) if np.prod(each) == gpus}


def test_16384_gpus_have_every_degree_and_no_layout_twice():
    """2^14 is shared out over four degrees in C(17, 3) ways."""
    assert len(degrees(16384)) == 680
    table = table_of(16384, 2**15, SETTINGS | {"micro_batch": (1, 8), "schedule": SCHEDULES})
    assert (table.ranks == 16384).all() and (table.dp * table.pp * table.cp * table.tp == 16384).all()
    columns = [np.unique(getattr(table, name), return_inverse=True)[1] for name in FIELDS]
    assert len(np.unique(np.stack(columns), axis=1).T) == len(table) > 100_000


@pytest.mark.parametrize("gpus, batch", [(1, 4), (4, 6), (8, 8)])
def test_the_table_is_what_a_literal_enumeration_gives(gpus, batch):
    """One loop inside the other, each layout checked by itself; what makes no difference is left at its default."""
    expected, numbers = set(), range(1, gpus + 1)
    for dp, pp, cp, tp in itertools.product(numbers, repeat=4):
        if dp * pp * cp * tp != gpus:
            continue
        for values in itertools.product(*SETTINGS.values()):
            chosen = dict(zip(SETTINGS, values, strict=True))
            if tp == 1:
                chosen["sequence_parallel"] = False
            if pp == 1:
                chosen["schedule"] = "1f1b"
            if chosen["schedule"] != "interleaved":
                chosen["virtual"] = 2
            if dp * cp == 1:
                chosen["zero_stage"] = 0
            if chosen["zero_stage"] != 3:
                chosen["replicate"] = 1
            keep = chosen["zero_stage"] == 3 and pp > 1
            expected.add(Layout(dp=dp, pp=pp, cp=cp, tp=tp, gather_once=keep, **chosen))
    able = set()
    for layout in expected:
        try:
            check_layout(TIED, layout, gpus, batch, 48)
            able.add(layout)
        except ValueError:
            continue
    table = table_of(gpus, batch, SETTINGS)
    table = table.where(refused(TIED, table, batch, 48, None)[0] == 0)
    found = [table[row] for row in range(len(table))]
    assert len(found) == len(set(found)) and set(found) == able


@pytest.mark.parametrize("name, value", [("sequence_parallel", True), ("zero_stage", 1), ("schedule", "zb-h1")])
def test_a_setting_with_one_value_leaves_those_it_does_not_matter_to(name, value):
    """On 8 GPUs, tp8 has no use for ZeRO, dp8 none for sequence parallelism or a schedule: they are still there."""
    table = table_of(8, 8, SETTINGS | {name: (value,)})
    assert {(row.dp, row.tp) for row in map(table.__getitem__, range(len(table)))} >= {(8, 1), (1, 8)}


def test_replicas_are_tried_with_zero_3_alone():
    """With one number of them as well: rows of other stages, and of fewer dp places, have none."""
    for values, expected in (((1, 2, 4), {(3, 1), (3, 2), (3, 4)}), ((4,), {(3, 4)})):
        table = table_of(8, 8, SETTINGS | {"zero_stage": (0, 3), "replicate": values})
        rows = [table[i] for i in range(len(table))]
        assert {(row.zero_stage, row.replicate) for row in rows} == {(0, 1)} | expected
        assert all(row.replicate <= row.dp for row in rows)


def test_the_first_rule_that_holds_is_the_reason():
    reasons = ["none"]
    rules = {"a": np.array([False, True, True, False]), "b": np.array([False, False, True, True])}
    assert [reasons[n] for n in first_reason(rules, reasons)] == ["none", "a", "a", "b"]
    again = first_reason({"b": np.array([True]), "c": np.array([True])}, reasons)
    assert reasons[again[0]] == "b" and sorted(reasons) == ["a", "b", "c", "none"], "reasons are not named twice"


def test_a_table_gives_its_layouts_back():
    layouts = [Layout(), Layout.parse("dp2,pp2,cp2,tp4,ep2,zero3,sp,mb3,zb-h1,v3,full,ulysses,contiguous,keep,rep2")]
    table = LayoutTable.of(layouts)
    assert [table[0], table[1]] == layouts and len(table) == 2 and table.ranks.tolist() == [1, 32]
    assert all(isinstance(getattr(table[1], name), type(getattr(layouts[1], name))) for name in FIELDS)
    assert table.where(np.array([False, True]))[0] == layouts[1] == table.where(np.array([1]))[0]
    assert len(LayoutTable.of([])) == 0


def test_an_estimate_in_chunks_is_the_estimate_of_the_table(monkeypatch):
    config, cluster, moe = PRESETS["llama3-8B"], CLUSTERS["H100"], {"experts": 8, "top_k": 2}
    full = planner.search(config, cluster, 16, 32, 4096, moe)
    monkeypatch.setattr(planner, "CHUNK", 1000)
    cut = planner.search(config, cluster, 16, 32, 4096, moe)
    assert len(full.table) > 3000 and cut.order.tolist() == full.order.tolist() and cut.rejected == full.rejected
    for parts, same in ((cut.estimate.time, full.estimate.time), (cut.estimate.memory, full.estimate.memory)):
        assert parts.keys() == same.keys()
        assert all(np.allclose(parts[name], np.broadcast_to(same[name], len(full.table)), rtol=1e-12) for name in parts)
    assert len(planner.search(config, cluster, 16, 32, 4096, moe, {"zero_stage": (2,), "micro_batch": (3,)}).table) == 0
