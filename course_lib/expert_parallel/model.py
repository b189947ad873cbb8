"""Expert parallelism: each rank has a part of the experts, and tokens go there and back. A part of data parallelism.

                    is on                gradients of               summed over     divided by
    dense weights   all dp ranks         a rank's own tokens        dp              dp
    an expert       dp / ep ranks        the tokens of ep ranks     dp / ep         dp

Parameters carry the groups: `reduce_group`, `norm_groups`, `tensor_shard`. A rank keeps 1/ep of the experts' weights,
gradients and states, 1/(ep tp) where their matrices are split as well. Lepikhin et al. 2020 (GShard); Fedus et al.
2021, §5 (data, model and expert parallelism); DeepSeek-V3 2024, §3.2.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from course_lib.expert_parallel.exchange import dispatch_and_combine
from course_lib.expert_parallel.mixture import MoE, apply_moe, mixture_params
from course_lib.expert_parallel.nested_shards import shard_nested
from course_lib.expert_parallel.router import SCORES, Routing, routers_of, take_counts, update_bias
from course_lib.sequence_parallel.model import gather_sequence, reduce_scatter_sequence
from course_lib.single_gpu import training as single_gpu
from course_lib.single_gpu.model import PRESETS, need_transformer
from course_lib.single_gpu.placement import placement_of
from course_lib.tensor_parallel.linear import new_disjoint_subgroups
from course_lib.tensor_parallel.model import apply_tensor_parallel, check_degree
from course_lib.tensor_parallel.regions import copy_to_group, sum_over_group
from course_lib.tensor_parallel.vocabulary import vocab_parallel_cross_entropy


class ExpertGroups(NamedTuple):
    """The groups of copies x ep x tp ranks, tp innermost; the ep ranks are nodes x ranks of a node where nodes > 1."""

    exchange: list[dist.ProcessGroup]  # the ranks that share the experts: one group, or two hops
    copies: dist.ProcessGroup  # those that hold the same experts
    dp: dist.ProcessGroup  # those with other tokens
    tp: dist.ProcessGroup

    @classmethod
    def make(cls, ep: int, nodes: int, tp: int) -> ExpertGroups:
        """Collective over the default group. Raises ValueError where the numbers do not divide its ranks."""
        world = dist.get_world_size()
        if world % (ep * tp) or ep % nodes:
            raise ValueError(
                f"--ep {ep} times --tp {tp} must divide the {world} ranks, and --nodes {nodes} must divide --ep"
            )
        device = "cpu" if dist.get_backend() == "gloo" else torch.accelerator.current_accelerator().type
        sizes = world // (ep * tp), nodes, ep // nodes, tp
        mesh = init_device_mesh(device, sizes, mesh_dim_names=("copies", "nodes", "inside", "tp"))

        def over(*axes: str) -> dist.ProcessGroup:
            """The ranks that differ in these axes alone."""
            return (mesh[axes]._flatten("_".join(axes)) if len(axes) > 1 else mesh[axes[0]]).get_group()

        exchange = [over("nodes"), over("inside")] if nodes > 1 else [over("inside")]
        return cls(exchange, over("copies"), over("copies", "nodes", "inside"), over("tp"))


def group_of_one() -> dist.ProcessGroup:
    """This rank alone. Collective over the default group."""
    return new_disjoint_subgroups([(rank,) for rank in range(dist.get_world_size())])


def run_expert_parallel(
    x: torch.Tensor, gates: torch.Tensor, meanwhile: Callable, compute: Callable, enter: Callable, leave: Callable
) -> torch.Tensor:
    """A mixture's `run` where tokens are exchanged. x: [b, s, h]; gates: [b, s, E]; returns [b, s, h]."""
    whole, gates = enter(x), enter(gates)
    out = compute(whole.flatten(0, -2), gates.flatten(0, -2), None, meanwhile=meanwhile)
    return leave(out.view_as(whole))


