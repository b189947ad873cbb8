"""Check of exercise 13.3: `tiled_forward` is exact, takes a step per tile, and makes no tensor larger than a tile."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from unittest import mock

import torch

from course_kit.checks.flash_attention.costs import count_tiles
from course_kit.checks.guard_bands import GuardBands
from course_kit.labs.flash_attention import assert_close, exact_attention
from course_lib.flash_attention import reference

CASES = (
    (37, 37, 4, 2, True, torch.float32),
    (20, 45, 2, 2, False, torch.float32),
    (45, 20, 2, 1, True, torch.bfloat16),
    (30, 30, 2, 1, True, torch.float64),
)


def count_steps(run: Callable) -> tuple[tuple, int]:
    """Return the result of `run`, and how often it called online_step."""
    with mock.patch.object(reference, "online_step", side_effect=reference.online_step) as counter:
        return run(), counter.call_count


def check() -> None:
    """Assert out, lse and dtypes; steps and the largest tensor; no keys, scores far below 0, sums in float32."""
    for s_q, s_k, heads, kv_heads, causal, dtype in CASES:
        q, k, v = (torch.randn(2, s, a, 8).to(dtype) for s, a in ((s_q, heads), (s_k, kv_heads), (s_k, kv_heads)))
        (out, lse), steps = count_steps(functools.partial(reference.tiled_forward, q, k, v, causal, 0.7, 16, 8))
        case = (
            f"{s_q} queries, {s_k} keys, {heads} heads for {kv_heads}, {'causal' if causal else 'not causal'}, "
            f"scale 0.7, {dtype}"
        )
        wanted, wanted_lse = exact_attention(q, k, v, causal, 0.7)
        wide, roundings = reference.wide_dtype(q), 256 if dtype == torch.float64 else 4
        assert out.dtype == dtype and lse.dtype == wide, (
            f"{case}: out is {out.dtype}, lse {lse.dtype}: expected {dtype} and {wide}"
        )
        divided = "Is it divided by total at the end? Query head i has key head i // (a / kv)."
        exactly = " Is something added to total, or a sum in float32?" if dtype == torch.float64 else ""
        assert_close(out, wanted, f"{case}: out [b, s, a, d]", roundings, divided + exactly)
        assert_close(lse, wanted_lse, f"{case}: lse [b, s, a]", roundings, "It is highest + log(total)." + exactly)
        visited, _ = count_tiles(s_q, s_k, 16, 8, causal)
        assert steps == visited, f"{case}: {steps} calls of online_step for {visited} tiles: one each, and no others"
    q = torch.randn(1, 128, 1, 4)
    with GuardBands() as guards:
        out, _ = reference.tiled_forward(q, q, q, True, None, 16, 16)
    assert guards.largest_bytes <= q.nbytes, (
        f"a tensor of {guards.largest_bytes:,} bytes was made, where q has {q.nbytes:,}: scores of more than a tile?"
    )
    few, many = torch.randn(1, 32, 4, 8), torch.randn(1, 128, 2, 8)
    with GuardBands() as guards:
        reference.tiled_forward(few, many, many, False, None, 16, 16)
    assert guards.largest_bytes <= many.nbytes, (
        f"4 query heads for 2 key heads: a tensor of {guards.largest_bytes:,} bytes was made, where k has "
        f"{many.nbytes:,}: are k and v repeated? fold_heads makes that unnecessary"
    )
    assert_close(out, exact_attention(q, q, q, True, 0.5)[0], "without a scale: out", hint="None means 1 / sqrt(d).")
    out, lse = reference.tiled_forward(q, q[:, :0], q[:, :0], False)
    assert (out == 0).all() and (lse == -math.inf).all(), "without any keys out is 0 and lse -inf"
    q, k, v = torch.full((1, 40, 1, 8), 10.0), torch.randn(1, 40, 1, 8) - 10, torch.randn(1, 40, 1, 8)
    out, lse = reference.tiled_forward(q, k, v, True, 0.375, 16, 8)
    wanted, wanted_lse = exact_attention(q, k, v, True, 0.375)
    begins = "With a highest that begins at 0 all exp(score - highest) are 0: which number is below all scores?"
    assert_close(out, wanted, "all scores about -300: out", hint=begins)
    assert_close(lse, wanted_lse, "all scores about -300: lse", hint=begins)
    one, many = (torch.ones(1, s, 1, 1, dtype=torch.bfloat16) for s in (1, 600))
    out, lse = reference.tiled_forward(0 * one, many, many, False, 1.0, 1, 1)  # 600 equal scores
    assert_close(lse, torch.full((1, 1, 1), 600.0).log().double(), "600 equal scores: lse", hint="A sum in bfloat16?")
    assert_close(
        out, one.double(), "600 equal scores and values: out", hint="Sums in bfloat16 end at 256: 256 + 1 is 256."
    )
