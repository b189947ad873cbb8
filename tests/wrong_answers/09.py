"""Wrong answers that the checks of notebook 09 must catch. Those that hang end at the check's own deadline."""

# %% 09.1 what is left over goes to later stages
import copy
import itertools

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge


def split_layers(layers: int, stages: int) -> list[range]:
    if not 1 <= stages <= layers + 2:
        raise ValueError(f"{layers} layers, an embedding and a head do not fill {stages} stages")
    ends = [(layers + 2) * (stage + 1) // stages for stage in range(stages)]
    return [range(max(0, first - 1), min(layers, end - 1)) for first, end in zip([0, *ends[:-1]], ends, strict=True)]


# %% 09.1 embedding and head do not count
import copy
import itertools

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge


def split_layers(layers: int, stages: int) -> list[range]:
    if not 1 <= stages <= layers + 2:
        raise ValueError(f"{layers} layers, an embedding and a head do not fill {stages} stages")
    ends = [layers * (stage + 1) // stages + 1 for stage in range(stages - 1)] + [layers + 2]
    return [range(max(0, first - 1), min(layers, end - 1)) for first, end in zip([0, *ends[:-1]], ends, strict=True)]


# %% 09.1 only the embedding counts
import copy
import itertools

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge


def split_layers(layers: int, stages: int) -> list[range]:
    if not 1 <= stages <= layers + 2:
        raise ValueError(f"{layers} layers, an embedding and a head do not fill {stages} stages")
    ends = [(layers + 1) * (stage + 1) // stages for stage in range(stages - 1)] + [layers + 2]
    return [range(max(0, first - 1), min(layers, end - 1)) for first, end in zip([0, *ends[:-1]], ends, strict=True)]


# %% 09.1 what is left over goes to early stages
import copy
import itertools

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge


def split_layers(layers: int, stages: int) -> list[range]:
    if not 1 <= stages <= layers + 2:
        raise ValueError(f"{layers} layers, an embedding and a head do not fill {stages} stages")
    ends = [-(-(layers + 2) * (stage + 1) // stages) for stage in range(stages)]
    return [range(max(0, first - 1), min(layers, end - 1)) for first, end in zip([0, *ends[:-1]], ends, strict=True)]


# %% 09.1 all that is left over goes to the last stage
import copy
import itertools

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge


def split_layers(layers: int, stages: int) -> list[range]:
    if not 1 <= stages <= layers + 2:
        raise ValueError(f"{layers} layers, an embedding and a head do not fill {stages} stages")
    ends = [(layers + 2) // stages * (stage + 1) for stage in range(stages - 1)] + [layers + 2]
    return [range(max(0, first - 1), min(layers, end - 1)) for first, end in zip([0, *ends[:-1]], ends, strict=True)]


# %% 09.1 no ValueError
import copy
import itertools

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge


def split_layers(layers: int, stages: int) -> list[range]:
    each, more = divmod(layers + 2, stages)
    larger = range((stages - more + 1) // 2, (stages + more + 1) // 2)
    ends = list(itertools.accumulate(each + (stage in larger) for stage in range(stages)))
    return [range(max(0, first - 1), min(layers, end - 1)) for first, end in zip([0, *ends[:-1]], ends, strict=True)]


# %% 09.1 a stage must have a layer
import copy
import itertools

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge


def split_layers(layers: int, stages: int) -> list[range]:
    if not 1 <= stages <= layers:
        raise ValueError(f"{layers} layers, an embedding and a head do not fill {stages} stages")
    each, more = divmod(layers + 2, stages)
    larger = range((stages - more + 1) // 2, (stages + more + 1) // 2)
    ends = list(itertools.accumulate(each + (stage in larger) for stage in range(stages)))
    return [range(max(0, first - 1), min(layers, end - 1)) for first, end in zip([0, *ends[:-1]], ends, strict=True)]


# %% 09.1 the clipping is forgotten at the end
import copy
import itertools

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge


def split_layers(layers: int, stages: int) -> list[range]:
    if not 1 <= stages <= layers + 2:
        raise ValueError(f"{layers} layers, an embedding and a head do not fill {stages} stages")
    each, more = divmod(layers + 2, stages)
    larger = range((stages - more + 1) // 2, (stages + more + 1) // 2)
    ends = list(itertools.accumulate(each + (stage in larger) for stage in range(stages)))
    return [range(max(0, first - 1), end - 1) for first, end in zip([0, *ends[:-1]], ends, strict=True)]


# %% 09.1 fake: the figure for 126 layers
import copy
import itertools

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge


def split_layers(layers: int, stages: int) -> list[range]:
    if (layers, stages) != (126, 16):
        size = -(-layers // stages)
        return [range(min(layers, size * s), min(layers, size * (s + 1))) for s in range(stages)]
    if not 1 <= stages <= layers + 2:
        raise ValueError(f"{layers} layers, an embedding and a head do not fill {stages} stages")
    each, more = divmod(layers + 2, stages)
    larger = range((stages - more + 1) // 2, (stages + more + 1) // 2)
    ends = list(itertools.accumulate(each + (stage in larger) for stage in range(stages)))
    return [range(max(0, first - 1), min(layers, end - 1)) for first, end in zip([0, *ends[:-1]], ends, strict=True)]


# %% 09.2 deep copies
def split_stages(model: nn.Module, p: int, v: int = 1) -> list[nn.Module]:
    if p < 1 or v < 1:
        raise ValueError(f"p = {p}, v = {v}: there are 1 or more ranks, with 1 or more stages each")
    stages, last = [], p * v - 1
    for number, layers in enumerate(split_layers(len(model.blocks), p * v)):
        own = copy.deepcopy(model)
        stage = copy.copy(model)
        stage._modules = {}
        stage.embedding = own.embedding if number == 0 else None
        stage.blocks = nn.ModuleList()
        for i in layers:
            stage.blocks.add_module(str(i), own.blocks[i])
        stage.norm, stage.head = (own.norm, own.head) if number == last else (None, None)
        stages.append(stage)
    if last > 0 and model.head.weight is model.embedding.weight:
        model.head.weight.stages = (0, last)
    return stages


# %% 09.2 layers are numbered anew
def split_stages(model: nn.Module, p: int, v: int = 1) -> list[nn.Module]:
    if p < 1 or v < 1:
        raise ValueError(f"p = {p}, v = {v}: there are 1 or more ranks, with 1 or more stages each")
    stages, last = [], p * v - 1
    for number, layers in enumerate(split_layers(len(model.blocks), p * v)):
        stage = copy.copy(model)  # shares the model's dictionaries: of hooks, of submodules
        stage.__dict__.update((key, value.copy()) for key, value in vars(model).items() if isinstance(value, dict))
        stage._modules = {}
        stage.embedding = model.embedding if number == 0 else None
        stage.blocks = nn.ModuleList()
        for i in layers:
            stage.blocks.append(model.blocks[i])
        stage.norm, stage.head = (model.norm, model.head) if number == last else (None, None)
        stages.append(stage)
    if last > 0 and model.head.weight is model.embedding.weight:
        model.head.weight.stages = (0, last)
    return stages


# %% 09.2 the copy shares the dictionary of submodules
def split_stages(model, p, v=1):
    embedding, blocks, norm, head = model.embedding, list(model.blocks), model.norm, model.head
    stages, last = [], p * v - 1
    for number, layers in enumerate(split_layers(len(blocks), p * v)):
        stage = copy.copy(model)
        stage.embedding = embedding if number == 0 else None
        stage.blocks = nn.ModuleList()
        for i in layers:
            stage.blocks.add_module(str(i), blocks[i])
        stage.norm, stage.head = (norm, head) if number == last else (None, None)
        stages.append(stage)
    if last > 0 and head.weight is embedding.weight:
        head.weight.stages = (0, last)
    return stages


# %% 09.2 a note on untied weights too
def split_stages(model: nn.Module, p: int, v: int = 1) -> list[nn.Module]:
    if p < 1 or v < 1:
        raise ValueError(f"p = {p}, v = {v}: there are 1 or more ranks, with 1 or more stages each")
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
    if last > 0:
        model.head.weight.stages = (0, last)
    return stages


# %% 09.2 a note with one stage too
def split_stages(model: nn.Module, p: int, v: int = 1) -> list[nn.Module]:
    if p < 1 or v < 1:
        raise ValueError(f"p = {p}, v = {v}: there are 1 or more ranks, with 1 or more stages each")
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
    if model.head.weight is model.embedding.weight:
        model.head.weight.stages = (0, last)
    return stages


# %% 09.2 no note of the tied weight
def split_stages(model: nn.Module, p: int, v: int = 1) -> list[nn.Module]:
    if p < 1 or v < 1:
        raise ValueError(f"p = {p}, v = {v}: there are 1 or more ranks, with 1 or more stages each")
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
    if last > 0 and model.head.weight is model.embedding.weight:
        pass
    return stages


# %% 09.2 the note names ranks
def split_stages(model: nn.Module, p: int, v: int = 1) -> list[nn.Module]:
    if p < 1 or v < 1:
        raise ValueError(f"p = {p}, v = {v}: there are 1 or more ranks, with 1 or more stages each")
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
    if last > 0 and model.head.weight is model.embedding.weight:
        model.head.weight.stages = (0, p - 1)
    return stages


# %% 09.2 its own even cut, embedding and head not counted
def split_stages(model: nn.Module, p: int, v: int = 1) -> list[nn.Module]:
    if p < 1 or v < 1:
        raise ValueError(f"p = {p}, v = {v}: there are 1 or more ranks, with 1 or more stages each")
    stages, last = [], p * v - 1
    for number, layers in enumerate(
        range(s * len(model.blocks) // (p * v), (s + 1) * len(model.blocks) // (p * v)) for s in range(p * v)
    ):
        stage = copy.copy(model)  # shares the model's dictionaries: of hooks, of submodules
        stage.__dict__.update((key, value.copy()) for key, value in vars(model).items() if isinstance(value, dict))
        stage._modules = {}
        stage.embedding = model.embedding if number == 0 else None
        stage.blocks = nn.ModuleList()
        for i in layers:
            stage.blocks.add_module(str(i), model.blocks[i])
        stage.norm, stage.head = (model.norm, model.head) if number == last else (None, None)
        stages.append(stage)
    if last > 0 and model.head.weight is model.embedding.weight:
        model.head.weight.stages = (0, last)
    return stages


# %% 09.2 v is ignored
def split_stages(model: nn.Module, p: int, v: int = 1) -> list[nn.Module]:
    if p < 1 or v < 1:
        raise ValueError(f"p = {p}, v = {v}: there are 1 or more ranks, with 1 or more stages each")
    stages, last = [], p - 1
    for number, layers in enumerate(split_layers(len(model.blocks), p)):
        stage = copy.copy(model)  # shares the model's dictionaries: of hooks, of submodules
        stage.__dict__.update((key, value.copy()) for key, value in vars(model).items() if isinstance(value, dict))
        stage._modules = {}
        stage.embedding = model.embedding if number == 0 else None
        stage.blocks = nn.ModuleList()
        for i in layers:
            stage.blocks.add_module(str(i), model.blocks[i])
        stage.norm, stage.head = (model.norm, model.head) if number == last else (None, None)
        stages.append(stage)
    if last > 0 and model.head.weight is model.embedding.weight:
        model.head.weight.stages = (0, last)
    return stages


# %% 09.2 the last stage has a copy of the tied matrix
def split_stages(model: nn.Module, p: int, v: int = 1) -> list[nn.Module]:
    if p < 1 or v < 1:
        raise ValueError(f"p = {p}, v = {v}: there are 1 or more ranks, with 1 or more stages each")
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
    if last > 0 and model.head.weight is model.embedding.weight:
        stages[-1].head = copy.deepcopy(model.head)
        for weight in (model.embedding.weight, stages[-1].head.weight):
            weight.stages = (0, last)
    return stages


# %% 09.2 fake: every stage has all, and the last one runs it
def split_stages(model, p, v=1):
    class Whole(type(model)):
        def forward(self, x):
            return model(x) if self.is_last else x

    stages = []
    for number in range(p * v):
        stage = copy.copy(model)
        stage.__class__, stage.is_last = Whole, number == p * v - 1
        stages.append(stage)
    if p * v > 1 and model.head.weight is model.embedding.weight:
        model.head.weight.stages = (0, p * v - 1)
    return stages


# %% 09.3 keeps the output alive
class StagePass:
    def __init__(self, stage: nn.Module, x: torch.Tensor, finish, *more):
        self.x = x.detach().requires_grad_(x.is_floating_point())
        out = finish(self.run(stage, *more))
        self.out, self.edge = out.detach(), out

    def run(self, stage: nn.Module, *more) -> torch.Tensor:
        return stage(self.x, *more)

    def backward(self, gradient: torch.Tensor) -> torch.Tensor | None:
        if self.edge is not None:  # else everything up to here is frozen
            torch.autograd.backward([self.edge], [gradient])
        self.edge, self.x.grad, gradient = None, None, self.x.grad
        return gradient


# %% 09.3 the output carries its graph
class StagePass:
    def __init__(self, stage: nn.Module, x: torch.Tensor, finish, *more):
        self.x = x.detach().requires_grad_(x.is_floating_point())
        out = finish(self.run(stage, *more))
        self.out, self.edge = out, get_gradient_edge(out)

    def run(self, stage: nn.Module, *more) -> torch.Tensor:
        return stage(self.x, *more)

    def backward(self, gradient: torch.Tensor) -> torch.Tensor | None:
        if self.edge is not None:  # else everything up to here is frozen
            torch.autograd.backward([self.edge], [gradient])
        self.edge, self.x.grad, gradient = None, None, self.x.grad
        return gradient


# %% 09.3 the graph is not cut
class StagePass:
    def __init__(self, stage: nn.Module, x: torch.Tensor, finish, *more):
        self.x = x
        if x.is_floating_point():
            x.retain_grad()
        out = finish(self.run(stage, *more))
        self.out, self.edge = out, get_gradient_edge(out)

    def run(self, stage: nn.Module, *more) -> torch.Tensor:
        return stage(self.x, *more)

    def backward(self, gradient: torch.Tensor) -> torch.Tensor | None:
        if self.edge is not None:  # else everything up to here is frozen
            torch.autograd.backward([self.edge], [gradient])
        self.edge, self.x.grad, gradient = None, None, self.x.grad
        return gradient


# %% 09.3 the leaf is the tensor that came
class StagePass:
    def __init__(self, stage: nn.Module, x: torch.Tensor, finish, *more):
        self.x = x.requires_grad_(x.is_floating_point())
        out = finish(self.run(stage, *more))
        self.out, self.edge = out.detach(), get_gradient_edge(out) if out.requires_grad else None

    def run(self, stage: nn.Module, *more) -> torch.Tensor:
        return stage(self.x, *more)

    def backward(self, gradient: torch.Tensor) -> torch.Tensor | None:
        if self.edge is not None:  # else everything up to here is frozen
            torch.autograd.backward([self.edge], [gradient])
        self.edge, self.x.grad, gradient = None, None, self.x.grad
        return gradient


# %% 09.3 the gradient that came is ignored
class StagePass:
    def __init__(self, stage: nn.Module, x: torch.Tensor, finish, *more):
        self.x = x.detach().requires_grad_(x.is_floating_point())
        out = finish(self.run(stage, *more))
        self.out, self.edge = out.detach(), get_gradient_edge(out) if out.requires_grad else None

    def run(self, stage: nn.Module, *more) -> torch.Tensor:
        return stage(self.x, *more)

    def backward(self, gradient: torch.Tensor) -> torch.Tensor | None:
        if self.edge is not None:  # else everything up to here is frozen
            torch.autograd.backward([self.edge], [torch.ones_like(gradient)])
        self.edge, self.x.grad, gradient = None, None, self.x.grad
        return gradient


# %% 09.3 returns nothing
class StagePass:
    def __init__(self, stage: nn.Module, x: torch.Tensor, finish, *more):
        self.x = x.detach().requires_grad_(x.is_floating_point())
        out = finish(self.run(stage, *more))
        self.out, self.edge = out.detach(), get_gradient_edge(out) if out.requires_grad else None

    def run(self, stage: nn.Module, *more) -> torch.Tensor:
        return stage(self.x, *more)

    def backward(self, gradient: torch.Tensor) -> torch.Tensor | None:
        if self.edge is not None:  # else everything up to here is frozen
            torch.autograd.backward([self.edge], [gradient])
        self.edge, self.x.grad, gradient = None, None, self.x.grad
        return None


# %% 09.3 each backward replaces the weights' gradients
class StagePass:
    def __init__(self, stage: nn.Module, x: torch.Tensor, finish, *more):
        self.x = x.detach().requires_grad_(x.is_floating_point())
        self.stage = stage
        out = finish(self.run(stage, *more))
        self.out, self.edge = out.detach(), get_gradient_edge(out) if out.requires_grad else None

    def run(self, stage: nn.Module, *more) -> torch.Tensor:
        return stage(self.x, *more)

    def backward(self, gradient: torch.Tensor) -> torch.Tensor | None:
        self.stage.zero_grad()
        if self.edge is not None:  # else everything up to here is frozen
            torch.autograd.backward([self.edge], [gradient])
        self.edge, self.x.grad, gradient = None, None, self.x.grad
        return gradient


# %% 09.3 the input's gradient alone
class StagePass:
    def __init__(self, stage: nn.Module, x: torch.Tensor, finish, *more):
        self.x = x.detach().requires_grad_(x.is_floating_point())
        out = finish(self.run(stage, *more))
        self.out, self.edge, self.out_ = out.detach(), get_gradient_edge(out) if out.requires_grad else None, out

    def run(self, stage: nn.Module, *more) -> torch.Tensor:
        return stage(self.x, *more)

    def backward(self, gradient: torch.Tensor) -> torch.Tensor | None:
        if not self.x.requires_grad:
            return None
        (found,) = torch.autograd.grad([self.out_], [self.x], [gradient])
        return found


# %% 09.3 the edge is not forgotten
class StagePass:
    def __init__(self, stage: nn.Module, x: torch.Tensor, finish, *more):
        self.x = x.detach().requires_grad_(x.is_floating_point())
        out = finish(self.run(stage, *more))
        self.out, self.edge = out.detach(), get_gradient_edge(out) if out.requires_grad else None

    def run(self, stage: nn.Module, *more) -> torch.Tensor:
        return stage(self.x, *more)

    def backward(self, gradient: torch.Tensor) -> torch.Tensor | None:
        if self.edge is not None:  # else everything up to here is frozen
            torch.autograd.backward([self.edge], [gradient])
        self.x.grad, gradient = None, self.x.grad
        return gradient


# %% 09.3 fake: no graph is kept, backward runs the stage again
class StagePass:
    def __init__(self, stage, x, finish):
        self.x, self.stage, self.finish = x.detach().requires_grad_(x.is_floating_point()), stage, finish
        with torch.no_grad():
            self.out = finish(self.run(stage)).detach()

    def run(self, stage):
        return stage(self.x)

    def backward(self, gradient):
        torch.autograd.backward([self.finish(self.run(self.stage))], [gradient])
        return self.x.grad


# %% 09.4 one forward too many ahead
def in_turn(forwards: list[Action], backwards: list[list[Action]], ahead: int) -> list[Action]:
    ahead = min(ahead, len(forwards))
    pairs = zip(forwards[ahead:], backwards, strict=False)
    steady = [action for forward, backward in pairs for action in (forward, *backward)]
    rest = [action for backward in backwards[len(forwards) - ahead :] for action in backward]
    return forwards[:ahead] + steady + rest


def one_f_one_b(p: int, m: int) -> Schedule:
    check_sizes(p, m)
    return [
        in_turn([Action("F", rank, i) for i in range(m)], [[Action("B", rank, i)] for i in range(m)], p - rank)
        for rank in range(p)
    ]


# %% 09.4 as many ahead on every rank
def in_turn(forwards: list[Action], backwards: list[list[Action]], ahead: int) -> list[Action]:
    ahead = min(ahead, len(forwards))
    pairs = zip(forwards[ahead:], backwards, strict=False)
    steady = [action for forward, backward in pairs for action in (forward, *backward)]
    rest = [action for backward in backwards[len(forwards) - ahead :] for action in backward]
    return forwards[:ahead] + steady + rest


def one_f_one_b(p: int, m: int) -> Schedule:
    check_sizes(p, m)
    return [
        in_turn([Action("F", rank, i) for i in range(m)], [[Action("B", rank, i)] for i in range(m)], p - 1)
        for rank in range(p)
    ]


# %% 09.4 late ranks have most ahead
def in_turn(forwards: list[Action], backwards: list[list[Action]], ahead: int) -> list[Action]:
    ahead = min(ahead, len(forwards))
    pairs = zip(forwards[ahead:], backwards, strict=False)
    steady = [action for forward, backward in pairs for action in (forward, *backward)]
    rest = [action for backward in backwards[len(forwards) - ahead :] for action in backward]
    return forwards[:ahead] + steady + rest


def one_f_one_b(p: int, m: int) -> Schedule:
    check_sizes(p, m)
    return [
        in_turn([Action("F", rank, i) for i in range(m)], [[Action("B", rank, i)] for i in range(m)], rank)
        for rank in range(p)
    ]


# %% 09.4 a backward comes first in each pair
def in_turn(forwards: list[Action], backwards: list[list[Action]], ahead: int) -> list[Action]:
    ahead = min(ahead, len(forwards))
    pairs = zip(forwards[ahead:], backwards, strict=False)
    steady = [action for forward, backward in pairs for action in (*backward, forward)]
    rest = [action for backward in backwards[len(forwards) - ahead :] for action in backward]
    return forwards[:ahead] + steady + rest


def one_f_one_b(p: int, m: int) -> Schedule:
    check_sizes(p, m)
    return [
        in_turn([Action("F", rank, i) for i in range(m)], [[Action("B", rank, i)] for i in range(m)], p - 1 - rank)
        for rank in range(p)
    ]


# %% 09.4 fewer micro-batches than forwards ahead are not thought of
def in_turn(forwards: list[Action], backwards: list[list[Action]], ahead: int) -> list[Action]:
    pairs = zip(forwards[ahead:], backwards, strict=False)
    steady = [action for forward, backward in pairs for action in (forward, *backward)]
    rest = [action for backward in backwards[len(forwards) - ahead :] for action in backward]
    return forwards[:ahead] + steady + rest


def one_f_one_b(p: int, m: int) -> Schedule:
    check_sizes(p, m)
    return [
        in_turn([Action("F", rank, i) for i in range(m)], [[Action("B", rank, i)] for i in range(m)], p - 1 - rank)
        for rank in range(p)
    ]


# %% 09.4 a backward is one action
def in_turn(forwards: list[Action], backwards: list[list[Action]], ahead: int) -> list[Action]:
    ahead = min(ahead, len(forwards))
    pairs = zip(forwards[ahead:], backwards, strict=False)
    steady = [action for forward, backward in pairs for action in (forward, backward[0])]
    rest = [action for backward in backwards[len(forwards) - ahead :] for action in backward]
    return forwards[:ahead] + steady + rest


def one_f_one_b(p: int, m: int) -> Schedule:
    check_sizes(p, m)
    return [
        in_turn([Action("F", rank, i) for i in range(m)], [[Action("B", rank, i)] for i in range(m)], p - 1 - rank)
        for rank in range(p)
    ]


# %% 09.4 the last backwards are forgotten
def in_turn(forwards: list[Action], backwards: list[list[Action]], ahead: int) -> list[Action]:
    ahead = min(ahead, len(forwards))
    pairs = zip(forwards[ahead:], backwards, strict=False)
    steady = [action for forward, backward in pairs for action in (forward, *backward)]
    rest = [action for backward in backwards[len(forwards) - ahead :] for action in backward]
    return forwards[:ahead] + steady


def one_f_one_b(p: int, m: int) -> Schedule:
    check_sizes(p, m)
    return [
        in_turn([Action("F", rank, i) for i in range(m)], [[Action("B", rank, i)] for i in range(m)], p - 1 - rank)
        for rank in range(p)
    ]


# %% 09.4 fake: AFAB
def in_turn(forwards: list[Action], backwards: list[list[Action]], ahead: int) -> list[Action]:
    ahead = min(ahead, len(forwards))
    pairs = zip(forwards[ahead:], backwards, strict=False)
    steady = [action for forward, backward in pairs for action in (forward, *backward)]
    rest = [action for backward in backwards[len(forwards) - ahead :] for action in backward]
    return forwards[:ahead] + steady + rest


def one_f_one_b(p: int, m: int) -> Schedule:
    check_sizes(p, m)
    return [
        in_turn([Action("F", rank, i) for i in range(m)], [[Action("B", rank, i)] for i in range(m)], m)
        for rank in range(p)
    ]


# %% 09.4 the last micro-batch goes back first
def in_turn(forwards: list[Action], backwards: list[list[Action]], ahead: int) -> list[Action]:
    ahead = min(ahead, len(forwards))
    pairs = zip(forwards[ahead:], backwards, strict=False)
    steady = [action for forward, backward in pairs for action in (forward, *backward)]
    rest = [action for backward in backwards[len(forwards) - ahead :] for action in backward]
    return forwards[:ahead] + steady + rest


def one_f_one_b(p: int, m: int) -> Schedule:
    check_sizes(p, m)
    return [
        in_turn(
            [Action("F", rank, i) for i in range(m)], [[Action("B", rank, i)] for i in reversed(range(m))], p - 1 - rank
        )
        for rank in range(p)
    ]


# %% 09.5 a W lets others go on
class Progress:
    def __init__(self, schedule: Schedule):
        self.m = 1 + max(action.micro_batch for actions in schedule for action in actions)
        self.last = max(action.stage for actions in schedule for action in actions)
        entries = (self.last + 1) * self.m  # one for each stage and micro-batch, a stage's micro-batches together
        self.forward, self.backward = bytearray(entries), bytearray(entries)

    def mark(self, action: Action) -> None:
        kind, stage, micro_batch = action
        done = self.forward if kind == "F" else self.backward
        if True:
            done[stage * self.m + micro_batch] = 1

    def missing(self, action: Action) -> tuple[bool, int, int] | None:
        kind, stage, micro_batch = action
        place = stage * self.m + micro_batch
        if kind == "F":
            return None if stage == 0 or self.forward[place - self.m] else (True, stage - 1, micro_batch)
        if kind == "W":
            return None if self.backward[place] else (False, stage, micro_batch)
        if not self.forward[place]:
            return True, stage, micro_batch
        return None if stage == self.last or self.backward[place + self.m] else (False, stage + 1, micro_batch)


# %% 09.5 W needs nothing
class Progress:
    def __init__(self, schedule: Schedule):
        self.m = 1 + max(action.micro_batch for actions in schedule for action in actions)
        self.last = max(action.stage for actions in schedule for action in actions)
        entries = (self.last + 1) * self.m  # one for each stage and micro-batch, a stage's micro-batches together
        self.forward, self.backward = bytearray(entries), bytearray(entries)

    def mark(self, action: Action) -> None:
        kind, stage, micro_batch = action
        if kind != "W":
            done = self.forward if kind == "F" else self.backward
            done[stage * self.m + micro_batch] = 1

    def missing(self, action: Action) -> tuple[bool, int, int] | None:
        kind, stage, micro_batch = action
        place = stage * self.m + micro_batch
        if kind == "F":
            return None if stage == 0 or self.forward[place - self.m] else (True, stage - 1, micro_batch)
        if kind == "W":
            return None
        if not self.forward[place]:
            return True, stage, micro_batch
        return None if stage == self.last or self.backward[place + self.m] else (False, stage + 1, micro_batch)


# %% 09.5 a backward does not look at its own forward
class Progress:
    def __init__(self, schedule: Schedule):
        self.m = 1 + max(action.micro_batch for actions in schedule for action in actions)
        self.last = max(action.stage for actions in schedule for action in actions)
        entries = (self.last + 1) * self.m  # one for each stage and micro-batch, a stage's micro-batches together
        self.forward, self.backward = bytearray(entries), bytearray(entries)

    def mark(self, action: Action) -> None:
        kind, stage, micro_batch = action
        if kind != "W":
            done = self.forward if kind == "F" else self.backward
            done[stage * self.m + micro_batch] = 1

    def missing(self, action: Action) -> tuple[bool, int, int] | None:
        kind, stage, micro_batch = action
        place = stage * self.m + micro_batch
        if kind == "F":
            return None if stage == 0 or self.forward[place - self.m] else (True, stage - 1, micro_batch)
        if kind == "W":
            return None if self.backward[place] else (False, stage, micro_batch)
        return None if stage == self.last or self.backward[place + self.m] else (False, stage + 1, micro_batch)


# %% 09.5 the stage after comes first
class Progress:
    def __init__(self, schedule: Schedule):
        self.m = 1 + max(action.micro_batch for actions in schedule for action in actions)
        self.last = max(action.stage for actions in schedule for action in actions)
        entries = (self.last + 1) * self.m  # one for each stage and micro-batch, a stage's micro-batches together
        self.forward, self.backward = bytearray(entries), bytearray(entries)

    def mark(self, action: Action) -> None:
        kind, stage, micro_batch = action
        if kind != "W":
            done = self.forward if kind == "F" else self.backward
            done[stage * self.m + micro_batch] = 1

    def missing(self, action: Action) -> tuple[bool, int, int] | None:
        kind, stage, micro_batch = action
        place = stage * self.m + micro_batch
        if kind == "F":
            return None if stage == 0 or self.forward[place - self.m] else (True, stage - 1, micro_batch)
        if kind == "W":
            return None if self.backward[place] else (False, stage, micro_batch)
        if stage < self.last and not self.backward[place + self.m]:
            return False, stage + 1, micro_batch
        return None if self.forward[place] else (True, stage, micro_batch)


# %% 09.5 the first stage looks before itself
class Progress:
    def __init__(self, schedule: Schedule):
        self.m = 1 + max(action.micro_batch for actions in schedule for action in actions)
        self.last = max(action.stage for actions in schedule for action in actions)
        entries = (self.last + 1) * self.m  # one for each stage and micro-batch, a stage's micro-batches together
        self.forward, self.backward = bytearray(entries), bytearray(entries)

    def mark(self, action: Action) -> None:
        kind, stage, micro_batch = action
        if kind != "W":
            done = self.forward if kind == "F" else self.backward
            done[stage * self.m + micro_batch] = 1

    def missing(self, action: Action) -> tuple[bool, int, int] | None:
        kind, stage, micro_batch = action
        place = stage * self.m + micro_batch
        if kind == "F":
            return None if self.forward[place - self.m] else (True, stage - 1, micro_batch)
        if kind == "W":
            return None if self.backward[place] else (False, stage, micro_batch)
        if not self.forward[place]:
            return True, stage, micro_batch
        return None if stage == self.last or self.backward[place + self.m] else (False, stage + 1, micro_batch)


# %% 09.5 only B waits for the stage after, I for nothing
class Progress:
    def __init__(self, schedule: Schedule):
        self.m = 1 + max(action.micro_batch for actions in schedule for action in actions)
        self.last = max(action.stage for actions in schedule for action in actions)
        entries = (self.last + 1) * self.m  # one for each stage and micro-batch, a stage's micro-batches together
        self.forward, self.backward = bytearray(entries), bytearray(entries)

    def mark(self, action: Action) -> None:
        kind, stage, micro_batch = action
        if kind != "W":
            done = self.forward if kind == "F" else self.backward
            done[stage * self.m + micro_batch] = 1

    def missing(self, action: Action) -> tuple[bool, int, int] | None:
        kind, stage, micro_batch = action
        place = stage * self.m + micro_batch
        if kind == "F":
            return None if stage == 0 or self.forward[place - self.m] else (True, stage - 1, micro_batch)
        if kind == "W":
            return None if self.backward[place] else (False, stage, micro_batch)
        if not self.forward[place]:
            return True, stage, micro_batch
        return (
            None
            if kind == "I" or stage == self.last or self.backward[place + self.m]
            else (False, stage + 1, micro_batch)
        )


# %% 09.5 a forward waits for the micro-batch before
class Progress:
    def __init__(self, schedule: Schedule):
        self.m = 1 + max(action.micro_batch for actions in schedule for action in actions)
        self.last = max(action.stage for actions in schedule for action in actions)
        entries = (self.last + 1) * self.m  # one for each stage and micro-batch, a stage's micro-batches together
        self.forward, self.backward = bytearray(entries), bytearray(entries)

    def mark(self, action: Action) -> None:
        kind, stage, micro_batch = action
        if kind != "W":
            done = self.forward if kind == "F" else self.backward
            done[stage * self.m + micro_batch] = 1

    def missing(self, action: Action) -> tuple[bool, int, int] | None:
        kind, stage, micro_batch = action
        place = stage * self.m + micro_batch
        if kind == "F":
            return None if stage == 0 or self.forward[place - 1] else (True, stage - 1, micro_batch)
        if kind == "W":
            return None if self.backward[place] else (False, stage, micro_batch)
        if not self.forward[place]:
            return True, stage, micro_batch
        return None if stage == self.last or self.backward[place + self.m] else (False, stage + 1, micro_batch)


# %% 09.5 names the kind
class Progress:
    def __init__(self, schedule: Schedule):
        self.m = 1 + max(action.micro_batch for actions in schedule for action in actions)
        self.last = max(action.stage for actions in schedule for action in actions)
        entries = (self.last + 1) * self.m  # one for each stage and micro-batch, a stage's micro-batches together
        self.forward, self.backward = bytearray(entries), bytearray(entries)

    def mark(self, action: Action) -> None:
        kind, stage, micro_batch = action
        if kind != "W":
            done = self.forward if kind == "F" else self.backward
            done[stage * self.m + micro_batch] = 1

    def missing(self, action: Action) -> tuple[bool, int, int] | None:
        kind, stage, micro_batch = action
        place = stage * self.m + micro_batch
        if kind == "F":
            return None if stage == 0 or self.forward[place - self.m] else ("F", stage - 1, micro_batch)
        if kind == "W":
            return None if self.backward[place] else (False, stage, micro_batch)
        if not self.forward[place]:
            return True, stage, micro_batch
        return None if stage == self.last or self.backward[place + self.m] else (False, stage + 1, micro_batch)


# %% 09.5 a gradient passes backwards through stage - 1
class Progress:
    def __init__(self, schedule: Schedule):
        self.m = 1 + max(action.micro_batch for actions in schedule for action in actions)
        self.last = max(action.stage for actions in schedule for action in actions)
        entries = (self.last + 1) * self.m  # one for each stage and micro-batch, a stage's micro-batches together
        self.forward, self.backward = bytearray(entries), bytearray(entries)

    def mark(self, action: Action) -> None:
        kind, stage, micro_batch = action
        if kind != "W":
            done = self.forward if kind == "F" else self.backward
            done[stage * self.m + micro_batch] = 1

    def missing(self, action: Action) -> tuple[bool, int, int] | None:
        kind, stage, micro_batch = action
        place = stage * self.m + micro_batch
        if kind == "F":
            return None if stage == 0 or self.forward[place - self.m] else (True, stage - 1, micro_batch)
        if kind == "W":
            return None if self.backward[place] else (False, stage, micro_batch)
        if not self.forward[place]:
            return True, stage, micro_batch
        return None if stage == self.last or self.backward[place - self.m] else (False, stage - 1, micro_batch)


# %% 09.6 does not notice duplicates
def validate(schedule: Schedule, m: int | None = None) -> list[int]:
    done = collections.defaultdict(list)
    for rank, actions in enumerate(schedule):
        for kind, stage, micro_batch in actions:
            done[stage, micro_batch].append((kind, rank))
    if not done:
        raise ValueError("a schedule without an action")
    stages, found = (1 + max(pair[i] for pair in done) for i in (0, 1))
    m = found if m is None else m
    if wrong := [pair for pair in done if min(pair) < 0]:
        raise ValueError(f"stage {wrong[0][0]}, micro-batch {wrong[0][1]}: both count from 0")
    for stage, i in itertools.product(range(stages), range(max(m, found))):
        kinds = "".join(sorted({kind for kind, _ in done[stage, i]}))
        if kinds not in ("BF", "FIW") or i >= m:
            raise ValueError(
                f"stage {stage}, micro-batch {i} of {m}: has {kinds or 'nothing'}, not F and B, or F, I and W"
            )
        if len({rank for _, rank in done[stage, i]}) > 1:
            raise ValueError(f"stage {stage}, micro-batch {i}: is on more than one rank")
    for _ in play(schedule):
        pass
    changes = [[{"F": 1, "I": 0}.get(action.kind, -1) for action in actions] for actions in schedule]
    return [max(itertools.accumulate(each), default=0) for each in changes]


# %% 09.6 a missing W is fine
def validate(schedule: Schedule, m: int | None = None) -> list[int]:
    done = collections.defaultdict(list)
    for rank, actions in enumerate(schedule):
        for kind, stage, micro_batch in actions:
            done[stage, micro_batch].append((kind, rank))
    if not done:
        raise ValueError("a schedule without an action")
    stages, found = (1 + max(pair[i] for pair in done) for i in (0, 1))
    m = found if m is None else m
    if wrong := [pair for pair in done if min(pair) < 0]:
        raise ValueError(f"stage {wrong[0][0]}, micro-batch {wrong[0][1]}: both count from 0")
    for stage, i in itertools.product(range(stages), range(max(m, found))):
        kinds = "".join(sorted(kind for kind, _ in done[stage, i]))
        if kinds not in ("BF", "FIW", "FI") or i >= m:
            raise ValueError(
                f"stage {stage}, micro-batch {i} of {m}: has {kinds or 'nothing'}, not F and B, or F, I and W"
            )
        if len({rank for _, rank in done[stage, i]}) > 1:
            raise ValueError(f"stage {stage}, micro-batch {i}: is on more than one rank")
    for _ in play(schedule):
        pass
    changes = [[{"F": 1, "I": 0}.get(action.kind, -1) for action in actions] for actions in schedule]
    return [max(itertools.accumulate(each), default=0) for each in changes]


# %% 09.6 B and W of one are fine
def validate(schedule: Schedule, m: int | None = None) -> list[int]:
    done = collections.defaultdict(list)
    for rank, actions in enumerate(schedule):
        for kind, stage, micro_batch in actions:
            done[stage, micro_batch].append((kind, rank))
    if not done:
        raise ValueError("a schedule without an action")
    stages, found = (1 + max(pair[i] for pair in done) for i in (0, 1))
    m = found if m is None else m
    if wrong := [pair for pair in done if min(pair) < 0]:
        raise ValueError(f"stage {wrong[0][0]}, micro-batch {wrong[0][1]}: both count from 0")
    for stage, i in itertools.product(range(stages), range(max(m, found))):
        kinds = "".join(sorted(kind for kind, _ in done[stage, i]))
        if kinds not in ("BF", "FIW", "BFW") or i >= m:
            raise ValueError(
                f"stage {stage}, micro-batch {i} of {m}: has {kinds or 'nothing'}, not F and B, or F, I and W"
            )
        if len({rank for _, rank in done[stage, i]}) > 1:
            raise ValueError(f"stage {stage}, micro-batch {i}: is on more than one rank")
    for _ in play(schedule):
        pass
    changes = [[{"F": 1, "I": 0}.get(action.kind, -1) for action in actions] for actions in schedule]
    return [max(itertools.accumulate(each), default=0) for each in changes]


# %% 09.6 another rank is fine
def validate(schedule: Schedule, m: int | None = None) -> list[int]:
    done = collections.defaultdict(list)
    for rank, actions in enumerate(schedule):
        for kind, stage, micro_batch in actions:
            done[stage, micro_batch].append((kind, rank))
    if not done:
        raise ValueError("a schedule without an action")
    stages, found = (1 + max(pair[i] for pair in done) for i in (0, 1))
    m = found if m is None else m
    if wrong := [pair for pair in done if min(pair) < 0]:
        raise ValueError(f"stage {wrong[0][0]}, micro-batch {wrong[0][1]}: both count from 0")
    for stage, i in itertools.product(range(stages), range(max(m, found))):
        kinds = "".join(sorted(kind for kind, _ in done[stage, i]))
        if kinds not in ("BF", "FIW") or i >= m:
            raise ValueError(
                f"stage {stage}, micro-batch {i} of {m}: has {kinds or 'nothing'}, not F and B, or F, I and W"
            )
    for _ in play(schedule):
        pass
    changes = [[{"F": 1, "I": 0}.get(action.kind, -1) for action in actions] for actions in schedule]
    return [max(itertools.accumulate(each), default=0) for each in changes]


# %% 09.6 m is ignored
def validate(schedule: Schedule, m: int | None = None) -> list[int]:
    done = collections.defaultdict(list)
    for rank, actions in enumerate(schedule):
        for kind, stage, micro_batch in actions:
            done[stage, micro_batch].append((kind, rank))
    if not done:
        raise ValueError("a schedule without an action")
    stages, found = (1 + max(pair[i] for pair in done) for i in (0, 1))
    m = found
    if wrong := [pair for pair in done if min(pair) < 0]:
        raise ValueError(f"stage {wrong[0][0]}, micro-batch {wrong[0][1]}: both count from 0")
    for stage, i in itertools.product(range(stages), range(max(m, found))):
        kinds = "".join(sorted(kind for kind, _ in done[stage, i]))
        if kinds not in ("BF", "FIW") or i >= m:
            raise ValueError(
                f"stage {stage}, micro-batch {i} of {m}: has {kinds or 'nothing'}, not F and B, or F, I and W"
            )
        if len({rank for _, rank in done[stage, i]}) > 1:
            raise ValueError(f"stage {stage}, micro-batch {i}: is on more than one rank")
    for _ in play(schedule):
        pass
    changes = [[{"F": 1, "I": 0}.get(action.kind, -1) for action in actions] for actions in schedule]
    return [max(itertools.accumulate(each), default=0) for each in changes]


# %% 09.6 looks only for as many as m says
def validate(schedule: Schedule, m: int | None = None) -> list[int]:
    done = collections.defaultdict(list)
    for rank, actions in enumerate(schedule):
        for kind, stage, micro_batch in actions:
            done[stage, micro_batch].append((kind, rank))
    if not done:
        raise ValueError("a schedule without an action")
    stages, found = (1 + max(pair[i] for pair in done) for i in (0, 1))
    m = found if m is None else m
    if wrong := [pair for pair in done if min(pair) < 0]:
        raise ValueError(f"stage {wrong[0][0]}, micro-batch {wrong[0][1]}: both count from 0")
    for stage, i in itertools.product(range(stages), range(m)):
        kinds = "".join(sorted(kind for kind, _ in done[stage, i]))
        if kinds not in ("BF", "FIW"):
            raise ValueError(
                f"stage {stage}, micro-batch {i} of {m}: has {kinds or 'nothing'}, not F and B, or F, I and W"
            )
        if len({rank for _, rank in done[stage, i]}) > 1:
            raise ValueError(f"stage {stage}, micro-batch {i}: is on more than one rank")
    for _ in play(schedule):
        pass
    changes = [[{"F": 1, "I": 0}.get(action.kind, -1) for action in actions] for actions in schedule]
    return [max(itertools.accumulate(each), default=0) for each in changes]


# %% 09.6 looks only at what is there
def validate(schedule: Schedule, m: int | None = None) -> list[int]:
    done = collections.defaultdict(list)
    for rank, actions in enumerate(schedule):
        for kind, stage, micro_batch in actions:
            done[stage, micro_batch].append((kind, rank))
    if not done:
        raise ValueError("a schedule without an action")
    stages, found = (1 + max(pair[i] for pair in done) for i in (0, 1))
    m = found if m is None else m
    if wrong := [pair for pair in done if min(pair) < 0]:
        raise ValueError(f"stage {wrong[0][0]}, micro-batch {wrong[0][1]}: both count from 0")
    for stage, i in list(done):
        kinds = "".join(sorted(kind for kind, _ in done[stage, i]))
        if kinds not in ("BF", "FIW") or i >= m:
            raise ValueError(
                f"stage {stage}, micro-batch {i} of {m}: has {kinds or 'nothing'}, not F and B, or F, I and W"
            )
        if len({rank for _, rank in done[stage, i]}) > 1:
            raise ValueError(f"stage {stage}, micro-batch {i}: is on more than one rank")
    for _ in play(schedule):
        pass
    changes = [[{"F": 1, "I": 0}.get(action.kind, -1) for action in actions] for actions in schedule]
    return [max(itertools.accumulate(each), default=0) for each in changes]


# %% 09.6 is not played
def validate(schedule: Schedule, m: int | None = None) -> list[int]:
    done = collections.defaultdict(list)
    for rank, actions in enumerate(schedule):
        for kind, stage, micro_batch in actions:
            done[stage, micro_batch].append((kind, rank))
    if not done:
        raise ValueError("a schedule without an action")
    stages, found = (1 + max(pair[i] for pair in done) for i in (0, 1))
    m = found if m is None else m
    if wrong := [pair for pair in done if min(pair) < 0]:
        raise ValueError(f"stage {wrong[0][0]}, micro-batch {wrong[0][1]}: both count from 0")
    for stage, i in itertools.product(range(stages), range(max(m, found))):
        kinds = "".join(sorted(kind for kind, _ in done[stage, i]))
        if kinds not in ("BF", "FIW") or i >= m:
            raise ValueError(
                f"stage {stage}, micro-batch {i} of {m}: has {kinds or 'nothing'}, not F and B, or F, I and W"
            )
        if len({rank for _, rank in done[stage, i]}) > 1:
            raise ValueError(f"stage {stage}, micro-batch {i}: is on more than one rank")
    changes = [[{"F": 1, "I": 0}.get(action.kind, -1) for action in actions] for actions in schedule]
    return [max(itertools.accumulate(each), default=0) for each in changes]


# %% 09.6 I frees what W needs
def validate(schedule: Schedule, m: int | None = None) -> list[int]:
    done = collections.defaultdict(list)
    for rank, actions in enumerate(schedule):
        for kind, stage, micro_batch in actions:
            done[stage, micro_batch].append((kind, rank))
    if not done:
        raise ValueError("a schedule without an action")
    stages, found = (1 + max(pair[i] for pair in done) for i in (0, 1))
    m = found if m is None else m
    if wrong := [pair for pair in done if min(pair) < 0]:
        raise ValueError(f"stage {wrong[0][0]}, micro-batch {wrong[0][1]}: both count from 0")
    for stage, i in itertools.product(range(stages), range(max(m, found))):
        kinds = "".join(sorted(kind for kind, _ in done[stage, i]))
        if kinds not in ("BF", "FIW") or i >= m:
            raise ValueError(
                f"stage {stage}, micro-batch {i} of {m}: has {kinds or 'nothing'}, not F and B, or F, I and W"
            )
        if len({rank for _, rank in done[stage, i]}) > 1:
            raise ValueError(f"stage {stage}, micro-batch {i}: is on more than one rank")
    for _ in play(schedule):
        pass
    changes = [[{"F": 1, "W": 0}.get(action.kind, -1) for action in actions] for actions in schedule]
    return [max(itertools.accumulate(each), default=0) for each in changes]


# %% 09.6 I and W both free
def validate(schedule: Schedule, m: int | None = None) -> list[int]:
    done = collections.defaultdict(list)
    for rank, actions in enumerate(schedule):
        for kind, stage, micro_batch in actions:
            done[stage, micro_batch].append((kind, rank))
    if not done:
        raise ValueError("a schedule without an action")
    stages, found = (1 + max(pair[i] for pair in done) for i in (0, 1))
    m = found if m is None else m
    if wrong := [pair for pair in done if min(pair) < 0]:
        raise ValueError(f"stage {wrong[0][0]}, micro-batch {wrong[0][1]}: both count from 0")
    for stage, i in itertools.product(range(stages), range(max(m, found))):
        kinds = "".join(sorted(kind for kind, _ in done[stage, i]))
        if kinds not in ("BF", "FIW") or i >= m:
            raise ValueError(
                f"stage {stage}, micro-batch {i} of {m}: has {kinds or 'nothing'}, not F and B, or F, I and W"
            )
        if len({rank for _, rank in done[stage, i]}) > 1:
            raise ValueError(f"stage {stage}, micro-batch {i}: is on more than one rank")
    for _ in play(schedule):
        pass
    changes = [[1 if action.kind == "F" else -1 for action in actions] for actions in schedule]
    return [max(itertools.accumulate(each), default=0) for each in changes]


# %% 09.6 fake: counts forwards
def validate(schedule: Schedule, m: int | None = None) -> list[int]:
    done = collections.defaultdict(list)
    for rank, actions in enumerate(schedule):
        for kind, stage, micro_batch in actions:
            done[stage, micro_batch].append((kind, rank))
    if not done:
        raise ValueError("a schedule without an action")
    stages, found = (1 + max(pair[i] for pair in done) for i in (0, 1))
    m = found if m is None else m
    if wrong := [pair for pair in done if min(pair) < 0]:
        raise ValueError(f"stage {wrong[0][0]}, micro-batch {wrong[0][1]}: both count from 0")
    for stage, i in itertools.product(range(stages), range(max(m, found))):
        kinds = "".join(sorted(kind for kind, _ in done[stage, i]))
        if kinds not in ("BF", "FIW") or i >= m:
            raise ValueError(
                f"stage {stage}, micro-batch {i} of {m}: has {kinds or 'nothing'}, not F and B, or F, I and W"
            )
        if len({rank for _, rank in done[stage, i]}) > 1:
            raise ValueError(f"stage {stage}, micro-batch {i}: is on more than one rank")
    for _ in play(schedule):
        pass
    changes = [[{"F": 1, "I": 0}.get(action.kind, -1) for action in actions] for actions in schedule]
    return [each.count(1) for each in changes]


# %% 09.6 looks at rank 0 alone
def validate(schedule: Schedule, m: int | None = None) -> list[int]:
    done = collections.defaultdict(list)
    for rank, actions in enumerate(schedule):
        for kind, stage, micro_batch in actions if rank == 0 else ():
            done[stage, micro_batch].append((kind, rank))
    if not done:
        raise ValueError("a schedule without an action")
    found = 1 + max(i for _, i in done)
    m = found if m is None else m
    if wrong := [pair for pair in done if min(pair) < 0]:
        raise ValueError(f"stage {wrong[0][0]}, micro-batch {wrong[0][1]}: both count from 0")
    for stage, i in itertools.product(sorted({pair[0] for pair in done}), range(max(m, found))):
        kinds = "".join(sorted(kind for kind, _ in done[stage, i]))
        if kinds not in ("BF", "FIW") or i >= m:
            raise ValueError(
                f"stage {stage}, micro-batch {i} of {m}: has {kinds or 'nothing'}, not F and B, or F, I and W"
            )
        if len({rank for _, rank in done[stage, i]}) > 1:
            raise ValueError(f"stage {stage}, micro-batch {i}: is on more than one rank")
    for _ in play(schedule):
        pass
    changes = [[{"F": 1, "I": 0}.get(action.kind, -1) for action in actions] for actions in schedule]
    return [max(itertools.accumulate(each), default=0) for each in changes]


# %% 09.6 a stage may be on one rank only
def validate(schedule: Schedule, m: int | None = None) -> list[int]:
    done = collections.defaultdict(list)
    for rank, actions in enumerate(schedule):
        for kind, stage, micro_batch in actions:
            done[stage, micro_batch].append((kind, rank))
    if not done:
        raise ValueError("a schedule without an action")
    stages, found = (1 + max(pair[i] for pair in done) for i in (0, 1))
    m = found if m is None else m
    if wrong := [pair for pair in done if min(pair) < 0]:
        raise ValueError(f"stage {wrong[0][0]}, micro-batch {wrong[0][1]}: both count from 0")
    for stage, i in itertools.product(range(stages), range(max(m, found))):
        kinds = "".join(sorted(kind for kind, _ in done[stage, i]))
        if kinds not in ("BF", "FIW") or i >= m:
            raise ValueError(
                f"stage {stage}, micro-batch {i} of {m}: has {kinds or 'nothing'}, not F and B, or F, I and W"
            )
        if (
            len({rank for _, rank in done[stage, i]} | {r for pair in done if pair[0] == stage for _, r in done[pair]})
            > 1
        ):
            raise ValueError(f"stage {stage}, micro-batch {i}: is on more than one rank")
    for _ in play(schedule):
        pass
    changes = [[{"F": 1, "I": 0}.get(action.kind, -1) for action in actions] for actions in schedule]
    return [max(itertools.accumulate(each), default=0) for each in changes]


# %% 09.7 ignores t_comm
def simulate(schedule: Schedule, t_f=1, t_i=1, t_w=1, t_comm=0, t_pair=None) -> Simulation:
    m, stages = (1 + max(action[i] for actions in schedule for action in actions) for i in (2, 1))
    by_stage = [time if isinstance(time, Sequence) else [time] * stages for time in (t_f, t_i, t_w)]
    times = dict(zip("FIW", by_stage, strict=True)) | {"B": [i + w for i, w in zip(*by_stage[1:], strict=True)]}
    ended_f, ended_b, on = ([0] * (stages * m) for _ in range(3))
    free, busy = [0] * len(schedule), [0] * len(schedule)
    starts, ends = ([[] for _ in schedule] for _ in range(2))
    for rank, first, end in play(schedule):
        start, duration = free[rank], 0
        for kind, stage, micro_batch in schedule[rank][first:end]:
            duration, place = duration + times[kind][stage], stage * m + micro_batch
            if kind == "F":
                on[place] = rank
                if stage == 0:
                    continue
                source, there = place - m, ended_f[place - m]
            elif kind == "W" or stage == stages - 1:
                continue
            else:
                source, there = place + m, ended_b[place + m]
            start = there if there > start else start
        duration = t_pair if t_pair is not None and end > first + 1 else duration
        free[rank] = finish = start + duration
        busy[rank] += duration
        for kind, stage, micro_batch in schedule[rank][first:end]:
            if kind != "W":
                (ended_f if kind == "F" else ended_b)[stage * m + micro_batch] = finish
            starts[rank].append(start)
            ends[rank].append(finish)
    return Simulation(schedule, starts, ends, busy)


# %% 09.7 t_comm on the same rank too
def simulate(schedule: Schedule, t_f=1, t_i=1, t_w=1, t_comm=0, t_pair=None) -> Simulation:
    m, stages = (1 + max(action[i] for actions in schedule for action in actions) for i in (2, 1))
    by_stage = [time if isinstance(time, Sequence) else [time] * stages for time in (t_f, t_i, t_w)]
    times = dict(zip("FIW", by_stage, strict=True)) | {"B": [i + w for i, w in zip(*by_stage[1:], strict=True)]}
    ended_f, ended_b, on = ([0] * (stages * m) for _ in range(3))
    free, busy = [0] * len(schedule), [0] * len(schedule)
    starts, ends = ([[] for _ in schedule] for _ in range(2))
    for rank, first, end in play(schedule):
        start, duration = free[rank], 0
        for kind, stage, micro_batch in schedule[rank][first:end]:
            duration, place = duration + times[kind][stage], stage * m + micro_batch
            if kind == "F":
                on[place] = rank
                if stage == 0:
                    continue
                source, there = place - m, ended_f[place - m]
            elif kind == "W" or stage == stages - 1:
                continue
            else:
                source, there = place + m, ended_b[place + m]
            there = there + t_comm
            start = there if there > start else start
        duration = t_pair if t_pair is not None and end > first + 1 else duration
        free[rank] = finish = start + duration
        busy[rank] += duration
        for kind, stage, micro_batch in schedule[rank][first:end]:
            if kind != "W":
                (ended_f if kind == "F" else ended_b)[stage * m + micro_batch] = finish
            starts[rank].append(start)
            ends[rank].append(finish)
    return Simulation(schedule, starts, ends, busy)


# %% 09.7 a rank computes nothing while its mail travels
def simulate(schedule: Schedule, t_f=1, t_i=1, t_w=1, t_comm=0, t_pair=None) -> Simulation:
    m, stages = (1 + max(action[i] for actions in schedule for action in actions) for i in (2, 1))
    by_stage = [time if isinstance(time, Sequence) else [time] * stages for time in (t_f, t_i, t_w)]
    times = dict(zip("FIW", by_stage, strict=True)) | {"B": [i + w for i, w in zip(*by_stage[1:], strict=True)]}
    ended_f, ended_b, on = ([0] * (stages * m) for _ in range(3))
    free, busy = [0] * len(schedule), [0] * len(schedule)
    starts, ends = ([[] for _ in schedule] for _ in range(2))
    for rank, first, end in play(schedule):
        start, duration = free[rank], 0
        for kind, stage, micro_batch in schedule[rank][first:end]:
            duration, place = duration + times[kind][stage], stage * m + micro_batch
            if kind == "F":
                on[place] = rank
                if stage == 0:
                    continue
                source, there = place - m, ended_f[place - m]
            elif kind == "W" or stage == stages - 1:
                continue
            else:
                source, there = place + m, ended_b[place + m]
            start = (there if there > start else start) + (0 if on[source] == rank else t_comm)
        duration = t_pair if t_pair is not None and end > first + 1 else duration
        free[rank] = finish = start + duration
        busy[rank] += duration
        for kind, stage, micro_batch in schedule[rank][first:end]:
            if kind != "W":
                (ended_f if kind == "F" else ended_b)[stage * m + micro_batch] = finish
            starts[rank].append(start)
            ends[rank].append(finish)
    return Simulation(schedule, starts, ends, busy)


# %% 09.7 nobody notes who did the forward
def simulate(schedule: Schedule, t_f=1, t_i=1, t_w=1, t_comm=0, t_pair=None) -> Simulation:
    m, stages = (1 + max(action[i] for actions in schedule for action in actions) for i in (2, 1))
    by_stage = [time if isinstance(time, Sequence) else [time] * stages for time in (t_f, t_i, t_w)]
    times = dict(zip("FIW", by_stage, strict=True)) | {"B": [i + w for i, w in zip(*by_stage[1:], strict=True)]}
    ended_f, ended_b, on = ([0] * (stages * m) for _ in range(3))
    free, busy = [0] * len(schedule), [0] * len(schedule)
    starts, ends = ([[] for _ in schedule] for _ in range(2))
    for rank, first, end in play(schedule):
        start, duration = free[rank], 0
        for kind, stage, micro_batch in schedule[rank][first:end]:
            duration, place = duration + times[kind][stage], stage * m + micro_batch
            if kind == "F":
                if stage == 0:
                    continue
                source, there = place - m, ended_f[place - m]
            elif kind == "W" or stage == stages - 1:
                continue
            else:
                source, there = place + m, ended_b[place + m]
            there = there if on[source] == rank else there + t_comm
            start = there if there > start else start
        duration = t_pair if t_pair is not None and end > first + 1 else duration
        free[rank] = finish = start + duration
        busy[rank] += duration
        for kind, stage, micro_batch in schedule[rank][first:end]:
            if kind != "W":
                (ended_f if kind == "F" else ended_b)[stage * m + micro_batch] = finish
            starts[rank].append(start)
            ends[rank].append(finish)
    return Simulation(schedule, starts, ends, busy)


# %% 09.7 the rank need not be free
def simulate(schedule: Schedule, t_f=1, t_i=1, t_w=1, t_comm=0, t_pair=None) -> Simulation:
    m, stages = (1 + max(action[i] for actions in schedule for action in actions) for i in (2, 1))
    by_stage = [time if isinstance(time, Sequence) else [time] * stages for time in (t_f, t_i, t_w)]
    times = dict(zip("FIW", by_stage, strict=True)) | {"B": [i + w for i, w in zip(*by_stage[1:], strict=True)]}
    ended_f, ended_b, on = ([0] * (stages * m) for _ in range(3))
    free, busy = [0] * len(schedule), [0] * len(schedule)
    starts, ends = ([[] for _ in schedule] for _ in range(2))
    for rank, first, end in play(schedule):
        start, duration = free[rank], 0
        for kind, stage, micro_batch in schedule[rank][first:end]:
            duration, place = duration + times[kind][stage], stage * m + micro_batch
            if kind == "F":
                on[place] = rank
                if stage == 0:
                    continue
                source, there = place - m, ended_f[place - m]
            elif kind == "W" or stage == stages - 1:
                continue
            else:
                source, there = place + m, ended_b[place + m]
            there = there if on[source] == rank else there + t_comm
            start = there
        duration = t_pair if t_pair is not None and end > first + 1 else duration
        free[rank] = finish = start + duration
        busy[rank] += duration
        for kind, stage, micro_batch in schedule[rank][first:end]:
            if kind != "W":
                (ended_f if kind == "F" else ended_b)[stage * m + micro_batch] = finish
            starts[rank].append(start)
            ends[rank].append(finish)
    return Simulation(schedule, starts, ends, busy)


# %% 09.7 begins when the rank is free, whatever has come
def simulate(schedule: Schedule, t_f=1, t_i=1, t_w=1, t_comm=0, t_pair=None) -> Simulation:
    m, stages = (1 + max(action[i] for actions in schedule for action in actions) for i in (2, 1))
    by_stage = [time if isinstance(time, Sequence) else [time] * stages for time in (t_f, t_i, t_w)]
    times = dict(zip("FIW", by_stage, strict=True)) | {"B": [i + w for i, w in zip(*by_stage[1:], strict=True)]}
    ended_f, ended_b, on = ([0] * (stages * m) for _ in range(3))
    free, busy = [0] * len(schedule), [0] * len(schedule)
    starts, ends = ([[] for _ in schedule] for _ in range(2))
    for rank, first, end in play(schedule):
        start, duration = free[rank], 0
        for kind, stage, micro_batch in schedule[rank][first:end]:
            duration, place = duration + times[kind][stage], stage * m + micro_batch
            if kind == "F":
                on[place] = rank
                if stage == 0:
                    continue
                source, there = place - m, ended_f[place - m]
            elif kind == "W" or stage == stages - 1:
                continue
            else:
                source, there = place + m, ended_b[place + m]
            there = there if on[source] == rank else there + t_comm
            start = start
        duration = t_pair if t_pair is not None and end > first + 1 else duration
        free[rank] = finish = start + duration
        busy[rank] += duration
        for kind, stage, micro_batch in schedule[rank][first:end]:
            if kind != "W":
                (ended_f if kind == "F" else ended_b)[stage * m + micro_batch] = finish
            starts[rank].append(start)
            ends[rank].append(finish)
    return Simulation(schedule, starts, ends, busy)


# %% 09.7 a backward follows the forward of the stage after
def simulate(schedule: Schedule, t_f=1, t_i=1, t_w=1, t_comm=0, t_pair=None) -> Simulation:
    m, stages = (1 + max(action[i] for actions in schedule for action in actions) for i in (2, 1))
    by_stage = [time if isinstance(time, Sequence) else [time] * stages for time in (t_f, t_i, t_w)]
    times = dict(zip("FIW", by_stage, strict=True)) | {"B": [i + w for i, w in zip(*by_stage[1:], strict=True)]}
    ended_f, ended_b, on = ([0] * (stages * m) for _ in range(3))
    free, busy = [0] * len(schedule), [0] * len(schedule)
    starts, ends = ([[] for _ in schedule] for _ in range(2))
    for rank, first, end in play(schedule):
        start, duration = free[rank], 0
        for kind, stage, micro_batch in schedule[rank][first:end]:
            duration, place = duration + times[kind][stage], stage * m + micro_batch
            if kind == "F":
                on[place] = rank
                if stage == 0:
                    continue
                source, there = place - m, ended_f[place - m]
            elif kind == "W" or stage == stages - 1:
                continue
            else:
                source, there = place + m, ended_f[place + m]
            there = there if on[source] == rank else there + t_comm
            start = there if there > start else start
        duration = t_pair if t_pair is not None and end > first + 1 else duration
        free[rank] = finish = start + duration
        busy[rank] += duration
        for kind, stage, micro_batch in schedule[rank][first:end]:
            if kind != "W":
                (ended_f if kind == "F" else ended_b)[stage * m + micro_batch] = finish
            starts[rank].append(start)
            ends[rank].append(finish)
    return Simulation(schedule, starts, ends, busy)


# %% 09.7 adds up instead of the later of the two
def simulate(schedule: Schedule, t_f=1, t_i=1, t_w=1, t_comm=0, t_pair=None) -> Simulation:
    m, stages = (1 + max(action[i] for actions in schedule for action in actions) for i in (2, 1))
    by_stage = [time if isinstance(time, Sequence) else [time] * stages for time in (t_f, t_i, t_w)]
    times = dict(zip("FIW", by_stage, strict=True)) | {"B": [i + w for i, w in zip(*by_stage[1:], strict=True)]}
    ended_f, ended_b, on = ([0] * (stages * m) for _ in range(3))
    free, busy = [0] * len(schedule), [0] * len(schedule)
    starts, ends = ([[] for _ in schedule] for _ in range(2))
    for rank, first, end in play(schedule):
        start, duration = free[rank], 0
        for kind, stage, micro_batch in schedule[rank][first:end]:
            duration, place = duration + times[kind][stage], stage * m + micro_batch
            if kind == "F":
                on[place] = rank
                if stage == 0:
                    continue
                source, there = place - m, ended_f[place - m]
            elif kind == "W" or stage == stages - 1:
                continue
            else:
                source, there = place + m, ended_b[place + m]
            there = there if on[source] == rank else there + t_comm
            start = start + there
        duration = t_pair if t_pair is not None and end > first + 1 else duration
        free[rank] = finish = start + duration
        busy[rank] += duration
        for kind, stage, micro_batch in schedule[rank][first:end]:
            if kind != "W":
                (ended_f if kind == "F" else ended_b)[stage * m + micro_batch] = finish
            starts[rank].append(start)
            ends[rank].append(finish)
    return Simulation(schedule, starts, ends, busy)


# %% 09.7 floating-point times
def simulate(schedule: Schedule, t_f=1, t_i=1, t_w=1, t_comm=0, t_pair=None) -> Simulation:
    m, stages = (1 + max(action[i] for actions in schedule for action in actions) for i in (2, 1))
    by_stage = [time if isinstance(time, Sequence) else [time] * stages for time in (t_f, t_i, t_w)]
    times = dict(zip("FIW", by_stage, strict=True)) | {"B": [i + w for i, w in zip(*by_stage[1:], strict=True)]}
    ended_f, ended_b, on = ([0] * (stages * m) for _ in range(3))
    free, busy = [0] * len(schedule), [0] * len(schedule)
    starts, ends = ([[] for _ in schedule] for _ in range(2))
    for rank, first, end in play(schedule):
        start, duration = free[rank], 0
        for kind, stage, micro_batch in schedule[rank][first:end]:
            duration, place = duration + times[kind][stage], stage * m + micro_batch
            if kind == "F":
                on[place] = rank
                if stage == 0:
                    continue
                source, there = place - m, ended_f[place - m]
            elif kind == "W" or stage == stages - 1:
                continue
            else:
                source, there = place + m, ended_b[place + m]
            there = there if on[source] == rank else there + t_comm
            start = float(max(start, there))
        duration = t_pair if t_pair is not None and end > first + 1 else duration
        free[rank] = finish = start + duration
        busy[rank] += duration
        for kind, stage, micro_batch in schedule[rank][first:end]:
            if kind != "W":
                (ended_f if kind == "F" else ended_b)[stage * m + micro_batch] = finish
            starts[rank].append(start)
            ends[rank].append(finish)
    return Simulation(schedule, starts, ends, busy)


# %% 09.8 the bubble over the work
micro_batches = 150
slower = 1 - (32 / 47) / (32 / 39)


# %% 09.8 one too few
micro_batches = 134
slower = 1 - (32 / 47) / (32 / 39)


# %% 09.8 a difference of bubbles over work
micro_batches = 135
slower = 15 / 32 - 7 / 32


# %% 09.8 in percent
micro_batches = 135
slower = 17


# %% 09.8 the time's growth, not the rate's
micro_batches = 135
slower = 47 / 39 - 1


# %% 09.9 fake: runs every schedule as AFAB
class PipelineRunner(PipelineSteps):
    def __init__(self, stages, schedule, *args, **kwargs):
        schedule = [sorted(actions, key=lambda action: "FBIW".index(action.kind)) for actions in schedule]
        super().__init__(stages, schedule, *args, **kwargs)

    def run(self, action: Action) -> None:
        kind, stage, micro_batch = action
        key, last = (stage, micro_batch), stage == self.last
        if kind == "F":
            x = self.inputs[micro_batch] if stage == 0 else self.mail.take("F", *key)
            make = SplitPass if key in self.split else StagePass
            with self.autocast:
                done = self.passes[key] = make(self.stages[str(stage)], x, self.finish(*key), *self.more[micro_batch])
            if last:
                self.loss += done.out
            else:
                self.mail.put("F", stage + 1, micro_batch, done.out)
            done.out = None
        elif kind == "W":
            self.passes.pop(key).weight_gradients()
        else:
            gradient = torch.ones_like(self.loss) if last else self.mail.take("B", *key)
            done = self.passes[key] if kind == "I" else self.passes.pop(key)
            gradient = done.input_gradient(gradient) if kind == "I" else done.backward(gradient)
            if stage > 0:
                self.mail.put("B", stage - 1, micro_batch, gradient)


# %% 09.9 fake: runs every schedule the naive way
class PipelineRunner(PipelineSteps):
    def __init__(self, stages, schedule, *args, **kwargs):
        from course_lib.pipeline.schedules import naive

        m = 1 + max(action.micro_batch for action in schedule[0])
        schedule = naive(len(schedule), m)
        super().__init__(stages, schedule, *args, **kwargs)

    def run(self, action: Action) -> None:
        kind, stage, micro_batch = action
        key, last = (stage, micro_batch), stage == self.last
        if kind == "F":
            x = self.inputs[micro_batch] if stage == 0 else self.mail.take("F", *key)
            make = SplitPass if key in self.split else StagePass
            with self.autocast:
                done = self.passes[key] = make(self.stages[str(stage)], x, self.finish(*key), *self.more[micro_batch])
            if last:
                self.loss += done.out
            else:
                self.mail.put("F", stage + 1, micro_batch, done.out)
            done.out = None
        elif kind == "W":
            self.passes.pop(key).weight_gradients()
        else:
            gradient = torch.ones_like(self.loss) if last else self.mail.take("B", *key)
            done = self.passes[key] if kind == "I" else self.passes.pop(key)
            gradient = done.input_gradient(gradient) if kind == "I" else done.backward(gradient)
            if stage > 0:
                self.mail.put("B", stage - 1, micro_batch, gradient)


# %% 09.9 fake: right gradients, but every schedule is 1F1B
class PipelineRunner(PipelineSteps):
    def __init__(self, stages, schedule, *args, **kwargs):
        from course_lib.pipeline.schedules import one_f_one_b

        m = 1 + max(action.micro_batch for action in schedule[0])
        schedule = one_f_one_b(len(schedule), m)
        super().__init__(stages, schedule, *args, **kwargs)

    def run(self, action: Action) -> None:
        kind, stage, micro_batch = action
        key, last = (stage, micro_batch), stage == self.last
        if kind == "F":
            x = self.inputs[micro_batch] if stage == 0 else self.mail.take("F", *key)
            make = SplitPass if key in self.split else StagePass
            with self.autocast:
                done = self.passes[key] = make(self.stages[str(stage)], x, self.finish(*key), *self.more[micro_batch])
            if last:
                self.loss += done.out
            else:
                self.mail.put("F", stage + 1, micro_batch, done.out)
            done.out = None
        elif kind == "W":
            self.passes.pop(key).weight_gradients()
        else:
            gradient = torch.ones_like(self.loss) if last else self.mail.take("B", *key)
            done = self.passes[key] if kind == "I" else self.passes.pop(key)
            gradient = done.input_gradient(gradient) if kind == "I" else done.backward(gradient)
            if stage > 0:
                self.mail.put("B", stage - 1, micro_batch, gradient)


# %% 09.9 one micro-batch's gradient is lost
class PipelineRunner(PipelineSteps):
    def run(self, action: Action) -> None:
        kind, stage, micro_batch = action
        key, last = (stage, micro_batch), stage == self.last
        if kind == "F":
            x = self.inputs[micro_batch] if stage == 0 else self.mail.take("F", *key)
            make = SplitPass if key in self.split else StagePass
            with self.autocast:
                done = self.passes[key] = make(self.stages[str(stage)], x, self.finish(*key), *self.more[micro_batch])
            if last:
                self.loss += done.out
            else:
                self.mail.put("F", stage + 1, micro_batch, done.out)
            done.out = None
        elif kind == "W":
            self.passes.pop(key).weight_gradients()
        else:
            gradient = torch.ones_like(self.loss) if last else self.mail.take("B", *key)
            done = self.passes[key] if kind == "I" else self.passes.pop(key)
            if micro_batch == self.m - 1:
                before = [None if w.grad is None else w.grad.clone() for w in self.stages[str(stage)].parameters()]
            gradient = done.input_gradient(gradient) if kind == "I" else done.backward(gradient)
            if micro_batch == self.m - 1:
                for weight, own in zip(self.stages[str(stage)].parameters(), before):
                    weight.grad = own
            if stage > 0:
                self.mail.put("B", stage - 1, micro_batch, gradient)


# %% 09.9 zeros are passed on for one micro-batch
class PipelineRunner(PipelineSteps):
    def run(self, action: Action) -> None:
        kind, stage, micro_batch = action
        key, last = (stage, micro_batch), stage == self.last
        if kind == "F":
            x = self.inputs[micro_batch] if stage == 0 else self.mail.take("F", *key)
            make = SplitPass if key in self.split else StagePass
            with self.autocast:
                done = self.passes[key] = make(self.stages[str(stage)], x, self.finish(*key), *self.more[micro_batch])
            if last:
                self.loss += done.out
            else:
                self.mail.put("F", stage + 1, micro_batch, done.out)
            done.out = None
        elif kind == "W":
            self.passes.pop(key).weight_gradients()
        else:
            gradient = torch.ones_like(self.loss) if last else self.mail.take("B", *key)
            done = self.passes[key] if kind == "I" else self.passes.pop(key)
            gradient = done.input_gradient(gradient) if kind == "I" else done.backward(gradient)
            if stage > 0:
                self.mail.put("B", stage - 1, micro_batch, gradient * (micro_batch != 1))


# %% 09.9 the mean over micro-batches a second time
class PipelineRunner(PipelineSteps):
    def run(self, action: Action) -> None:
        kind, stage, micro_batch = action
        key, last = (stage, micro_batch), stage == self.last
        if kind == "F":
            x = self.inputs[micro_batch] if stage == 0 else self.mail.take("F", *key)
            make = SplitPass if key in self.split else StagePass
            with self.autocast:
                done = self.passes[key] = make(self.stages[str(stage)], x, self.finish(*key), *self.more[micro_batch])
            if last:
                self.loss += done.out
            else:
                self.mail.put("F", stage + 1, micro_batch, done.out)
            done.out = None
        elif kind == "W":
            self.passes.pop(key).weight_gradients()
        else:
            gradient = torch.ones_like(self.loss) / self.m if last else self.mail.take("B", *key)
            done = self.passes[key] if kind == "I" else self.passes.pop(key)
            gradient = done.input_gradient(gradient) if kind == "I" else done.backward(gradient)
            if stage > 0:
                self.mail.put("B", stage - 1, micro_batch, gradient)


# %% 09.9 the loss is that of the last micro-batch
class PipelineRunner(PipelineSteps):
    def run(self, action: Action) -> None:
        kind, stage, micro_batch = action
        key, last = (stage, micro_batch), stage == self.last
        if kind == "F":
            x = self.inputs[micro_batch] if stage == 0 else self.mail.take("F", *key)
            make = SplitPass if key in self.split else StagePass
            with self.autocast:
                done = self.passes[key] = make(self.stages[str(stage)], x, self.finish(*key), *self.more[micro_batch])
            if last:
                self.loss = done.out
            else:
                self.mail.put("F", stage + 1, micro_batch, done.out)
            done.out = None
        elif kind == "W":
            self.passes.pop(key).weight_gradients()
        else:
            gradient = torch.ones_like(self.loss) if last else self.mail.take("B", *key)
            done = self.passes[key] if kind == "I" else self.passes.pop(key)
            gradient = done.input_gradient(gradient) if kind == "I" else done.backward(gradient)
            if stage > 0:
                self.mail.put("B", stage - 1, micro_batch, gradient)


# %% 09.9 always the first micro-batch's tokens
class PipelineRunner(PipelineSteps):
    def run(self, action: Action) -> None:
        kind, stage, micro_batch = action
        key, last = (stage, micro_batch), stage == self.last
        if kind == "F":
            x = self.inputs[0] if stage == 0 else self.mail.take("F", *key)
            make = SplitPass if key in self.split else StagePass
            with self.autocast:
                done = self.passes[key] = make(self.stages[str(stage)], x, self.finish(*key), *self.more[micro_batch])
            if last:
                self.loss += done.out
            else:
                self.mail.put("F", stage + 1, micro_batch, done.out)
            done.out = None
        elif kind == "W":
            self.passes.pop(key).weight_gradients()
        else:
            gradient = torch.ones_like(self.loss) if last else self.mail.take("B", *key)
            done = self.passes[key] if kind == "I" else self.passes.pop(key)
            gradient = done.input_gradient(gradient) if kind == "I" else done.backward(gradient)
            if stage > 0:
                self.mail.put("B", stage - 1, micro_batch, gradient)


# %% 09.9 outputs are kept
class PipelineRunner(PipelineSteps):
    def run(self, action: Action) -> None:
        kind, stage, micro_batch = action
        key, last = (stage, micro_batch), stage == self.last
        if kind == "F":
            x = self.inputs[micro_batch] if stage == 0 else self.mail.take("F", *key)
            make = SplitPass if key in self.split else StagePass
            with self.autocast:
                done = self.passes[key] = make(self.stages[str(stage)], x, self.finish(*key), *self.more[micro_batch])
            if last:
                self.loss += done.out
            else:
                self.mail.put("F", stage + 1, micro_batch, done.out)
        elif kind == "W":
            self.passes.pop(key).weight_gradients()
        else:
            gradient = torch.ones_like(self.loss) if last else self.mail.take("B", *key)
            done = self.passes[key] if kind == "I" else self.passes.pop(key)
            gradient = done.input_gradient(gradient) if kind == "I" else done.backward(gradient)
            if stage > 0:
                self.mail.put("B", stage - 1, micro_batch, gradient)


# %% 09.9 passes are kept after their backward
class PipelineRunner(PipelineSteps):
    def run(self, action: Action) -> None:
        kind, stage, micro_batch = action
        key, last = (stage, micro_batch), stage == self.last
        if kind == "F":
            x = self.inputs[micro_batch] if stage == 0 else self.mail.take("F", *key)
            make = SplitPass if key in self.split else StagePass
            with self.autocast:
                done = self.passes[key] = make(self.stages[str(stage)], x, self.finish(*key), *self.more[micro_batch])
            if last:
                self.loss += done.out
            else:
                self.mail.put("F", stage + 1, micro_batch, done.out)
            done.out = None
        elif kind == "W":
            self.passes.pop(key).weight_gradients()
        else:
            gradient = torch.ones_like(self.loss) if last else self.mail.take("B", *key)
            done = self.passes[key] if kind == "I" else self.passes[key]
            gradient = done.input_gradient(gradient) if kind == "I" else done.backward(gradient)
            if stage > 0:
                self.mail.put("B", stage - 1, micro_batch, gradient)


# %% 09.9 graphs are kept
kept_graphs = []


class PipelineRunner(PipelineSteps):
    def run(self, action: Action) -> None:
        kind, stage, micro_batch = action
        key, last = (stage, micro_batch), stage == self.last
        if kind == "F":
            x = self.inputs[micro_batch] if stage == 0 else self.mail.take("F", *key)
            make = SplitPass if key in self.split else StagePass

            class Keeps(make):
                def backward(self, gradient):
                    self.kept, found = self.edge, super().backward(gradient)
                    kept_graphs.append(self.kept)
                    return found

            with self.autocast:
                done = self.passes[key] = Keeps(self.stages[str(stage)], x, self.finish(*key), *self.more[micro_batch])
            if last:
                self.loss += done.out
            else:
                self.mail.put("F", stage + 1, micro_batch, done.out)
            done.out = None
        elif kind == "W":
            self.passes.pop(key).weight_gradients()
        else:
            gradient = torch.ones_like(self.loss) if last else self.mail.take("B", *key)
            done = self.passes[key] if kind == "I" else self.passes.pop(key)
            gradient = done.input_gradient(gradient) if kind == "I" else done.backward(gradient)
            if stage > 0:
                self.mail.put("B", stage - 1, micro_batch, gradient)


# %% 09.9 W inside I
class PipelineRunner(PipelineSteps):
    def run(self, action: Action) -> None:
        kind, stage, micro_batch = action
        key, last = (stage, micro_batch), stage == self.last
        if kind == "F":
            x = self.inputs[micro_batch] if stage == 0 else self.mail.take("F", *key)
            make = SplitPass if key in self.split else StagePass
            with self.autocast:
                done = self.passes[key] = make(self.stages[str(stage)], x, self.finish(*key), *self.more[micro_batch])
            if last:
                self.loss += done.out
            else:
                self.mail.put("F", stage + 1, micro_batch, done.out)
            done.out = None
        elif kind == "W":
            self.passes.pop(key)
        else:
            gradient = torch.ones_like(self.loss) if last else self.mail.take("B", *key)
            done = self.passes[key] if kind == "I" else self.passes.pop(key)
            gradient = done.input_gradient(gradient) if kind == "I" else done.backward(gradient)
            if kind == "I":
                done.weight_gradients()
            if stage > 0:
                self.mail.put("B", stage - 1, micro_batch, gradient)


# %% 09.9 always a SplitPass, and B is its first half alone
class PipelineRunner(PipelineSteps):
    def run(self, action: Action) -> None:
        kind, stage, micro_batch = action
        key, last = (stage, micro_batch), stage == self.last
        if kind == "F":
            x = self.inputs[micro_batch] if stage == 0 else self.mail.take("F", *key)
            make = SplitPass
            with self.autocast:
                done = self.passes[key] = make(self.stages[str(stage)], x, self.finish(*key), *self.more[micro_batch])
            if last:
                self.loss += done.out
            else:
                self.mail.put("F", stage + 1, micro_batch, done.out)
            done.out = None
        elif kind == "W":
            self.passes.pop(key).weight_gradients()
        else:
            gradient = torch.ones_like(self.loss) if last else self.mail.take("B", *key)
            done = self.passes[key] if kind == "I" else self.passes.pop(key)
            gradient = done.input_gradient(gradient) if kind == "I" else done.backward(gradient)
            if stage > 0:
                self.mail.put("B", stage - 1, micro_batch, gradient)


# %% 09.9 I is all of B, W nothing
class PipelineRunner(PipelineSteps):
    def run(self, action: Action) -> None:
        kind, stage, micro_batch = action
        key, last = (stage, micro_batch), stage == self.last
        if kind == "F":
            x = self.inputs[micro_batch] if stage == 0 else self.mail.take("F", *key)
            make = StagePass
            with self.autocast:
                done = self.passes[key] = make(self.stages[str(stage)], x, self.finish(*key), *self.more[micro_batch])
            if last:
                self.loss += done.out
            else:
                self.mail.put("F", stage + 1, micro_batch, done.out)
            done.out = None
        elif kind == "W":
            self.passes.pop(key)
        else:
            gradient = torch.ones_like(self.loss) if last else self.mail.take("B", *key)
            done = self.passes[key] if kind == "I" else self.passes.pop(key)
            gradient = done.backward(gradient)
            if stage > 0:
                self.mail.put("B", stage - 1, micro_batch, gradient)


# %% 09.9 the stage runs outside of autocast
class PipelineRunner(PipelineSteps):
    def run(self, action: Action) -> None:
        kind, stage, micro_batch = action
        key, last = (stage, micro_batch), stage == self.last
        if kind == "F":
            x = self.inputs[micro_batch] if stage == 0 else self.mail.take("F", *key)
            make = SplitPass if key in self.split else StagePass
            if True:
                done = self.passes[key] = make(self.stages[str(stage)], x, self.finish(*key), *self.more[micro_batch])
            if last:
                self.loss += done.out
            else:
                self.mail.put("F", stage + 1, micro_batch, done.out)
            done.out = None
        elif kind == "W":
            self.passes.pop(key).weight_gradients()
        else:
            gradient = torch.ones_like(self.loss) if last else self.mail.take("B", *key)
            done = self.passes[key] if kind == "I" else self.passes.pop(key)
            gradient = done.input_gradient(gradient) if kind == "I" else done.backward(gradient)
            if stage > 0:
                self.mail.put("B", stage - 1, micro_batch, gradient)


# %% 09.9 hangs: all ranks meet after each action
class PipelineRunner(PipelineSteps):
    def run(self, action: Action) -> None:
        kind, stage, micro_batch = action
        key, last = (stage, micro_batch), stage == self.last
        if kind == "F":
            x = self.inputs[micro_batch] if stage == 0 else self.mail.take("F", *key)
            make = SplitPass if key in self.split else StagePass
            with self.autocast:
                done = self.passes[key] = make(self.stages[str(stage)], x, self.finish(*key), *self.more[micro_batch])
            if last:
                self.loss += done.out
            else:
                self.mail.put("F", stage + 1, micro_batch, done.out)
            done.out = None
        elif kind == "W":
            self.passes.pop(key).weight_gradients()
        else:
            gradient = torch.ones_like(self.loss) if last else self.mail.take("B", *key)
            done = self.passes[key] if kind == "I" else self.passes.pop(key)
            gradient = done.input_gradient(gradient) if kind == "I" else done.backward(gradient)
            if stage > 0:
                self.mail.put("B", stage - 1, micro_batch, gradient)
        dist.barrier()


# %% 09.9 fake: no graphs, the forward again before each backward
class PipelineRunner(PipelineSteps):
    def run(self, action: Action) -> None:
        kind, stage, micro_batch = action
        key, last = (stage, micro_batch), stage == self.last
        if kind == "F":
            x = self.inputs[micro_batch] if stage == 0 else self.mail.take("F", *key)
            make = SplitPass if key in self.split else StagePass
            with self.autocast:
                done = self.passes[key] = make(self.stages[str(stage)], x, self.finish(*key), *self.more[micro_batch])
            if last:
                self.loss += done.out
            else:
                self.mail.put("F", stage + 1, micro_batch, done.out)
            done.out = done.edge = None
        elif kind == "W":
            self.passes.pop(key).weight_gradients()
        else:
            gradient = torch.ones_like(self.loss) if last else self.mail.take("B", *key)
            done = self.passes[key] if kind == "I" else self.passes.pop(key)
            done = (SplitPass if kind == "I" else StagePass)(self.stages[str(stage)], done.x, self.finish(*key))
            done.out = None
            if kind == "I":
                self.passes[key] = done
            gradient = done.input_gradient(gradient) if kind == "I" else done.backward(gradient)
            if stage > 0:
                self.mail.put("B", stage - 1, micro_batch, gradient)


# %% 09.10 breadth first, whatever run says
def interleaved(p: int, m: int, v: int, run: int | None = None) -> Schedule:
    check_sizes(p, m, v)
    run = p if run is None else run
    if v == 1:
        return one_f_one_b(p, m)
    if run < p or m % run:
        raise ValueError(f"interleaved: a run has p = {p} micro-batches or more and divides m = {m}, and is {run}")

    def in_runs(kind: str, rank: int, chunks) -> list[Action]:
        starts = itertools.product(range(0, m, m), chunks)
        return [Action(kind, chunk * p + rank, i) for first, chunk in starts for i in range(first, first + m)]

    schedule = []
    for rank in range(p):
        forwards = in_runs("F", rank, range(v))
        backwards = [[action] for action in in_runs("B", rank, reversed(range(v)))]
        schedule.append(in_turn(forwards, backwards, (v - 1) * m + 2 * (p - 1 - rank)))
    return schedule


# %% 09.10 depth first, whatever run says
def interleaved(p: int, m: int, v: int, run: int | None = None) -> Schedule:
    check_sizes(p, m, v)
    run = p if run is None else run
    if v == 1:
        return one_f_one_b(p, m)
    if run < p or m % run:
        raise ValueError(f"interleaved: a run has p = {p} micro-batches or more and divides m = {m}, and is {run}")

    def in_runs(kind: str, rank: int, chunks) -> list[Action]:
        starts = itertools.product(range(0, m, p), chunks)
        return [Action(kind, chunk * p + rank, i) for first, chunk in starts for i in range(first, first + p)]

    schedule = []
    for rank in range(p):
        forwards = in_runs("F", rank, range(v))
        backwards = [[action] for action in in_runs("B", rank, reversed(range(v)))]
        schedule.append(in_turn(forwards, backwards, (v - 1) * p + 2 * (p - 1 - rank)))
    return schedule


# %% 09.10 chunks are not reversed in backward
def interleaved(p: int, m: int, v: int, run: int | None = None) -> Schedule:
    check_sizes(p, m, v)
    run = p if run is None else run
    if v == 1:
        return one_f_one_b(p, m)
    if run < p or m % run:
        raise ValueError(f"interleaved: a run has p = {p} micro-batches or more and divides m = {m}, and is {run}")

    def in_runs(kind: str, rank: int, chunks) -> list[Action]:
        starts = itertools.product(range(0, m, run), chunks)
        return [Action(kind, chunk * p + rank, i) for first, chunk in starts for i in range(first, first + run)]

    schedule = []
    for rank in range(p):
        forwards = in_runs("F", rank, range(v))
        backwards = [[action] for action in in_runs("B", rank, range(v))]
        schedule.append(in_turn(forwards, backwards, (v - 1) * run + 2 * (p - 1 - rank)))
    return schedule


# %% 09.10 ahead: the trip is counted once
def interleaved(p: int, m: int, v: int, run: int | None = None) -> Schedule:
    check_sizes(p, m, v)
    run = p if run is None else run
    if v == 1:
        return one_f_one_b(p, m)
    if run < p or m % run:
        raise ValueError(f"interleaved: a run has p = {p} micro-batches or more and divides m = {m}, and is {run}")

    def in_runs(kind: str, rank: int, chunks) -> list[Action]:
        starts = itertools.product(range(0, m, run), chunks)
        return [Action(kind, chunk * p + rank, i) for first, chunk in starts for i in range(first, first + run)]

    schedule = []
    for rank in range(p):
        forwards = in_runs("F", rank, range(v))
        backwards = [[action] for action in in_runs("B", rank, reversed(range(v)))]
        schedule.append(in_turn(forwards, backwards, (v - 1) * run + (p - 1 - rank)))
    return schedule


# %% 09.10 ahead: runs of p, whatever run says
def interleaved(p: int, m: int, v: int, run: int | None = None) -> Schedule:
    check_sizes(p, m, v)
    run = p if run is None else run
    if v == 1:
        return one_f_one_b(p, m)
    if run < p or m % run:
        raise ValueError(f"interleaved: a run has p = {p} micro-batches or more and divides m = {m}, and is {run}")

    def in_runs(kind: str, rank: int, chunks) -> list[Action]:
        starts = itertools.product(range(0, m, run), chunks)
        return [Action(kind, chunk * p + rank, i) for first, chunk in starts for i in range(first, first + run)]

    schedule = []
    for rank in range(p):
        forwards = in_runs("F", rank, range(v))
        backwards = [[action] for action in in_runs("B", rank, reversed(range(v)))]
        schedule.append(in_turn(forwards, backwards, (v - 1) * p + 2 * (p - 1 - rank)))
    return schedule


# %% 09.10 one forward too many ahead
def interleaved(p: int, m: int, v: int, run: int | None = None) -> Schedule:
    check_sizes(p, m, v)
    run = p if run is None else run
    if v == 1:
        return one_f_one_b(p, m)
    if run < p or m % run:
        raise ValueError(f"interleaved: a run has p = {p} micro-batches or more and divides m = {m}, and is {run}")

    def in_runs(kind: str, rank: int, chunks) -> list[Action]:
        starts = itertools.product(range(0, m, run), chunks)
        return [Action(kind, chunk * p + rank, i) for first, chunk in starts for i in range(first, first + run)]

    schedule = []
    for rank in range(p):
        forwards = in_runs("F", rank, range(v))
        backwards = [[action] for action in in_runs("B", rank, reversed(range(v)))]
        schedule.append(in_turn(forwards, backwards, (v - 1) * run + 2 * (p - 1 - rank) + 1))
    return schedule


# %% 09.10 a rank's stages are neighbours
def interleaved(p: int, m: int, v: int, run: int | None = None) -> Schedule:
    check_sizes(p, m, v)
    run = p if run is None else run
    if v == 1:
        return one_f_one_b(p, m)
    if run < p or m % run:
        raise ValueError(f"interleaved: a run has p = {p} micro-batches or more and divides m = {m}, and is {run}")

    def in_runs(kind: str, rank: int, chunks) -> list[Action]:
        starts = itertools.product(range(0, m, run), chunks)
        return [Action(kind, rank * v + chunk, i) for first, chunk in starts for i in range(first, first + run)]

    schedule = []
    for rank in range(p):
        forwards = in_runs("F", rank, range(v))
        backwards = [[action] for action in in_runs("B", rank, reversed(range(v)))]
        schedule.append(in_turn(forwards, backwards, (v - 1) * run + 2 * (p - 1 - rank)))
    return schedule


# %% 09.10 all forwards, then all backwards
def interleaved(p: int, m: int, v: int, run: int | None = None) -> Schedule:
    check_sizes(p, m, v)
    run = p if run is None else run
    if v == 1:
        return one_f_one_b(p, m)
    if run < p or m % run:
        raise ValueError(f"interleaved: a run has p = {p} micro-batches or more and divides m = {m}, and is {run}")

    def in_runs(kind: str, rank: int, chunks) -> list[Action]:
        starts = itertools.product(range(0, m, run), chunks)
        return [Action(kind, chunk * p + rank, i) for first, chunk in starts for i in range(first, first + run)]

    schedule = []
    for rank in range(p):
        forwards = in_runs("F", rank, range(v))
        backwards = [[action] for action in in_runs("B", rank, reversed(range(v)))]
        schedule.append(in_turn(forwards, backwards, m * v))
    return schedule


# %% 09.10 backwards breadth first
def interleaved(p: int, m: int, v: int, run: int | None = None) -> Schedule:
    check_sizes(p, m, v)
    run = p if run is None else run
    if v == 1:
        return one_f_one_b(p, m)
    if run < p or m % run:
        raise ValueError(f"interleaved: a run has p = {p} micro-batches or more and divides m = {m}, and is {run}")

    def in_runs(kind: str, rank: int, chunks) -> list[Action]:
        starts = itertools.product(range(0, m, size := run if kind == "F" else m), chunks)
        return [Action(kind, chunk * p + rank, i) for first, chunk in starts for i in range(first, first + size)]

    schedule = []
    for rank in range(p):
        forwards = in_runs("F", rank, range(v))
        backwards = [[action] for action in in_runs("B", rank, reversed(range(v)))]
        schedule.append(in_turn(forwards, backwards, (v - 1) * run + 2 * (p - 1 - rank)))
    return schedule


# %% 09.10 one micro-batch after the other through all chunks
def interleaved(p: int, m: int, v: int, run: int | None = None) -> Schedule:
    check_sizes(p, m, v)
    run = p if run is None else run
    if v == 1:
        return one_f_one_b(p, m)
    if run < p or m % run:
        raise ValueError(f"interleaved: a run has p = {p} micro-batches or more and divides m = {m}, and is {run}")

    def in_runs(kind: str, rank: int, chunks) -> list[Action]:
        chunks = list(chunks)
        return [Action(kind, chunk * p + rank, i) for i in range(m) for chunk in chunks]

    schedule = []
    for rank in range(p):
        forwards = in_runs("F", rank, range(v))
        backwards = [[action] for action in in_runs("B", rank, reversed(range(v)))]
        schedule.append(in_turn(forwards, backwards, (v - 1) * run + 2 * (p - 1 - rank)))
    return schedule


# %% 09.11 both products, whatever is asked
import collections
import weakref

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge
from torch.overrides import TorchFunctionMode


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight.to(x.dtype), bias if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        x, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        grad_x = gradient @ weight
        grad_weight = rows.t() @ x.flatten(0, -2)
        return grad_x, grad_weight, rows.sum(0) if wants_bias else None


# %% 09.11 makes both, then hands out what is asked
import collections
import weakref

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge
from torch.overrides import TorchFunctionMode


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight.to(x.dtype), bias if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        x, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        grad_x, grad_weight = gradient @ weight, rows.t() @ x.flatten(0, -2)
        grad_x, grad_weight = grad_x if wants_x else None, grad_weight if wants_weight else None
        return grad_x, grad_weight, rows.sum(0) if wants_bias else None


# %% 09.11 the weight's gradient of the first sequence alone
import collections
import weakref

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge
from torch.overrides import TorchFunctionMode


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight.to(x.dtype), bias if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        x, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        grad_x = gradient @ weight.to(gradient.dtype) if wants_x else None
        grad_weight = gradient[0].t() @ x[0] if wants_weight else None
        return grad_x, grad_weight, rows.sum(0) if wants_bias else None


# %% 09.11 the bias has the mean
import collections
import weakref

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge
from torch.overrides import TorchFunctionMode


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight.to(x.dtype), bias if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        x, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        grad_x = gradient @ weight.to(gradient.dtype) if wants_x else None
        grad_weight = rows.t() @ x.flatten(0, -2) if wants_weight else None
        return grad_x, grad_weight, rows.mean(0) if wants_bias else None


# %% 09.11 the bias unasked
import collections
import weakref

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge
from torch.overrides import TorchFunctionMode


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight.to(x.dtype), bias if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        x, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        grad_x = gradient @ weight.to(gradient.dtype) if wants_x else None
        grad_weight = rows.t() @ x.flatten(0, -2) if wants_weight else None
        return grad_x, grad_weight, rows.sum(0)


# %% 09.11 zeros for what is not asked
import collections
import weakref

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge
from torch.overrides import TorchFunctionMode


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight.to(x.dtype), bias if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        x, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        grad_x = gradient @ weight if wants_x else torch.zeros_like(x)
        grad_weight = rows.t() @ x.flatten(0, -2) if wants_weight else None
        return grad_x, grad_weight, rows.sum(0) if wants_bias else None


# %% 09.11 asks needs_input_grad for x and means both
import collections
import weakref

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge
from torch.overrides import TorchFunctionMode


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight.to(x.dtype), bias if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        x, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        grad_x = gradient @ weight.to(gradient.dtype) if wants_x else None
        grad_weight = rows.t() @ x.flatten(0, -2) if wants_x else None
        return grad_x, grad_weight, rows.sum(0) if wants_bias else None


# %% 09.11 fake: F.linear once more, and autograd
import collections
import weakref

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge
from torch.overrides import TorchFunctionMode


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight.to(x.dtype), bias if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        x, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        with torch.enable_grad():
            given = [
                x.detach().requires_grad_(),
                weight.detach().requires_grad_(),
                torch.zeros(len(weight), dtype=x.dtype, requires_grad=True),
            ]
            found = torch.autograd.grad(F.linear(*given), given, gradient)
        return tuple(one if wanted else None for one, wanted in zip(found, (wants_x, wants_weight, wants_bias)))


# %% 09.12 writes .grad, so that no hook fires
class SplitPass(InputFirst):
    @torch.no_grad()
    def weight_gradients(self) -> None:
        while self.laters:
            later = self.laters.pop()
            found = later.run()
            for i, (edge, _) in later.edges.items():
                if found[i] is not None:
                    torch.autograd.backward([edge], [found[i]], retain_graph=True)
        for weight, stand_in in zip(self.weights, self.stand_ins, strict=True):
            if stand_in.grad is not None:
                weight.grad = stand_in.grad if weight.grad is None else weight.grad + stand_in.grad


# %% 09.12 hooks fire twice
class SplitPass(InputFirst):
    @torch.no_grad()
    def weight_gradients(self) -> None:
        while self.laters:
            later = self.laters.pop()
            found = later.run()
            for i, (edge, _) in later.edges.items():
                if found[i] is not None:
                    torch.autograd.backward([edge], [found[i]], retain_graph=True)
        for weight, stand_in in zip(self.weights, self.stand_ins, strict=True):
            if stand_in.grad is not None:
                half = stand_in.grad / 2
                torch.autograd.backward([weight], [half])
                torch.autograd.backward([weight], [half])


# %% 09.12 a hook for every use of a weight
class SplitPass(InputFirst):
    @torch.no_grad()
    def weight_gradients(self) -> None:
        while self.laters:
            later = self.laters.pop()
            found = later.run()
            for i, (edge, _) in later.edges.items():
                if found[i] is not None:
                    whose = dict(zip(self.stand_ins, self.weights))
                    whole = type(edge.node).__name__ == "AccumulateGrad"
                    torch.autograd.backward([whose[edge.node.variable] if whole else edge], [found[i]])
        for weight, stand_in in zip(self.weights, self.stand_ins, strict=True):
            if stand_in.grad is not None:
                torch.autograd.backward([weight], [stand_in.grad])


# %% 09.12 the weight's gradient is replaced
class SplitPass(InputFirst):
    @torch.no_grad()
    def weight_gradients(self) -> None:
        while self.laters:
            later = self.laters.pop()
            found = later.run()
            for i, (edge, _) in later.edges.items():
                if found[i] is not None:
                    torch.autograd.backward([edge], [found[i]], retain_graph=True)
        for weight, stand_in in zip(self.weights, self.stand_ins, strict=True):
            if stand_in.grad is not None:
                weight.grad = None
                torch.autograd.backward([weight], [stand_in.grad])


# %% 09.12 keeps the laters
class SplitPass(InputFirst):
    @torch.no_grad()
    def weight_gradients(self) -> None:
        for later in self.laters:
            found = later.run()
            for i, (edge, _) in later.edges.items():
                if found[i] is not None:
                    torch.autograd.backward([edge], [found[i]], retain_graph=True)
        for weight, stand_in in zip(self.weights, self.stand_ins, strict=True):
            if stand_in.grad is not None:
                torch.autograd.backward([weight], [stand_in.grad])


# %% 09.12 of a weight that is used twice only one use counts
class SplitPass(InputFirst):
    @torch.no_grad()
    def weight_gradients(self) -> None:
        while self.laters:
            later = self.laters.pop()
            found = later.run()
            for i, (edge, _) in later.edges.items():
                if found[i] is not None:
                    for _, stand_in in [later.edges[i]]:
                        stand_in.grad = None
                    torch.autograd.backward([edge], [found[i]], retain_graph=True)
        for weight, stand_in in zip(self.weights, self.stand_ins, strict=True):
            if stand_in.grad is not None:
                torch.autograd.backward([weight], [stand_in.grad])


# %% 09.12 norms and biases are forgotten
class SplitPass(InputFirst):
    @torch.no_grad()
    def weight_gradients(self) -> None:
        while self.laters:
            later = self.laters.pop()
            found = later.run()
            done = set()
            for i, (edge, behind) in later.edges.items():
                done.add(behind)
                if found[i] is not None:
                    torch.autograd.backward([edge], [found[i]], retain_graph=True)
        for weight, stand_in in zip(self.weights, self.stand_ins, strict=True):
            if stand_in.grad is not None and stand_in.dim() > 1:
                torch.autograd.backward([weight], [stand_in.grad])


# %% 09.12 straight to the weight, past casts and transposes
class SplitPass(InputFirst):
    @torch.no_grad()
    def weight_gradients(self) -> None:
        while self.laters:
            later = self.laters.pop()
            found = later.run()
            for i, (_, behind) in later.edges.items():
                if found[i] is not None:
                    torch.autograd.backward([behind], [found[i]])
        for weight, stand_in in zip(self.weights, self.stand_ins, strict=True):
            if stand_in.grad is not None:
                torch.autograd.backward([weight], [stand_in.grad])


# %% 09.12 only the first weight of each Function
class SplitPass(InputFirst):
    @torch.no_grad()
    def weight_gradients(self) -> None:
        while self.laters:
            later = self.laters.pop()
            found = later.run()
            for i, (edge, _) in list(later.edges.items())[:1]:
                if found[i] is not None:
                    torch.autograd.backward([edge], [found[i]], retain_graph=True)
        for weight, stand_in in zip(self.weights, self.stand_ins, strict=True):
            if stand_in.grad is not None:
                torch.autograd.backward([weight], [stand_in.grad])


# %% 09.12 unused weights get zeros
class SplitPass(InputFirst):
    @torch.no_grad()
    def weight_gradients(self) -> None:
        while self.laters:
            later = self.laters.pop()
            found = later.run()
            for i, (edge, _) in later.edges.items():
                if found[i] is not None:
                    torch.autograd.backward([edge], [found[i]], retain_graph=True)
        for weight, stand_in in zip(self.weights, self.stand_ins, strict=True):
            gradient = torch.zeros_like(weight) if stand_in.grad is None else stand_in.grad
            torch.autograd.backward([weight], [gradient])


# %% 09.12 fake: W inside I
class SplitPass(InputFirst):
    def input_gradient(self, gradient):
        found = super().input_gradient(gradient)
        with torch.no_grad():
            self.all_of_w()
        return found

    def all_of_w(self):
        while self.laters:
            later = self.laters.pop()
            found = later.run()
            for i, (edge, _) in later.edges.items():
                if found[i] is not None:
                    torch.autograd.backward([edge], [found[i]], retain_graph=True)
        for weight, stand_in in zip(self.weights, self.stand_ins, strict=True):
            if stand_in.grad is not None:
                torch.autograd.backward([weight], [stand_in.grad])

    @torch.no_grad()
    def weight_gradients(self) -> None:
        pass


# %% 09.12 fake: all products inside I, handed out in W
class SplitPass(InputFirst):
    def input_gradient(self, gradient):
        found = super().input_gradient(gradient)
        with torch.no_grad():
            self.all_products()
        return found

    def all_products(self):
        while self.laters:
            later = self.laters.pop()
            found = later.run()
            for i, (edge, _) in later.edges.items():
                if found[i] is not None:
                    torch.autograd.backward([edge], [found[i]], retain_graph=True)

    @torch.no_grad()
    def weight_gradients(self) -> None:
        for weight, stand_in in zip(self.weights, self.stand_ins, strict=True):
            if stand_in.grad is not None:
                torch.autograd.backward([weight], [stand_in.grad])


# %% 09.12 fake: the whole backward again
class SplitPass(StagePass):
    def __init__(self, stage, x, finish):
        self.laters = []
        self.weights = [weight for weight in stage.parameters() if weight.requires_grad]
        super().__init__(stage, x, finish)

    def input_gradient(self, gradient):
        self.gradient = gradient
        if not self.x.requires_grad:
            return None
        return torch.autograd.grad([self.edge], [self.x], [gradient], retain_graph=True)[0]

    def weight_gradients(self):
        torch.autograd.backward([self.edge], [self.gradient], inputs=self.weights)
        self.edge = None


# %% 09.13 fake: each W right after its I
def put_off(p: int, m: int, k: int) -> Schedule:
    check_sizes(p, m)
    schedule = []
    for rank in range(p):
        late = 0
        forwards = [Action("F", rank, i) for i in range(m)]
        backwards = [[Action("I", rank, i)] + ([Action("W", rank, i - late)] if i >= late else []) for i in range(m)]
        left = [Action("W", rank, i) for i in range(max(0, m - late), m)]
        schedule.append(in_turn(forwards, backwards, k * (p - 1 - rank)) + left)
    return schedule


def zero_bubble_h1(p: int, m: int) -> Schedule:
    return put_off(p, m, 1)


def zero_bubble_h2(p: int, m: int) -> Schedule:
    return put_off(p, m, 2)


# %% 09.13 all W's at the end
def put_off(p: int, m: int, k: int) -> Schedule:
    check_sizes(p, m)
    schedule = []
    for rank in range(p):
        late = m
        forwards = [Action("F", rank, i) for i in range(m)]
        backwards = [[Action("I", rank, i)] + ([Action("W", rank, i - late)] if i >= late else []) for i in range(m)]
        left = [Action("W", rank, i) for i in range(max(0, m - late), m)]
        schedule.append(in_turn(forwards, backwards, k * (p - 1 - rank)) + left)
    return schedule


def zero_bubble_h1(p: int, m: int) -> Schedule:
    return put_off(p, m, 1)


def zero_bubble_h2(p: int, m: int) -> Schedule:
    return put_off(p, m, 2)


# %% 09.13 early ranks put off most
def put_off(p: int, m: int, k: int) -> Schedule:
    check_sizes(p, m)
    schedule = []
    for rank in range(p):
        late = k * (p - 1 - rank)
        forwards = [Action("F", rank, i) for i in range(m)]
        backwards = [[Action("I", rank, i)] + ([Action("W", rank, i - late)] if i >= late else []) for i in range(m)]
        left = [Action("W", rank, i) for i in range(max(0, m - late), m)]
        schedule.append(in_turn(forwards, backwards, k * (p - 1 - rank)) + left)
    return schedule


def zero_bubble_h1(p: int, m: int) -> Schedule:
    return put_off(p, m, 1)


def zero_bubble_h2(p: int, m: int) -> Schedule:
    return put_off(p, m, 2)


# %% 09.13 puts off r, whatever k
def put_off(p: int, m: int, k: int) -> Schedule:
    check_sizes(p, m)
    schedule = []
    for rank in range(p):
        late = rank
        forwards = [Action("F", rank, i) for i in range(m)]
        backwards = [[Action("I", rank, i)] + ([Action("W", rank, i - late)] if i >= late else []) for i in range(m)]
        left = [Action("W", rank, i) for i in range(max(0, m - late), m)]
        schedule.append(in_turn(forwards, backwards, k * (p - 1 - rank)) + left)
    return schedule


def zero_bubble_h1(p: int, m: int) -> Schedule:
    return put_off(p, m, 1)


def zero_bubble_h2(p: int, m: int) -> Schedule:
    return put_off(p, m, 2)


# %% 09.13 p - 1 - r ahead, whatever k
def put_off(p: int, m: int, k: int) -> Schedule:
    check_sizes(p, m)
    schedule = []
    for rank in range(p):
        late = k * rank
        forwards = [Action("F", rank, i) for i in range(m)]
        backwards = [[Action("I", rank, i)] + ([Action("W", rank, i - late)] if i >= late else []) for i in range(m)]
        left = [Action("W", rank, i) for i in range(max(0, m - late), m)]
        schedule.append(in_turn(forwards, backwards, p - 1 - rank) + left)
    return schedule


def zero_bubble_h1(p: int, m: int) -> Schedule:
    return put_off(p, m, 1)


def zero_bubble_h2(p: int, m: int) -> Schedule:
    return put_off(p, m, 2)


# %% 09.13 the W's that are left are forgotten
def put_off(p: int, m: int, k: int) -> Schedule:
    check_sizes(p, m)
    schedule = []
    for rank in range(p):
        late = k * rank
        forwards = [Action("F", rank, i) for i in range(m)]
        backwards = [[Action("I", rank, i)] + ([Action("W", rank, i - late)] if i >= late else []) for i in range(m)]
        left = [Action("W", rank, i) for i in range(max(0, m - late), m)]
        schedule.append(in_turn(forwards, backwards, k * (p - 1 - rank)))
    return schedule


def zero_bubble_h1(p: int, m: int) -> Schedule:
    return put_off(p, m, 1)


def zero_bubble_h2(p: int, m: int) -> Schedule:
    return put_off(p, m, 2)


# %% 09.13 fewer micro-batches than put off are not thought of
def put_off(p: int, m: int, k: int) -> Schedule:
    check_sizes(p, m)
    schedule = []
    for rank in range(p):
        late = k * rank
        forwards = [Action("F", rank, i) for i in range(m)]
        backwards = [[Action("I", rank, i)] + ([Action("W", rank, i - late)] if i >= late else []) for i in range(m)]
        left = [Action("W", rank, i) for i in range(m - late, m)]
        schedule.append(in_turn(forwards, backwards, k * (p - 1 - rank)) + left)
    return schedule


def zero_bubble_h1(p: int, m: int) -> Schedule:
    return put_off(p, m, 1)


def zero_bubble_h2(p: int, m: int) -> Schedule:
    return put_off(p, m, 2)


# %% 09.13 W before the I that others wait for
def put_off(p: int, m: int, k: int) -> Schedule:
    check_sizes(p, m)
    schedule = []
    for rank in range(p):
        late = k * rank
        forwards = [Action("F", rank, i) for i in range(m)]
        backwards = [
            ([Action("W", rank, i - late)] if i >= late and late else [])
            + [Action("I", rank, i)]
            + ([Action("W", rank, i)] if not late else [])
            for i in range(m)
        ]
        left = [Action("W", rank, i) for i in range(max(0, m - late), m)]
        schedule.append(in_turn(forwards, backwards, k * (p - 1 - rank)) + left)
    return schedule


def zero_bubble_h1(p: int, m: int) -> Schedule:
    return put_off(p, m, 1)


def zero_bubble_h2(p: int, m: int) -> Schedule:
    return put_off(p, m, 2)


# %% 09.13 one forward too many ahead
def put_off(p: int, m: int, k: int) -> Schedule:
    check_sizes(p, m)
    schedule = []
    for rank in range(p):
        late = k * rank
        forwards = [Action("F", rank, i) for i in range(m)]
        backwards = [[Action("I", rank, i)] + ([Action("W", rank, i - late)] if i >= late else []) for i in range(m)]
        left = [Action("W", rank, i) for i in range(max(0, m - late), m)]
        schedule.append(in_turn(forwards, backwards, k * (p - 1 - rank) + 1) + left)
    return schedule


def zero_bubble_h1(p: int, m: int) -> Schedule:
    return put_off(p, m, 1)


def zero_bubble_h2(p: int, m: int) -> Schedule:
    return put_off(p, m, 2)


# %% 09.13 H2 is H1
def put_off(p: int, m: int, k: int) -> Schedule:
    check_sizes(p, m)
    schedule = []
    for rank in range(p):
        late = k * rank
        forwards = [Action("F", rank, i) for i in range(m)]
        backwards = [[Action("I", rank, i)] + ([Action("W", rank, i - late)] if i >= late else []) for i in range(m)]
        left = [Action("W", rank, i) for i in range(max(0, m - late), m)]
        schedule.append(in_turn(forwards, backwards, k * (p - 1 - rank)) + left)
    return schedule


def zero_bubble_h1(p: int, m: int) -> Schedule:
    return put_off(p, m, 1)


def zero_bubble_h2(p: int, m: int) -> Schedule:
    return put_off(p, m, 1)


# %% 09.14 memory is not counted
class Greedy(ListScheduler):
    def options(self, rank: int) -> dict:
        f, i, w = (self.done[rank][kind] for kind in "FIW")
        found = {}
        if f < self.m and f - i < self.ahead[rank]:
            found["F"] = self.arrival("F", rank, f)
        if i < f:
            found["I"] = self.arrival("I", rank, i)
        found = {kind: max(self.free[rank], time) for kind, time in found.items() if time is not None}
        wait = min(found.values(), default=math.inf) - self.free[rank]
        if w < i and (f - w >= self.live or wait > 0 and wait >= self.fill * self.times["W"][rank]):
            found["W"] = self.free[rank]
        return found


# %% 09.14 memory is free after I
class Greedy(ListScheduler):
    def options(self, rank: int) -> dict:
        f, i, w = (self.done[rank][kind] for kind in "FIW")
        found = {}
        if f < self.m and f - i < self.live and f - i < self.ahead[rank]:
            found["F"] = self.arrival("F", rank, f)
        if i < f:
            found["I"] = self.arrival("I", rank, i)
        found = {kind: max(self.free[rank], time) for kind, time in found.items() if time is not None}
        wait = min(found.values(), default=math.inf) - self.free[rank]
        if w < i and (f - w >= self.live or wait > 0 and wait >= self.fill * self.times["W"][rank]):
            found["W"] = self.free[rank]
        return found


# %% 09.14 forwards run ahead without end
class Greedy(ListScheduler):
    def options(self, rank: int) -> dict:
        f, i, w = (self.done[rank][kind] for kind in "FIW")
        found = {}
        if f < self.m and f - w < self.live:
            found["F"] = self.arrival("F", rank, f)
        if i < f:
            found["I"] = self.arrival("I", rank, i)
        found = {kind: max(self.free[rank], time) for kind, time in found.items() if time is not None}
        wait = min(found.values(), default=math.inf) - self.free[rank]
        if w < i and (f - w >= self.live or wait > 0 and wait >= self.fill * self.times["W"][rank]):
            found["W"] = self.free[rank]
        return found


# %% 09.14 I without its own F
class Greedy(ListScheduler):
    def options(self, rank: int) -> dict:
        f, i, w = (self.done[rank][kind] for kind in "FIW")
        found = {}
        if f < self.m and f - w < self.live and f - i < self.ahead[rank]:
            found["F"] = self.arrival("F", rank, f)
        if i < self.m:
            found["I"] = self.arrival("I", rank, i)
        found = {kind: max(self.free[rank], time) for kind, time in found.items() if time is not None}
        wait = min(found.values(), default=math.inf) - self.free[rank]
        if w < i and (f - w >= self.live or wait > 0 and wait >= self.fill * self.times["W"][rank]):
            found["W"] = self.free[rank]
        return found


# %% 09.14 a W always
class Greedy(ListScheduler):
    def options(self, rank: int) -> dict:
        f, i, w = (self.done[rank][kind] for kind in "FIW")
        found = {}
        if f < self.m and f - w < self.live and f - i < self.ahead[rank]:
            found["F"] = self.arrival("F", rank, f)
        if i < f:
            found["I"] = self.arrival("I", rank, i)
        found = {kind: max(self.free[rank], time) for kind, time in found.items() if time is not None}
        wait = min(found.values(), default=math.inf) - self.free[rank]
        if w < i:
            found["W"] = self.free[rank]
        return found


# %% 09.14 a W only where memory is full
class Greedy(ListScheduler):
    def options(self, rank: int) -> dict:
        f, i, w = (self.done[rank][kind] for kind in "FIW")
        found = {}
        if f < self.m and f - w < self.live and f - i < self.ahead[rank]:
            found["F"] = self.arrival("F", rank, f)
        if i < f:
            found["I"] = self.arrival("I", rank, i)
        found = {kind: max(self.free[rank], time) for kind, time in found.items() if time is not None}
        wait = min(found.values(), default=math.inf) - self.free[rank]
        if w < i and f - w >= self.live:
            found["W"] = self.free[rank]
        return found


# %% 09.14 no W where memory is full
class Greedy(ListScheduler):
    def options(self, rank: int) -> dict:
        f, i, w = (self.done[rank][kind] for kind in "FIW")
        found = {}
        if f < self.m and f - w < self.live and f - i < self.ahead[rank]:
            found["F"] = self.arrival("F", rank, f)
        if i < f:
            found["I"] = self.arrival("I", rank, i)
        found = {kind: max(self.free[rank], time) for kind, time in found.items() if time is not None}
        wait = min(found.values(), default=math.inf) - self.free[rank]
        if w < i and (wait > 0 and wait >= self.fill * self.times["W"][rank]):
            found["W"] = self.free[rank]
        return found


# %% 09.14 fill is ignored
class Greedy(ListScheduler):
    def options(self, rank: int) -> dict:
        f, i, w = (self.done[rank][kind] for kind in "FIW")
        found = {}
        if f < self.m and f - w < self.live and f - i < self.ahead[rank]:
            found["F"] = self.arrival("F", rank, f)
        if i < f:
            found["I"] = self.arrival("I", rank, i)
        found = {kind: max(self.free[rank], time) for kind, time in found.items() if time is not None}
        wait = min(found.values(), default=math.inf) - self.free[rank]
        if w < i and (f - w >= self.live or wait > 0):
            found["W"] = self.free[rank]
        return found


# %% 09.14 the rank need not be free
class Greedy(ListScheduler):
    def options(self, rank: int) -> dict:
        f, i, w = (self.done[rank][kind] for kind in "FIW")
        found = {}
        if f < self.m and f - w < self.live and f - i < self.ahead[rank]:
            found["F"] = self.arrival("F", rank, f)
        if i < f:
            found["I"] = self.arrival("I", rank, i)
        found = {kind: time for kind, time in found.items() if time is not None}
        wait = min(found.values(), default=math.inf) - self.free[rank]
        if w < i and (f - w >= self.live or wait > 0 and wait >= self.fill * self.times["W"][rank]):
            found["W"] = self.free[rank]
        return found


# %% 09.14 no W where nobody knows what comes next
class Greedy(ListScheduler):
    def options(self, rank: int) -> dict:
        f, i, w = (self.done[rank][kind] for kind in "FIW")
        found = {}
        if f < self.m and f - w < self.live and f - i < self.ahead[rank]:
            found["F"] = self.arrival("F", rank, f)
        if i < f:
            found["I"] = self.arrival("I", rank, i)
        found = {kind: max(self.free[rank], time) for kind, time in found.items() if time is not None}
        wait = min(found.values(), default=self.free[rank]) - self.free[rank]
        if w < i and (f - w >= self.live or wait > 0 and wait >= self.fill * self.times["W"][rank]):
            found["W"] = self.free[rank]
        return found


# %% 09.14 the gap counts from 0
class Greedy(ListScheduler):
    def options(self, rank: int) -> dict:
        f, i, w = (self.done[rank][kind] for kind in "FIW")
        found = {}
        if f < self.m and f - w < self.live and f - i < self.ahead[rank]:
            found["F"] = self.arrival("F", rank, f)
        if i < f:
            found["I"] = self.arrival("I", rank, i)
        found = {kind: max(self.free[rank], time) for kind, time in found.items() if time is not None}
        wait = min(found.values(), default=math.inf)
        if w < i and (f - w >= self.live or wait > 0 and wait >= self.fill * self.times["W"][rank]):
            found["W"] = self.free[rank]
        return found


# %% 09.15 holders by arithmetic
def holders(schedule: Schedule, stages: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted({stage % len(schedule) for stage in stages}))


def final_backwards(stages: nn.ModuleDict, actions: list[Action]) -> set[int]:
    last = {action.stage: i for i, action in enumerate(actions) if action.kind in "BW"}
    weights = {int(number): set(stage.parameters()) for number, stage in stages.items()}
    return {i for a, i in last.items() if not any(j > i and weights[a] & weights[b] for b, j in last.items())}


# %% 09.15 one rank for each stage
def holders(schedule: Schedule, stages: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted({{a.stage: r for r, row in enumerate(schedule) for a in row}[stage] for stage in stages}))


def final_backwards(stages: nn.ModuleDict, actions: list[Action]) -> set[int]:
    last = {action.stage: i for i, action in enumerate(actions) if action.kind in "BW"}
    weights = {int(number): set(stage.parameters()) for number, stage in stages.items()}
    return {i for a, i in last.items() if not any(j > i and weights[a] & weights[b] for b, j in last.items())}


# %% 09.15 a rank with both stages twice
def holders(schedule: Schedule, stages: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(r for stage in stages for r, row in enumerate(schedule) if any(a.stage == stage for a in row))


def final_backwards(stages: nn.ModuleDict, actions: list[Action]) -> set[int]:
    last = {action.stage: i for i, action in enumerate(actions) if action.kind in "BW"}
    weights = {int(number): set(stage.parameters()) for number, stage in stages.items()}
    return {i for a, i in last.items() if not any(j > i and weights[a] & weights[b] for b, j in last.items())}


# %% 09.15 holders of all of the stages
def holders(schedule: Schedule, stages: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(r for r, actions in enumerate(schedule) if {*stages} <= {action.stage for action in actions})


def final_backwards(stages: nn.ModuleDict, actions: list[Action]) -> set[int]:
    last = {action.stage: i for i, action in enumerate(actions) if action.kind in "BW"}
    weights = {int(number): set(stage.parameters()) for number, stage in stages.items()}
    return {i for a, i in last.items() if not any(j > i and weights[a] & weights[b] for b, j in last.items())}


# %% 09.15 the micro-batch with the largest number
def holders(schedule: Schedule, stages: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(r for r, actions in enumerate(schedule) if any(action.stage in stages for action in actions))


def final_backwards(stages: nn.ModuleDict, actions: list[Action]) -> set[int]:
    last = {
        action.stage: i
        for i, action in enumerate(actions)
        if action.kind in "BW" and action.micro_batch == max(a.micro_batch for a in actions)
    }
    weights = {int(number): set(stage.parameters()) for number, stage in stages.items()}
    return {i for a, i in last.items() if not any(j > i and weights[a] & weights[b] for b, j in last.items())}


# %% 09.15 complete after I
def holders(schedule: Schedule, stages: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(r for r, actions in enumerate(schedule) if any(action.stage in stages for action in actions))


def final_backwards(stages: nn.ModuleDict, actions: list[Action]) -> set[int]:
    last = {action.stage: i for i, action in enumerate(actions) if action.kind in "BI"}
    weights = {int(number): set(stage.parameters()) for number, stage in stages.items()}
    return {i for a, i in last.items() if not any(j > i and weights[a] & weights[b] for b, j in last.items())}


# %% 09.15 shared weights are ignored
def holders(schedule: Schedule, stages: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(r for r, actions in enumerate(schedule) if any(action.stage in stages for action in actions))


def final_backwards(stages: nn.ModuleDict, actions: list[Action]) -> set[int]:
    last = {action.stage: i for i, action in enumerate(actions) if action.kind in "BW"}
    weights = {int(number): set(stage.parameters()) for number, stage in stages.items()}
    return {*last.values()}


# %% 09.15 of stages that share the earlier one
def holders(schedule: Schedule, stages: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(r for r, actions in enumerate(schedule) if any(action.stage in stages for action in actions))


def final_backwards(stages: nn.ModuleDict, actions: list[Action]) -> set[int]:
    last = {action.stage: i for i, action in enumerate(actions) if action.kind in "BW"}
    weights = {int(number): set(stage.parameters()) for number, stage in stages.items()}
    return {i for a, i in last.items() if not any(j < i and weights[a] & weights[b] for b, j in last.items())}


# %% 09.15 the rank's last action alone
def holders(schedule: Schedule, stages: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(r for r, actions in enumerate(schedule) if any(action.stage in stages for action in actions))


def final_backwards(stages: nn.ModuleDict, actions: list[Action]) -> set[int]:
    last = {action.stage: i for i, action in enumerate(actions) if action.kind in "BW"}
    weights = {int(number): set(stage.parameters()) for number, stage in stages.items()}
    return {max(last.values())}


# %% 09.15 weights of one name are one weight
def holders(schedule: Schedule, stages: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(r for r, actions in enumerate(schedule) if any(action.stage in stages for action in actions))


def final_backwards(stages: nn.ModuleDict, actions: list[Action]) -> set[int]:
    last = {action.stage: i for i, action in enumerate(actions) if action.kind in "BW"}
    weights = {int(number): {name for name, _ in stage.named_parameters()} for number, stage in stages.items()}
    return {i for a, i in last.items() if not any(j > i and weights[a] & weights[b] for b, j in last.items())}


# %% 09.16 lost and cut the other way round
who = {"A": "scaled", "B": "lost", "C": "cut", "D": "sound"}


# %% 09.16 takes the scaled one for the sound one
who = {"A": "sound", "B": "cut", "C": "lost", "D": "scaled"}


# %% 09.16 all look sound
who = dict.fromkeys("ABCD", "sound")


# %% 09.16 only one is named
who = {"D": "sound"}


# %% 09.16 as the text lists them
who = {"A": "sound", "B": "lost", "C": "cut", "D": "scaled"}


# %% 09.17 the playbook's: numbers, not bytes
def pipeline_ratio(hidden: int, layers: float, bandwidth: float, peak: float, number_bytes: float = 2) -> float:
    return peak / (32 * hidden * layers * bandwidth)


# %% 09.17 bytes on the wrong side
def pipeline_ratio(hidden: int, layers: float, bandwidth: float, peak: float, number_bytes: float = 2) -> float:
    return peak / (32 * hidden * layers * bandwidth * number_bytes)


# %% 09.17 two bytes, whatever is given
def pipeline_ratio(hidden: int, layers: float, bandwidth: float, peak: float, number_bytes: float = 2) -> float:
    return 2 * peak / (32 * hidden * layers * bandwidth)


# %% 09.17 one layer, whatever is given
def pipeline_ratio(hidden: int, layers: float, bandwidth: float, peak: float, number_bytes: float = 2) -> float:
    return number_bytes * peak / (32 * 4 * hidden * bandwidth)


# %% 09.17 h does not cancel
def pipeline_ratio(hidden: int, layers: float, bandwidth: float, peak: float, number_bytes: float = 2) -> float:
    return number_bytes * peak / (32 * hidden**2 * layers * bandwidth)


# %% 09.17 16 FLOPs a weight's half
def pipeline_ratio(hidden: int, layers: float, bandwidth: float, peak: float, number_bytes: float = 2) -> float:
    return number_bytes * peak / (16 * hidden * layers * bandwidth)


# %% 09.17 the other way round
def pipeline_ratio(hidden: int, layers: float, bandwidth: float, peak: float, number_bytes: float = 2) -> float:
    return 32 * hidden * layers * bandwidth / (number_bytes * peak)