def in_sequence_parts(block: nn.Module) -> bool:
    """Whether the block's hidden states are split along the sequence (notebook 07)."""
    return getattr(block.attention.o_proj, "output_reduce", None) is reduce_scatter_sequence


def borders(block: nn.Module, tp_group: dist.ProcessGroup | None) -> tuple[Callable, Callable]:
    """How tokens enter experts whose matrices are split over tp_group, and how sums leave them."""
    if tp_group is None:
        return lambda x: x, lambda x: x
    if in_sequence_parts(block):
        return tuple(functools.partial(f, group=tp_group) for f in (gather_sequence, reduce_scatter_sequence))
    return tuple(functools.partial(f, group=tp_group) for f in (copy_to_group, sum_over_group))


def check_split(layer: MoE, ep: int, tp: int) -> None:
    """Raise ValueError where a mixture can't be split over ep times tp ranks, or is split already."""
    experts, width, _ = layer.experts.gate_proj.weight.shape
    if placement_of(layer.experts.gate_proj.weight).tensor_shard:
        raise ValueError("the experts are split already")
    if experts % ep or width % tp:
        raise ValueError(f"{ep} ranks must divide {experts} experts, and {tp} ranks their width {width}")


def check_batch_group(block: nn.Module, batch_group: dist.ProcessGroup) -> None:
    """Raise ValueError where the router's gradient would lack a tensor-parallel rank's tokens, or count them twice."""
    tp_group = getattr(block.attention.o_proj, "group", None)
    if tp_group is None:
        return
    members, sequence = dist.get_process_group_ranks(batch_group), in_sequence_parts(block)
    inside = sum(rank in members for rank in dist.get_process_group_ranks(tp_group))
    if inside != (tp_group.size() if sequence else 1):
        wanted = "all tensor-parallel ranks, which split the sequence" if sequence else "one tensor-parallel rank alone"
        raise ValueError(f"batch_group must hold {wanted}; it holds {inside}")


