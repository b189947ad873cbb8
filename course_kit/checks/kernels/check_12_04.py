"""Check of exercise 12.4: `elu_kernel` is exact, stays within its tensors, and each program does one block."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton

from course_kit.checks.kernels import assert_near, run_guarded
from course_kit.checks.kernels.compiled import assert_compiles, compiled_first
from course_kit.checks.kernels.offsets import wide_offsets
from course_kit.gpu.launches import record_launches
from course_lib.kernels import elu

BLOCK = 128


def run_elu(x: torch.Tensor, alpha: float, programs: int, block: int = BLOCK) -> torch.Tensor:
    """Return ELU of x by `programs` programs, uninitialized where no program stores."""
    out = torch.empty_like(x)
    elu.elu_kernel[(programs,)](x, out, alpha, x.numel(), BLOCK=block)
    return out


@compiled_first
def check() -> None:
    """Assert ELU of full and ragged blocks, of two dtypes, of large numbers, the block of each program, the width of
    its offsets, and that it compiles for a GPU.
    """
    for numel in (1, 127, 128, 129, 1000):
        for dtype in (torch.float32, torch.bfloat16):
            x = (3 * torch.randn(numel)).to(dtype)
            x[0] = -1e-6
            result = run_guarded(elu.elu_kernel, run_elu, x, 1.5, triton.cdiv(numel, BLOCK))
            assert_near(result, F.elu(x.double(), 1.5), f"ELU of {numel} elements, {dtype}")
    large = run_guarded(elu.elu_kernel, run_elu, torch.tensor([200.0, -200.0]), 1.0, 1)
    assert large.tolist() == [200.0, -1.0], f"ELU(200) is 200 and ELU(-200) is -1, yours says {large.tolist()}"
    with wide_offsets(BLOCK), record_launches() as launches:
        run_guarded(elu.elu_kernel, run_elu, torch.randn(1000).bfloat16(), 1.0, 8)
    assert_compiles(launches)
    done = int((~run_guarded(elu.elu_kernel, run_elu, torch.randn(1000), 1.0, 2).isnan()).sum())
    x = torch.randn(70)
    assert_near(run_guarded(elu.elu_kernel, run_elu, x, 1.5, 3, 32), F.elu(x.double(), 1.5), "ELU, BLOCK = 32")
    assert done == 256, f"2 programs of BLOCK = 128 do the first 256 elements of 1,000, one block each; yours do {done}"
