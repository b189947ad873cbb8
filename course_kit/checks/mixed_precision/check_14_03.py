"""Check of exercise 14.3: an optimizer on float32 masters, and gradients that are summed there."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from course_lib.mixed_precision.masters import MasterWeights


def check_steps(layer: nn.Linear, wrapped: MasterWeights) -> nn.Linear:
    """Assert 30 small steps against float32's; return the layer that took them."""
    plain = nn.Linear(8, 8, bias=False)
    plain.weight.data.copy_(layer.weight)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4)
    for number in range(30):
        gradient = torch.randn(8, 8, generator=torch.Generator().manual_seed(number)).bfloat16()
        layer.weight.grad, plain.weight.grad = gradient.clone(), gradient.float()
        wrapped.step()
        optimizer.step()
        wrapped.zero_grad()
        assert torch.equal(layer.weight, wrapped.master_parameters[0].bfloat16()), (
            "the model's weights are the masters after the step, rounded"
        )
    dtypes = layer.weight.dtype, wrapped.master_parameters[0].dtype
    assert dtypes == (torch.bfloat16, torch.float32), f"weights of 16 bits, masters of 32: these are {dtypes}"
    assert torch.equal(wrapped.master_parameters[0], plain.weight), (
        "30 small steps of the masters differ from float32's: are they kept, and do they get the gradients?"
    )
    return plain


def check_fp16() -> None:
    """Assert a step of an FP16 weight with the gradients of three micro-batches, in the weight's own memory."""
    weight = nn.Parameter(torch.ones(4).half())
    memory = weight.data_ptr()
    wrapped = MasterWeights([weight], torch.optim.SGD, lr=1.0)
    for power in (-10, -9):
        weight.grad = torch.full((4,), 2.0**power).half()
        wrapped.accumulate_into_master()
    weight.grad = torch.full((4,), 2.0**-11).half()
    wrapped.step()
    master = wrapped.master_parameters[0][0].item()
    assert master == 1 - 7 * 2.0**-11, (
        f"SGD at rate 1 with micro-batches of 2, 4 and 1 times 2⁻¹¹: a master of 1 becomes {master}, not "
        f"{1 - 7 / 2048}: do gradients from before step() count?"
    )
    assert weight.dtype == torch.float16 and bool((weight == master).all()), (
        f"an FP16 weight becomes {weight[0].item()}, {weight.dtype}, and its master {master} is an FP16 number: "
        "rounded to the dtype of the weight"
    )
    assert weight.data_ptr() == memory, "the weight has new memory: write into it, other code may hold views of it"


def check() -> None:
    """Assert steps, sums of micro-batches, a float32 weight, and weights that a step does not use."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 8, bias=False).bfloat16()
    wrapped = MasterWeights(layer.parameters(), torch.optim.AdamW, lr=1e-4)
    plain = check_steps(layer, wrapped)
    for _ in range(1000):  # micro-batches: in BF16 a sum of 0.001 stops at 0.25
        layer.weight.grad = torch.full((8, 8), 0.001).bfloat16()
        wrapped.accumulate_into_master()
        assert layer.weight.grad is None, "the 16-bit gradients stay: 2 bytes per parameter too many, and counted twice"
    total = 1000 * torch.tensor(0.001).bfloat16().float()
    result = wrapped.master_parameters[0].grad
    assert result is not None, "after accumulate_into_master() the masters have no gradient"
    assert torch.allclose(result, total, rtol=1e-4), (
        f"1,000 micro-batches of 0.001 add up to {result[0, 0]:.4f}: not summed, or not in float32"
    )
    check_fp16()
    norm = nn.Parameter(torch.ones(8))  # of float32 already, beside a weight that this step doesn't use
    other = nn.Parameter(torch.ones(8).bfloat16())
    both = MasterWeights([cast(nn.Parameter, layer.weight), norm, other], torch.optim.SGD, lr=1.0)
    assert both.master_parameters[1].data_ptr() == norm.data_ptr(), (
        "a float32 parameter is its own master: no copy of it"
    )
    norm.grad, other.grad = torch.ones(8), torch.ones(8).bfloat16()
    both.step()
    assert not other.any(), "of several weights, one of 16 bits lacks its master's value: round all of self.weights"
    assert not norm.any(), "a float32 parameter, its own master, is not updated"
    assert torch.equal(layer.weight, plain.weight.bfloat16()), "a weight without a gradient has changed"
