"""A model cut into stages by its layers, and one micro-batch in one stage: a graph that ends at the cut.

The embedding and the head count as a layer each (Llama Team 2024, The Llama 3 Herd of Models, §3.3.2). A stage is a
`Transformer` that shares the model's layers under their names in it; what it lacks is None. Tied embeddings: both
stages that have the matrix name each other in its attribute `stages`.

    forward     x arrives   -> x is a leaf -> layers -> output leaves, its graph stays
    backward    gradient of the output arrives -> backward -> x.grad leaves
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from course_lib.single_gpu.model import Transformer, need_transformer
from course_lib.single_gpu.placement import placement_of

OutputFn = Callable[[torch.Tensor], torch.Tensor]  # what is made of a stage's output: the loss, in the last stage


# exercise 09.1
def split_layers(layers: int, stages: int) -> list[range]:
    """Return the range of layers of each stage, in order. The embedding and the head count as one layer each.

    Stage sizes differ by at most one, and the larger stages are in the middle: the first stage is never larger, and the
    last stage is larger only if all stages between them are. A stage without layers has an empty range. Raises
    ValueError, with `stages` in its message, if `stages` is below 1 or above layers + 2.
    """
    if not 1 <= stages <= layers + 2:
        raise ValueError(f"{layers} layers, an embedding and a head do not fill {stages} stages")
    size, extra = divmod(layers + 2, stages)
    larger = range((stages - extra + 1) // 2, (stages + extra + 1) // 2)
    ends = list(itertools.accumulate(size + (stage in larger) for stage in range(stages)))
    return [range(max(0, first - 1), min(layers, end - 1)) for first, end in zip([0, *ends[:-1]], ends, strict=True)]


# exercise 09.2
def split_stages(model: Transformer, p: int, v: int = 1) -> list[Transformer]:
    """Return the p·v stages of a `Transformer`, in order; v: stages per rank.

    The stages share its layers, under the same names; the model, which may be on the meta device, does not change.
    Each stage has the model's hooks; hooks registered
    on a stage later are not shared. Only the first stage has an embedding, and only the last
    one norm and head: elsewhere they are None. `blocks` of a stage has gaps: iterate over it, or look a layer up by
    name. With more than one stage, a weight that is both embedding and head gets `placement_of(weight).stages`,
    (0, p·v - 1). Call it after tensor, sequence, expert and context parallelism. Raises ValueError for p or v below 1,
    and for too few layers.
    """
    if p < 1 or v < 1:
        raise ValueError(f"p = {p}, v = {v}: ranks and stages per rank must be 1 or more")
    need_transformer(model, "split_stages", "PipelineRunner takes stages of any kind that return one tensor")
    stages, last = [], p * v - 1
    for number, layers in enumerate(split_layers(len(model.blocks), p * v)):
        stage = copy.copy(model)  # shares the model's dictionaries: of hooks, of submodules
        stage.__dict__.update((key, value.copy()) for key, value in vars(model).items() if isinstance(value, dict))
        stage._modules = {}
        stage.embedding = model.embedding if number == 0 else None
        stage.blocks = nn.ModuleList()
        for i in layers:
            stage.blocks.add_module(str(i), model.blocks[i])
        stage.norm, stage.head = (model.norm, model.head) if number == last else (None, None)
        stages.append(stage)
    if last > 0 and model.head and model.embedding and model.head.weight is model.embedding.weight:
        placement_of(model.head.weight).stages = (0, last)
    return stages


class StagePass:
    """One micro-batch in one stage. x: tokens [b, s] or hidden states [b, s, h]; args: the stage's other arguments
    (positions); `out`: output_fn(stage(x, *args)) without its graph, to be sent and dropped.
    """

    out: Any  # a tensor; None once it is sent
    edge: GradientEdge | None

    # exercise 09.3
    def __init__(self, stage: nn.Module, x: torch.Tensor, output_fn: Callable, *args) -> None:
        """Run the stage on a leaf `self.x` with the values of x; its graph reaches no further back.

        x: tokens [b, s] or hidden states [b, s, h]; args: the stage's other arguments, for self.run. Sets `self.out`,
        the values of output_fn(self.run(stage, *args)) without a graph, and `self.edge`, their position in the graph
        (None if they need no gradient). A floating-point leaf requires a gradient, tokens do not.
        """
        self.x = x.detach().requires_grad_(x.is_floating_point())
        out = output_fn(self.run(stage, *args))
        self.out, self.edge = out.detach(), get_gradient_edge(out) if out.requires_grad else None

    def run(self, stage: nn.Module, *args) -> torch.Tensor:
        """Return the stage's output."""
        return stage(self.x, *args)

    # exercise 09.3
    def backward(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Add to the weights' gradients, and return the gradient of x [b, s, h], None for tokens.

        gradient: of `out`. Needs no second forward. Afterwards the pass keeps neither the graph nor x's gradient. If
        `edge` is None there is nothing to do.
        """
        if self.edge is not None:  # else everything up to here is frozen
            torch.autograd.backward([self.edge], [gradient])
        self.edge = None
        grad_x, self.x.grad = self.x.grad, None
        return grad_x
