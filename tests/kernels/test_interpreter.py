import inspect
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from triton.errors import TritonError

from course_lib.kernels import interpreter  # the package has called interpreter.install()

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels run on the GPU")


@triton.jit
def double(x):
    return tl.where(x > 2, x + x, 2 * x)


@triton.jit
def sum_kernel(x, out, n, block: tl.constexpr):
    places = tl.arange(0, block)
    loaded = tl.load(x + tl.program_id(0) * n + places, places < n, 0)
    tl.store(out + tl.program_id(0), double(tl.sum(loaded)) + tl.max(loaded, 0))


@triton.jit
def failing_kernel(x):
    tl.store(x, tl.sum(tl.load(x + tl.arange(0, 4))) + tl.load(x + tl.arange(0, 3)))


def launch(rows: int) -> None:
    x, out = torch.randn(rows, 5), torch.empty(rows)
    sum_kernel[(rows,)](x, out, 5, 8)
    torch.testing.assert_close(out, 2 * x.sum(1) + x.amax(1).clamp(min=0))


def test_it_looks_through_the_language_once_however_many_functions_are_called():
    launch(1)
    with mock.patch.object(inspect, "getmembers", side_effect=AssertionError("it looked again")):
        launch(3)


def test_types_are_made_once_however_many_programs_run():
    launch(1)
    with mock.patch.object(tl.core, "validate_block_shape", side_effect=AssertionError("a type was made again")):
        launch(3)


def test_a_second_install_changes_nothing():
    patched = [interpreter.interpreter._patch_lang, tl.core.block_type.__init__, tl.core.tensor.__init__]
    interpreter.install()
    assert patched == [interpreter.interpreter._patch_lang, tl.core.block_type.__init__, tl.core.tensor.__init__]


def test_types_are_tritons():
    """Blocks that differ in one thing alone, each asked for twice, sizes as integers and as constants."""
    far = tl.pointer_type(tl.float32, address_space=3)
    types = [tl.float32, tl.int32, tl.pointer_type(tl.float32), far, tl.pointer_type(tl.float32, const=True)]
    for element, sizes in [(each, sizes) for each in types for sizes in ((4, 8), (8, 4), (32,))] * 2:
        for shape in (sizes, [tl.constexpr(size) for size in sizes]):
            block = tl.block_type(element, list(shape))
            assert block.element_ty == element and block.name == f"<{block.shape}, {element}>" and block.numel == 32
            made = tl.tensor(None, block)
            assert [*block.shape] == [size.value for size in made.shape] == [*sizes]
            assert made.numel.value == 32 and made.dtype == element and made.type is block
    assert tl.tensor(None, tl.int32).numel.value == 1 and len(tl.tensor(None, tl.int32).shape) == 0
    for wrong, error in (([], TypeError), ([3], ValueError), ([0.5], TypeError)):
        for _ in range(2):
            with pytest.raises(error):
                tl.block_type(tl.float32, wrong)


def test_it_replaces_once_a_launch(monkeypatch):
    changes = []
    scope = interpreter.interpreter._LangPatchScope
    keep = scope.set_attr
    monkeypatch.setattr(scope, "set_attr", lambda self, *args: changes.append(args[:2]) or keep(self, *args))
    launch(1)
    once = len(changes)
    launch(7)
    assert once > 100 and len(changes) == 2 * once


@pytest.mark.parametrize("fails", [False, True])
def test_the_language_is_as_before_after_a_launch(fails):
    before = [dict(vars(place)) for place in (tl, tl.core, tl.tensor, tl.math)]
    if fails:
        with pytest.raises(TritonError):
            failing_kernel[(1,)](torch.zeros(4))
    else:
        launch(2)
    assert [dict(vars(place)) for place in (tl, tl.core, tl.tensor, tl.math)] == before
    assert tl.core.is_builtin(tl.load) and tl.core.is_builtin(tl.core.load)
