"""course_kit.labs.fused_kernels: bytes of operations and kernels, what is kept, the faults of the lab's candidates."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

from course_kit.labs import fused_kernels as labs
from course_lib.kernels.fused_loss import linear_cross_entropy
from course_lib.single_gpu.model import PRESETS


@pytest.fixture(scope="module")
def operators():
    return labs.operators(rows=4, hidden=256)


def test_both_forms_of_an_operator_are_the_same(operators):
    for operator in operators.values():
        for theirs, ours in zip(*map(tree_leaves, (operator.eager(), operator.fused())), strict=True):
            torch.testing.assert_close(ours, theirs)


def test_kernels_move_less_and_keep_less(operators):
    for name, operator in operators.items():
        eager, fused = labs.bytes_moved(operator)
        assert sum(labs.operation_sizes(operator)) < eager and fused < 0.6 * eager, name
        eager, fused = labs.saved_elements(operator)
        assert fused <= eager, name
    assert labs.saved_elements(operators["SwiGLU"]) == (3, 2)


def test_softmax_moves_eight_n_forward(operators):
    assert sum(labs.operation_sizes(operators["softmax"])) == pytest.approx(8, abs=0.1)


def test_loss_bytes_of_llama():
    config = PRESETS["llama3-8B"]
    assert labs.eager_loss_bytes(config, 16384) == pytest.approx(29.4e9, rel=0.01)
    assert labs.chunked_loss_bytes(config, 16384) < labs.eager_loss_bytes(config, 16384) / 8


def test_peak_of_the_loss_counts_the_logits_inside_the_operator():
    hidden, weight, targets = torch.randn(64, 16), torch.randn(512, 16), torch.randint(0, 512, (64,))
    in_chunks, at_once = (
        labs.peak_of_loss(functools.partial(linear_cross_entropy, chunk_rows=rows), hidden, weight, targets)
        for rows in (8, 64)
    )
    assert in_chunks[0] < 64 * 512 * 4 / 2**20 < at_once[0]
    assert in_chunks[1:] == pytest.approx(at_once[1:])


@pytest.mark.parametrize(("hidden", "right"), [(64, "ABC"), (50, "B")])
def test_candidates_are_right_with_a_power_of_two(hidden, right):
    x, weight = torch.randn(3, hidden), torch.rand(hidden)
    exact = F.rms_norm(x, (hidden,), weight, 1e-5)
    found = {name: candidate for name, candidate in labs.candidates().items() if (name, hidden) != ("A", 50)}
    for name, candidate in found.items():  # A with 50 columns writes behind its tensor
        assert torch.allclose(candidate(x, weight), exact, rtol=1e-4, atol=1e-5) == (name in right), name
