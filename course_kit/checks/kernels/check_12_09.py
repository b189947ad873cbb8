"""Check of exercise 12.9: `cross_entropy_kernel` gives losses and gradients of rows longer than a block, in place."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from course_kit.checks.kernels import assert_near, loads, run_guarded
from course_kit.checks.kernels.compiled import assert_compiles, compiled_first
from course_kit.checks.kernels.offsets import wide_offsets
from course_kit.gpu.launches import record_launches
from course_lib.kernels import fused_loss

NOTES = {
    0: "logits around 90, whose exp is infinite",
    1: "the largest logits come last",
    2: "its target is ignore_index",
    3: "its first 32 logits are -inf",
}
CASES = (  # the last number: ignore_index
    (64, 64, torch.float32, -100),
    (77, 32, torch.float32, 3),
    (50, 64, torch.float32, -1),
    (45, 16, torch.bfloat16, -100),
)


def run_loss(
    logits: torch.Tensor, targets: torch.Tensor, gradient: bool, block: int, ignored: int = -100
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the losses of the kernel, and the logits as it leaves them."""
    losses = torch.empty(len(targets), dtype=torch.float32, device=logits.device)
    fused_loss.cross_entropy_kernel[(len(targets),)](
        logits, targets, losses, logits.shape[1], logits.stride(0), ignored, GRADIENT=gradient, BLOCK=block
    )
    return losses, logits


@compiled_first
def check() -> None:
    """Assert losses and gradients of six rows in several sizes, and of rows whose target is no column; loads, the width
    of offsets, and that the kernel compiles for a GPU.
    """
    for vocab, block, dtype, ignored in CASES:
        logits, targets = (4 * torch.randn(6, vocab + 5)).to(dtype)[:, :vocab], torch.randint(0, vocab, (6,))
        logits[0] += 90.0
        logits[1, -3:], targets[2] = 30.0, ignored
        logits[3, :32], targets[3] = -float("inf"), vocab - 1
        exact = logits.double().requires_grad_()
        each = F.cross_entropy(exact, targets, ignore_index=ignored, reduction="none")
        (wanted,) = torch.autograd.grad(each.sum(), exact)
        for gradient in (False, True):
            given = logits, targets, gradient, block, ignored
            with wide_offsets(vocab + block), loads() as counts, record_launches() as launches:
                losses, saved = run_guarded(fused_loss.cross_entropy_kernel, run_loss, *given)
            case = f"{vocab} words in blocks of {block}, {dtype}, GRADIENT {gradient}, ignore_index {ignored}"
            wrong = [row for row in range(6) if not abs(losses[row].item() - each[row].item()) < 1e-4]
            hint = " (right without: was the target's logit overwritten before it was read?)" * gradient
            assert not wrong, (
                f"{case}{hint}: the losses of rows {wrong} of 0 to 5 are wrong; row {wrong[0]}, "
                f"{NOTES.get(wrong[0], 'a plain one')}: {losses[wrong[0]]:.6g} instead of {each[wrong[0]]:.6g}"
            )
            most = 6 * ((1 + gradient) * vocab + 2)  # and the target, and its logit
            assert sum(counts) <= most, (
                f"{case}: {sum(counts):,} elements loaded, {most:,} are enough: each logit once for the loss, and once "
                "more for the gradient"
            )
            if gradient:
                what = f"{case}: the gradient, softmax - onehot (row 2, whose target is ignore_index: 0)"
                assert_near(saved, wanted, what, factor=64, least=1)
            else:
                assert torch.equal(saved, logits), f"{case}: the logits stay as they are"
    assert_compiles(launches)
    for below in (300.0, 1e5):
        check_far_rows(below)


def check_far_rows(below: float) -> None:
    """Assert the losses of rows whose target is no column, and of a row so far below 0."""
    logits, targets = torch.randn(3, 43)[:, :40] - below, torch.tensor([-1, 40, 5])
    losses, _ = run_guarded(fused_loss.cross_entropy_kernel, run_loss, logits, targets, False, 64)
    assert losses.isnan().tolist() == [True, True, False], (
        f"targets -1 and 40 are no columns of 40: their losses are NaN; losses of -1, 40, 5: {losses.tolist()}"
    )
    wanted = F.cross_entropy(logits[2:].double(), targets[2:]).item()
    assert abs(losses[2].item() - wanted) < max(1e-4, 2e-7 * below), (
        f"all logits around -{below:,.0f}, whose exp is 0: the loss is {losses[2]:.6g} instead of {wanted:.6g}. The "
        "largest so far begins below all numbers of float32, not at 0"
    )
