"""Check of exercise 13.4: `tiled_backward` is exact, of parts of the keys too, and makes no tensor of all scores."""

from __future__ import annotations

import math

import torch

from course_kit.checks.flash_attention.check_13_03 import CASES
from course_kit.checks.guard_bands import GuardBands
from course_kit.labs.flash_attention import assert_close, exact_attention, exact_gradients
from course_lib.flash_attention import reference


def check() -> None:
    """Assert the gradients and their dtypes, the largest tensor, keys in two chunks, sums in float32, and rounding."""
    for s_q, s_k, heads, kv_heads, causal, dtype in CASES:
        q, k, v = (torch.randn(2, s, a, 8).to(dtype) for s, a in ((s_q, heads), (s_k, kv_heads), (s_k, kv_heads)))
        gradient = torch.randn(q.shape).to(dtype)
        out, lse = exact_attention(q, k, v, causal, 0.7)
        out, lse = out.to(dtype), lse.to(reference.wide_dtype(q))
        with GuardBands():  # new memory is NaN until it is written
            result = reference.tiled_backward(gradient, q, k, v, out, lse, causal, 0.7, 16, 8)
        case = (
            f"{s_q} queries, {s_k} keys, {heads} heads for {kv_heads}, {'causal' if causal else 'not causal'}, "
            f"scale 0.7, {dtype}"
        )
        rows = "Is delta the full row's, and the result scaled?"
        hints = {
            "q": rows,
            "k": rows + " All heads that share a key head add to it.",
            "v": "It is p^T do, of all heads.",
        }
        for name, mine, wanted in zip("qkv", result, exact_gradients(gradient, q, k, v, causal, 0.7), strict=True):
            assert mine.dtype == dtype, f"{case}: the gradient of {name} is {mine.dtype}"
            roundings = 512 if dtype == torch.float64 else 8
            assert_close(mine, wanted, f"{case}: gradient of {name}", roundings, hints[name])
    q = torch.randn(1, 128, 1, 4)
    with GuardBands() as guards:
        reference.tiled_backward(q, q, q, q, q, q[..., 0].contiguous() + 9, True, None, 16, 16)
    assert guards.largest_bytes <= q.nbytes, (
        f"a tensor of {guards.largest_bytes:,} bytes was made, where q has {q.nbytes:,}: scores of more than a tile?"
    )
    few, many = torch.randn(1, 32, 4, 8), torch.randn(1, 128, 2, 8)
    with GuardBands() as guards:
        reference.tiled_backward(few, few, many, many, few, few[..., 0].contiguous() + 9, False, None, 16, 16)
    assert guards.largest_bytes <= many.nbytes, (
        f"4 query heads for 2 key heads: a tensor of {guards.largest_bytes:,} bytes was made, where k has "
        f"{many.nbytes:,}: are k and v repeated? fold_heads makes that unnecessary"
    )
    check_chunks()
    check_sums()
    check_rounding()


def check_chunks() -> None:
    """Assert that two chunks of keys, each with the out and lse of both, give the gradients of all keys."""
    q, k, v, gradient = (torch.randn(1, 12, 1, 8) for _ in range(4))
    out, lse = exact_attention(q, k, v, False, 0.7)
    parts = [
        reference.tiled_backward(gradient, q, k[:, i], v[:, i], out.float(), lse.float(), False, 0.7, 8, 4)
        for i in (slice(0, 5), slice(5, 12))
    ]
    wanted = exact_gradients(gradient, q, k, v, False, 0.7)
    given = "Are p and delta from the lse and out that are given?"
    assert_close(parts[0][0] + parts[1][0], wanted[0], "keys in two chunks: the sum of both dq", hint=given)
    assert_close(torch.cat([parts[0][1], parts[1][1]], 1), wanted[1], "keys in two chunks: dk", hint=given)


def check_sums() -> None:
    """Assert sums of 600 ones: with scores, lse and delta of 0 all p and ds are 1, and gradients sums of ones."""
    x, y = (torch.tensor([[[row]]], dtype=torch.bfloat16) for row in ([1.0, 0.0], [0.0, 1.0]))  # [1, 1, 1, 2]
    for s_q, s_k in ((600, 1), (1, 600)):
        q, k = x.repeat(1, s_q, 1, 1), y.repeat(1, s_k, 1, 1)
        result = reference.tiled_backward(q, q, k, k.flip(-1), 0 * q, torch.zeros(1, s_q, 1), False, 1.0, 1, 1)
        case, stuck = f"{s_q} queries, {s_k} keys, all p and ds are 1", "Sums in bfloat16 end at 256: 256 + 1 is 256."
        for name, mine, count, row in zip("qkv", result, (s_k, s_q, s_q), (y, x, x), strict=True):
            assert_close(mine, (count * row.double()).expand_as(mine), f"{case}: gradient of {name}", hint=stuck)


def bfloat16_rows(*rows: list[float]) -> torch.Tensor:
    """Return rows of one head, [1, s, 1, d], in bfloat16."""
    return torch.tensor(rows, dtype=torch.bfloat16)[None, :, None]


def check_rounding() -> None:
    """Assert in bfloat16 that delta is summed unrounded, and that p and ds are rounded before their matmuls."""
    # One key, so p = 1, out = v and ds = dp - delta = 0. 257 and 3 * 129 need more bits than bfloat16 has.
    q, k, v = bfloat16_rows([1, 0], [1, 0]), bfloat16_rows([0, 1]), bfloat16_rows([129, 128])
    gradient = bfloat16_rows([1, 1], [3, 1])
    dq, *_ = reference.tiled_backward(gradient, q, k, v, v.expand_as(q), torch.zeros(1, 2, 1), False, 1.0, 16, 8)
    assert (dq == 0).all(), (
        "bfloat16, one key: its p is 1 and its dp is delta, so dq is 0, and yours is not. Is delta multiplied and "
        "summed in wide_dtype(q)?"
    )
    # p = ds = 0.501831 is 0.5 in bfloat16. Times 3 it is 1.5; unrounded it would be 1.5055, in bfloat16 1.5078.
    q, k, v, gradient = (bfloat16_rows(row) for row in ([3.0, 0.0], [0.0, 3.0], [0.0, 1.0], [3.0, 1.0]))
    lse = torch.full((1, 1, 1), -math.log(0.5 * (1 + 2**-8 - 2**-12)))
    result = reference.tiled_backward(gradient, q, k, v, 0 * q, lse, False, 1.0, 16, 8)
    for name, x, mine, wanted in zip("qkv", ("ds", "ds", "p"), result, ([0, 1.5], [1.5, 0], [1.5, 0.5]), strict=True):
        assert mine.flatten().tolist() == wanted, (
            f"bfloat16: the gradient of {name} is {mine.flatten().tolist()} where {wanted} is right: {x} is rounded "
            "to bfloat16 before its matmul. Use rounded_matmul for each"
        )
