"""course_lib.five_d.layouts: words, places, and that what cannot work is refused with a way out. Plain Python, any
machine.
"""

import dataclasses
import itertools
import random
import re
from types import SimpleNamespace

import pytest
import torch

from course_lib.five_d import meshes
from course_lib.five_d.layouts import (
    NAMED_TOKENS,
    NUMERIC_TOKENS,
    Layout,
    check_layout,
    coordinates,
    groups_along,
    micro_batches,
    schedule_of,
)
from course_lib.pipeline.actions import validate
from course_lib.pipeline.schedules import num_stages
from course_lib.pipeline.stages import split_layers
from course_lib.single_gpu.model import ModelConfig

OF = ModelConfig(layers=6, hidden=48, heads=12, kv_heads=4, ffn_hidden=60, vocab=97)
EXPERTS = {"experts": 6, "top_k": 2}
AXES = ("dp", "pp", "cp", "tp")


# Words.


def any_layout(random: random.Random) -> Layout:
    """Fields drawn by chance, one by one: most layouts make no sense."""
    words = {
        field: [None, *(value for name, value in NAMED_TOKENS.values() if name == field)]
        for field, _ in NAMED_TOKENS.values()
    }
    drawn = {field: random.choice(values) for field, values in words.items()}
    drawn |= {name: random.choice([1, 1, 2, 2, 3, 4]) for name in ("dp", "pp", "cp", "tp", "ep", "micro_batch")}
    drawn |= {"zero_stage": random.randrange(4), "virtual": random.choice([1, 2, 2, 3])}
    drawn |= {"replicate": random.choice([1, 1, 1, 1, 2, 3])}
    return Layout(**{field: value for field, value in drawn.items() if value is not None})


def test_str_gives_the_words_back():
    assert str(Layout()) == "dp1" and Layout.parse("dp1") == Layout()
    assert str(Layout.parse("sp, zb-h1 ,tp4,zero1,pp2,dp2")) == "dp2,pp2,tp4,zero1,sp,zb-h1"
    for word, field in NUMERIC_TOKENS.items():
        assert getattr(Layout.parse(f"{word}7"), field) == 7 and str(Layout.parse(f"{word}7")) == f"{word}7"
    for word, (field, value) in NAMED_TOKENS.items():
        layout = Layout.parse(word)
        assert getattr(layout, field) == value
        assert str(layout) == (word if layout != Layout() else "dp1"), word
    by_chance = random.Random(0)
    for layout in (any_layout(by_chance) for _ in range(300)):
        assert Layout.parse(str(layout)) == layout


def test_every_field_has_a_word():
    assert {*NUMERIC_TOKENS.values(), *(field for field, _ in NAMED_TOKENS.values())} == {
        f.name for f in dataclasses.fields(Layout)
    }


@pytest.mark.parametrize("word", ["dp", "4", "xp2", "dp-1", "dp2.5", "DP2", "zb", "sp2", "1f1b2", "none", ""])
def test_a_word_that_is_none(word):
    with pytest.raises(ValueError, match="is not one of dpN, .*sp, keep") as error:
        Layout.parse(f"dp2,{word}")
    assert repr(word) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("first, second", [("dp2", "dp2"), ("1f1b", "zb-v"), ("ring", "ulysses"), ("sp", "sp")])
def test_a_field_that_is_named_twice(first, second):
    with pytest.raises(ValueError, match=f"'{second}' sets .* again"):
        Layout.parse(f"{first},pp2,{second}")


# Places.


SHAPES = [(1, 1, 1, 1), (2, 3, 1, 4), (2, 2, 2, 2), (1, 4, 2, 3), (5, 1, 3, 1)]


@pytest.mark.parametrize("shape", SHAPES)
def test_coordinates_and_groups_are_those_of_a_grid(shape):
    """A grid of all ranks, tp along its last dimension: its entries, and its lines along any set of axes."""
    layout, grid = Layout(*shape), torch.arange(torch.Size(shape).numel()).view(shape)
    for rank in range(layout.ranks):
        place = coordinates(rank, layout)
        assert list(place) == list(AXES) and grid[tuple(place.values())] == rank
    for count in range(5):
        for axes in itertools.combinations(AXES, count):
            dims = [AXES.index(axis) for axis in axes]
            others = [dim for dim in range(4) if dim not in dims]
            lines = grid.permute(*others, *dims).reshape(-1, torch.Size(shape[dim] for dim in dims).numel())
            for order in (axes, axes[::-1]):
                assert sorted(groups_along(layout, *order)) == sorted(lines.tolist()), order


def test_the_map_of_llama_3():
    """16 GPUs, tp 2, cp 2, pp 2, dp 2: neighbours share tensors, then contexts, stages, and data (Llama Team 2024,
    figure 5).
    """
    layout = Layout(2, 2, 2, 2)
    for axis, first in (("tp", [0, 1]), ("cp", [0, 2]), ("pp", [0, 4]), ("dp", [0, 8])):
        groups = groups_along(layout, axis)
        assert groups[0] == first and len(groups) == 8
        assert sorted(rank for group in groups for rank in group) == list(range(16))
    assert groups_along(layout, "dp", "cp")[0] == [0, 2, 8, 10]


