"""Expert parallelism: the experts are sharded over data-parallel ranks, and tokens travel to them and back.

                    is on                gradients of               summed over     divided by
    dense weights   all dp ranks         a rank's local tokens      dp              dp
    an expert       dp / ep ranks        the tokens of ep ranks     dp / ep         dp

The groups are in the parameters' placements: `reduce_group`, `norm_groups`, `tensor_shard`. A rank keeps 1/ep of the
experts' weights, gradients and states, 1/(ep tp) if their matrices are split as well. Lepikhin et al. 2020 (GShard);
Fedus et al. 2021, §5 (data, model and expert parallelism); DeepSeek-V3 2024, §3.2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from course_lib.collectives.devices import device_type
from course_lib.collectives.groups import group_or_world
from course_lib.expert_parallel.exchange import dispatch_and_combine
from course_lib.expert_parallel.mixture import MoE
from course_lib.expert_parallel.nested_shards import shard_nested
from course_lib.sequence_parallel.model import gather_sequence, reduce_scatter_sequence
from course_lib.single_gpu.model import Transformer, need_transformer
from course_lib.single_gpu.placement import placement_of
from course_lib.tensor_parallel.linear import new_disjoint_subgroups
from course_lib.tensor_parallel.regions import copy_to_group, sum_over_group


class ExpertGroups(NamedTuple):
    """The groups of copies x ep x tp ranks, tp innermost; if nodes > 1, ep is nodes x ranks per node."""

    exchange: list[dist.ProcessGroup]  # the ranks over which the experts are split: one group, or two hops
    copies: dist.ProcessGroup  # the ranks that hold the same experts
    dp: dist.ProcessGroup  # the ranks with different tokens
    tp: dist.ProcessGroup

    @classmethod
    def make(cls, ep: int, nodes: int, tp: int) -> ExpertGroups:
        """Create the groups. Collective over the default group. Raises ValueError if they do not divide its ranks."""
        world = dist.get_world_size()
        if world % (ep * tp) or ep % nodes:
            raise ValueError(
                f"--ep {ep} times --tp {tp} must divide the {world} ranks, and --nodes {nodes} must divide --ep"
            )
        sizes = world // (ep * tp), nodes, ep // nodes, tp
        mesh = init_device_mesh(device_type(), sizes, mesh_dim_names=("copies", "nodes", "inside", "tp"))

        def over(*axes: str) -> dist.ProcessGroup:
            """Return the group of the ranks that differ in these axes only."""
            return (mesh[axes]._flatten("_".join(axes)) if len(axes) > 1 else mesh[axes[0]]).get_group()

        exchange = [over("nodes"), over("inside")] if nodes > 1 else [over("inside")]
        return cls(exchange, over("copies"), over("copies", "nodes", "inside"), over("tp"))


def group_of_one() -> dist.ProcessGroup:
    """Return a group of this rank alone. Collective over the default group."""
    return cast(dist.ProcessGroup, new_disjoint_subgroups([(rank,) for rank in range(dist.get_world_size())]))


TensorFunction = Callable[[torch.Tensor], torch.Tensor]


def run_expert_parallel(
    x: torch.Tensor,
    gates: torch.Tensor,
    overlap_with: Callable[[], object],
    compute: Callable[..., torch.Tensor],
    input_gather: TensorFunction,
    output_reduce: TensorFunction,
) -> torch.Tensor:
    """Return the output [b, s, h] of experts on other ranks: a mixture's `run`. x: [b, s, h]; gates: [b, s, E]."""
    x, gates = input_gather(x), input_gather(gates)
    out = compute(x.flatten(0, -2), gates.flatten(0, -2), None, overlap_with=overlap_with)
    return output_reduce(out.view_as(x))


def tp_boundary(model: Transformer, tp_group: dist.ProcessGroup | None) -> tuple[TensorFunction, TensorFunction]:
    """Return input_gather and output_reduce of experts whose matrices are split over tp_group."""
    if tp_group is None:
        return lambda x: x, lambda x: x
    if "sequence_parallel" in model.applied:
        return functools.partial(gather_sequence, group=tp_group), functools.partial(
            reduce_scatter_sequence, group=tp_group
        )
    return functools.partial(copy_to_group, group=tp_group), functools.partial(sum_over_group, group=tp_group)


def check_split(layer: MoE, ep: int, tp: int) -> None:
    """Raise ValueError if a mixture cannot be split over ep times tp ranks, or is split already."""
    experts, width, _ = layer.experts.gate_proj.weight.shape
    if placement_of(layer.experts.gate_proj.weight).tensor_shard:
        raise ValueError("the experts are split already")
    if experts % ep or width % tp:
        raise ValueError(f"{ep} ranks must divide {experts} experts, and {tp} ranks their width {width}")


