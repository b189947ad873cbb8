"""Which experts a token goes to: scores, the k best, what keeps the experts busy alike.

Gates are dense: [..., E] in float32, 0 for the experts that a token does not go to. With f_i the share of all choices
that fall on expert i, and P_i its mean share of the scores:

    balance loss   E sum f_i P_i             1 for even shares. f is counted, the gradient goes through P.
    z-loss         mean (log sum exp)²       keeps the router's logits small
    bias           +- rate a step            joins the ranking, never the gates: no gradient, no loss
    capacity       c t k / E tokens          an expert takes no more, the others are dropped
    node limit     M of n nodes a token      the nodes with the best sum of their best k/M scores

Shazeer et al. 2017; Lepikhin et al. 2020 (GShard: capacity); Fedus et al. 2021, §2.2 (Switch: the balance loss); Zoph
et al. 2022, §3.3 (ST-MoE: z-loss); Wang et al. 2024 (loss-free balancing); DeepSeek-V3 2024, §2.1.2 (sigmoid, bias,
nodes).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course_lib.tensor_parallel.regions import OnceDifferentiable
from course_lib.zero.full_sharding import in_backward


# exercise 08.1
def top_k_gates(scores: torch.Tensor, ranking: torch.Tensor, k: int) -> torch.Tensor:
    """Gates [..., E] of the k experts that stand highest in `ranking` [..., E], 0 for the others.

    Those of the chosen are above 0: their scores [..., E], for k > 1 divided by their sum.
    """
    chosen = ranking.topk(k, dim=-1).indices
    gates = scores.gather(-1, chosen)
    if k > 1:
        gates = gates / gates.sum(-1, keepdim=True).clamp(min=torch.finfo(gates.dtype).tiny)
    gates = gates.clamp(min=torch.finfo(gates.dtype).tiny)
    return torch.zeros_like(scores).scatter(-1, chosen, gates)


SCORES = {"softmax": lambda logits: logits.softmax(-1), "sigmoid": torch.sigmoid}


@dataclass(frozen=True)
class Routing:
    """How tokens are routed. Raises ValueError where the numbers do not fit together."""

    experts: int  # E
    top_k: int  # k, experts a token
    score: str = "softmax"  # or "sigmoid"
    scale: float = 1.0  # gates are multiplied by it at the end
    aux_loss_coeff: float = 0.0  # weight of the balance loss
    z_loss_coeff: float = 0.0  # weight of the z-loss
    capacity: float | None = None  # times its even share of a call's tokens that an expert takes; None: all
    nodes: int = 1  # on which experts are, in equal parts
    node_limit: int = 1  # M, to how many of them a token goes

    def __post_init__(self):
        if self.score not in SCORES:
            raise ValueError(f"score {self.score!r}: it is one of {', '.join(SCORES)}")
        if not 1 <= self.top_k <= self.experts:
            raise ValueError(f"top_k {self.top_k}: it must be 1 to {self.experts}, the number of experts")
        if not 1 <= self.node_limit <= self.nodes or self.experts % self.nodes:
            wrong = f"nodes {self.nodes}, node_limit {self.node_limit}"
            raise ValueError(f"{wrong}: nodes must divide experts ({self.experts}), and node_limit be 1 to nodes")
        if self.top_k > self.node_limit * self.experts // self.nodes:
            raise ValueError(
                f"node_limit {self.node_limit}: on so many nodes are fewer than top_k {self.top_k} experts"
            )
        if self.capacity is not None and not self.capacity > 0:
            raise ValueError(f"capacity {self.capacity}: it must be above 0, or None")

    def slots(self, tokens: int) -> int:
        """How many of a call's tokens an expert takes at most."""
        if self.capacity is None:
            return tokens
        return math.ceil(self.capacity * tokens * self.top_k / self.experts - 1e-9)  # 1.1 x 10 is 11, rounding or not


