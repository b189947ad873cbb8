"""Backward in two halves: the input's gradient, which the stage before waits for, and the weights', for later.

Each autograd Function whose backward makes only what `ctx.needs_input_grad` asks for runs it in two halves, once for
its inputs and once for its weights: together the FLOPs of one backward. A Function that makes everything anyway runs
once, and its weights' gradients wait. Nodes that are no Function, small ones (norms, biases, embeddings; the matmuls of
batched_experts), and compiled nodes belong to the first half. The first half frees all activations but those that the
second half needs: a Function's saved tensors and its output's gradient. While a stage runs, proxies replace its
weights: leaves with the same values. The weights get their gradients in the second half alone, so a hook on a weight
fires once, in that half.

Full recomputation: a Function saves its tensors after its matmul, so the replay repeats a block's last matmul, which
PyTorch's checkpoint skips otherwise. Qi et al. 2023, Zero Bubble Pipeline Parallelism, §2.
"""

from __future__ import annotations

import collections
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node
from torch.overrides import TorchFunctionMode

from course_lib.pipeline.deferred_grads import DeferredWeightGrad, can_defer, weight_edges
from course_lib.pipeline.stages import OutputFn, StagePass
from course_lib.tensor_parallel.linear import as_autocast
from course_lib.zero.parameters import parameter_slots, swap_parameters


# exercise 09.11
class Linear(torch.autograd.Function):
    """x · weightᵀ + bias, whose backward makes the gradients that it is asked for, and no others."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x: [..., in]; weight: [out, in]; bias: [out]; returns [..., out], all in x's dtype (of autocast)."""
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight.to(x.dtype), bias if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        """Return the gradients of x, weight and bias, each None if it is not requested; gradient: [..., out].

        Under autocast gradient and x are BF16, and the weight is float32: matmuls are in the gradient's dtype.
        x and gradient need not be contiguous.
        """
        x, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        grad_x = gradient @ weight.to(gradient.dtype) if wants_x else None
        grad_weight = rows.t() @ x.flatten(0, -2) if wants_weight else None
        return grad_x, grad_weight, rows.sum(0) if wants_bias else None


class GroupedMatmul(torch.autograd.Function):
    """F.grouped_mm: rows [r, in], those up to ends[0] by weight[0], …; weight: [E, in, out]; returns [r, out]."""

    @staticmethod
    def forward(ctx, rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, weight, ends)
        return F.grouped_mm(rows, weight, offs=ends)  # notebook 08's experts cast their weights before

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        (rows, weight, ends), gradient = ctx.saved_tensors, gradient.contiguous()
        wants_rows, wants_weight, _ = ctx.needs_input_grad
        grad_rows = F.grouped_mm(gradient, weight.transpose(-2, -1), offs=ends) if wants_rows else None
        return grad_rows, F.grouped_mm(rows.t(), gradient, offs=ends) if wants_weight else None, None


class SelectiveMatmuls(TorchFunctionMode):
    """Inside, matmuls with weights are Functions that make only the gradients that they are asked for."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is F.linear and args[0].dim() > 1:
            x, weight, bias = args if len(args) == 3 else (*args, kwargs.get("bias"))
            return Linear.apply(*as_autocast(x), weight, bias)
        if function is F.grouped_mm and kwargs.get("offs") is not None:
            return GroupedMatmul.apply(*args, kwargs["offs"])
        return function(*args, **kwargs)


class SplitPass(StagePass):
    """A StagePass whose backward is input_gradient and, any time after it, weight_gradients.

    After input_gradient, `deferred` has what is left for weight_gradients, in the same order on all ranks that run the
    same stage (it may communicate). `weights` and `proxies` belong to the stage, in one order.
    """

    def __init__(self, stage: nn.Module, x: torch.Tensor, output_fn: OutputFn, *args):
        self.deferred: list[DeferredWeightGrad] = []
        super().__init__(stage, x, output_fn, *args)

    def run(self, stage: nn.Module, *args) -> torch.Tensor:
        """Return the stage's output, computed from proxies of its weights."""
        slots = {weight: where for weight, where in parameter_slots(stage).items() if weight.requires_grad}
        self.weights, self.proxies = list(slots), [weight.detach().requires_grad_() for weight in slots]
        swap_parameters(slots.values(), self.proxies)
        try:
            with SelectiveMatmuls():
                return stage(self.x, *args)
        finally:
            swap_parameters(slots.values(), self.weights)

    def defer_weight_grads(self, root: Node) -> list[GradientEdge]:
        """Defer the weights' half of each Function in the graph of `root`. Return edges to the other leaves."""
        proxies, seen, stack, leaves = set(self.proxies), set(), [root], []
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            edges = weight_edges(node, proxies)
            if edges:
                self.deferred.append(DeferredWeightGrad(cast(BackwardCFunction, node), edges))
            if hasattr(node, "variable"):
                leaves.append(GradientEdge(node, 0))
            skipped = {(edge.node, edge.output_nr) for edge, _ in edges.values()}
            stack += [edge[0] for edge in node.next_functions if edge[0] is not None and edge not in skipped]
        return leaves

    def input_gradient(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """I: return the gradient of x [b, s, h], None for tokens; gradient: of `out`."""
        if self.edge is not None:
            leaves = self.defer_weight_grads(self.edge.node) if can_defer() else None
            with SelectiveMatmuls():  # a replayed forward saves the same tensors then
                torch.autograd.backward([self.edge], [gradient], inputs=leaves)
        self.edge = None
        grad_x, self.x.grad = self.x.grad, None
        return grad_x

    # exercise 09.12
    @torch.no_grad()
    def weight_gradients(self) -> None:
        """W: add to the weights' gradients, and fire their hooks, once for each weight.

        Run each of `self.deferred` once, and take its gradients along their edges to the proxies; then give each weight
        the gradient of its proxy, as backward would. A weight whose proxy has no gradient does not change. Afterwards
        `deferred` is empty.
        """
        weight_of, roots = dict(zip(self.proxies, self.weights, strict=True)), []
        uses = collections.Counter(proxy for deferred in self.deferred for _, proxy in deferred.edges.values())

        def hand_over(roots: list[torch.Tensor], proxies: list[torch.Tensor]) -> None:
            early = {weight_of[proxy]: proxy.grad for proxy in proxies if proxy.grad is not None}
            torch.autograd.backward([*roots, *early], [*(root.detach() for root in roots), *early.values()])
            for proxy in proxies:
                proxy.grad = None

        while self.deferred:
            deferred = self.deferred.pop()
            proxies, root = [proxy for _, proxy in deferred.edges.values()], deferred.as_root(weight_of)
            if root is None:
                deferred.to_proxies()
            else:
                roots.append(root)
            copied = root is None or not all(weight_of[proxy].is_leaf for proxy in proxies)  # else no gradient waits
            if copied and all(uses[proxy] == 1 for proxy in proxies):
                hand_over([roots.pop()] if root is not None else [], proxies)
        hand_over(roots, self.proxies)
        self.proxies, self.weights = [], []