# What is refused.


# words, other arguments of check_layout, what the message says
REFUSED = [
    ("dp2,tp2", {"world_size": 8}, "dp 2 x pp 1 x cp 1 x tp 2 = 4 ranks, and there are 8: make dp 4"),
    ("pp3", {"world_size": 8}, "pp 3 .*= 3 ranks, and there are 8: make pp x cp x tp, now 3, a divisor of 8"),
    ("tp0", {}, "tp is 0: make it 1 or more"),
    ("pp2,interleaved,v0", {}, "virtual is 0: make it 1 or more"),
    ("dp2,mb0", {}, "micro_batch is 0: make it 1 or more"),
    ("dp4,ep3", {"moe": EXPERTS}, "ep 3 does not divide dp 4.*change ep"),
    ("dp2,zero4", {}, "zero_stage 4: it is 0, 1, 2 or 3"),
    ("dp2,sp", {}, "tp is 1: raise tp, or leave out sp"),
    ("dp2,pp2,zero3", {}, "zero_stage 3 with pp 2 .*: make zero_stage 1, or keep"),
    ("dp2,pp2,zero1,keep", {}, "gather_once with zero_stage 1 and pp 2.*leave out keep"),
    ("dp2,zero3,keep", {}, "gather_once with zero_stage 3 and pp 1.*leave out keep"),
    ("dp2,pp2,zero3,keep,dualpipe", {}, "dualpipe .* make zero_stage 1"),
    ("dp2,zero3,rep0", {}, "replicate is 0: make it 1 or more"),
    ("dp2,zero1,rep2", {}, "replicate 2 .* zero_stage 3, and zero_stage is 1: make replicate 1, or zero_stage 3"),
    ("dp4,pp2,rep2", {}, "replicate 2 .* zero_stage 3, and zero_stage is 0: make replicate 1"),
    ("dp4,zero3,rep3", {}, "replicate 3 does not divide dp 4 .*change replicate"),
    ("dp2,cp2,zero3,rep4", {}, "replicate 4 does not divide dp 2 .*change replicate"),
    ("cp2,selective", {}, "selective .* cp 2 .* make recompute none or full"),
    ("tp5", {}, "tp 5 does not divide heads, which is 12.*change tp"),
    ("tp6", {}, "tp 6 and kv_heads, which is 4.*change tp"),
    ("pp9", {}, "pp 9, schedule 1f1b: 6 layers.*9 stages; change pp"),
    ("pp2,interleaved,v5", {}, "pp 2, schedule interleaved: 6 layers.*10 stages"),
    ("pp5,zb-v", {}, "pp 5, schedule zb-v: 6 layers.*10 stages; change pp"),
    ("pp3,dualpipe", {}, "pp 3, schedule dualpipe: .*even.*change pp"),
    ("cp8,ulysses", {}, "cp 8 with tp 1: ulysses: 8 ranks can't share 12 heads.*change cp"),
    ("cp2,tp4,ulysses", {}, "cp 2 with tp 4: ulysses: 2 ranks can't share 3 heads.*change cp"),
    ("dp2,ep2", {}, "ep 2, and the model has no experts: make ep 1"),
    ("dp4,ep4", {"moe": EXPERTS}, "ep 4 does not divide experts, which is 6: change ep"),
    ("tp4", {"moe": EXPERTS | {"ffn_hidden": 62}}, "tp 4 does not divide the experts' width 62: change tp"),
    ("dp2", {"moe": {"experts": 2, "top_k": 3}}, "top_k 3"),
    ("dp4,mb2", {"batch": 12}, "batch 12 is not a multiple of dp 4 x mb 2: make it 16"),
    ("dp4", {"batch": 0}, "batch 0 is not a multiple of dp 4 x mb 1: make it 4"),
    ("pp4,interleaved,v1", {"batch": 0}, "batch 0 .*: make it 1$"),
    ("pp4,interleaved", {"batch": 6}, "batch 6 makes 6 micro-batches per rank: interleaved: .*change batch or mb"),
    ("dp2,pp2,dualpipe", {"batch": 4}, "batch 4 makes 2 micro-batches per rank: dualpipe: .*change batch or mb"),
    ("dp2,pp2,dualpipe", {"batch": 10}, "batch 10 makes 5 micro-batches per rank: dualpipe: .*change batch or mb"),
    ("cp4", {"seq": 12}, "seq 12 is not a multiple of 8.*: make it 16"),
    ("cp4,contiguous", {"seq": 10}, "seq 10 is not a multiple of 4.*: make it 12"),
    ("cp3,tp4,sp", {"seq": 13}, "seq 13 is not a multiple of 12.*: make it 24"),
    ("tp4,sp", {"seq": 0}, "seq 0 is not a multiple of 4.*: make it 4"),
]


