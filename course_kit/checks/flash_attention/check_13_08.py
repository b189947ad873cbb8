"""Check of exercise 13.8: `gather_key_gradients` is exact, masks where necessary, and compiles for a GPU."""

from __future__ import annotations

import torch
import triton

from course_kit.checks.flash_attention.backward_cases import CASES, backward_inputs, lse_and_delta
from course_kit.checks.flash_attention.costs import assert_counts, count_operations, in_blocks
from course_kit.checks.flash_attention.far_rows import assert_far_rows
from course_kit.checks.kernels import run_guarded
from course_kit.checks.kernels.compiled import assert_16_bit_matmuls, assert_compiles, compiled_first
from course_kit.checks.kernels.offsets import wide_offsets
from course_kit.gpu.launches import record_launches
from course_kit.labs.flash_attention import assert_close, exact_gradients
from course_lib.flash_attention import backward, forward


def run_key_gradients(
    gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor,
    causal: bool, scale: float,
) -> list[torch.Tensor]:  # fmt: skip
    """Return the gradients of k and v, of the kernel that calls gather_key_gradients."""
    result = [x.new_empty(x.shape) for x in (k, v)]
    (s_q, heads), (s_k, kv_heads) = q.shape[1:3], k.shape[1:3]
    backward.key_gradient_kernel[lambda meta: (triton.cdiv(s_k, meta["BLOCK_K"]), kv_heads, 1)](
        q, k, v, gradient, lse, delta, *result, None, s_q, s_k, heads // kv_heads, scale, *forward.strides_of(q, k, v),
        causal, **forward.head_sizes(q.shape[3]),
    )  # fmt: skip
    return result


def find_far(gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return dk and dv of one head, causal."""
    lse, delta = lse_and_delta(gradient, q, k, v, True, 0.25)
    return dict(zip(("dk", "dv"), run_key_gradients(gradient, q, k, v, lse, delta, True, 0.25), strict=True))


@compiled_first
def check() -> None:
    """Assert dk and dv, counts of operations, and rows that are far apart, and the width of offsets."""
    kernel = backward.key_gradient_kernel
    for s_q, s_k, heads, kv_heads, d, causal, dtype in CASES:
        gradient, q, k, v, lse, delta = backward_inputs(s_q, s_k, heads, kv_heads, d, dtype, causal, 0.4)
        case = f"{s_q} queries, {s_k} keys, head {d}, {'causal' if causal else 'not causal'}, {dtype}"
        with count_operations() as counts, record_launches() as launches:
            result = run_guarded(kernel, run_key_gradients, gradient, q, k, v, lse, delta, causal, 0.4)
        asked = "Are the given sums continued? Is p right: the mask, the first tile, lse in base 2?"
        hints = {"k": asked + " Is delta taken off, the scale left to the kernel?", "v": asked}
        wanted = exact_gradients(gradient, q, k, v, causal, 0.4)[1:]
        for name, mine, exact in zip("kv", result, wanted, strict=True):
            assert_close(mine, exact, f"{case}: gradient of {name}", 8, hints[name])
        blocks = backward.KEY_CONFIGURATIONS[0].kwargs
        assert_counts(counts, case, 4, heads, s_q, s_k, blocks, causal, dtype)
    given = backward_inputs(50, 50, 1, 1, 16, torch.float32, True, 0.4)
    with in_blocks(kernel, BLOCK_Q=16, BLOCK_K=32):
        result = run_guarded(kernel, run_key_gradients, *given, True, 0.4)
    gradient, q, k, v, _, _ = given
    for name, mine, exact in zip("kv", result, exact_gradients(gradient, q, k, v, True, 0.4)[1:], strict=True):
        assert_close(mine, exact, f"tiles of 16 queries and 32 keys: gradient of {name}", 8)
    assert_far_rows(("q",), find_far)
    given = backward_inputs(200, 200, 1, 1, 16, torch.float32, True, 0.4)
    with in_blocks(kernel, BLOCK_Q=16, BLOCK_K=32), wide_offsets(32 * 32):  # those inside a tile are smaller
        run_guarded(kernel, run_key_gradients, *given, True, 0.4)
    assert_16_bit_matmuls(assert_compiles(launches))  # of the last case, in bfloat16
