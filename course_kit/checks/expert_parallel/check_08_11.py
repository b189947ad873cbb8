"""Check of exercise 08.11: which choices are dropped, their gradients, and reads on the host."""

from __future__ import annotations

import torch

from course_kit.checks.expert_parallel.work import Work
from course_lib.expert_parallel import router


def check() -> None:
    """Judge within_capacity."""
    gates = torch.tensor([[0.5, 0.5, 0], [0.9, 0, 0.1], [0.6, 0.4, 0], [0.3, 0, 0.7]]).view(2, 2, 3).requires_grad_()
    saved = router.within_capacity(gates, 2)
    wanted = torch.tensor([[0.5, 0.5, 0], [0.9, 0, 0.1], [0, 0.4, 0], [0, 0, 0.7]]).view(2, 2, 3)
    assert torch.equal(saved.detach(), wanted), f"2 slots, gates:\n{saved.detach()}\nnot\n{wanted}"
    (gradient,) = torch.autograd.grad(saved.sum(), gates)
    assert torch.equal(gradient != 0, wanted != 0) or torch.equal((gradient != 0) & (gates != 0), wanted != 0), (
        "what is kept has a gradient, what is dropped has none"
    )
    assert torch.equal(router.within_capacity(gates, 4), gates), "4 slots are enough for all"
    gates = torch.tensor([[[0.2, 0.8], [0.0, 1.0], [0.7, 0.3]]], dtype=torch.bfloat16)
    saved = router.within_capacity(gates, 1)
    wanted = torch.tensor([[[0.2, 0.8], [0.0, 0.0], [0.0, 0.0]]], dtype=torch.bfloat16)
    assert saved.dtype == torch.bfloat16 and torch.equal(saved, wanted), (
        f"1 slot, [1, 3, 2] in BF16, gates:\n{saved}\nnot, in BF16,\n{wanted}"
    )
    flat = router.within_capacity(torch.tensor([[0.5, 0.5], [0.2, 0.8], [1.0, 0.0]]), 2)
    assert torch.equal(flat, torch.tensor([[0.5, 0.5], [0.2, 0.8], [0.0, 0.0]])), (
        f"2 slots, gates [t, E] = [3, 2]: {flat.tolist()}: the third token of expert 0 is dropped"
    )
    with Work() as work:
        router.within_capacity(gates, 2)
    assert not work.read, f"{work.read[0]} makes the host wait for the device"
