"""Check of exercise 13.9: the block of a ring is exact, alone and merged from six chunks, and runs our kernels."""

from __future__ import annotations

from typing import Any, cast

import torch

from course_kit.checks.guard_bands import GuardBands
from course_kit.gpu.launches import record_launches
from course_kit.labs.flash_attention import assert_close, device, exact_attention, exact_gradients
from course_lib.context_parallel.blocks import (
    AttentionBlock,
    attend,
    attend_backward,
    in_tokens,
    initial_out_lse,
    visible,
)
from course_lib.flash_attention import operator

KERNELS = ["flash_forward_kernel", "delta_kernel", "query_gradient_kernel", "key_gradient_kernel"]


def check() -> None:
    """Assert out, lse, gradients, the kernels launched, and what is refused; then a causal ring of three chunks."""
    on = device()
    for s_q, s_k, dtype in ((10, 100, torch.float32), (100, 10, torch.float32), (40, 24, torch.bfloat16)):
        sizes = ((s_q, 4), (s_k, 2), (s_k, 2), (s_q, 4))
        q, k, v, gradient = (torch.randn(1, s, a, 16, device=on).to(dtype) for s, a in sizes)
        case, wanted = f"{s_q} queries, {s_k} keys, {dtype}", exact_gradients(gradient, q, k, v, False, 0.25)
        exact, exact_lse = exact_attention(q, k, v, False, 0.25)
        with record_launches() as launches, GuardBands():  # new memory is NaN until it is written
            out, lse = operator.flash_block_forward(q, k, v, False)
            result = operator.flash_block_backward(gradient, q, k, v, exact.to(dtype), exact_lse.float(), False)
        assert lse.shape == (1, s_q, 4), f"{case}: lse is {list(lse.shape)}: expected [b, s, a], {[1, s_q, 4]}"
        dtypes = [str(x.dtype) for x in (out, lse, *result)]
        assert dtypes == [str(dtype), "torch.float32", *3 * [str(dtype)]], (
            f"{case}: out, lse and the gradients are {', '.join(dtypes)}: lse is float32, the others are as q"
        )
        longest = "`longest` is the most queries or keys, and the scale check_for_kernel's."
        assert_close(out, exact, f"{case}: out", hint=longest)
        assert_close(lse, exact_lse, f"{case}: lse", hint=longest)
        for name, mine, gradients in zip("qkv", result, wanted, strict=True):
            assert_close(mine, gradients, f"{case}: gradient of {name}", 8, f"lse goes in as [b, a, s]; {longest}")
        names = list(dict.fromkeys(launch.name for launch in launches))
        one_walk = dtype == torch.bfloat16  # then backward may take one walk or two
        expected = KERNELS[:2] if one_walk else KERNELS
        assert names[: 2 if one_walk else None] == expected, (
            f"{case}: launched were {', '.join(names)}: expected {', '.join(expected)}"
        )
    check_refusal(on)
    check_ring(on)


def check_refusal(on: torch.device) -> None:
    """Assert that both functions raise ValueError for what the kernels do not take, before they launch any."""
    x = torch.zeros(1, 8, 2, 16, dtype=torch.float64, device=on)
    calls = {
        "flash_block_forward": lambda: operator.flash_block_forward(x, x, x, True),
        "flash_block_backward": lambda: operator.flash_block_backward(x, x, x, x, x, x[..., 0], True),
    }
    for name, call in calls.items():
        refused = False
        with record_launches() as launches:
            try:
                call()
            except ValueError:
                refused = True
            except Exception:  # the kernels' own errors: see the assertion below
                pass
        assert refused and not launches, (
            f"{name} of float64 inputs, which the kernels do not take: expected the ValueError of check_for_kernel"
        )


def check_ring(on: torch.device) -> None:
    """Assert out, lse and gradients of a causal ring of three chunks, merged one at a time."""
    block = AttentionBlock(operator.flash_block_forward, cast(Any, operator.flash_block_backward))
    q, k, v, gradient = (torch.randn(1, 48, a, 16, device=on) for a in (4, 2, 2, 4))
    wanted, wanted_lse = exact_attention(q, k, v, True, 0.25)
    out, lse = initial_out_lse(q)
    # the queries of chunk 0, 1, 2 meet the keys of the chunks up to theirs
    meetings = [(rank, source) for rank in range(3) for source in range(rank + 1)]
    for rank, source in meetings:
        shards = in_tokens(visible((rank,), (source,), True), 16)
        rows, keys = slice(16 * rank, 16 * rank + 16), slice(16 * source, 16 * source + 16)
        attend(q[:, rows], k[:, keys], v[:, keys], shards, block, out[:, rows], lse[:, rows])
    assert_close(out, wanted, "six chunks of a ring, merged: out")
    assert_close(lse, wanted_lse, "six chunks of a ring, merged: lse")
    result = [torch.zeros_like(x) for x in (q, k, v)]
    for rank, source in meetings:
        shards = in_tokens(visible((rank,), (source,), True), 16)
        rows, keys = slice(16 * rank, 16 * rank + 16), slice(16 * source, 16 * source + 16)
        attend_backward(
            gradient[:, rows], q[:, rows], k[:, keys], v[:, keys], out[:, rows], lse[:, rows], shards, block,
            result[0][:, rows], result[1][:, keys], result[2][:, keys],
        )  # fmt: skip
    for name, mine, exact in zip("qkv", result, exact_gradients(gradient, q, k, v, True, 0.25), strict=True):
        asked = "Does backward take the merged out and lse that it is given?"
        assert_close(mine, exact, f"six chunks of a ring: gradient of {name}", hint=asked)
