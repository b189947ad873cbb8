"""An MLP that is split over ranks and trained without autograd: matrix products and gradients are written out.

    U = X Aᵀ       by columns: a rank has rows A_r of the stored weight, and makes columns of U
    Z = silu(U)
    Y = Z Bᵀ       by rows: a rank has columns B_r, and makes a summand of Y

`train` runs it beside the package's layers, which start from the same weights. This first version gathers U only to cut
it again, and makes it a second time in backward; between a ColumnParallelLinear and a RowParallelLinear nothing is
sent.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course_lib.single_gpu.data import seeded
from course_lib.single_gpu.training import ADAMW
from course_lib.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear


def cut(full: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """This rank's part of a tensor along `dim`, as a view; the size divides by the number of ranks."""
    return full.chunk(group.size(), dim)[group.rank()]


# exercise 06.1
def split_matmul(x: torch.Tensor, weight: torch.Tensor, how: str, group: dist.ProcessGroup) -> torch.Tensor:
    """Multiply x by weightᵀ, each rank doing an N-th of the multiplications; return all of it [n, out] on every rank.

    x: [n, in] and weight: [out, in], both whole on every rank and left as they are, of one dtype, which the result has
    too. how: "columns" (of the product) or "rows" (of weightᵀ). N divides the sizes that are cut.
    """
    if how == "columns":
        part = F.linear(x, cut(weight, group, 0))  # [n, out/N]
        pieces = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(pieces, part, group=group)
        return torch.cat(pieces, dim=-1)
    part = F.linear(cut(x, group, -1), cut(weight, group, 1))  # [n, out], a summand
    dist.all_reduce(part, group=group)
    return part


def silu_gradient(u: torch.Tensor) -> torch.Tensor:
    """The derivative of silu at u."""
    share = u.sigmoid()
    return share * (1 + u * (1 - share))


# exercise 06.3
def mlp_backward(
    x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, grad_y: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of x (whole), a and b (this rank's), where y = sum over the ranks of silu(x · aᵀ) · bᵀ.

    x, grad_y: [n, h], the same on all ranks; a: [ffn/N, h] and b: [h, ffn/N], this rank's.
    """
    u = F.linear(x, a)  # [n, ffn/N]
    grad_b = grad_y.t() @ F.silu(u)
    grad_u = (grad_y @ b) * silu_gradient(u)
    grad_a = grad_u.t() @ x
    grad_x = grad_u @ a
    dist.all_reduce(grad_x, group=group)
    return grad_x, grad_a, grad_b


def mlp_weights(hidden: int, ffn_hidden: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole weights of an MLP, as nn.Linear stores them: [ffn, h] and [h, ffn]."""
    a = torch.randn(ffn_hidden, hidden, generator=generator) / hidden**0.5
    b = torch.randn(hidden, ffn_hidden, generator=generator) / ffn_hidden**0.5
    return a, b


def as_linear(weight: torch.Tensor) -> nn.Linear:
    """A layer without a bias that has a copy of this weight."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight.clone())
    return layer


def step_by_hand(
    x: torch.Tensor, target: torch.Tensor, a: torch.Tensor, b: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the mean squared error of the MLP, and the gradients of this rank's parts of a and b.

    a: [ffn, h] and b: [h, ffn]. Of both only this rank's parts are read.
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
    """Train an MLP by hand, and one of the package's layers, to do what a third MLP does with random inputs.

    Returns, and passes to `on_step`, a record of each step: step, loss, and layers_loss, that of the layers. Raises
    ValueError where the ranks do not divide ffn_hidden. Collective over `group`.
    """
    group = group or dist.group.WORLD
    if ffn_hidden % group.size():
        raise ValueError(f"{group.size()} ranks do not divide ffn_hidden, which is {ffn_hidden}")
    generator = seeded(seed)
    x = torch.randn(tokens, hidden, generator=generator).to(device)
    teacher, (a, b) = ([weight.to(device) for weight in mlp_weights(hidden, ffn_hidden, generator)] for _ in range(2))
    target = F.linear(F.silu(F.linear(x, teacher[0])), teacher[1])
    up, down = ColumnParallelLinear(as_linear(a), group), RowParallelLinear(as_linear(b), group)
    own = [nn.Parameter(cut(a, group, 0)), nn.Parameter(cut(b, group, 1))]  # views: a step changes a and b
    settings = {name: value for name, value in ADAMW.items() if name != "fused"}  # of a view with gaps: not fused
    by_hand = torch.optim.AdamW(own, lr, **settings)
    by_layers = torch.optim.AdamW([up.weight, down.weight], lr, **settings)
    records = []
    for number in range(1, steps + 1):
        step_loss, own[0].grad, own[1].grad = step_by_hand(x, target, a, b, group)
        by_hand.step()
        by_layers.zero_grad()
        layers_loss = F.mse_loss(down(F.silu(up(x))), target)
        layers_loss.backward()
        by_layers.step()
        records.append({"step": number, "loss": step_loss.item(), "layers_loss": layers_loss.item()})
        on_step(records[-1])
    return records
