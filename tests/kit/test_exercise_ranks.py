"""Answers on ranks: they run what the kernel's library runs, call by call."""

import pytest

from course_kit.exercises.install import Answer, install, installed, uninstall, without
from course_kit.ranks import RankError
from course_lib.kernels import rounding
from course_lib.single_gpu import model
from course_lib.tensor_parallel import regions

LOSS = "#| export single_gpu.model\n\ndef loss(logits, targets):\n    return {}\n"
FUNCTION = (
    "#| export tensor_parallel.regions\nclass CopyToGroup(OnceDifferentiable):\n    @staticmethod\n"
    "    def forward(ctx, x, group):\n        return x.view_as(x)\n\n    @staticmethod\n"
    "    def backward(ctx, gradient):\n"
    "        return {} * gradient, None\n"
)
WIDEN = "#| export kernels.rounding\n@triton.jit\ndef widen(x):\n    return 3 * x\n"


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    for answer in installed():
        uninstall(answer.exercise)


def put(exercise: str, source: str) -> None:
    install(Answer(exercise, ((source, f"<{exercise}>"),)))


def seen():
    """Return what a rank's library does."""
    import torch

    x = torch.ones(2, requires_grad=True)
    regions.CopyToGroup.apply(x, None).sum().backward()
    try:
        loss = model.loss(2, 3)
    except Exception:
        loss = "reference"
    return loss, x.grad.tolist(), "3 * x" in open_source(rounding.widen)


def open_source(kernel) -> str:
    import inspect

    return inspect.getsource(kernel.fn)


def test_ranks_run_what_the_kernels_library_runs(two):
    reference = ("reference", [2, 2], False)  # backward adds up over the two ranks
    assert two(seen) == [reference] * 2
    put("01.1", LOSS.format("logits + targets"))
    put("06.2", FUNCTION.format(5))
    put("12.1", WIDEN)
    assert two(seen) == [(5, [5, 5], True)] * 2
    put("01.1", LOSS.format("logits * targets"))
    with without("06.2"):
        assert two(seen) == [(6, [2, 2], True)] * 2
    assert two(seen) == [(6, [5, 5], True)] * 2
    for answer in installed():
        uninstall(answer.exercise)
    assert two(seen) == [reference] * 2


def test_an_error_on_a_rank_names_the_learners_line(two):
    put("01.1", LOSS.format("1 / 0"))
    with pytest.raises(RankError) as failed:
        two(lambda: model.loss(1, 2))
    assert "<01.1>, line 4: return 1 / 0" in str(failed.value)


def test_a_limit_of_time_never_lengthens_another(two):
    before = two.timeout_s
    with two.within(20):
        assert two.timeout_s == 20
        with two.within(60):
            assert two.timeout_s == 20
    assert two.timeout_s == before
