"""Check of exercise 12.7: `softmax_forward_kernel` is exact far from 0, with padding and without rows."""

from __future__ import annotations

import torch
import triton

from course_kit.checks.kernels import assert_near, run_guarded
from course_kit.checks.kernels.compiled import assert_compiles, compiled_first
from course_kit.checks.kernels.offsets import wide_offsets
from course_kit.gpu.launches import record_launches
from course_lib.kernels import fused_softmax

CASES = (  # rows, columns, rows of a program, dtype
    (3, 64, 1, torch.float32),
    (5, 50, 2, torch.float32),
    (1, 1, 2, torch.float32),
    (5, 33, 4, torch.bfloat16),  # the last one is compiled, too
)


def run_softmax(x: torch.Tensor, tile: int) -> torch.Tensor:
    """Return the softmax of x [rows, columns], `tile` rows per program."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, columns = x.shape
    fused_softmax.softmax_forward_kernel[(triton.cdiv(rows, tile),)](
        x, y, x.stride(0), rows, columns, ROWS=tile, BLOCK=triton.next_power_of_2(columns)
    )
    return y


@compiled_first
def check() -> None:
    """Assert the softmax of strided rows around 0, 300, -300 and farther, the width of offsets, and that the kernel
    compiles for a GPU.
    """
    for rows, columns, tile, dtype in CASES:
        around = torch.tensor([0.0, 300.0, -300.0, -1e5, 1e5])[:rows, None]  # exp(300) is infinite, exp(-300) is 0
        x = (2 * torch.randn(rows, columns + 7) + around).to(dtype)[:, :columns]  # rows are not contiguous
        with wide_offsets(triton.next_power_of_2(columns) + 1), record_launches() as launches:
            result = run_guarded(fused_softmax.softmax_forward_kernel, run_softmax, x, tile)
        case = f"softmax of {rows} x {columns}, {tile} rows per program, {dtype}, rows around 0, 300, -300, -1e5, 1e5"
        assert_near(result, x.double().softmax(-1), case, factor=16)
    assert_compiles(launches)
