"""course_kit.checks.advice: an error in an interpreted kernel is its message and its lines. Interpreter, no GPU."""

import pytest
import torch

import course_lib  # noqa: F401  where there is no GPU, kernels are interpreted
from course_kit.checks import CheckFailed
from course_kit.checks.advice import advice, shorten_kernel_errors

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's compiler has its own messages")


@triton.jit
def loaded(pointer):
    return tl.load(pointer, otter=0.0)


@triton.jit
def kernel(pointer):
    loaded(pointer)


def launch() -> None:
    kernel[(1,)](torch.zeros(4))


@interpreted
def test_a_check_names_the_first_error_and_its_line():
    with pytest.raises(CheckFailed) as failed, advice("12.4"):
        launch()
    first, *places = str(failed.value).splitlines()
    assert first.startswith("Exercise 12.4: your code raised TypeError: ") and first.endswith("'otter'")
    assert "return tl.load(pointer, otter=0.0)" in places[0] and "loaded(pointer)" in places[1]


@interpreted
def test_a_cell_shows_the_same_without_a_stack():
    shorten_kernel_errors()
    try:
        launch()
    except Exception as error:
        (shown,) = error._render_traceback_()
    first, *places = shown.splitlines()
    assert first.startswith("TypeError: ") and first.endswith("'otter'") and len(places) == 4
    assert "return tl.load(pointer, otter=0.0)" in places[0]