class Router(nn.Module):
    """x [..., h] to gates [..., E], float32. `weight`: [E, h]; `bias`: [E], added to the ranking alone. **routing: of
    Routing. The balance loss and the z-loss join the gradient in backward, and are no part of the model's loss.
    """

    def __init__(self, hidden: int, experts: int, top_k: int, **routing):
        super().__init__()
        self.routing = Routing(experts, top_k, **routing)
        self.weight = nn.Parameter(torch.empty(experts, hidden))
        self.register_buffer("bias", torch.zeros(experts))
        self.batch_group: dist.ProcessGroup | None = None  # ranks whose tokens make up one batch
        self.loss_weight = 1.0  # one over the micro-batches of a step, times the loss scale where there is one
        self.parts = 1  # how many ranks have parts of the same sequences: each has a part of the losses
        self.counts: torch.Tensor | None = None  # [E], choices since take_counts

    def _apply(self, fn, recurse=True):
        """As nn.Module's, for .to() and the like; the bias stays float32, or small steps would be lost."""
        bias = self.bias
        super()._apply(fn, recurse)
        if self.bias.dtype != bias.dtype:
            self.bias = bias.to(self.bias.device)
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., h]; returns gates [..., E], float32."""
        how = self.routing
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.float(), self.weight.float())
        scores = SCORES[how.score](logits)
        ranking = scores.detach() + self.bias
        if how.node_limit < how.nodes:
            ranking = within_nodes(ranking, how.nodes, how.node_limit, how.top_k)
        gates = top_k_gates(scores, ranking, how.top_k) * how.scale
        counts = (gates.detach() != 0).flatten(0, -2).sum(0)
        if how.capacity is not None:
            gates = within_capacity(gates, how.slots(gates[..., 0].numel()))
        if self.training and gates.requires_grad:
            gates = RouterLoss.apply(gates, self.losses(logits, scores, counts), counts, self)
        return gates

    def losses(self, logits: torch.Tensor, scores: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """The balance loss and the z-loss, weighted: a scalar."""
        total = logits.new_zeros(())
        if self.routing.aux_loss_coeff and self.batch_group is None:
            total = total + self.routing.aux_loss_coeff * balance_loss(scores, counts)
        elif self.routing.aux_loss_coeff:
            total = total + self.routing.aux_loss_coeff * DeferredBalanceLoss.apply(scores, counts, self.batch_group)
        if self.routing.z_loss_coeff:
            total = total + self.routing.z_loss_coeff * z_loss(logits)
        return total / self.parts


class DeferredBalanceLoss(OnceDifferentiable):
    """balance_loss by the counts of all ranks of `group`, for its gradient alone: its value is 0. The counts are on
    their way from forward to backward, and no rank waits for them in forward. A recomputed forward sends none: backward
    has those of the first.
    """

    @staticmethod
    def forward(ctx, scores: torch.Tensor, counts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.save_for_backward(scores)
        ctx.counts, ctx.group = counts.clone(), group
        ctx.work = None if in_backward() else dist.all_reduce(ctx.counts, group=group, async_op=True)
        return scores.new_zeros(())

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        if ctx.work is None:  # of a reentrant checkpoint, whose first forward had no graph
            dist.all_reduce(ctx.counts, group=ctx.group)
        else:
            ctx.work.wait()
        with torch.enable_grad():
            scores = ctx.saved_tensors[0].detach().requires_grad_()
            found = torch.autograd.grad(balance_loss(scores, ctx.counts), scores)[0]
        return gradient * found, None, None


# exercise 08.8
def balance_loss(scores: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """E sum f_i P_i, a scalar: 1 for even shares. scores: [..., E]; counts: [E], the choices of each expert, of these
    tokens or of all ranks' (then the mean of the ranks' losses is the loss of all tokens).
    """
    shares = (scores / scores.sum(-1, keepdim=True)).flatten(0, -2).mean(0)  # P
    return len(counts) * (counts / counts.sum() * shares).sum()


# exercise 08.8
def z_loss(logits: torch.Tensor) -> torch.Tensor:
    """Mean (log sum exp logits)² over the tokens, a scalar. logits: [..., E]."""
    return logits.logsumexp(-1).square().mean()


# exercise 08.9
class RouterLoss(OnceDifferentiable):
    """The gates, unchanged. Backward gives `extra` the gradient router.loss_weight, as if it had been added to the
    loss, and adds `counts` to router.counts: once for each micro-batch, even where forward is replayed.
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
    """The routers of a model, in order."""
    return [module for module in model.modules() if isinstance(module, Router)]


# exercise 08.10
@torch.no_grad()
def take_counts(model: nn.Module) -> torch.Tensor:
    """How many tokens chose each expert, by router [R, E], in all backwards since the last call and on all ranks of the
    routers' batch_group, which is the same for all. Collective over it.
    """
    routers = routers_of(model)
    if not routers:  # a stage without mixtures
        return torch.zeros(0, 0, dtype=torch.long)
    counts = [torch.zeros_like(r.bias, dtype=torch.long) if r.counts is None else r.counts for r in routers]
    counts = torch.stack(counts)
    for router in routers:
        router.counts = None
    if routers[0].batch_group is not None:
        dist.all_reduce(counts, group=routers[0].batch_group)
    return counts


# exercise 08.10
@torch.no_grad()
def update_bias(model: nn.Module, counts: torch.Tensor, rate: float) -> None:
    """After a step, move each expert's bias by `rate`: down where it had more than the mean of `counts` [R, E], up
    where it had less. Wang et al. 2024, algorithm 1.
    """
    counts = counts.float()
    steps = rate * (counts.mean(1, keepdim=True) - counts).sign()
    for router, step in zip(routers_of(model), steps, strict=True):
        router.bias.add_(step)


# exercise 08.11
def within_capacity(gates: torch.Tensor, slots: int) -> torch.Tensor:
    """The gates [..., E], 0 where an expert has had `slots` tokens already; earlier tokens come first."""
    place = (gates.detach() != 0).flatten(0, -2).cumsum(0).view_as(gates)
    return gates * (place <= slots)


# exercise 08.15
def within_nodes(ranking: torch.Tensor, nodes: int, limit: int, k: int) -> torch.Tensor:
    """The ranking [..., E], -inf outside of the `limit` nodes with the best sum of their ceil(k / limit) best. The
    experts of a node are one of `nodes` equal parts. DeepSeek-V3 2024, §2.1.2.
    """
    by_node = ranking.unflatten(-1, (nodes, -1))  # [..., nodes, E/nodes]
    best = by_node.topk(-(-k // limit), dim=-1).values.sum(-1)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter(-1, best.topk(limit, dim=-1).indices, True)
    return by_node.masked_fill(~kept.unsqueeze(-1), -math.inf).flatten(-2)