def check_batch_group(model: Transformer, batch_group: dist.ProcessGroup) -> None:
    """Raise ValueError if the router's gradient would lack a tensor-parallel rank's tokens, or count them twice."""
    tp_group = model.applied.get("tensor_parallel")
    if tp_group is None:
        return
    members, sequence = dist.get_process_group_ranks(batch_group), "sequence_parallel" in model.applied
    inside = sum(rank in members for rank in dist.get_process_group_ranks(tp_group))
    if inside != (tp_group.size() if sequence else 1):
        wanted = "all tensor-parallel ranks, which split the sequence" if sequence else "one tensor-parallel rank alone"
        raise ValueError(f"batch_group must hold {wanted}; it holds {inside}")


def mixtures_of(model: Transformer) -> list[MoE]:
    """Return the mixtures of a `Transformer`. Raises TypeError for another model."""
    need_transformer(
        model, "apply_expert_parallel", "dispatch_and_combine(x, gates, ..., group, compute) works with any experts"
    )
    return [module for module in model.modules() if isinstance(module, MoE)]


def check_expert_parallel(
    model: Transformer,
    groups: list[dist.ProcessGroup],
    batch_group: dist.ProcessGroup | None,
    tp_group: dist.ProcessGroup | None,
) -> None:
    """Raise ValueError if the model has no mixture, the ranks do not divide it, or batch_group is missing or does not
    fit.
    """
    layers = mixtures_of(model)
    if not layers:
        raise ValueError("the model has no mixture of experts: call apply_moe first")
    ep, tp = functools.reduce(lambda size, each: size * each.size(), groups, 1), tp_group.size() if tp_group else 1
    for layer in layers:
        check_split(layer, ep, tp)
    if batch_group is None and len(groups) > 1:
        raise ValueError("two groups: pass batch_group too, all ranks whose tokens make up the batch")
    check_batch_group(model, batch_group or groups[0])


# exercise 08.16
def apply_expert_parallel(
    model: Transformer,
    group: dist.ProcessGroup | list[dist.ProcessGroup] | None = None,
    reduce_group: dist.ProcessGroup | None = None,
    batch_group: dist.ProcessGroup | None = None,
    tp_group: dist.ProcessGroup | None = None,
) -> Transformer:
    """Split the experts of each mixture of a `Transformer` over the ranks of `group`, in place; return the model.

    group: ranks with different tokens; or a list of two groups, across the nodes (ranks of one number in each) and
    within a node: then a token crosses to a node once. reduce_group: the dp/ep ranks that hold the same experts; None:
    this rank alone. batch_group: all ranks whose tokens make up the batch, including the tensor-parallel ranks if they
    split the sequence; None: a single `group`. tp_group: ranks over which each expert's matrices are split; they have
    the same tokens, or shards of the same sequences under sequence parallelism. Call it after apply_moe,
    apply_tensor_parallel and apply_sequence_parallel. The model may be on the meta device (then `materialize` it).
    Without a reduce_group it is collective over the default group. Raises ValueError, and changes nothing, if
    `check_expert_parallel` refuses the model.
    """
    groups = list(group) if isinstance(group, (list, tuple)) else [group_or_world(group)]
    layers = mixtures_of(model)
    check_expert_parallel(model, groups, batch_group, tp_group)
    model.applied["expert_parallel"] = groups[0] if len(groups) == 1 else None
    batch_group, reduce_group = batch_group or groups[0], reduce_group or group_of_one()
    if sequence_group := model.applied.get("sequence_parallel"):  # each of its ranks routes a shard of the sequence
        for layer in layers:
            layer.router.sequence_shards = sequence_group.size()
    input_gather, output_reduce = tp_boundary(model, tp_group)
    for layer in layers:
        experts = layer.experts
        for linear, dim in ((experts.gate_proj, 1), (experts.up_proj, 1), (experts.down_proj, 2)):
            cuts = [(each, 0) for each in groups] + ([(tp_group, dim)] if tp_group else [])
            linear.weight = shard_nested(linear.weight, cuts)
            placement_of(linear.weight).reduce_group = reduce_group
        layer.router.batch_group = placement_of(layer.router.weight).reduce_group = batch_group
        compute: Callable[..., torch.Tensor] = experts
        for each in reversed(groups):
            compute = functools.partial(dispatch_and_combine, group=each, compute=compute)
        layer.run = functools.partial(
            run_expert_parallel, compute=compute, input_gather=input_gather, output_reduce=output_reduce
        )
    return model


# exercise 08.17
def dispatch_ratio(
    copies: float,
    top_k: int,
    ffn_hidden: int,
    bandwidth: float,
    peak: float,
    dispatch_bytes: float = 2,
    combine_bytes: float = 2,
) -> float:
    """Return the time of dispatch and combine over the time of the experts, in forward; hidden size and tokens cancel.

    copies: the number of other ranks (or nodes) that a token is sent to; top_k: experts per token, shared ones too;
    bandwidth: bytes per second per GPU on the link that is crossed; peak: floating-point operations per second;
    dispatch_bytes, combine_bytes: per element.
    """
    return copies * (dispatch_bytes + combine_bytes) / (6 * top_k * ffn_hidden) * peak / bandwidth
