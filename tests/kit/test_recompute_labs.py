"""course_kit.labs.recompute: the measurements of notebook 02 that compute something. CPU."""

from __future__ import annotations

import contextlib
import os

import pytest
import torch

from course_kit.labs import recompute as labs
from course_kit.labs.single_gpu import text_tokens
from course_lib.recompute import by_hand, profiling
from course_lib.single_gpu.model import ModelConfig, Transformer

os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def test_a_layer_of_gpt3_costs_a_third_more_with_full_and_half_a_percent_with_selective():
    flops = labs.gpt3_flops()
    assert flops["full"] / flops["none"] == pytest.approx(4 / 3, abs=1e-4)
    assert flops["selective"] / flops["none"] == pytest.approx(1.0045, abs=1e-4)


def test_full_leaves_out_the_last_matmul_of_our_block():
    """Weights of a block: 2h² of Q and O, 2 h kv d of K and V, 3hf, of which hf are not replayed; and the head."""
    flops, layer, last = labs.small_flops(), 131_072 + 65_536 + 540_672, 180_224
    assert flops["full"] / flops["none"] == pytest.approx(1 + 6 * (layer - last) / (3 * (6 * layer + 65_536)))


def test_with_other_dice_the_loss_is_right_and_the_gradients_are_not():
    noisy = Transformer(ModelConfig(2, 64, 4, 2, 96, 256, dropout=0.1)).train()
    words = torch.randint(256, (2, 3, 33), generator=torch.Generator().manual_seed(0))
    results = [labs.gradients_of(noisy, *words)]
    for dice in (labs.other_random_numbers, contextlib.nullcontext):
        with labs.called_by(by_hand.recompute, noisy), dice():
            results.append(labs.gradients_of(noisy, *words))
    losses, found = zip(*results, strict=True)
    assert losses[0] == losses[1] == losses[2]
    assert labs.relative_difference(found[0].values(), found[1].values()) > 0.05
    assert labs.relative_difference(found[0].values(), found[2].values()) == 0


def test_the_mean_of_means_is_right_for_equal_counts_alone():
    errors = labs.weighting_errors([48, 12])
    assert max(errors["accumulate"]) < 1e-5 and errors["mean of means"][0] < 1e-5 < 0.1 < errors["mean of means"][1]


def test_micro_batches_keep_the_peak_of_one():
    tokens = text_tokens()
    assert labs.step_peak(tokens, 1, 4) == pytest.approx(labs.step_peak(tokens, 1, 2), rel=0.01)
    assert labs.step_peak(tokens, 4, 4) > 1.1 * labs.step_peak(tokens, 1, 4)


def test_a_bf16_sum_loses_what_an_fp32_sum_keeps():
    errors = labs.buffer_errors(text_tokens(), [2, 16])
    assert errors["BF16"][1] > errors["BF16"][0] > 1e-4 > 1e-7 > errors["FP32"][1]


def test_pytorchs_fp32_gradients_differ_from_ours_by_their_rounding_alone():
    rows = labs.grad_dtype_rows(text_tokens())
    assert all(rounded for _, _, rounded in rows) and {error > 0 for _, error, _ in rows} == {True, False}


def test_the_slow_loop_learns_what_the_repaired_one_learns_and_has_three_faults():
    slow, repaired = labs.slow_training(labs.fresh_model()), profiling.marked_training(labs.fresh_model(), labs.text())
    assert [slow().item() for _ in range(3)] == pytest.approx([repaired().item() for _ in range(3)], abs=1e-4)
    sick, well = (profiling.symptoms(profiling.profile_step(step, active=1)) for step in (slow, repaired))
    assert sick["host_reads"] == 20 and well["host_reads"] == 0
    assert sick["optimizer_ops"] > 1000 > 30 > well["optimizer_ops"] > 0
    assert sick["data_share"] > well["data_share"]


def test_all_checkpoints_give_the_same_bits_and_one_stops_early():
    rows = labs.against_checkpoint(repeats=0)
    assert all(row["equal"] for row in rows.values()) and len({row["saved_mib"] for row in rows.values()}) == 1
    assert rows["ours"]["gflop"] == rows["reentrant"]["gflop"] > rows["checkpoint"]["gflop"]
