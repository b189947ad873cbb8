"""The state of a ZeroOptimizer, put together from all ranks and taken apart again: that of one process's optimizer.

{"state": {number of the parameter: {name: whole tensor, or a number}}, "param_groups": [...]}, as of torch.optim. All
of it is on every rank, in the host's memory: 12 bytes a parameter with Adam and master weights.
"""

from __future__ import annotations

import torch


def check_states(param_groups: list[dict], state_dict: dict) -> None:
    """Raise ValueError where a state_dict is not one of these parameter groups."""
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


@torch.no_grad()
def whole_state(zero) -> dict:
    """See ZeroOptimizer.state_dict."""
    zero.wait()
    numbers = {p: i for i, p in enumerate(p for group in zero.param_groups for p in group["params"])}
    states = {number: {} for number in numbers.values()}
    for shard in zero.shards:
        for name, wholes in shard.whole_states(zero.optimizer).items():
            for parameter, whole in zip(shard.parameters, wholes, strict=True):
                states[numbers[parameter]][name] = whole
    groups = [group | {"params": [numbers[p] for p in group["params"]]} for group in zero.param_groups]
    return {"state": {number: state for number, state in states.items() if state}, "param_groups": groups}


@torch.no_grad()
def load_state(zero, state_dict: dict) -> None:
    """See ZeroOptimizer.load_state_dict."""
    zero.copy_from_params()
    parameters = [p for group in zero.param_groups for p in group["params"]]
    states = {parameter: state_dict["state"].get(i, {}) for i, parameter in enumerate(parameters)}
    for ours, theirs in zip(zero.param_groups, state_dict["param_groups"], strict=True):
        ours.update((key, value) for key, value in theirs.items() if key != "params")
    found = {}
    for shard in zero.shards:
        found[shard.shard] = shard.own_states([states[parameter] for parameter in shard.parameters])
        master = found[shard.shard].pop("master", None)
        if master is not None:
            shard.shard.copy_(master)
        shard.gather()
    inner = zero.optimizer.state_dict()
    order = [shard for group in zero.optimizer.param_groups for shard in group["params"]]
    inner["state"] = {i: found[shard] for i, shard in enumerate(order) if found[shard]}
    zero.optimizer.load_state_dict(inner)
    zero.wait()