def mixture_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a `Transformer` whose MLP is a mixture. Raises TypeError for another model."""
    need_transformer(
        model, "apply_expert_parallel", "dispatch_and_combine(x, gates, ..., group, compute) works with any experts"
    )
    return [block for block in model.blocks if isinstance(block.mlp, MoE)]


def check_expert_parallel(
    blocks: list[nn.Module],
    groups: list[dist.ProcessGroup],
    batch_group: dist.ProcessGroup | None,
    tp_group: dist.ProcessGroup | None,
) -> None:
    """Raise ValueError where there is no block with a mixture, the ranks do not divide it, or batch_group is missing or
    does not fit.
    """
    if not blocks:
        raise ValueError("the model has no mixture of experts: apply_moe comes first")
    ep, tp = functools.reduce(lambda size, each: size * each.size(), groups, 1), tp_group.size() if tp_group else 1
    for block in blocks:
        check_split(block.mlp, ep, tp)
    if batch_group is None and len(groups) > 1:
        raise ValueError("two groups: pass batch_group too, all ranks whose tokens make up the batch")
    for block in blocks:
        check_batch_group(block, batch_group or groups[0])


# exercise 08.16
def apply_expert_parallel(
    model: nn.Module,
    group: dist.ProcessGroup | list[dist.ProcessGroup] | None = None,
    reduce_group: dist.ProcessGroup | None = None,
    batch_group: dist.ProcessGroup | None = None,
    tp_group: dist.ProcessGroup | None = None,
) -> nn.Module:
    """Spread the experts of each mixture of a `Transformer` over the ranks of `group`, in place; returns the model.

    group: ranks with different tokens; or a list of two, the nodes (ranks of one number in each) and the ranks of a
    node: then tokens cross to a node once. reduce_group: the ranks that hold the same experts, dp/ep of them; None:
    this one alone. batch_group: all ranks whose tokens make up the batch, the tensor-parallel ones too where they split
    the sequence; None: those of a single `group`. tp_group: ranks that share each expert's matrices; they have the same
    tokens, or parts of the same sequences under sequence parallelism. After apply_moe, apply_tensor_parallel and
    apply_sequence_parallel. The model may be on the meta device (then `materialize` it). Without a reduce_group
    collective over the default group. Raises ValueError, and changes nothing, where `check_expert_parallel` refuses.
    """
    groups = list(group) if isinstance(group, (list, tuple)) else [group or dist.group.WORLD]
    blocks = mixture_blocks(model)
    check_expert_parallel(blocks, groups, batch_group, tp_group)
    batch_group, reduce_group = batch_group or groups[0], reduce_group or group_of_one()
    for block in blocks:
        if in_sequence_parts(block):  # each tensor-parallel rank routes a part of a sequence
            block.mlp.router.parts = block.attention.o_proj.group.size()
    for block in blocks:
        layer, (enter, leave) = block.mlp, borders(block, tp_group)
        experts = layer.experts
        for linear, dim in ((experts.gate_proj, 1), (experts.up_proj, 1), (experts.down_proj, 2)):
            cuts = [(each, 0) for each in groups] + [(tp_group, dim)] * (tp_group is not None)
            linear.weight = shard_nested(linear.weight, cuts)
            placement_of(linear.weight).reduce_group = reduce_group
        layer.router.batch_group = placement_of(layer.router.weight).reduce_group = batch_group
        compute = experts
        for each in reversed(groups):
            compute = functools.partial(dispatch_and_combine, group=each, compute=compute)
        layer.run = functools.partial(run_expert_parallel, compute=compute, enter=enter, leave=leave)
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
    """Time of dispatch and combine over that of the experts between them, in forward; hidden size and tokens cancel.

    copies: to how many other ranks (or nodes) a token goes; top_k: experts of a token, shared ones too; bandwidth:
    bytes a second of a GPU on the link that is crossed; peak: floating-point operations a second; bytes: of a number.
    """
    return copies * (dispatch_bytes + combine_bytes) / (6 * top_k * ffn_hidden) * peak / bandwidth


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """The program's options. Touches nothing; an unknown or impossible one ends the program with status 2."""
    parser = single_gpu.training_parser(
        "expert_parallel", "Train a mixture of experts with expert, data and tensor parallelism."
    )
    parser.add_argument("--experts", type=int, default=8, help="experts a layer")
    parser.add_argument("--top-k", type=int, default=2, help="experts a token")
    parser.add_argument("--expert-hidden", type=int, help="width of an expert; that of the preset's MLP by default")
    parser.add_argument("--shared", type=int, default=0, help="experts that every token goes through")
    parser.add_argument("--score", default="softmax", choices=list(SCORES), help="of the router")
    parser.add_argument("--balance", type=float, default=0.01, help="weight of the balance loss")
    parser.add_argument("--z", type=float, default=0.0, help="weight of the router's z-loss")
    parser.add_argument("--bias-rate", type=float, default=0.0, help="step of the routers' biases; 0: they stay 0")
    parser.add_argument("--capacity", type=float, help="times its even share that an expert takes; all by default")
    parser.add_argument("--ep", type=int, help="ranks that share the experts; all that --tp leaves by default")
    parser.add_argument("--nodes", type=int, default=1, help="nodes among these ranks; above 1: two hops")
    parser.add_argument("--node-limit", type=int, help="nodes a token goes to; all by default")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share the matrices, those of experts too")
    parser.add_argument("--micro-batch", type=int, help="sequences at a time; all by default")
    parser.add_argument("--recompute", default="none", choices=["none", "selective", "full"])
    chosen = single_gpu.parse(parser, argv)
    chosen.micro_batch = chosen.batch if chosen.micro_batch is None else chosen.micro_batch
    chosen.node_limit = chosen.nodes if chosen.node_limit is None else chosen.node_limit
    if not 1 <= chosen.micro_batch <= chosen.batch:
        parser.error("--micro-batch must be 1 or more, and no more than --batch")
    sizes = chosen.tp, chosen.nodes, chosen.ep, chosen.expert_hidden
    if any(size is not None and size < 1 for size in sizes) or chosen.shared < 0:
        parser.error("--ep, --tp, --nodes and --expert-hidden must be 1 or more, --shared 0 or more")
    try:
        check_degree(PRESETS[chosen.preset], chosen.tp)
        Routing(chosen.experts, chosen.top_k, **routing_of(chosen))
    except ValueError as error:
        parser.error(str(error))
    return chosen


