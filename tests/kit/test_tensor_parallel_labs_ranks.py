"""course_kit.labs.tensor_parallel: evidence of the lab's faults, the slow link, steps of a profile. CPU, gloo."""

import contextlib
import math
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from course_kit.labs.tensor_parallel import dropout, faults, rivals, step, timeline
from course_kit.labs.tensor_parallel.models import MHA, TINY, in_groups, on_first, process_trial, relative_error
from course_lib.recompute.profiling import Span

SMALL = {"batch": 2, "seq": 16, "config": TINY}


def with_loss_of_one(function, *args):
    return function(*args), process_trial(TINY, 1).losses[0]


@pytest.mark.parametrize("block", [0, 1])
def test_each_fault_leaves_its_own_evidence(ranks, block):
    """The row layer spoils the first loss, a missing f the norm in front of it, copies out of sync their K and V."""
    attention = f"blocks.{block}.attention"
    diverged = {"f": [f"{attention}_norm.weight"], "copies": [f"{attention}.{name}_proj.weight" for name in "kv"]}
    for fault in faults.FAULTS:
        run, one = ranks(with_loss_of_one, faults.lab_trial, fault, block, 1, TINY)[0]
        assert run["differing"] == diverged.get(fault, [])
        assert math.isclose(run["losses"][0], one, rel_tol=1e-5) == (fault != "row layer")


def test_the_runs_that_are_shown_have_each_fault_once():
    assert sorted(faults.RUNS) == sorted(faults.FAULTS)


def test_dropout_by_region_keeps_the_same_outside_and_its_own_inside(ranks):
    for how, alike in {"one seed": (True, True), "own seed": (False, False), "by region": (False, True)}.items():
        first, *others = ranks(dropout.dropout_masks, how)
        for other in others:
            assert tuple(torch.equal(*pair) for pair in zip(first, other, strict=True)) == alike


def test_a_seed_per_rank_lets_norms_diverge(ranks):
    names = {how: ranks(dropout.trained_with_dropout, how)[0][1] for how in ("own seed", "one seed", "by region")}
    assert names["one seed"] == names["by region"] == []
    assert names["own seed"] and all("norm" in name for name in names["own seed"])


def test_a_relative_error_is_infinite_for_what_cannot_be_compared():
    expected = torch.tensor([4.0, -8.0])
    assert relative_error(torch.tensor([4.0, -6.0]), expected) == 0.25
    for got in (None, torch.zeros(3), torch.tensor([math.nan, 0.0])):
        assert relative_error(got, expected) == math.inf


def test_the_link_takes_one_message_at_a_time(monkeypatch):
    """4 kB take 4 ms each: the second waits for the first, the third waits for none; a wait sleeps for the rest."""
    clock, marks = SimpleNamespace(now=10.0), []

    def sleep(seconds):
        clock.now += seconds

    def mark(name):
        marks.append(name)
        return contextlib.nullcontext()

    monkeypatch.setattr(timeline, "time", SimpleNamespace(perf_counter=lambda: clock.now, sleep=sleep))
    monkeypatch.setattr(timeline, "record_function", mark)
    started = []
    slow = timeline.over_a_link(lambda *args, **options: started.append((args, options)) or mock.Mock(), gb_s=1e-3)
    tensor = torch.ones(1000)
    first, second = (slow(tensor, group="tp", async_op=True) for _ in range(2))
    first.wait()
    assert clock.now == pytest.approx(10.004)
    second.wait()
    assert clock.now == pytest.approx(10.008)
    assert slow(tensor, group="tp") is None and clock.now == pytest.approx(10.012)
    times = [tuple(map(float, name.split()[1:])) for name in marks if name.startswith("link")]
    assert times == [pytest.approx(pair, abs=1e-6) for pair in ((0, 4), (4, 4), (0, 4))]
    assert marks.count("wait") == 3
    assert started == [((tensor,), {"async_op": True, "group": "tp"})] * 3


def test_steps_of_a_profile_begin_at_zero_the_shortest_first():
    found = []
    for start, length in ((10.0, 8.0), (30.0, 4.0)):  # two steps, of 16 and 8 ms
        found += [
            Span("phases", "forward", start, start + length),
            Span("phases", "link 1.0 2.0", start + 1, start + 1.1),
            Span("phases", "wait", start + 2, start + 4),
            Span("phases", "backward", start + length, start + 2 * length),
        ]
    short, long = timeline.steps_of(found)
    assert [max(span.end_ms for span in each) for each in (short, long)] == [8.0, 16.0]
    assert [span for span in short if span.name == "sum"] == [Span("network", "sum", 2.0, 4.0)]
    assert {span.lane for span in short if span.name != "sum"} == {"compute"}
    told = [timeline.waiting_ms(each, "forward") for each in (short, long)]
    assert [waits / whole for waits, whole in told] == [0.5, 0.25]
    assert timeline.waiting_ms(short, "backward")[0] == 0


def test_a_profiled_step_has_the_sums_that_its_kind_sends(ranks):
    """Two layers: 2 per layer in forward and 2 in backward, one at each end of the model, 2 in the loss."""
    kinds = "apart", "together", 2
    counts = {kind: ranks(on_first, 2, timeline.profiled, kind, *SMALL.values()) for kind in kinds}
    assert all(others == [None] * 3 for _, *others in counts.values())
    sums = {}
    for kind, (found, *_) in counts.items():
        steps = list(timeline.steps_of(found))
        assert len(steps) == 6
        (sums[kind],) = {sum(span.name == "sum" for span in each) for each in steps}
    assert sums == {"apart": 12, "together": 12, 2: 16}


def test_what_is_sent_and_kept(ranks):
    """2 layers on 4 ranks: 10 all-reduces of [2, 64, 48] in float32. Of the weights a rank keeps its part."""
    assert ranks(in_groups, 4, step.sent_per_step, MHA, 2, 64) == [10 * 2 * 3 * 2 * 64 * 48] * 4
    kept = {tp: ranks(on_first, tp, step.saved_by_rank, MHA, 2, 16)[0] for tp in (1, 2)}
    assert 1 / 2 < kept[2][0] / kept[1][0] < 0.54 and 1 / 2 < kept[2][1] / kept[1][1] < 0.9


def test_both_ways_to_split_give_the_same(ranks):
    told, *_ = ranks(on_first, 2, rivals.compare, TINY, 2, 16, 1)
    assert told.losses["ours"] == pytest.approx(told.losses["DTensor"], rel=1e-5) and told.gradient_error < 1e-4
    assert told.calls["DTensor"] == told.calls["DTensor again"] == told.calls["ours"] + 1
    assert all(len(seconds) == 1 for seconds in told.times.values()) and min(told.peaks.values()) > 0
