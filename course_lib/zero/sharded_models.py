"""`fully_shard` applies ZeRO stage 3 to a model; `full_state_dict` returns the unsharded state.

    model = fully_shard(module, group)            # each rank keeps its local shards
    model = fully_shard(module, mesh)             # replicas along the mesh's first dimension, shards along the second
    state = full_state_dict(model)                # of the full module, on every rank's CPU

(Zhao et al. 2023, PyTorch FSDP, §3.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from course_lib.data_parallel.same_model import broadcast_from_first, check_same_model
from course_lib.single_gpu.model import plain_name
from course_lib.single_gpu.placement import placement_of
from course_lib.zero.full_sharding import FullyShard
from course_lib.zero.parameters import parameter_slots
from course_lib.zero.sharded_parameters import Encoding, FSDPUnit, ShardedParameters, find_blocks
from course_lib.zero.shards import norm_group


class ReplicaGroups(NamedTuple):
    """A rank's groups: all ranks; those that share the parameters; those with the same local shards, or None."""

    everyone: dist.ProcessGroup
    shards: dist.ProcessGroup
    replicas: dist.ProcessGroup | None


Group = dist.ProcessGroup | DeviceMesh | ReplicaGroups | None  # what `fully_shard` takes
Init = Callable[[str, torch.Tensor], None]


def resolve_groups(group: Group) -> ReplicaGroups:
    """Resolve the `group` argument of `fully_shard` to process groups. Raises ValueError for a DeviceMesh that is not
    replicas x shards.
    """
    if isinstance(group, ReplicaGroups):
        return group
    if not isinstance(group, DeviceMesh):
        shards = cast(dist.ProcessGroup, group or dist.group.WORLD)
        return ReplicaGroups(shards, shards, None)
    if group.ndim != 2 or not group.mesh_dim_names:
        raise ValueError(f"{group}: it needs 2 dimensions with names, first the replicas, then the shards")
    if (group.mesh.diff(dim=1) < 0).any():  # groups sort their ranks: replicas would have different shards
        raise ValueError(f"the mesh {group.mesh.tolist()}: the ranks of a row must be in ascending order")
    return ReplicaGroups(group._flatten().get_group(), group.get_group(1), group.get_group(0))


def check_units(module: nn.Module, units: list[list[nn.Module]], init: Init | None) -> None:
    """Raise ValueError if a unit is not in `module`, units are nested or repeated, or a meta tensor has no `init`."""
    if not {each for unit in units for each in unit} <= {*module.modules()}:
        raise ValueError("a unit is not of the module")
    inside = Counter(inner for unit in units for each in unit for inner in each.modules())
    for each in (each for unit in units for each in unit):
        if inside[each] > 1:
            raise ValueError(f"a unit ({type(each).__name__}) is inside another one, or is listed twice")
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.is_meta and init is None:
            raise ValueError(f"{name} is on the meta device: pass `init`, which fills it")


def needs_own_collective(parameter: nn.Parameter, unit: Sequence[nn.Parameter]) -> bool:
    """Return True for a small parameter of a unit that needs collectives of its own, over another group: norms under
    sequence parallelism, routers. It belongs to the root instead, unsharded for the whole step.
    """
    return placement_of(parameter).reduce_group is not None and 32 * parameter.numel() <= sum(p.numel() for p in unit)


@torch.no_grad()
def filled(name: str, like: torch.Tensor, init: Init) -> torch.Tensor:
    """Return a tensor like a meta tensor, on the default device, with the values that `init` gives it."""
    tensor = torch.empty_like(like, device=torch.get_default_device())
    init(name, tensor)
    return tensor


def split_into_units(module: nn.Module, units: list[list[nn.Module]]) -> list[tuple[list[nn.Module], list]]:
    """Return (modules, parameters) for each unit, then for the root.

    The root gets the parameters that belong to no unit or to more than one, and the parameters for which
    `needs_own_collective` is true.
    """
    held = [list(dict.fromkeys(p for each in unit for p in each.parameters())) for unit in units]
    counts = Counter(p for each in held for p in each)
    local = [[p for p in each if counts[p] == 1 and not needs_own_collective(p, each)] for each in held]
    in_units = {p for each in local for p in each}
    rest = [p for p in module.parameters() if p not in in_units]
    return list(zip([*units, [module]], [*local, rest], strict=True))