def routing_of(chosen: argparse.Namespace) -> dict:
    """Routing's keywords of the program's options."""
    return {name: getattr(chosen, name) for name in ("score", "capacity", "nodes", "node_limit")} | {
        "aux_loss_coeff": chosen.balance,
        "z_loss_coeff": chosen.z,
    }


def main(argv: list[str] | None = None) -> list[dict]:
    """Train as the options say. Rank 0 prints one line a step and writes where --out says; at the end how uneven the
    last step's choices were. tokens/s are those of its batch, divided by the ranks that share it.

    Returns the records. Needs the default process group. Raises ValueError where ranks or experts can't be split.
    """

    from course_lib.data_parallel.replicas import DataParallel, parallel_accumulate
    from course_lib.recompute.modes import apply_recompute
    from course_lib.single_gpu.model import Transformer, init_parameter
    from course_lib.tensor_parallel.shards import materialize
    from course_lib.zero.shards import clip_grad_norm_

    chosen, rank, world_size = options(argv), dist.get_rank(), dist.get_world_size()
    groups = ExpertGroups.make(chosen.ep or max(1, world_size // chosen.tp), chosen.nodes, chosen.tp)
    sizes = chosen.experts, chosen.top_k, chosen.expert_hidden, chosen.shared
    counts = None

    def build(config, seed):
        with torch.device("meta"):
            model = apply_moe(Transformer(config), *sizes, **routing_of(chosen))
        if chosen.tp > 1:
            apply_tensor_parallel(model, groups.tp)
        split = groups.tp if chosen.tp > 1 else None
        apply_expert_parallel(model, groups.exchange, groups.copies, groups.dp, split)
        materialize(model, lambda name, tensor: init_parameter(name, tensor, config, seed))
        if rank == 0:
            total, active = mixture_params(config, *sizes)
            words = f"{chosen.preset} with {chosen.experts} experts in place of each MLP, {chosen.top_k} a token"
            print(f"{words}: {total:,} parameters, {active:,} active; without:")
        return DataParallel(apply_recompute(model, chosen.recompute), groups.dp)

    def step(dp, optimizer, inputs, targets, dtype=torch.float32, max_norm=1.0):
        nonlocal counts

        def summed_loss(logits, targets):
            return vocab_parallel_cross_entropy(logits, targets, groups.tp, dp.module.config.vocab, "sum")

        optimizer.zero_grad()
        parts = list(zip(inputs.split(chosen.micro_batch), targets.split(chosen.micro_batch), strict=True))
        for router in routers_of(dp.module):
            router.loss_weight = 1 / len(parts)
        step_loss = parallel_accumulate(dp, parts, dtype, summed_loss)
        clip_grad_norm_(dp.parameters(), max_norm)
        optimizer.step()
        counts = take_counts(dp.module)
        update_bias(dp.module, counts, chosen.bias_rate)
        return step_loss

    records = single_gpu.run(chosen, step, build, rank=rank, world_size=world_size, ranks_per_batch=chosen.tp)
    if rank == 0:
        uneven = counts.max(1).values / counts.float().mean(1)
        print("last step, busiest expert over its even share, by layer:", [round(each, 2) for each in uneven.tolist()])
    return records
