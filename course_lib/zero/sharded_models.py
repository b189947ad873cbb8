"""A model made into one of ZeRO stage 3, and its state as a whole.

    model = fully_shard(module, group)            # each rank keeps its pieces
    model = fully_shard(module, mesh)             # replicas along the mesh's first dimension, pieces along the second
    state = full_state_dict(model)                # the whole module's, on every rank's CPU

(Zhao et al. 2023, PyTorch FSDP, §3.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from course_lib.data_parallel.replicas import broadcast_from_first, check_same_model
from course_lib.single_gpu.model import plain_name
from course_lib.single_gpu.placement import placement_of
from course_lib.zero.full_sharding import FullyShard, UnitRunner
from course_lib.zero.sharded_parameters import Encoding, FSDPUnit, ShardedParameters, find_blocks
from course_lib.zero.shards import norm_group


def parameter_slots(module: nn.Module) -> dict[nn.Parameter, list[tuple[str, nn.Module, str]]]:
    """Of each parameter where it stands: its full name, the module that has it, its name there."""
    places: dict[nn.Parameter, list] = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):  # a module at two places has two names
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(parameter, []).append((f"{prefix}.{name}" if prefix else name, owner, name))
    return places


def check_units(module: nn.Module, units: list[list[nn.Module]], init) -> None:
    """Raise ValueError where units lie elsewhere or inside of one another, and where a meta tensor has no `init`."""
    if not {each for unit in units for each in unit} <= {*module.modules()}:
        raise ValueError("a unit is not of the module")
    inside = Counter(inner for unit in units for each in unit for inner in each.modules())
    for each in (each for unit in units for each in unit):
        if inside[each] > 1:
            raise ValueError(f"a unit ({type(each).__name__}) lies inside of another one, or is there twice")
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.is_meta and init is None:
            raise ValueError(f"{name} is on the meta device: say by `init` what it holds")


class ReplicaGroups(NamedTuple):
    """A rank's groups: all ranks; those that share the parameters out; those that have the same pieces, or None."""

    everyone: dist.ProcessGroup
    shards: dist.ProcessGroup
    replicas: dist.ProcessGroup | None


def groups_of(group: dist.ProcessGroup | DeviceMesh | ReplicaGroups | None) -> ReplicaGroups:
    """The groups that `fully_shard` is given. Raises ValueError for a mesh that is not replicas x shards."""
    if isinstance(group, ReplicaGroups):
        return group
    if not isinstance(group, DeviceMesh):
        group = group or dist.group.WORLD
        return ReplicaGroups(group, group, None)
    if group.ndim != 2 or not group.mesh_dim_names:
        raise ValueError(f"{group}: it has 2 dimensions with names, replicas and those who share parameters out")
    if (group.mesh.diff(dim=1) < 0).any():  # groups sort their ranks: replicas would have other pieces
        raise ValueError(f"the mesh {group.mesh.tolist()}: ranks that share parameters out stand in ascending order")
    return ReplicaGroups(group._flatten().get_group(), group.get_group(1), group.get_group(0))


def needs_own_collective(parameter: nn.Parameter, unit: list[nn.Parameter]) -> bool:
    """Whether a small parameter of a unit would need collectives of its own, over another group: norms under sequence
    parallelism, routers. It is whole for a step instead, with what belongs to no unit.
    """
    return placement_of(parameter).reduce_group is not None and 32 * parameter.numel() <= sum(
        each.numel() for each in unit
    )


