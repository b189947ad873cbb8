"""An MLP that is split over ranks and trained without autograd: its matmuls and gradients are written out.

    U = X Aᵀ       by columns: a rank has rows A_r of the stored weight, and computes columns of U
    Z = silu(U)
    Y = Z Bᵀ       by rows: a rank has columns B_r, and computes a summand of Y

`train` runs it beside the package's layers, which start from the same weights. This first version gathers U only to
split it again, and recomputes it in backward; a ColumnParallelLinear followed by a RowParallelLinear sends nothing in
between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course_lib.collectives.groups import group_or_world
from course_lib.single_gpu.data import seeded
from course_lib.single_gpu.training import ADAMW
from course_lib.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear


def cut(full: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """Return this rank's shard of a full tensor along `dim`, as a view. The number of ranks must divide the size."""
    return full.chunk(group.size(), dim)[group.rank()]


# exercise 06.1
def split_matmul(x: torch.Tensor, weight: torch.Tensor, how: str, group: dist.ProcessGroup) -> torch.Tensor:
    """Multiply x by weightᵀ, an N-th of the multiplications on each rank; return the full [n, out] on every rank.

    x: [n, in] and weight: [out, in], both full on every rank; neither is changed. They have one dtype, and so have the
    matmuls and the result. how: "columns" (of the result) or "rows" (of weightᵀ). N divides the sizes that are split.
    """
    if how == "columns":
        local = F.linear(x, cut(weight, group, 0))  # [n, out/N]
        shards = [torch.empty_like(local) for _ in range(group.size())]
        dist.all_gather(shards, local, group=group)
        return torch.cat(shards, dim=-1)
    local = F.linear(cut(x, group, -1), cut(weight, group, 1))  # [n, out], a summand
    dist.all_reduce(local, group=group)
    return local


def silu_gradient(u: torch.Tensor) -> torch.Tensor:
    """Return the derivative of silu at u."""
    sigmoid = u.sigmoid()
    return sigmoid * (1 + u * (1 - sigmoid))


# exercise 06.3
def mlp_backward(
    x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, grad_y: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of x (full), a and b (local), where y = sum over the ranks of silu(x · aᵀ) · bᵀ.

    x, grad_y: [n, h], the same on all ranks; a: [ffn/N, h] and b: [h, ffn/N], local shards. None is
    changed. Matmuls and gradients have their dtype; five matmuls are enough, x · aᵀ among them.
    """
    u = F.linear(x, a)  # [n, ffn/N]
    grad_b = grad_y.t() @ F.silu(u)
    grad_u = (grad_y @ b) * silu_gradient(u)
    grad_a = grad_u.t() @ x
    grad_x = grad_u @ a
    dist.all_reduce(grad_x, group=group)
    return grad_x, grad_a, grad_b


def mlp_weights(hidden: int, ffn_hidden: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the full weights of an MLP, as nn.Linear stores them: [ffn, h] and [h, ffn]."""
    a = torch.randn(ffn_hidden, hidden, generator=generator) / hidden**0.5
    b = torch.randn(hidden, ffn_hidden, generator=generator) / ffn_hidden**0.5
    return a, b


def as_linear(weight: torch.Tensor) -> nn.Linear:
    """Return a layer without a bias that holds a copy of `weight`."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight.clone())
    return layer


def step_by_hand(
    x: torch.Tensor, target: torch.Tensor, a: torch.Tensor, b: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the mean squared error of the MLP, and the gradients of this rank's shards of a and b.

    a: [ffn, h] and b: [h, ffn]; only this rank's shards of them are read.
    """
    u = split_matmul(x, a, "columns", group)  # [n, ffn]
    y = split_matmul(F.silu(u), b, "rows", group)  # [n, h]
    error = y - target
    _, grad_a, grad_b = mlp_backward(x, cut(a, group, 0), cut(b, group, 1), 2 / error.numel() * error, group)
    return error.square().mean(), grad_a, grad_b


def train(
    hidden: int,
    ffn_hidden: int,
    tokens: int,
    steps: int,
    lr: float,
    seed: int = 0,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
    on_step: Callable[[dict], None] = lambda record: None,
) -> list[dict]:
    """Train two MLPs, one by hand and one made of the package's layers, to imitate a third on random inputs.

    Returns a record per step, and passes each to `on_step`: step, loss (by hand), and layers_loss (by the layers).
    Raises ValueError if the ranks do not divide ffn_hidden. Collective over `group`.
    """
    group = group_or_world(group)
    if ffn_hidden % group.size():
        raise ValueError(f"ffn_hidden {ffn_hidden} is not divisible by {group.size()} ranks")
    generator = seeded(seed)
    x = torch.randn(tokens, hidden, generator=generator).to(device)
    teacher, (a, b) = ([weight.to(device) for weight in mlp_weights(hidden, ffn_hidden, generator)] for _ in range(2))
    target = F.linear(F.silu(F.linear(x, teacher[0])), teacher[1])
    up, down = ColumnParallelLinear(as_linear(a), group), RowParallelLinear(as_linear(b), group)
    shards = [nn.Parameter(cut(a, group, 0)), nn.Parameter(cut(b, group, 1))]  # views: a step changes a and b
    settings: dict[str, Any] = {name: value for name, value in ADAMW.items() if name != "fused"}  # no view with gaps
    by_hand = torch.optim.AdamW(shards, lr, **settings)
    by_layers = torch.optim.AdamW([up.weight, down.weight], lr, **settings)
    records = []
    for number in range(1, steps + 1):
        step_loss, shards[0].grad, shards[1].grad = step_by_hand(x, target, a, b, group)
        by_hand.step()
        by_layers.zero_grad()
        layers_loss = F.mse_loss(down(F.silu(up(x))), target)
        layers_loss.backward()
        by_layers.step()
        records.append({"step": number, "loss": step_loss.item(), "layers_loss": layers_loss.item()})
        on_step(records[-1])
    return records