@pytest.mark.parametrize("text, arguments, message", REFUSED)
def test_what_does_not_fit_is_one_line_with_the_number_and_what_to_change(text, arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        check_layout(OF, Layout.parse(text), **arguments)
    assert "\n" not in str(error.value)


def test_dropout_is_refused_where_tensor_parallel_ranks_would_draw_their_own_masks():
    config = dataclasses.replace(OF, dropout=0.1)
    with pytest.raises(ValueError, match="^dropout 0.1: tp 2 ranks would draw different masks: make dropout 0$"):
        check_layout(config, Layout.parse("dp2,tp2,sp"))
    check_layout(config, Layout.parse("dp2,pp2,cp2"))


def followed(message: str, layout: Layout, sizes: dict) -> tuple[Layout, dict] | None:
    """The layout and sizes after what the message advises; None where it leaves the number open."""
    change = dataclasses.replace
    if number := re.search(r"^(batch|seq) .*: make it (\d+)$", message):
        return layout, sizes | {number[1]: int(number[2])}
    if number := re.search(r"make (dp|ep|zero_stage|replicate) (\d+)", message):
        return change(layout, **{number[1]: int(number[2])}), sizes
    if "leave out sp" in message:
        return change(layout, sequence_parallel=False), sizes
    if "leave out keep" in message:
        return change(layout, gather_once=False), sizes
    if "make recompute none" in message:
        return change(layout, recompute="none"), sizes
    return None


@pytest.mark.parametrize("text, arguments, message", REFUSED)
def test_advice_that_names_a_value_leads_to_what_is_accepted(text, arguments, message):
    layout, sizes = Layout.parse(text), arguments
    for _ in range(5):
        try:
            check_layout(OF, layout, **sizes)
            return
        except ValueError as error:
            advised = followed(str(error), layout, sizes)
        if advised is None:
            return
        assert advised != (layout, sizes), "the advice changes nothing"
        layout, sizes = advised
    pytest.fail("the advice leads nowhere")


@pytest.mark.parametrize("field", ["schedule", "recompute", "cp_method", "cp_order"])
def test_a_setting_that_is_none(field):
    with pytest.raises(ValueError, match=f"{field} 'other'.* one of "):
        check_layout(OF, dataclasses.replace(Layout(pp=2, cp=2), **{field: "other"}))


def test_what_is_not_given_is_not_looked_at():
    check_layout(OF, Layout.parse("dp4,pp2,interleaved,cp2,tp2,sp"))
    check_layout(OF, Layout.parse("dp4,pp2,interleaved,cp2,tp2,sp"), 32, 8, 16)
    check_layout(OF, Layout.parse("dp4,ep2,tp4,zero3"), 16, 4, 7, EXPERTS)


def test_what_is_accepted_can_be_carried_out():
    """Layouts by chance: the pieces of an accepted one come out even, whatever else is drawn."""
    by_chance, accepted, refused = random.Random(1), 0, 0
    for _ in range(4000):
        layout, moe = any_layout(by_chance), by_chance.choice([None, EXPERTS])
        batch, seq = by_chance.choice([4, 8, 12, 24]), by_chance.choice([16, 24, 48])
        try:
            check_layout(OF, layout, layout.ranks, batch, seq, moe)
        except ValueError as error:
            refused += 1
            assert "\n" not in str(error) and re.search(r"\d", str(error)), error
            continue
        accepted += 1
        m = micro_batches(layout, batch)
        assert m * layout.dp * layout.micro_batch == batch
        schedule = schedule_of(layout, m)
        validate(schedule, m)
        assert len(schedule) == layout.pp
        assert num_stages(schedule) == num_stages(schedule_of(layout, 2 * layout.pp))  # as parallelize cuts it
        split_layers(OF.layers, num_stages(schedule))
        chunks = layout.cp * (2 if layout.cp > 1 and layout.cp_order == "zigzag" else 1)
        assert seq % chunks == 0 and (not layout.sequence_parallel or seq // layout.cp % layout.tp == 0)
        assert layout.dp % layout.replicate == 0 and (layout.zero_stage == 3 or layout.replicate == 1)
        assert layout.dp % layout.ep == 0 and (moe is not None or layout.ep == 1)
    assert accepted > 100 and refused > 1000, (accepted, refused)


def test_the_groups_of_hsdp_are_two_splits_of_the_world(monkeypatch):
    """Not one for each of the world's 512 groups: of all shards together, and of all replicas."""
    splits = []
    monkeypatch.setattr(meshes, "new_disjoint_subgroups", lambda lists: splits.append(lists) or f"group {len(splits)}")
    layout = Layout(dp=128, pp=4, tp=2, zero_stage=3, replicate=16, gather_once=True)
    assert meshes.shard_groups(layout, SimpleNamespace(replicas="all")) == ("all", "group 1", "group 2")
    assert [(len(lists), {len(ranks) for ranks in lists}) for lists in splits] == [(128, {8}), (64, {16})]
    assert all(sorted(rank for ranks in lists for rank in ranks) == list(range(1024)) for lists in splits)
