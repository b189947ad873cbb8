"""Checks of the arguments of ZeroOptimizer, and of the states that it loads."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

# Optimizers of torch whose update of an element depends on its full matrix, or on all parameters.
NEED_FULL_MATRICES = ("Adafactor", "LBFGS", "Muon", "SparseAdam")


def parameter_groups(
    module_or_params: nn.Module | Iterable[nn.Parameter], param_groups: list[dict] | None
) -> list[dict]:
    """Return parameter groups as torch.optim has them, with the parameters that require a gradient."""
    given: list = list(param_groups or ())
    if param_groups is None:
        given = list(module_or_params.parameters() if isinstance(module_or_params, nn.Module) else module_or_params)
    if given and not isinstance(given[0], dict):
        given = [{"params": given}]
    groups = [each | {"params": [each["params"]]} if torch.is_tensor(each["params"]) else each for each in given]
    return [each | {"params": [p for p in each["params"] if p.requires_grad]} for each in groups]


def check_arguments(
    module: nn.Module, optimizer_cls: type, stage: int, bucket_mb: float, parameters: list[nn.Parameter]
) -> None:
    """Raise ValueError for arguments that ZeroOptimizer cannot use."""
    if not parameters:
        raise ValueError("there is no parameter to train")
    if len(set(parameters)) < len(parameters):
        raise ValueError("a parameter is in more than one parameter group, or twice in one")
    if not set(parameters) <= set(module.parameters()):
        raise ValueError("a parameter in the parameter groups is not of the module")
    if stage not in (1, 2):
        raise ValueError(f"stage {stage}: it is 1 or 2; stage 3 is fully_shard, stage 0 DataParallel")
    if not bucket_mb > 0:
        raise ValueError(f"bucket_mb {bucket_mb}: a bucket has a size above 0")
    names = [name for name in NEED_FULL_MATRICES if hasattr(torch.optim, name)]
    if issubclass(optimizer_cls, tuple(getattr(torch.optim, name) for name in names)):
        raise ValueError(f"{optimizer_cls.__name__} needs full matrices; a shard is a slice of a flat buffer")
    if any(parameter.is_meta for parameter in parameters):
        raise ValueError("parameters are on the meta device: give them values first")


def check_states(param_groups: list[dict], state_dict: dict) -> None:
    """Raise ValueError unless a state_dict comes from an optimizer with these parameter groups."""
    if not {"state", "param_groups"} <= set(state_dict):
        raise ValueError("not the state of an optimizer: it has no state or no param_groups")
    sizes = [[len(each["params"]) for each in groups] for groups in (param_groups, state_dict["param_groups"])]
    if sizes[0] != sizes[1]:
        raise ValueError(f"the state has parameter groups of {sizes[1]} parameters, this optimizer of {sizes[0]}")
    for i, parameter in enumerate(p for each in param_groups for p in each["params"]):
        for name, value in state_dict["state"].get(i, {}).items():
            if torch.is_tensor(value) and value.dim() and value.shape != parameter.shape:
                raise ValueError(
                    f"{name} of parameter {i} has shape {list(value.shape)}, the parameter {list(parameter.shape)}"
                )
