"""Backward in two halves: the input's gradient, which the stage before waits for, and the weights', for later.

Any autograd Function whose backward makes only what `ctx.needs_input_grad` asks for is run in two halves, once for
its inputs and once for its weights: together the FLOPs of one backward. One that makes everything anyway is run once,
and its weights' gradients wait. What is no Function and is no large product either (norms, biases, embeddings;
products of batched_experts), and what torch.compile has made, belongs to the first half. Activations are freed by the
first half, but for what the second one needs: a Function's saved tensors and its gradient. While a stage runs, its
weights are stand-ins: leaves with the same values. The weights get their gradients in the second half alone, so a hook
on a weight fires once, in that half.

Full recomputation: a Function saves after it has multiplied, so the replay makes a block's last product once more,
which PyTorch's checkpoint skips otherwise. Qi et al. 2023, Zero Bubble Pipeline Parallelism, §2.
"""

from __future__ import annotations

import collections
import weakref

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge
from torch.overrides import TorchFunctionMode

from course_lib.pipeline.stages import StagePass
from course_lib.tensor_parallel.linear import as_autocast
from course_lib.tensor_parallel.regions import OnceDifferentiable
from course_lib.zero.parameters import parameter_slots


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
        """Return the gradients of x, weight and bias, each None where it is not asked for; gradient: [..., out].

        Under autocast gradient and x are BF16, and the weight is float32: products are in the gradient's dtype.
        """
        x, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        grad_x = gradient @ weight.to(gradient.dtype) if wants_x else None
        grad_weight = rows.t() @ x.flatten(0, -2) if wants_weight else None
        return grad_x, grad_weight, rows.sum(0) if wants_bias else None


class GroupedProduct(torch.autograd.Function):
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


class AskedProducts(TorchFunctionMode):
    """Inside, products with weights are Functions that make no gradient which they are not asked for."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is F.linear and args[0].dim() > 1:
            x, weight, bias = args if len(args) == 3 else (*args, kwargs.get("bias"))
            return Linear.apply(*as_autocast(x), weight, bias)
        if function is F.grouped_mm and kwargs.get("offs") is not None:
            return GroupedProduct.apply(*args, kwargs["offs"])
        return function(*args, **kwargs)


class Kept:
    """Stands for the context of a Function whose graph is gone: with its saved tensors, asked for something else."""

    def __init__(self, node, needs_input_grad: tuple[bool, ...]):
        self.node, self.saved_tensors, self.needs_input_grad = node, node.saved_tensors, needs_input_grad

    def __getattr__(self, name: str):
        return getattr(self.node, name)

    def backward(self, gradients: tuple) -> tuple:
        """The Function's own backward: one gradient, or None, for each argument of its forward."""
        found = type(self.node).apply(self, *gradients)
        return found if isinstance(found, tuple) else (found,)


def weight_behind(node, weights: set) -> torch.Tensor | None:
    """The one of `weights` to which the graph leads from `node` on, and to nothing else (by a cast, a transpose)."""
    while node is not None and not hasattr(node, "variable"):
        following = [each for each, _ in node.next_functions if each is not None]
        node = following[0] if len(following) == 1 else None
    return node.variable if node is not None and node.variable in weights else None


def weights_of(node, stand_ins: set) -> dict[int, tuple[GradientEdge, torch.Tensor]]:
    """Of a Function that has inputs and weights: by argument, the edge to each weight, and the weight's stand-in.

    Nothing for other nodes, and for compiled ones, whose backward is one piece: they are run whole.
    """
    if not isinstance(node, BackwardCFunction) or type(node).__name__ == "CompiledFunctionBackward":
        return {}
    arguments = [i for i, need in enumerate(node.needs_input_grad) if need]
    edges = [GradientEdge(*edge) for edge in node.next_functions if edge[0] is not None]
    behind = [weight_behind(edge.node, stand_ins) for edge in edges]
    found = {i: (edge, leaf) for i, edge, leaf in zip(arguments, edges, behind, strict=True) if leaf is not None}
    return found if len(found) < len(edges) else {}


class WeightHalf(OnceDifferentiable):
    """A number without a meaning. Its backward runs `later`, and autograd takes the gradients to `weights`."""

    @staticmethod
    def forward(ctx, later: Later, *weights: torch.Tensor) -> torch.Tensor:
        ctx.later = later
        return torch.zeros((), device=weights[0].device)

    @staticmethod
    def backward(ctx, _) -> tuple:
        later, ctx.later = ctx.later, None  # what it keeps is free afterwards
        found = later.run()
        return None, *(found[i] for i in later.edges)


