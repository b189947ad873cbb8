"""Check of exercise 12.10: `adamw_kernel` takes the steps of torch.optim.AdamW, and stores a copy in 16 bits."""

from __future__ import annotations

import torch
import triton

from course_kit.checks.kernels import assert_near, run_guarded
from course_kit.checks.kernels.compiled import assert_compiles, compiled_first
from course_kit.checks.kernels.offsets import wide_offsets
from course_kit.gpu.launches import record_launches
from course_lib.kernels import fused_adamw

CASES = (  # elements, dtype of the gradient, dtype of the copy; lr, betas, eps, BLOCK
    (1, torch.float32, None, 0.5, (0.9, 0.999), 1e-2, 256),
    (1000, torch.float32, torch.float16, 0.5, (0.9, 0.999), 1e-2, 256),
    (300, torch.bfloat16, torch.bfloat16, 0.125, (0.8, 0.95), 1e-1, 128),
)
DECAY = 0.3


def run_adamw(
    w: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor, weights: torch.Tensor | None, t: torch.Tensor,
    lr: float, betas: tuple[float, float], eps: float, block: int,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """Return w, m, v and weights after one step of the kernel, in place."""
    fused_adamw.adamw_kernel[(triton.cdiv(len(w), block),)](
        w, g, m, v, weights, t, len(w), lr, 1 - lr * DECAY, eps, BETA1=betas[0], BETA2=betas[1], BLOCK=block
    )
    return w, m, v, weights


@compiled_first
def check() -> None:
    """Assert moments, weights and their copy after three steps of three sizes, the width of offsets, and that the
    kernel compiles for a GPU.
    """
    for numel, dtype, copies, lr, betas, eps, block in CASES:
        w, m, v = torch.randn(numel), torch.zeros(numel), torch.zeros(numel)
        weights = torch.zeros(numel, dtype=copies) if copies else None
        exact = torch.nn.Parameter(w.double())
        optimizer = torch.optim.AdamW([exact], lr=lr, betas=betas, eps=eps, weight_decay=DECAY)
        for t in (1, 2, 3):
            g = torch.randn(numel).to(dtype)
            exact.grad = g.double()
            optimizer.step()
            given = w, g, m, v, weights, torch.tensor(float(t)), lr, betas, eps, block
            with wide_offsets(block + 1), record_launches() as launches:
                w, m, v, weights = run_guarded(fused_adamw.adamw_kernel, run_adamw, *given)
            case, state = f"{numel} elements, gradient {dtype}, betas {betas}, step {t}", optimizer.state[exact]
            assert_near(m, state["exp_avg"], f"{case}: exp_avg (decay is no part of the gradient)", least=1)
            assert_near(v, state["exp_avg_sq"], f"{case}: exp_avg_sq", factor=16, least=1e-6)
            error = (w - exact.detach()).abs().max().item()
            assert error < 1.5e-6, (
                f"{case}: w is up to {error:.2g} off torch.optim.AdamW's (off by 1e-6 to 1e-5: is 1 - βᵗ of float64? "
                "more: is ε outside of the root, is w decayed before the step, is the step corrected for t?)"
            )
            if copies:
                assert torch.equal(weights, w.to(copies)), f"{case}: weights is the new w, rounded (`cast`) to {copies}"
    assert_compiles(launches)
