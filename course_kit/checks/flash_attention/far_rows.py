"""Rows so far apart that their offsets need 64 bits, in memory that is reserved and not touched."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import torch
import triton

from course_kit.checks.kernels import silent_infinities
from course_kit.labs.flash_attention import assert_close, exact_results

STRIDE = 2**24  # elements: 32 rows of a tile are within 32 bits, in bytes too; row 128 of the sequence is not
TOKENS = 144
NO_RESERVE = 0x4000  # Linux's MAP_NORESERVE


def far_apart(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return float16 copies of tensors [1, s, 1, d] of one shape, with rows STRIDE elements apart, in one mapping.

    Half of the offsets of 32 bits are negative: 2^31 elements before the first row are part of the mapping too, and
    read as zeros. Only pages that are written take memory.
    """
    _, s, _, d = tensors[0].shape
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    memory = torch.frombuffer(mmap.mmap(-1, 2 * (2**31 + s * STRIDE), flags=flags), dtype=torch.float16)
    positions = [
        memory.as_strided((1, s, 1, d), (s * STRIDE, STRIDE, d, 1), 2**31 + d * n) for n in range(len(tensors))
    ]
    return [position.copy_(x) for position, x in zip(positions, tensors, strict=True)]


def assert_far_rows(far: tuple[str, ...], run: Callable[..., dict[str, torch.Tensor]]) -> None:
    """Assert that run(gradient, q, k, v) finds its rows if the rows of the tensors named in `far` are far apart.

    run: returns what it computes by name (out, dq, dk, dv), causal, with a scale of 0.25. Only in the interpreter: a
    GPU cannot map memory without allocating it.
    """
    if not triton.knobs.runtime.interpret:
        return
    generator = torch.Generator().manual_seed(0)
    names = ("gradient", "q", "k", "v")
    inputs = {name: torch.randn(1, TOKENS, 1, 16, generator=generator).half() for name in names}
    wanted = dict(zip(("out", "dq", "dk", "dv"), exact_results(**inputs, causal=True, scale=0.25), strict=True))
    moved = dict(zip(far, far_apart(*(inputs[name] for name in far)), strict=True))
    with silent_infinities():
        result = run(*(inputs | moved).values())
    for name, mine in result.items():
        hint = "The offset of a row may need 64 bits: cast to tl.int64 before the multiplication, or move the pointers"
        assert_close(mine, wanted[name], f"rows of {' and '.join(far)} 2^24 elements apart: {name}", 8, hint)
