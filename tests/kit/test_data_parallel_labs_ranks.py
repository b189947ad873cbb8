"""course_kit.labs.data_parallel, and what the checks of notebook 04 compare with. CPU, gloo."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from course_kit.checks.data_parallel import check_04_08
from course_kit.checks.data_parallel.comparing import TINY, bucket_count, one_process
from course_kit.labs import data_parallel as labs
from course_lib.data_parallel.buckets import make_buckets
from course_lib.recompute.modes import accumulate
from course_lib.single_gpu.memory import param_count
from course_lib.single_gpu.model import PRESETS, Transformer


def test_naive_averaging_sends_twice_the_gradients_but_an_nth(ranks):
    assert ranks(labs.sent_per_step, "debug") == [2 * 3 * 4 * param_count(PRESETS["debug"]) // 4] * 4


def test_a_parameter_gets_the_mean_if_any_rank_has_used_it(ranks):
    outcomes = ranks(labs.branches_trial)
    frozen = {told.pop("frozen, its values") for told, _ in outcomes}
    assert len(frozen) == 1, "all ranks start from one rank's values"
    for told, alone in outcomes:
        assert told == pytest.approx(alone, abs=2e-4)
        assert told["never.weight"] is None and told["frozen.weight"] is None
        assert told["left.weight"] and told["right.weight"]


def test_a_sum_in_float32_is_closer_and_takes_twice_the_bytes(ranks):
    (rough, few), (close, many) = (ranks(labs.bf16_error, dtype)[0] for dtype in (None, torch.float32))
    assert close < 0.8 * rough and many == 2 * few


def test_the_faulty_rank_leaves_the_others_one_step_later_and_no_average_shows_it(ranks):
    runs = labs.drift_runs(ranks)
    assert list(runs) == [fault[:2] for fault in labs.FAULTS]
    for (rank, step), told in runs.items():
        probes, averaged = (np.array([run[name] for run in told]) for name in ("probe", "averaged"))
        others = np.delete(probes, rank, axis=0)
        np.testing.assert_allclose(others, others[:1].repeat(3, axis=0), rtol=1e-6)
        apart = np.abs(probes[rank] / others[0] - 1) > 1e-4
        assert list(np.flatnonzero(apart))[:1] == [step + 1]
        np.testing.assert_allclose(averaged, averaged[:1].repeat(4, axis=0), rtol=1e-6)
    assert labs.drift_runs(ranks) is runs, "the same runs every time"


@pytest.mark.parametrize("limit", [0, 5_000, 20_000, 40_000, 10**9])
def test_the_number_of_buckets_is_that_of_the_library(limit):
    for model in (Transformer(TINY), Transformer(PRESETS["debug"])):
        assert bucket_count(model, limit) == len(make_buckets(model.parameters(), limit))


@pytest.mark.parametrize("lengths", [*check_04_08.OF_FOUR, *check_04_08.OF_THREE[1:]])
def test_the_mean_over_all_target_tokens_is_that_of_accumulate(lengths):
    model = Transformer(TINY)
    parts = [part for rank in range(len(lengths)) for part in check_04_08.uneven(lengths, rank)]
    mean = accumulate(model, parts)
    grads, expected = check_04_08.in_one_process(lengths, torch.float32)
    assert expected.item() == pytest.approx(mean.item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-4, atol=1e-6)


def test_one_process_takes_the_steps_that_are_asked_for():
    (first, weights), (second, later) = one_process(4), one_process(4, 2)
    for name in first:
        torch.testing.assert_close(later[name], weights[name] - 0.1 * second[name])
