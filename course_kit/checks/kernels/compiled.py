"""Kernels compiled for an H100, before their results in the interpreter are judged."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

from course_kit.checks.advice import CheckFailed
from course_kit.gpu.compiled import Compiled, compile_launches
from course_kit.gpu.launches import Launch, record_launches


def assert_compiles(launches: list[Launch]) -> Compiled:
    """Return the last of these launches, compiled for an H100. Raises AssertionError if the compiler refuses."""
    try:
        return compile_launches(launches[-1:])[0]
    except ValueError as error:
        raise AssertionError(f"the interpreter runs it, but for a GPU it {error}") from None


def assert_16_bit_matmuls(compiled: Compiled) -> None:
    """Raise AssertionError if a kernel of 16-bit tensors multiplies in float32 or TF32, at half the rate or less."""
    inputs = re.findall(r"(?:tt\.dot|warp_group_dot) .*? : (.*) ->", compiled.ttgir)
    wide = sum("xf32" in pair for pair in inputs)
    assert inputs and not wide, (
        f"compiled for an H100, {wide} of {len(inputs)} matmuls multiply float32, at half the rate or less, though the "
        "tensors have 16 bits. `cast` what is float32 to the other tile's dtype, and do not widen a tile for its matmul"
    )


def compiled_first(check: Callable[[], None]) -> Callable[[], None]:
    """Return the check, which says why the last kernel does not compile, if it does not, instead of what is wrong.

    The interpreter runs what no GPU can: an `if` on a block takes one branch for all of its elements.
    """

    @functools.wraps(check)
    def checked() -> None:
        with record_launches() as launches:
            try:
                check()
            except (AssertionError, CheckFailed):
                if launches:
                    assert_compiles(launches)
                raise

    return checked