def fully_shard(
    module: nn.Module,
    group: dist.ProcessGroup | DeviceMesh | ReplicaGroups | None = None,
    compute_dtype: torch.dtype | None = None,
    encode: Encoding | Callable[[ShardedParameters], Encoding | None] | None = None,
    *,
    reduce_dtype: torch.dtype | None = None,
    units: Iterable | None = None,
    init: Callable[[str, torch.Tensor], None] | None = None,
    wrapper: type[UnitRunner] = FullyShard,
) -> UnitRunner:
    """Share the parameters of `module` out over `group`; returns it wrapped. Its parameters are this rank's pieces.

    group: a mesh of two dimensions shares them out over the second, and keeps the same pieces along the first (HSDP);
    ReplicaGroups say the same without a mesh.
    compute_dtype: what parameters are gathered in, and floating-point inputs cast to; reduce_dtype: of gradients on
    their way (None: as they are made). units: modules, or lists of modules, gathered at a time; None: `find_blocks`.
    encode: what travels in place of values, or a function that says so for each flat buffer; None: values in
    compute_dtype. init(name, tensor): fills a whole tensor of a meta-device module, on the default device; one is made
    at a time. A parameter's `reduce_group` is read as by DataParallel: its ranks share it out, with replicas as
    without. A parameter that no rank has used keeps its `.grad`, None after zero_grad(); if some ranks have used it,
    the others count as having a gradient of 0. wrapper: who decides when units are gathered (notebook 10 has another
    one); it lives as long as the module. Make the optimizer later.

    Raises ValueError, on all ranks, for meta tensors without `init`, units inside of one another, a module that is
    sharded already, and different models or arguments on the ranks.
    """
    everyone, group, replicas = groups_of(group)
    if any(placement_of(parameter).flat_shard for parameter in module.parameters()):
        raise ValueError("the module is sharded already")
    units = [list(unit) if isinstance(unit, (list, tuple)) else [unit] for unit in units or find_blocks(module)]
    arguments = {"compute_dtype": compute_dtype, "reduce_dtype": reduce_dtype, "units": len(units)}
    check_same_model(module, everyone, arguments)
    check_units(module, units, init)
    places, buffers = parameter_slots(module), dict(module.named_buffers())
    if not any(tensor.is_meta for tensor in [*places, *buffers.values()]):
        broadcast_from_first(module, everyone)

    @torch.no_grad()
    def make(name: str, like: torch.Tensor) -> torch.Tensor:
        whole = torch.empty_like(like, device=torch.get_default_device())
        init(name, whole)
        return whole

    for name, buffer in buffers.items():
        if buffer.is_meta:
            owner, _, own_name = name.rpartition(".")
            module.get_submodule(owner)._buffers[own_name] = make(name, buffer)
    held = [list(dict.fromkeys(p for each in unit for p in each.parameters())) for unit in units]
    counts, made = Counter(p for each in held for p in each), []
    own = [[p for p in each if counts[p] == 1 and not needs_own_collective(p, each)] for each in held]
    in_units = {p for each in own for p in each}
    for modules, parameters in zip([*units, [module]], [*own, [p for p in places if p not in in_units]], strict=True):
        alike: dict[tuple, list[nn.Parameter]] = {}
        for p in parameters:
            its_group = placement_of(p).reduce_group  # of all that have it: there are no replicas beside
            over = (its_group, everyone, None) if its_group else (group, group, replicas)
            alike.setdefault((p.dtype, p.device, p.requires_grad, placement_of(p).norm_groups, over), []).append(p)
        options = 1 / everyone.size(), compute_dtype, reduce_dtype, encode, make
        parts = [ShardedParameters(e, [places[p] for p in e], kind[-1][0], *options) for kind, e in alike.items()]
        for (*_, outer, (over, all_pieces, copies)), part in zip(alike, parts, strict=True):
            part.join(norm_group(all_pieces, over, outer), *outer)
            part.replicas = copies
        made.append(FSDPUnit(modules, parts))
    return wrapper(module, everyone, [unit for unit in made[:-1] if unit.flat_params], made[-1], compute_dtype)


@torch.no_grad()
def full_state_dict(model: FullyShard) -> dict[str, torch.Tensor]:
    """The state_dict of the whole module, on the CPU of every rank; one unit at a time is gathered. Collective."""
    whole = {}
    for part in model.flat_params:
        for tensor, places in zip(part.layout.gather(part.shard), part.slots, strict=True):
            tensor = tensor.to("cpu", copy=True)
            whole.update((name, tensor) for name, _, _ in places)
    state = model.module.state_dict()
    return {plain_name(name): whole[name] if name in whole else state[name].to("cpu", copy=True) for name in state}


@torch.no_grad()
def load_full_state_dict(model: FullyShard, state_dict: dict[str, torch.Tensor]) -> None:
    """Take this rank's pieces from the state_dict of the whole module, which every rank has. Not collective.

    Raises ValueError where names or shapes differ; nothing is changed then.
    """
    parts = model.flat_params
    state_dict = {plain_name(name): value for name, value in state_dict.items()}
    shapes = {plain_name(name): value.shape for name, value in model.module.state_dict().items()}
    for part in parts:
        for shape, places in zip(part.layout.shapes, part.slots, strict=True):
            shapes.update((plain_name(name), shape) for name, _, _ in places)
    found = {name: value.shape for name, value in state_dict.items()}
    for name in sorted(shapes.keys() | found.keys()):
        if shapes.get(name) != found.get(name):
            raise ValueError(f"{name}: the module has {shapes.get(name)}, the state has {found.get(name)}")
    for part in parts:
        part.shard.copy_(part.layout.shard_of([state_dict[plain_name(places[0][0])] for places in part.slots]))
    for name, buffer in model.module.named_buffers():
        if plain_name(name) in state_dict:
            buffer.copy_(state_dict[plain_name(name)])