def fully_shard(
    module: nn.Module,
    group: Group = None,
    compute_dtype: torch.dtype | None = None,
    encode: Encoding | Callable[[ShardedParameters], Encoding | None] | None = None,
    *,
    reduce_dtype: torch.dtype | None = None,
    units: Iterable | None = None,
    init: Init | None = None,
    wrapper: type[FullyShard] = FullyShard,
) -> FullyShard:
    """Shard the parameters of `module` over `group`, and return it wrapped. Its parameters are the local shards.

    group: a mesh of two dimensions shards them over the second, and keeps the same shards along the first (HSDP);
    ReplicaGroups say the same without a mesh.
    compute_dtype: the dtype in which parameters are gathered, and to which floating-point inputs are cast;
    reduce_dtype: the dtype in which gradients are sent (None: as backward makes them). units: modules, or lists of
    modules, to gather together; None: `find_blocks`.
    encode: an Encoding to send in place of values, or a function that returns one per flat buffer; None: values in
    compute_dtype. init(name, tensor): fills a full tensor of a meta-device module, on the default device; one tensor
    exists at a time. The `reduce_group` of a parameter's placement is used as by DataParallel: its ranks share the
    parameter, with replicas or without. A parameter that no rank has used keeps its `.grad`, None after zero_grad(); if
    some ranks have used it, the others count as having a gradient of 0. wrapper: the class that decides when units are
    gathered (notebook 10 has another one); it lives as long as the module. Create the optimizer after this call.

    Raises ValueError, on all ranks, for meta tensors without `init`, units inside of one another, a module that is
    sharded already, and different models or arguments on the ranks.
    """
    everyone, shards, replicas = resolve_groups(group)
    if any(placement_of(parameter).flat_shard for parameter in module.parameters()):
        raise ValueError("the module is sharded already")
    lists = [list(unit) if isinstance(unit, (list, tuple)) else [unit] for unit in units or find_blocks(module)]
    arguments = {"compute_dtype": compute_dtype, "reduce_dtype": reduce_dtype, "units": len(lists)}
    check_same_model(module, everyone, arguments)
    check_units(module, lists, init)
    slots, buffers = parameter_slots(module), dict(module.named_buffers())
    if not any(tensor.is_meta for tensor in [*slots, *buffers.values()]):
        broadcast_from_first(module, everyone)

    def make(name: str, like: torch.Tensor) -> torch.Tensor:
        return filled(name, like, cast(Init, init))

    for path, buffer in buffers.items():
        if buffer.is_meta:
            owner, _, name = path.rpartition(".")
            module.get_submodule(owner)._buffers[name] = make(path, buffer)
    made: list[FSDPUnit] = []
    for modules, parameters in split_into_units(module, lists):
        alike: dict[tuple, list[nn.Parameter]] = {}
        for p in parameters:
            reduce_group = placement_of(p).reduce_group  # includes the replicas
            over = (reduce_group, everyone, None) if reduce_group else (shards, shards, replicas)
            alike.setdefault((p.dtype, p.device, p.requires_grad, placement_of(p).norm_groups, over), []).append(p)
        flat_params = []
        for (*_, outer, (over_group, all_shards, same_shards)), each in alike.items():
            settings = 1 / everyone.size(), compute_dtype, reduce_dtype, encode, make
            flat = ShardedParameters(each, [slots[p] for p in each], over_group, *settings)
            flat.set_norm_groups(norm_group(all_shards, over_group, outer), *outer)
            flat.replicas = same_shards
            flat_params.append(flat)
        made.append(FSDPUnit(modules, flat_params))
    return wrapper(module, everyone, [unit for unit in made[:-1] if unit.flat_params], made[-1], compute_dtype)


@torch.no_grad()
def full_state_dict(model: FullyShard) -> dict[str, torch.Tensor]:
    """Return the unsharded state_dict, on the CPU of every rank; one unit at a time is gathered. Collective."""
    full: dict[str, torch.Tensor] = {}
    for flat in model.flat_params:
        for tensor, slots in zip(flat.layout.gather(flat.shard), flat.slots, strict=True):
            tensor_on_cpu = tensor.to("cpu", copy=True)
            full.update((slot.path, tensor_on_cpu) for slot in slots)
    state = model.module.state_dict()
    return {plain_name(name): full[name] if name in full else state[name].to("cpu", copy=True) for name in state}


@torch.no_grad()
def load_full_state_dict(model: FullyShard, state_dict: dict[str, torch.Tensor]) -> None:
    """Load this rank's local shards from an unsharded state_dict, which every rank has. Not collective.

    Raises ValueError for different names or shapes; nothing has changed then.
    """
    state_dict = {plain_name(name): value for name, value in state_dict.items()}
    expected = {plain_name(name): value.shape for name, value in model.module.state_dict().items()}
    for flat in model.flat_params:
        for shape, slots in zip(flat.layout.shapes, flat.slots, strict=True):
            expected.update((plain_name(slot.path), shape) for slot in slots)
    shapes = {name: value.shape for name, value in state_dict.items()}
    for name in sorted(expected.keys() | shapes.keys()):
        if expected.get(name) != shapes.get(name):
            raise ValueError(f"{name}: the module has {expected.get(name)}, the state has {shapes.get(name)}")
    for flat in model.flat_params:
        flat.shard.copy_(flat.layout.shard_of([state_dict[plain_name(slots[0].path)] for slots in flat.slots]))
    for name, buffer in model.module.named_buffers():
        if plain_name(name) in state_dict:
            buffer.copy_(state_dict[plain_name(name)])
