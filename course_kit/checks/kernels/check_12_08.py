"""Check of exercise 12.8: `norm_backward_kernel` gives dx and parts of dw, and all programs share the rows."""

from __future__ import annotations

import re

import torch
import triton

from course_kit.checks.kernels import assert_near, run_guarded
from course_kit.checks.kernels.compiled import assert_compiles, compiled_first
from course_kit.gpu.launches import Launch, record_launches
from course_lib.kernels import norm_kernels

CASES = (  # rows, columns, with a gradient of the sum, dtype
    (8, 64, True, torch.float32),
    (7, 50, False, torch.float32),
    (3, 16, True, torch.float32),
    (5, 33, True, torch.bfloat16),  # the last one is compiled, too
)


def norm_gradients(
    dy: torch.Tensor, dsum: torch.Tensor | None, summed: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dx and dweight in float64, by autograd through PyTorch's own operations."""
    s, w = (t.double().requires_grad_() for t in (summed, weight))
    y = s * torch.rsqrt(s.pow(2).mean(-1, keepdim=True) + eps) * w
    total = (y * dy.double()).sum() + (0 if dsum is None else (s * dsum.double()).sum())
    grad_s, grad_w = torch.autograd.grad(total, (s, w))
    return grad_s, grad_w


def run_norm(
    dy: torch.Tensor, dsum: torch.Tensor | None, summed: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor,
    programs: int, rows_at_once: int = 2, stages: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return dx and parts of the kernel, with `rows_at_once` rows at a time in each of `programs` programs."""
    rows, hidden = summed.shape
    dx = torch.empty(rows, hidden, dtype=summed.dtype, device=dy.device)
    parts = torch.empty(programs, hidden, dtype=torch.float32, device=dy.device)
    strides = dy.stride(0), 0 if dsum is None else dsum.stride(0), summed.stride(0)
    block = max(16, triton.next_power_of_2(hidden))
    norm_kernels.norm_backward_kernel[(programs,)](
        dy, dsum, summed, weight, rstd, dx, parts, *strides, rows, hidden, ROWS=rows_at_once, BLOCK=block, STAGES=stages
    )
    return dx, parts


@compiled_first
def check() -> None:
    """Assert dx, the sum of parts, how many programs had rows, with and without dsum, the width of offsets, and that
    the kernel compiles for a GPU.
    """
    for rows, hidden, with_sum, dtype in CASES:
        dy, gradient, summed = (torch.randn(rows, hidden + gap).to(dtype)[:, :hidden] for gap in (1, 2, 3))
        dsum = gradient if with_sum else None
        weight, rstd = torch.rand(hidden) + 0.5, torch.rsqrt(summed.float().pow(2).mean(-1) + 1e-5)
        wanted_dx, wanted_dw = norm_gradients(dy, dsum, summed, weight)
        for programs, rows_at_once, stages in ((1, 2, 1), (3, 2 if hidden == 64 else 1, 2)):
            given = dy, dsum, summed, weight, rstd, programs, rows_at_once, stages
            with record_launches() as launches:
                dx, parts = run_guarded(norm_kernels.norm_backward_kernel, run_norm, *given)
            case = f"{rows} rows of {hidden}, {dtype}, {programs} programs, {'with' if with_sum else 'without'} dsum"
            assert_near(dx, wanted_dx, f"{case}: dx", factor=16, least=1)
            nan = int(parts.isnan().sum())
            assert not nan, f"{case}: {nan} elements of parts are NaN: each program stores its full row of parts"
            error = ((parts.double().sum(0) - wanted_dw).abs().max() / wanted_dw.abs().max()).item()
            assert error < 1e-5, f"{case}: the rows of parts add up to dw; yours miss it by {error:.2g} of its largest"
            used, most = int((parts.abs().sum(1) > 0).sum()), min(programs, -(-rows // rows_at_once))
            assert used == most, f"{case}: {used} had rows to work on, not {most}: deal the rows out to all of them"
    check_offsets(launches)


def check_offsets(launches: list[Launch]) -> None:
    """Assert that the offsets of rows have 64 bits, by the compiled code: the interpreter's loop counts in 32 bits."""
    wide = re.findall(r"tt\.addptr .*i64", assert_compiles(launches).ttgir)  # launched without dsum, or with it
    assert len(wide) >= 3, (
        f"of the tensors of rows (summed, dy, dx) {len(wide)} have offsets of 64 bits; row times stride may pass 2^31. "
        "Take tl.program_id(0).to(tl.int64)"
    )
