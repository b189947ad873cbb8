"""The weights' half of an autograd Function's backward, deferred until it is run.

To run the inputs' half alone, an `apply` is set on one node of the graph. PyTorch does not document that autograd looks
it up there, and compiled autograd does not: `can_defer` tests it, and otherwise backward runs unsplit. The way of
torch.distributed.pipelining (hooks on graph edges; the graph is kept for the second half) makes the same gradients, but
keeps all activations until W (1.7 times the peak of a ZB-H1 step), and replays a recomputed forward again for each W.
"""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

from course_lib.tensor_parallel.regions import OnceDifferentiable


class Identity(torch.autograd.Function):
    """Returns x."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


@functools.cache
def autograd_calls_replaced_apply() -> bool:
    """Return whether this version of PyTorch calls an `apply` that is set on one node of the graph."""
    called = False

    def replacement(gradient: torch.Tensor) -> torch.Tensor:
        nonlocal called
        called = True
        return gradient

    with torch.enable_grad():
        out = Identity.apply(torch.zeros(1, requires_grad=True))
    vars(out.grad_fn)["apply"] = replacement
    out.backward()
    return called


def can_defer() -> bool:
    """Return whether weight gradients can be left for W. Warns if they cannot."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    if getattr(compiled, "compiled_autograd_enabled", False):
        reason = "compiled autograd is on"
    elif not autograd_calls_replaced_apply():
        reason = f"PyTorch {torch.__version__} does not call an `apply` that is set on a node of its graph"
    else:
        return True
    warnings.warn(f"{reason}: I computes the weights' gradients too, and W only adds them to .grad", stacklevel=3)
    return False


class SavedContext:
    """The context of a Function after its graph is freed: its saved tensors, and which gradients to make."""

    def __init__(self, node: BackwardCFunction, needs_input_grad: tuple[bool, ...]):
        self.node, self.saved_tensors, self.needs_input_grad = node, node.saved_tensors, needs_input_grad

    def __getattr__(self, name: str) -> Any:
        return getattr(self.node, name)

    def backward(self, gradients: tuple) -> tuple:
        """Run the Function's own backward: return one gradient, or None, for each argument of its forward."""
        grads = type(self.node).apply(self, *gradients)  # type: ignore[arg-type]  # it needs a context's attributes
        return grads if isinstance(grads, tuple) else (grads,)


Edges = dict[int, tuple[GradientEdge, torch.Tensor]]  # by a Function's argument: the edge to a weight, and its proxy


def proxy_behind(node: Node | None, proxies: set[torch.Tensor]) -> torch.Tensor | None:
    """Return the proxy to which the graph leads from `node` on, and to nothing else (by a cast, a transpose)."""
    while node is not None and not hasattr(node, "variable"):
        following = [each for each, _ in node.next_functions if each is not None]
        node = following[0] if len(following) == 1 else None
    return node.variable if node is not None and node.variable in proxies else None


def weight_edges(node: Node, proxies: set[torch.Tensor]) -> Edges:
    """Return the edges to the weights of a Function that has weights and other inputs.

    Empty for other nodes, and for compiled ones, whose backward cannot be split.
    """
    if not isinstance(node, BackwardCFunction) or type(node).__name__ == "CompiledFunctionBackward":
        return {}
    arguments = [i for i, need in enumerate(node.needs_input_grad) if need]
    edges = [GradientEdge(following, number) for following, number in node.next_functions if following is not None]
    behind = [proxy_behind(edge.node, proxies) for edge in edges]
    to_weights = {i: (edge, leaf) for i, edge, leaf in zip(arguments, edges, behind, strict=True) if leaf is not None}
    return to_weights if len(to_weights) < len(edges) else {}


class WeightGradRoot(OnceDifferentiable):
    """A root of a graph whose backward runs a DeferredWeightGrad: autograd adds the gradients to the weights' .grad."""

    @staticmethod
    def forward(ctx, deferred: DeferredWeightGrad, *weights: torch.Tensor) -> torch.Tensor:
        ctx.deferred = deferred
        return torch.zeros((), device=weights[0].device)

    @staticmethod
    def backward(ctx, _) -> tuple:
        deferred, ctx.deferred = ctx.deferred, None  # frees its saved tensors afterwards
        grads = deferred.run()
        return None, *(grads[i] for i in deferred.edges)


class DeferredWeightGrad:
    """The half of one Function's backward that makes its weights' gradients: `run` returns them by argument.

    The constructor replaces the node's `apply` by the other half, which sets `run`.
    """

    run: Callable[[], tuple]

    def __init__(self, node: BackwardCFunction, edges: Edges):
        self.edges = edges
        inputs = tuple(need and i not in edges for i, need in enumerate(node.needs_input_grad))
        weak = weakref.ref(node)  # node and function must not keep each other alive

        def input_half(*gradients: torch.Tensor) -> tuple:
            node = weak()
            assert node is not None, "autograd runs it"
            del vars(node)["apply"]
            context = SavedContext(node, inputs)
            grads = context.backward(gradients)
            context.needs_input_grad = tuple(i in edges for i in range(len(inputs)))
            selective = all(grads[i] is None for i in edges)  # it has made no more than it was asked for
            self.run = (lambda: context.backward(gradients)) if selective else lambda: grads
            return tuple(None if i in edges else gradient for i, gradient in enumerate(grads))

        vars(node)["apply"] = input_half

    def as_root(self, weight_of: dict[torch.Tensor, nn.Parameter]) -> torch.Tensor | None:
        """Return a WeightGradRoot over the weights; None if one is cast or transposed before its use.

        weight_of: the weight of each proxy.
        """
        if any(not hasattr(edge.node, "variable") for edge, _ in self.edges.values()):
            return None
        with torch.enable_grad():
            return WeightGradRoot.apply(self, *(weight_of[proxy] for _, proxy in self.edges.values()))

    @torch.no_grad()  # as autograd runs a backward
    def to_proxies(self) -> None:
        """Add the weights' gradients to the proxies' gradients."""
        grads = self.run()
        for i, (edge, _) in self.edges.items():
            if grads[i] is not None:
                torch.autograd.backward([edge], [grads[i]], retain_graph=True)
