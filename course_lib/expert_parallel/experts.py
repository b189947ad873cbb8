"""Experts: E SwiGLU MLPs with stacked weights, and three ways to send each token through the experts it has chosen.

    loop       one expert after the other                          E times as many calls
    batched    each expert has the same slots: [E, slots, h]       fixed sizes; empty slots are computed too
    grouped    tokens sorted by expert, one matmul for all         computes every choice once, and nothing else

x: [t, h]; gates: [t, E], float32, 0 for experts that a token has not chosen; choices: the number of nonzero gates,
known on the host, so that nothing has to be read from the device (grouped_mm itself reads `ends` if PyTorch has no
kernel for a dtype on a device, such as float32 on a GPU); batched takes slots instead. All three sum in float32 and
round once, the last two the gradients of x as well; on a GPU index_add sums in any order, unless
torch.use_deterministic_algorithms is on. A choice costs 6 h f FLOPs in forward.
Gale et al. 2022 (MegaBlocks: dropless, by grouped matmuls); Lepikhin et al. 2020 (GShard: slots).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from course_lib.single_gpu.model import swiglu
from course_lib.tensor_parallel.linear import as_autocast


class ExpertLinear(nn.Module):
    """A linear layer for each expert: `weight` [E, out, in]."""

    def __init__(self, experts: int, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))


class Experts(nn.Module):
    """E SwiGLU MLPs. `compute(experts, x, gates, choices)` sends tokens through them: loop or grouped."""

    def __init__(self, experts: int, hidden: int, ffn_hidden: int, compute: Callable[..., torch.Tensor]):
        super().__init__()
        self.gate_proj = ExpertLinear(experts, hidden, ffn_hidden)  # [E, f, h]
        self.up_proj = ExpertLinear(experts, hidden, ffn_hidden)  # [E, f, h]
        self.down_proj = ExpertLinear(experts, ffn_hidden, hidden)  # [E, h, f]
        self.compute = compute

    def weights(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return x, gate [E, f, h], up [E, f, h] and down [E, h, f], in autocast's dtype if it is enabled."""
        return as_autocast(x, self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight)

    def forward(self, x: torch.Tensor, gates: torch.Tensor, choices: int) -> torch.Tensor:
        """Return the experts' output [t, h]. x: [t, h]; gates: [t, E], of which `choices` are not 0."""
        return self.compute(self, x, gates, choices)


# exercise 08.2
def loop_experts(experts: Experts, x: torch.Tensor, gates: torch.Tensor, choices: int) -> torch.Tensor:
    """Return the output [t, h], computed expert by expert. x: [t, h]; gates: [t, E]."""
    x, *weights = experts.weights(x)
    out = torch.zeros_like(x, dtype=gates.dtype)
    for e, (gate, up, down) in enumerate(zip(*(weight.unbind() for weight in weights), strict=True)):
        token = gates.detach()[:, e].nonzero().squeeze(1)
        rows = x[token]
        rows = F.linear(swiglu(F.linear(rows, gate), F.linear(rows, up)), down)
        out = out.index_add(0, token, rows * gates[token, e, None])
    return out.to(x.dtype)


class AddByToken(torch.autograd.Function):
    """Add row i of [r, h] to token[i] of the result [tokens, h]: in float32, rounded once. It keeps only `token`."""

    @staticmethod
    def forward(ctx, rows: torch.Tensor, token: torch.Tensor, tokens: int) -> torch.Tensor:
        ctx.token = token
        wide = torch.promote_types(rows.dtype, torch.float32)
        sums = rows.new_zeros(tokens, *rows.shape[1:], dtype=wide)
        return sums.index_add_(0, token, rows.to(wide)).to(rows.dtype)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        return gradient.index_select(0, ctx.token), None, None


class TakeByToken(torch.autograd.Function):
    """Return the rows x[token], [r, h]. Backward sums the gradients of a token's rows as AddByToken does."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(token)
        ctx.tokens = len(x)
        return x.index_select(0, token)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        return AddByToken.apply(gradient, *ctx.saved_tensors, ctx.tokens), None


def grouped_matmul(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply rows [r, in] up to ends[0] by weight[0], those up to ends[1] by weight[1], ...; return [r, out].

    weight: [E, out, in]. grouped_mm needs rows of a multiple of 16 bytes (other widths are padded, which copies the
    weights) and a contiguous gradient.
    """
    multiple = 16 // rows.element_size()
    missing, missing_out = -rows.shape[1] % multiple, -weight.shape[1] % multiple
    if missing or missing_out:
        padded = F.pad(rows, (0, missing)), F.pad(weight, (0, missing, 0, missing_out))
        return grouped_matmul(*padded, ends)[:, : weight.shape[1]]
    out = F.grouped_mm(rows, weight.transpose(-2, -1), offs=ends)
    if out.requires_grad:
        out.register_hook(torch.Tensor.contiguous)
    return out


# exercise 08.3
def sorted_choices(gates: torch.Tensor, choices: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return expert [choices] and token [choices], sorted by expert, and each expert's end in them, int32 [E]."""
    by_expert = gates.detach().t()
    expert, token = torch.nonzero_static(by_expert, size=choices).unbind(1)
    return expert, token, (by_expert != 0).sum(1).cumsum(0, dtype=torch.int32)


# exercise 08.3
def grouped_experts(experts: Experts, x: torch.Tensor, gates: torch.Tensor, choices: int) -> torch.Tensor:
    """Return the output [t, h], from tokens sorted by expert and three grouped matmuls. x: [t, h]; gates: [t, E]."""
    x, gate, up, down = experts.weights(x)
    expert, token, ends = sorted_choices(gates, choices)
    rows = TakeByToken.apply(x, token)
    rows = swiglu(grouped_matmul(rows, gate, ends), grouped_matmul(rows, up, ends))
    row_gates = gates.flatten().index_select(0, token * gates.shape[1] + expert)
    rows = grouped_matmul(rows, down, ends) * row_gates[:, None]
    return AddByToken.apply(rows, token, len(x)).to(x.dtype)


# exercise 08.4
def batched_experts(experts: Experts, x: torch.Tensor, gates: torch.Tensor, slots: int) -> torch.Tensor:
    """Return the output [t, h]; each expert computes `slots` rows, of its largest gates. x: [t, h]; gates: [t, E]."""
    x, gate, up, down = experts.weights(x)
    slot_gates, token = gates.t().topk(min(slots, len(x)), dim=1)  # [E, slots]
    rows = TakeByToken.apply(x, token.flatten()).unflatten(0, token.shape)  # [E, slots, h]
    rows = swiglu(rows @ gate.transpose(-2, -1), rows @ up.transpose(-2, -1))
    rows = rows @ down.transpose(-2, -1) * slot_gates[..., None]
    return AddByToken.apply(rows.flatten(0, 1), token.flatten(), len(x)).to(x.dtype)
