"""Routing of tokens to experts: scores, the k best, and the methods that balance the experts' load.

Gates are dense: [..., E] in float32, 0 for experts that a token has not chosen. With f_i the share of all choices that
fall on expert i, and P_i its mean share of the scores:

    balance loss   E sum f_i P_i             1 for even shares. f is counted, the gradient flows through P.
    z-loss         mean (log sum exp)²       keeps the router's logits small
    bias           +- rate per step          is added to the ranking, never to the gates: no gradient, no loss
    capacity       c t k / E tokens          the most that an expert takes; further tokens are dropped
    node limit     M of n nodes per token    the nodes with the best sum of their best k/M scores

Shazeer et al. 2017; Lepikhin et al. 2020 (GShard: capacity); Fedus et al. 2021, §2.2 (Switch: the balance loss); Zoph
et al. 2022, §3.3 (ST-MoE: z-loss); Wang et al. 2024 (loss-free balancing); DeepSeek-V3 2024, §2.1.2 (sigmoid, bias,
nodes).
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course_lib.expert_parallel.routing import Routing
from course_lib.tensor_parallel.regions import OnceDifferentiable
from course_lib.zero.full_sharding import in_backward


# exercise 08.1
def top_k_gates(scores: torch.Tensor, ranking: torch.Tensor, k: int) -> torch.Tensor:
    """Return gates [..., E]: positive for the k experts that rank highest in `ranking` [..., E], 0 for the others.

    The positive gates are the experts' scores, from `scores` [..., E], divided by their sum if k > 1.
    """
    experts = ranking.topk(k, dim=-1).indices
    gates = scores.gather(-1, experts)
    if k > 1:
        gates = gates / gates.sum(-1, keepdim=True).clamp(min=torch.finfo(gates.dtype).tiny)
    gates = gates.clamp(min=torch.finfo(gates.dtype).tiny)
    return torch.zeros_like(scores).scatter(-1, experts, gates)


SCORES = {"softmax": lambda logits: logits.softmax(-1), "sigmoid": torch.sigmoid}


class Router(nn.Module):
    """A router: x [..., h] to gates [..., E], float32. `weight`: [E, h]; `bias`: [E], added to the ranking only.

    routing: of Routing. Backward adds the gradients of the balance loss and of the z-loss; the model's loss does not
    include them. Each backward adds the choices of its forward to `counts` (see take_counts).
    """

    bias: torch.Tensor

    def __init__(self, hidden: int, experts: int, top_k: int, **routing):
        super().__init__()
        self.routing = Routing(experts, top_k, **routing)
        self.weight = nn.Parameter(torch.empty(experts, hidden))
        self.register_buffer("bias", torch.zeros(experts))
        self.batch_group: dist.ProcessGroup | None = None  # the ranks whose tokens make up a batch
        self.loss_weight = 1.0  # 1 / (micro-batches per step), times the loss scale if there is one
        self.sequence_shards = 1  # ranks that split the same sequences: the losses are divided by their number
        self.counts: torch.Tensor | None = None  # [E], choices since the last take_counts

    def _apply(self, fn, recurse=True):
        """Apply `fn` as nn.Module does (.to() and so on), but keep the bias in float32: small steps would be lost."""
        bias = self.bias
        super()._apply(fn, recurse)
        if self.bias.dtype != bias.dtype:
            self.bias = bias.to(self.bias.device)
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return gates [..., E], float32. x: [..., h]."""
        routing = self.routing
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.float(), self.weight.float())
        scores = SCORES[routing.score](logits)
        ranking = scores.detach() + self.bias
        if routing.node_limit < routing.nodes:
            ranking = within_nodes(ranking, routing.nodes, routing.node_limit, routing.top_k)
        gates = top_k_gates(scores, ranking, routing.top_k) * routing.scale
        counts = (gates.detach() != 0).flatten(0, -2).sum(0)
        if routing.capacity is not None:
            gates = within_capacity(gates, routing.slots(gates[..., 0].numel()))
        if self.training and gates.requires_grad:
            gates = RouterLoss.apply(gates, self.losses(logits, scores, counts), counts, self)
        return gates

    def losses(self, logits: torch.Tensor, scores: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the balance loss and the z-loss, a scalar."""
        total = logits.new_zeros(())
        if self.routing.aux_loss_coeff and self.batch_group is None:
            total = total + self.routing.aux_loss_coeff * balance_loss(scores, counts)
        elif self.routing.aux_loss_coeff:
            total = total + self.routing.aux_loss_coeff * DeferredBalanceLoss.apply(scores, counts, self.batch_group)
        if self.routing.z_loss_coeff:
            total = total + self.routing.z_loss_coeff * z_loss(logits)
        return total / self.sequence_shards


class DeferredBalanceLoss(OnceDifferentiable):
    """balance_loss with the counts of all ranks of `group`, for its gradient only: its value is 0.

    The all-reduce of the counts starts in forward and is waited for in backward. A recomputed forward starts none:
    backward uses the counts of the first one.
    """

    @staticmethod
    def forward(ctx, scores: torch.Tensor, counts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.save_for_backward(scores)
        ctx.counts, ctx.group = counts.clone(), group
        ctx.work = None if in_backward() else dist.all_reduce(ctx.counts, group=group, async_op=True)
        return scores.new_zeros(())

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        if ctx.work is None:  # in a reentrant checkpoint, whose first forward has no graph
            dist.all_reduce(ctx.counts, group=ctx.group)
        else:
            ctx.work.wait()
        with torch.enable_grad():
            scores = ctx.saved_tensors[0].detach().requires_grad_()
            grad_scores = torch.autograd.grad(balance_loss(scores, ctx.counts), scores)[0]
        return gradient * grad_scores, None, None


# exercise 08.8
def balance_loss(scores: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return E sum f_i P_i, a scalar: 1 for even shares. scores: [..., E]; counts: [E], choices per expert, of these
    tokens or of all ranks' tokens (then the mean of the ranks' losses is the loss of all tokens).
    """
    shares = (scores / scores.sum(-1, keepdim=True)).flatten(0, -2).mean(0)  # P
    return len(counts) * (counts / counts.sum() * shares).sum()


# exercise 08.8
def z_loss(logits: torch.Tensor) -> torch.Tensor:
    """Return the mean of (log sum exp logits)² over the tokens, a scalar. logits: [..., E]."""
    return logits.logsumexp(-1).square().mean()


# exercise 08.9
class RouterLoss(OnceDifferentiable):
    """Return the gates, unchanged. Backward gives `extra` the gradient router.loss_weight, as if `extra` had been added
    to the loss, and adds `counts` to router.counts: once per micro-batch, even if forward is recomputed.
    """

    @staticmethod
    def forward(ctx, gates: torch.Tensor, extra: torch.Tensor, counts: torch.Tensor, router: Router) -> torch.Tensor:
        ctx.router, ctx.counts = router, counts
        return gates.view_as(gates)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        router, counts = ctx.router, ctx.counts
        router.counts = counts if router.counts is None else router.counts + counts
        return gradient, gradient.new_ones(()) * router.loss_weight, None, None


def routers_of(model: nn.Module) -> list[Router]:
    """Return the routers of a model, in order."""
    return [module for module in model.modules() if isinstance(module, Router)]


# exercise 08.10
@torch.no_grad()
def take_counts(model: nn.Module) -> torch.Tensor:
    """Return and reset the number of tokens that chose each expert, by router [R, E]: in all backwards since the last
    call, summed over the routers' batch_group, which is the same for all routers. Collective over it.
    int64; [0, 0] of a model without routers.
    """
    routers = routers_of(model)
    if not routers:  # a stage without mixtures
        return torch.zeros(0, 0, dtype=torch.long)
    counts = torch.stack(
        [torch.zeros_like(r.bias, dtype=torch.long) if r.counts is None else r.counts for r in routers]
    )
    for router in routers:
        router.counts = None
    if routers[0].batch_group is not None:
        dist.all_reduce(counts, group=routers[0].batch_group)
    return counts


# exercise 08.10
@torch.no_grad()
def update_bias(model: nn.Module, counts: torch.Tensor, rate: float) -> None:
    """Move each expert's bias by `rate` after a step: down if it had more than the mean of `counts` [R, E], up if less.
    Wang et al. 2024, algorithm 1.
    """
    counts = counts.float()
    steps = rate * (counts.mean(1, keepdim=True) - counts).sign()
    for router, step in zip(routers_of(model), steps, strict=True):
        router.bias.add_(step)


# exercise 08.11
def within_capacity(gates: torch.Tensor, slots: int) -> torch.Tensor:
    """Return the gates [..., E] with those beyond an expert's first `slots` tokens set to 0."""
    position = (gates.detach() != 0).flatten(0, -2).cumsum(0).view_as(gates)
    return gates * (position <= slots)


# exercise 08.15
def within_nodes(ranking: torch.Tensor, nodes: int, limit: int, k: int) -> torch.Tensor:
    """Return the ranking [..., E], -inf outside the `limit` nodes with the best sum of their ceil(k / limit) best. The
    experts of node j are j E/nodes to (j + 1) E/nodes - 1. DeepSeek-V3 2024, §2.1.2.
    """
    by_node = ranking.unflatten(-1, (nodes, -1))  # [..., nodes, E/nodes]
    best = by_node.topk(-(-k // limit), dim=-1).values.sum(-1)
    allowed = torch.zeros_like(best, dtype=torch.bool).scatter(-1, best.topk(limit, dim=-1).indices, True)
    return by_node.masked_fill(~allowed.unsqueeze(-1), -math.inf).flatten(-2)
