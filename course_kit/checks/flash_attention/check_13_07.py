"""Check of exercise 13.7: `gather_query_gradients` is exact, masks where necessary, and compiles for a GPU."""

from __future__ import annotations

import math

import torch
import triton

from course_kit.checks.flash_attention.backward_cases import CASES, backward_inputs, lse_and_delta
from course_kit.checks.flash_attention.costs import assert_counts, count_operations, in_blocks
from course_kit.checks.flash_attention.far_rows import assert_far_rows
from course_kit.checks.kernels import run_guarded
from course_kit.checks.kernels.compiled import assert_16_bit_matmuls, assert_compiles, compiled_first
from course_kit.gpu.launches import record_launches
from course_kit.labs.flash_attention import assert_close, exact_gradients
from course_lib.flash_attention import backward, forward


def run_query_gradients(
    gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor,
    causal: bool, scale: float,
) -> torch.Tensor:  # fmt: skip
    """Return the gradient of q, of the kernel that calls gather_query_gradients."""
    result, (s_q, heads), (s_k, kv_heads) = q.new_empty(q.shape), q.shape[1:3], k.shape[1:3]
    backward.query_gradient_kernel[lambda meta: (triton.cdiv(s_q, meta["BLOCK_Q"]), heads, 1)](
        q, k, v, gradient, lse, delta, result, None, s_q, s_k, heads // kv_heads, scale, *forward.strides_of(q, k, v),
        causal, **forward.head_sizes(q.shape[3]),
    )  # fmt: skip
    return result


def find_far(gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return dq of one head, causal."""
    lse, delta = lse_and_delta(gradient, q, k, v, True, 0.25)
    return {"dq": run_query_gradients(gradient, q, k, v, lse, delta, True, 0.25)}


@compiled_first
def check() -> None:
    """Assert dq, counts of operations, and finite numbers past the last key, and rows that are far apart."""
    kernel = backward.query_gradient_kernel
    for s_q, s_k, heads, kv_heads, d, causal, dtype in CASES:
        gradient, q, k, v, lse, delta = backward_inputs(s_q, s_k, heads, kv_heads, d, dtype, causal, 0.4)
        case = f"{s_q} queries, {s_k} keys, head {d}, {'causal' if causal else 'not causal'}, {dtype}"
        with count_operations() as counts, record_launches() as launches:
            result = run_guarded(kernel, run_query_gradients, gradient, q, k, v, lse, delta, causal, 0.4)
        wanted = exact_gradients(gradient, q, k, v, causal, 0.4)[0]
        asked = "Is p masked at the diagonal, lse in base 2, delta taken off, the scale left to the kernel?"
        assert_close(result, wanted, f"{case}: gradient of q", 8, asked)
        blocks = backward.QUERY_CONFIGURATIONS[0].kwargs
        assert_counts(counts, case, 3, heads, s_q, s_k, blocks, causal, dtype)
    given = backward_inputs(50, 50, 1, 1, 16, torch.float32, True, 0.4)
    with in_blocks(kernel, BLOCK_Q=32, BLOCK_K=16):
        result = run_guarded(kernel, run_query_gradients, *given, True, 0.4)
    gradient, q, k, v, _, _ = given
    wanted = exact_gradients(gradient, q, k, v, True, 0.4)[0]
    assert_close(result, wanted, "tiles of 32 queries and 16 keys: gradient of q", 8)
    x = torch.full((1, 33, 1, 16), 3.5)  # scores of -196
    lse, delta = torch.full((1, 1, 33), math.log(33) - 196), torch.ones(1, 1, 33)
    result = run_guarded(kernel, run_query_gradients, x, x, -x, x, lse, delta, False, 1.0)
    assert result.isfinite().all(), (
        "scores of -196: past the last key, where none is loaded, exp2 overflows. Mask p there"
    )
    assert_far_rows(("k", "v"), find_far)
    assert_16_bit_matmuls(assert_compiles(launches))  # of the last case, in bfloat16
