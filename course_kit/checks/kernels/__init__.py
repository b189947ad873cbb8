"""Tests of a kernel besides its results: it ran, it stayed within its tensors, and it did the work itself."""

import contextlib
import warnings
from collections.abc import Iterator
from unittest import mock

import numpy as np
import torch
from torch.utils._pytree import tree_map_only
from triton.errors import TritonError
from triton.runtime.interpreter import InterpreterBuilder

from course_kit.checks.guard_bands import GuardBands
from course_kit.gpu.launches import first_configuration, record_launches
from course_kit.labs.kernels import device


@contextlib.contextmanager
def stray_loads() -> Iterator[list[int]]:
    """Yield, for each load in the `with` block, how many lanes read a band, or memory that was never written.

    Lanes that a mask switches off are NaN where the load names no `other`: on a GPU they are undefined. Counted in the
    interpreter; elsewhere a stray load shows only if it reaches a result. The bits of the bands' NaNs equal the
    integers -100 to -1. In a type of one byte any number may have them: those loads are not counted.
    """
    load, strays = InterpreterBuilder.create_masked_load, []

    def watching(self, pointers, mask, other, *rest, **options):
        loaded = load(self, pointers, mask, other, *rest, **options)
        if pointers.get_element_ty().is_floating() and loaded.data.itemsize > 1:
            bits = loaded.data.view(f"i{loaded.data.itemsize}")
            strays.append(int(((bits < 0) & (bits >= -100) & mask.data).sum()))
            if other is None and mask.data.size > 1:  # the interpreter drops the `other=0.0` of a single number
                bits[~mask.data.astype(bool)] = np.iinfo(bits.dtype).max  # a NaN, and in no band
        return loaded

    with mock.patch.object(InterpreterBuilder, "create_masked_load", watching):
        yield strays


@contextlib.contextmanager
def loads() -> Iterator[list[int]]:
    """Yield the elements that each load of the `with` block reads from memory. Counted in the interpreter."""
    load, counts = InterpreterBuilder.create_masked_load, []

    def counting(self, pointers, mask, *rest, **options):
        counts.append(int(mask.data.sum()))
        return load(self, pointers, mask, *rest, **options)

    with mock.patch.object(InterpreterBuilder, "create_masked_load", counting):
        yield counts


@contextlib.contextmanager
def silent_infinities() -> Iterator[None]:
    """Let the interpreter make infinities and NaN without a warning, as a GPU does."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton.runtime.interpreter")
        yield


def run_guarded(kernel, run, *inputs):
    """Return run(*inputs) on the CPU, after a run with guard bands around all tensors. Raises AssertionError or
    CheckFailed unless `kernel` does the work, within its tensors, and PyTorch does nothing.
    """
    kernel, _ = first_configuration(kernel, {})
    inputs = tree_map_only(torch.Tensor, lambda x: x.to(device()), inputs)
    with record_launches() as launches, stray_loads() as strays, GuardBands() as guards:
        try:
            with silent_infinities():
                result = run(*[guards.guarded(x) if torch.is_tensor(x) else x for x in inputs])
        except TritonError as error:  # it wraps what a kernel raises: a blank one should say that it is blank
            if "NotImplementedError()" in str(error):
                raise NotImplementedError from None
            assert "get_bf16" not in str(error), "no arithmetic in bfloat16 here: `widen` after each load"
            raise
    guards.check()
    assert not any(strays), (
        f"{sum(strays)} lanes loaded memory outside of the tensors. Give each tl.load a mask, or load_rows its "
        "count, and rows their stride"
    )
    assert any(launch.kernel is kernel for launch in launches), (
        "no kernel of yours was launched: the function under @triton.jit has to do the work"
    )
    assert not guards.operations, f"PyTorch did some of the work: {', '.join(guards.operations)}; the kernel has to"
    return tree_map_only(torch.Tensor, torch.Tensor.cpu, result)


def assert_near(outcome: torch.Tensor, wanted: torch.Tensor, what: str, factor: float = 4, least: float = 1e-3) -> None:
    """Raise AssertionError unless `outcome` is `wanted` (float64), computed in float32 and rounded once to its dtype.

    Allowed: `factor` roundings of a float32 of its size, or of `least`, and half of the last bit of a shorter dtype.
    """
    short = outcome.dtype != torch.float32
    hint = ". Is it only here? Then `widen` after each load, `cast` before each store" if short else ""
    nan = int(outcome.isnan().sum())
    assert not nan, (
        f"{what}: {nan} of {outcome.numel()} elements are NaN. Never written? inf - inf or inf / inf on "
        f"the way? A masked load without `other`, whose lanes that are off meet the rest?{hint}"
    )
    last_bit = torch.finfo(outcome.dtype).eps / 2 if short else 0
    bound = last_bit * wanted.abs() + factor * torch.finfo(torch.float32).eps * wanted.abs().clamp(min=least)
    wrong = ((outcome.double() - wanted).abs() > bound).nonzero()
    if len(wrong):
        first = tuple(wrong[0].tolist())
        raise AssertionError(
            f"{what}: {len(wrong)} of {outcome.numel()} elements are wrong, the first at {list(first)}: "
            f"{outcome[first].item():.6g} instead of {wanted[first].item():.6g}{hint}"
        )