class Later:
    """The half of one Function's backward that makes its weights' gradients: `run` returns them by argument."""

    def __init__(self, node, edges: dict[int, tuple[GradientEdge, torch.Tensor]]):
        self.edges = edges  # by argument: where its gradient goes, and the weight behind
        inputs = tuple(need and i not in edges for i, need in enumerate(node.needs_input_grad))
        weak = weakref.ref(node)  # node and function must not keep each other alive

        def first_half(*gradients):
            node = weak()
            del node.apply
            kept = Kept(node, inputs)
            found = kept.backward(gradients)
            kept.needs_input_grad = tuple(i in edges for i in range(len(inputs)))
            asked = all(found[i] is None for i in edges)  # it has made no more than it was asked for
            self.run = (lambda: kept.backward(gradients)) if asked else lambda: found
            return tuple(None if i in edges else gradient for i, gradient in enumerate(found))

        node.apply = first_half

    def half(self, weight_of: dict) -> torch.Tensor | None:
        """A WeightHalf that gives the weights their gradients; None where one is cast or transposed before its use.
        weight_of: the weight of each stand-in.
        """
        if any(not hasattr(edge.node, "variable") for edge, _ in self.edges.values()):
            return None
        with torch.enable_grad():
            return WeightHalf.apply(self, *(weight_of[stand_in] for _, stand_in in self.edges.values()))

    @torch.no_grad()  # as autograd runs a backward
    def to_stand_ins(self) -> None:
        """Add the weights' gradients to those of their stand-ins."""
        found = self.run()
        for i, (edge, _) in self.edges.items():
            if found[i] is not None:
                torch.autograd.backward([edge], [found[i]], retain_graph=True)


class SplitPass(StagePass):
    """A StagePass whose backward is input_gradient and, any time after it, weight_gradients.

    `laters` has what is left for the second half, in the same order on all ranks that run the same stage (it may
    communicate); `weights` and `stand_ins` are those of the stage, in one order.
    """

    def __init__(self, stage: nn.Module, x: torch.Tensor, finish, *more):
        self.laters, self.leaves = [], []
        super().__init__(stage, x, lambda out: self.cut(finish(out)), *more)

    def run(self, stage: nn.Module, *more) -> torch.Tensor:
        """The stage's output, from stand-ins of its weights."""
        places = {weight: where for weight, where in parameter_slots(stage).items() if weight.requires_grad}
        self.weights, self.stand_ins = list(places), [weight.detach().requires_grad_() for weight in places]
        try:
            for stand_in, where in zip(self.stand_ins, places.values(), strict=True):
                for _, owner, name in where:
                    owner._parameters[name] = stand_in
            with AskedProducts():
                return stage(self.x, *more)
        finally:
            for weight, where in places.items():
                for _, owner, name in where:
                    owner._parameters[name] = weight

    def cut(self, out: torch.Tensor) -> torch.Tensor:
        """Put off the weights' part of each Function in out's graph that has inputs and weights; note other leaves."""
        stand_ins, seen, ahead = set(self.stand_ins), set(), [out.grad_fn]
        while ahead:
            node = ahead.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            off = weights_of(node, stand_ins)
            if off:
                self.laters.append(Later(node, off))
            if hasattr(node, "variable"):
                self.leaves.append(GradientEdge(node, 0))
            put_off = {(edge.node, edge.output_nr) for edge, _ in off.values()}
            ahead += [edge[0] for edge in node.next_functions if edge not in put_off]
        return out

    def input_gradient(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """I: returns the gradient of x [b, s, h], None for tokens; gradient: of `out`."""
        if self.edge is not None:
            with AskedProducts():  # a replayed forward saves the same tensors then
                torch.autograd.backward([self.edge], [gradient], inputs=self.leaves)
        self.edge, self.leaves, self.x.grad, gradient = None, (), None, self.x.grad
        return gradient

    # exercise 09.12
    @torch.no_grad()
    def weight_gradients(self) -> None:
        """W: add to the weights' gradients, and fire their hooks, once for each weight.

        Run each of `self.laters` once, and take its gradients along their edges to the stand-ins; then give each weight
        the gradient of its stand-in, as backward would. A weight whose stand-in has none stays as it is. Afterwards
        `laters` is empty.
        """
        weight_of, halves = dict(zip(self.stand_ins, self.weights, strict=True)), []
        uses = collections.Counter(stand_in for later in self.laters for _, stand_in in later.edges.values())

        def hand_over(halves: list[torch.Tensor], stand_ins: list[torch.Tensor]) -> None:
            early = {weight_of[each]: each.grad for each in stand_ins if each.grad is not None}
            torch.autograd.backward([*halves, *early], [*(half.detach() for half in halves), *early.values()])
            for each in stand_ins:
                each.grad = None

        while self.laters:
            later = self.laters.pop()
            own, half = [stand_in for _, stand_in in later.edges.values()], later.half(weight_of)
            if half is None:
                later.to_stand_ins()
            else:
                halves.append(half)
            copied = half is None or not all(weight_of[each].is_leaf for each in own)  # gradients on their way are kept
            if copied and all(uses[each] == 1 for each in own):
                hand_over([halves.pop()] if half is not None else [], own)
        hand_over(halves, self.stand_ins)
        self.stand_ins = self.weights = ()
