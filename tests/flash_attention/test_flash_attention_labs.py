"""What notebook 13 and its checks compare with, and its lab."""

import inspect
import textwrap

import pytest
import torch
import torch.nn.functional as F

from course_kit.checks.flash_attention.costs import count_tiles
from course_kit.exercises.install import Answer, install, installed, uninstall
from course_kit.labs import flash_attention as labs
from course_lib.flash_attention import forward, tiles


def test_the_exact_results_are_pytorchs_in_float64():
    q, gradient = (torch.randn(2, 9, 4, 8, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(2, 9, 2, 8, dtype=torch.float64) for _ in range(2))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    heads_first = [x.transpose(1, 2) for x in leaves]
    out = F.scaled_dot_product_attention(*heads_first, is_causal=True, scale=0.7, enable_gqa=True).transpose(1, 2)
    wanted = [out, *torch.autograd.grad(out, leaves, gradient)]
    for mine, theirs in zip(labs.exact_results(gradient, q, k, v, True, 0.7), wanted, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(
    "size", [(37, 37, 16, 8, True), (20, 45, 16, 8, False), (45, 20, 16, 8, True), (7, 3, 2, 4, 1)]
)
def test_tiles_counted_by_the_mask_are_those_of_the_library(size):
    found = tiles.tiles(*size)
    assert count_tiles(*size) == (len(found), sum(tile.kind == "partial" for tile in found))


def test_each_fault_of_the_lab_shows_where_the_text_says():
    errors = dict(zip(labs.LAB_ORDER, labs.lab_errors(), strict=True))
    wrong = {letter: rows > 1e-4 for letter, rows in errors.items()}  # out, out, dq, dq, dk, dv; 12 parts of 16 tokens
    by_row = {letter: rows.any(1).tolist() for letter, rows in wrong.items()}
    assert by_row["d"] == [False, False, True, True, True, False]
    assert by_row["g"] == [False, False, False, False, True, True]
    assert by_row["r"] == [True] * 5 + [False] and not wrong["r"][:2, :2].any() and wrong["r"][:2, 2:].any(0).all()
    assert wrong["m"][:2].tolist() == [[True, True, False, False] * 3] * 2


@pytest.fixture
def halved():
    """An answer to 13.6 that gives half of everything."""
    text = textwrap.dedent(inspect.getsource(forward.attend_tiles.fn))
    text = text.replace("return highest, total, weighted", "return highest, total, weighted * 0.5")
    install(Answer("13.6", (("#| export flash_attention.forward\n" + text, "<answer>"),)))
    yield
    uninstall("13.6")


def test_finished_kernels_call_the_reference_whatever_is_installed(halved):
    q, k, v = (torch.randn(1, 40, 1, 16, device=labs.device()) for _ in range(3))
    exact, _ = labs.exact_attention(q, k, v, True, 0.25)

    def run(kernel):
        out, lse = torch.empty_like(q), torch.empty(1, 1, 40, device=q.device)
        kernel[1, 1, 1](
            q, k, v, out, lse, None, 40, 40, 1, 0.25, *forward.strides_of(q, k, v),
            CAUSAL=True, **forward.head_sizes(16), BLOCK_Q=64, BLOCK_K=32,
        )  # fmt: skip
        return out

    assert labs.error(run(forward.flash_forward_kernel.fn), exact / 2) < 1e-5
    assert labs.error(run(labs.finished_kernels({"all": {}})["all"]), exact) < 1e-5
    assert [answer.exercise for answer in installed()] == ["13.6"], "and afterwards the answer is in place again"
