"""Check of exercise 13.6: `attend_tiles` is exact, pays for no mask it does not need, and compiles for a GPU."""

from __future__ import annotations

import torch
import triton

from course_kit.checks.flash_attention.costs import assert_counts, count_operations, in_blocks
from course_kit.checks.flash_attention.far_rows import assert_far_rows
from course_kit.checks.kernels import run_guarded
from course_kit.checks.kernels.compiled import assert_16_bit_matmuls, assert_compiles, compiled_first
from course_kit.gpu.launches import record_launches
from course_kit.labs.flash_attention import assert_close, exact_attention
from course_lib.flash_attention import forward

CASES = (
    (100, 100, 2, 1, 16, True, torch.float32),
    (70, 150, 2, 2, 24, False, torch.float32),
    (150, 70, 1, 1, 16, True, torch.bfloat16),
    (40, 33, 1, 1, 64, True, torch.float16),
)


FEW_TILES = (  # keys, causal, what is tried, and what is wrong if nothing before it was; tiles of 32 x 32
    (
        32,
        False,
        "one full tile of keys",
        "There is nothing to mask and nothing to shrink. Exponentials are tl.exp2, of scores times to_base_2; highest "
        "is of the unscaled scores; the kernel divides, not you.",
    ),
    (
        64,
        False,
        "two full tiles of keys",
        "One tile was right. Do k_rows and v_rows move on? Do total and weighted both shrink where the maximum rises?",
    ),
    (40, False, "a full tile of keys and a ragged one", "Full tiles were right. Are the keys past the end masked?"),
    (32, True, "one tile on the diagonal", "Without the causal mask it was right. Which keys does each query see?"),
)


def run_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | None, longest: int,
    causal: bool, scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return out [b, s, a, d] and lse [b, a, s] of the forward kernel, which calls attend_tiles."""
    return forward.launch_forward(q, k, v, cu_seqlens, longest, causal, scale)


def find_far(gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return out of one head, causal."""
    return {"out": run_forward(q, k, v, None, q.shape[1], True, 0.25)[0]}


@compiled_first
def check() -> None:
    """Assert out and lse, counts of operations, scores and rows far away, packed sequences, the assembler's report."""
    check_few_tiles()
    for s_q, s_k, heads, kv_heads, d, causal, dtype in CASES:
        q, k, v = (torch.randn(1, s, a, d + 16) for s, a in ((s_q, heads), (s_k, kv_heads), (s_k, kv_heads)))
        q, k, v = (x.to(dtype)[..., :d] for x in (q, k, v))  # heads are further apart than they are wide
        v = torch.stack([v, v], 2)[:, :, 0]  # and v's rows further than k's
        case = f"{s_q} queries, {s_k} keys, head {d}, {'causal' if causal else 'not causal'}, {dtype}"
        with count_operations() as counts, record_launches() as launches:
            out, lse = run_guarded(forward.flash_forward_kernel, run_forward, q, k, v, None, s_q, causal, 0.4)
        wanted, wanted_lse = exact_attention(q, k, v, causal, 0.4)
        shrunk = "Does all that was summed shrink where the maximum rises? Which keys are masked? No division here."
        assert_close(out, wanted, f"{case}: out [b, s, a, d]", hint=shrunk)
        assert_close(lse.mT, wanted_lse, f"{case}: lse [b, s, a]", hint="Is highest from the unscaled scores?")
        blocks = forward.FORWARD_CONFIGURATIONS[0].kwargs
        counts["create_select"] -= heads * triton.cdiv(s_q, blocks["BLOCK_Q"])  # the kernel's own, one in each program
        assert_counts(counts, case, 2, heads, s_q, s_k, blocks, causal, dtype)
    with in_blocks(forward.flash_forward_kernel, BLOCK_Q=32, BLOCK_K=16):
        q = torch.randn(1, 50, 1, 16)
        out, _ = run_guarded(forward.flash_forward_kernel, run_forward, q, q, q, None, 50, True, 0.4)
        assert_close(out, exact_attention(q, q, q, True, 0.4)[0], "tiles of 32 queries and 16 keys: out")
    check_large_scores()
    check_packed()
    assert_far_rows(("k", "v"), find_far)
    compiled = assert_compiles(launches)  # the last case, in float16
    assert_16_bit_matmuls(compiled)
    assert "C7515" not in compiled.report, (
        "NVIDIA's assembler has serialized the matmuls (warning C7515): is there a second loop after the first?"
    )


def check_few_tiles() -> None:
    """Assert out of one tile of keys, of two, of a ragged one and of one on the diagonal, each with its own advice."""
    kernel = forward.flash_forward_kernel
    for s_k, causal, case, hint in FEW_TILES:
        q, k, v = (torch.randn(1, s, 1, 16) for s in (32, s_k, s_k))
        with in_blocks(kernel, BLOCK_Q=32, BLOCK_K=32):
            out, lse = run_guarded(kernel, run_forward, q, k, v, None, 32, causal, 0.4)
        wanted, wanted_lse = exact_attention(q, k, v, causal, 0.4)
        assert_close(out, wanted, f"{case}: out", hint=hint)
        assert_close(lse.mT, wanted_lse, f"{case}: lse", hint=hint)


def check_large_scores() -> None:
    """Assert out and lse where all scores are far above 0, and where all are far below."""
    kernel, large = forward.flash_forward_kernel, torch.full((1, 40, 1, 16), 100.0)
    out, lse = run_guarded(kernel, run_forward, large, large, large, None, 40, True, 1.0)
    assert_close(out, large.double(), "scores of 160,000: out", hint="Is the maximum taken off before exp2?")
    q, v = large / 10, torch.randn(1, 40, 1, 16)
    out, lse = run_guarded(kernel, run_forward, q, -q, v, None, 40, True, 0.25)
    wanted, wanted_lse = exact_attention(q, -q, v, True, 0.25)
    begins = "Does highest begin at -inf? Above all scores it makes all exponentials 0."
    assert_close(out, wanted, "all scores -400: out", hint=begins)
    assert_close(lse.mT, wanted_lse, "all scores -400: lse", hint=begins)


def check_packed() -> None:
    """Assert that sequences packed in one row are attended to each for itself."""
    x = torch.randn(1, 32, 1, 16)
    ends = torch.tensor([0, 5, 25, 32], dtype=torch.int32)
    out, _ = run_guarded(forward.flash_forward_kernel, run_forward, x, x, x, ends, 20, True, 1.0)
    for start, end in ((0, 5), (5, 25), (25, 32)):
        part = x[:, start:end]
        wanted, _ = exact_attention(part, part, part, True, 1.0)
        assert_close(out[:, start:end], wanted, f"sequences packed in one row: tokens {start} to {end}")
