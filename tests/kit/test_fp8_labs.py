"""course_kit.labs.fp8: what notebook 14b measures. CPU."""

from __future__ import annotations

import copy

import pytest
import torch

from course_kit.labs import fp8 as labs
from course_kit.labs.fp8.training import SpikingSwiglu, jump
from course_lib.fp8.operands import Cast, Casts
from course_lib.fp8.quantization import ROW
from course_lib.fp8.recipes import RECIPES, per_tensor
from course_lib.mixed_precision.formats import E4M3
from course_lib.single_gpu.model import swiglu


def test_inside_the_range_the_scale_does_not_matter():
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    best = x.abs().max().item() / 448
    errors = [labs.error_at_scale(x, E4M3, best * factor) for factor in (1, 8, 2.0**30)]
    assert errors[0] == pytest.approx(0.026, rel=0.1) and errors[1] == pytest.approx(errors[0], rel=0.05)
    assert errors[2] > 0.99


def test_an_outlier_doubles_the_error_of_integers_and_leaves_e4m3_alone():
    few, many = labs.outlier_errors(labs.int8, [8, 16])
    assert many == pytest.approx(2 * few, rel=0.1)
    assert max(labs.outlier_errors(lambda x: labs.in_e4m3(x, ROW), [1, 64])) < 0.03


def test_a_short_accumulator_loses_more_the_longer_the_sum_and_promotion_fixes_it():
    a, b = (torch.rand(4, 1024, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    short, long = labs.short_sum_errors(a, b, [128, 1024], 14, None)
    assert long > 2 * short and labs.short_sum_errors(a, b, [1024], 14, 128)[0] < 0.5 * long


def test_a_second_moment_that_is_lost_makes_updates_that_are_huge():
    lost, usual = labs.stored_second_moment(lambda v: v)
    assert lost == 0 and usual < 0.01
    lost, largest = labs.stored_second_moment(torch.zeros_like)
    assert lost > 0.9 and largest > 1000 * usual


@pytest.mark.parametrize("name, kept", [("BF16, FP32 accumulation", [2, 4, 4, 8]), ("BF16", [2, 4, 0, 8])])
def test_bytes_in_memory_are_those_of_the_recipe(name, kept):
    assert labs.bytes_per_parameter(RECIPES[name]) == pytest.approx(kept, abs=0.01)


def test_a_jump_and_planted_outliers_change_nothing_in_float32():
    model, (inputs, _) = labs.trained_model()
    other = copy.deepcopy(model)
    jump(other, 64)
    assert torch.equal(other(inputs), model(inputs))
    losses = labs.losses_with_outliers(None, [1, 2.0**20])
    assert losses[0] == losses[1]


def test_delayed_scales_cut_a_jump_for_one_step():
    before, during, after = labs.losses_at_a_jump(per_tensor(history=16), 256)
    assert during > before + 0.1 and abs(after - before) < 0.05


def test_a_spike_is_one_token_and_one_channel():
    gate, up = torch.randn(2, 2, 5, 7, generator=torch.Generator().manual_seed(0)).unbind()
    spiking = SpikingSwiglu()
    assert torch.equal(spiking(gate, up), swiglu(gate, up))
    spiking.growth = 1000.0
    other = (spiking(gate, up) != swiglu(gate, up)).nonzero()
    assert len(other) == 1 and other[0, :2].tolist() == [0, 0]


def test_a_kept_weight_is_quantized_once():
    casts = Casts(Cast(), Cast(), Cast())
    (many, gradient), (few, same) = (labs.count_casts(casts, keep) for keep in (False, True))
    assert (many, few) == (4, 1) and torch.equal(gradient, same)


def test_each_fault_of_the_lab_shows_in_its_columns():
    found = labs.lab_errors()
    right, lost = found.pop("no fault")
    assert max(right) < 0.05 and lost < 0.05
    for fault, (errors, lost) in zip(labs.LAB_ORDER, found.values(), strict=True):
        worse = "".join(name for name, error, usual in zip("yxw", errors, right, strict=True) if error > 1.2 * usual)
        assert worse == {"s": "xw", "e": "yw", "o": "yx", "w": "w"}[fault], fault
        assert (lost > 0.5) == (fault == "s")


def test_gradients_of_a_small_model_need_a_scale():
    gradients = labs.small_gradients()
    assert gradients.isfinite().all() and (gradients != 0).all() and gradients.abs().max() < 1e-3
    assert gradients.to(torch.float8_e4m3fn).float().count_nonzero() == 0
    assert labs.in_e4m3(gradients[None], ROW).count_nonzero() > 0.5 * len(gradients)
