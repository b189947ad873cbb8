"""course_kit.labs.mixed_precision, and what the checks of notebook 14 compare with."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from course_kit.checks.mixed_precision.numbers import E3M2, numbers
from course_kit.labs import mixed_precision as labs
from course_lib.mixed_precision.formats import FORMATS, decode


@pytest.fixture(scope="module")
def batches():
    return labs.batches_of_text()


@pytest.mark.parametrize("fmt", [*FORMATS.values(), E3M2], ids=lambda fmt: fmt.name)
def test_the_formula_gives_the_numbers_of_the_library(fmt):
    codes = torch.arange(2**fmt.bits) if fmt.bits < 20 else torch.arange(0, 2**fmt.bits, 40_009)
    found, expected = numbers(codes, fmt), decode(codes, fmt)
    same = (found == expected) & (found.signbit() == expected.signbit()) | found.isnan() & expected.isnan()
    assert same.all()


def test_most_gradients_of_a_large_batch_are_zero_in_eight_bits():
    gradients = labs.micro_batch_gradients()
    zero = [(gradients.to(dtype).float() == 0).float().mean() for dtype in (torch.float16, torch.float8_e4m3fn)]
    assert 0.05 < zero[0] < 0.15 and zero[1] == 1


def test_all_of_adam_in_half_precision_ends_after_a_step(batches):
    losses = labs.plain_curve(torch.float16, batches, fused=False)
    assert len(losses) == 2 and math.isnan(losses[1])
    shares = labs.half_step(batches[0])
    assert shares["v is 0"] > shares["v is 0, m is not"] > 0.7
    assert shares["weight is inf or NaN"] == pytest.approx(shares["v is 0"], abs=0.01)


def test_small_steps_leave_most_bfloat16_weights_where_they_are(batches):
    unmoved = labs.unmoved_by_rate(batches, [3e-3, 1e-5])
    assert unmoved[3e-3][0] < 0.3 and unmoved[1e-5][0] > 0.9
    assert all(wide >= fine for wide, fine in unmoved.values()), "BF16 has the shorter mantissa"


def test_a_larger_batch_underflows_more(batches):
    shares = labs.underflow_by_batch(batches, [2**7, 2**20])
    assert shares[2**7][0] < 0.1 < 0.5 < shares[2**20][0] and sum(shares[2**20]) <= 1 + 1e-6


def test_norms_in_half_precision_make_the_scale_useless(batches):
    (good, kept), (bad, shrunk) = (labs.sums_curve(half, batches[:12]) for half in (False, True))
    assert kept == 2.0**12 and shrunk <= 2.0**2 and good[-1] < bad[-1]


def test_a_naive_norm_is_that_of_pytorch_in_float32():
    norm, x = nn.RMSNorm(8, eps=1e-5), torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(labs.HalfNorm(norm)(x), norm(x))


def test_a_sum_in_turn_stops_where_one_is_half_a_unit():
    assert labs.sum_in_turn(torch.ones(300, dtype=torch.bfloat16)) == 256
    assert labs.sum_in_turn(torch.ones(300)) == 300


def test_means_of_a_curve_begin_with_its_first_value():
    assert labs.smoothed([1.0, 3.0, 5.0, 7.0], width=2) == [1.0, 2.0, 4.0, 6.0]


def test_ours_and_torch_amp_have_the_same_losses(batches):
    curves, taken = labs.against_amp(batches[:8])
    assert curves["ours"] == curves["torch.amp"] and len(curves["ours"]) == 8 and min(taken.values()) > 0
