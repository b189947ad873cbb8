"""Context parallelism: a sequence is split over n ranks, through the full model; each rank holds all weights.

Each rank has its local tokens (sequence_parallel.shards), zig-zag by default, so that causal attention is the same work
on all ranks. Only attention communicates, by `method` (see `attention`). Activations shrink as 1/n, states do not;
gradients are averaged over the context-parallel ranks as over data-parallel ranks. (The Ultra-Scale Playbook, chapter
5; Liu et al. 2023; Llama 3 2024, §3.3.2.)
"""

from __future__ import annotations

import argparse
import functools

import torch
import torch.distributed as dist
from torch import nn

from course_lib.collectives.devices import device_type
from course_lib.collectives.groups import group_or_world
from course_lib.context_parallel.attention import all_gather_attention, ring_attention, ulysses_attention
from course_lib.context_parallel.blocks import FUSED_BLOCK, AttentionBlock
from course_lib.context_parallel.methods import METHOD_NAMES, check_heads
from course_lib.sequence_parallel.model import apply_sequence_parallel, forward_inputs, require_positions
from course_lib.sequence_parallel.shards import ORDERS, local_positions, shard_sequence
from course_lib.single_gpu import training as single_gpu
from course_lib.single_gpu.model import PRESETS, Transformer, need_transformer
from course_lib.tensor_parallel.model import apply_tensor_parallel, check_degree
from course_lib.tensor_parallel.vocabulary import vocab_parallel_cross_entropy

METHODS = dict(zip(METHOD_NAMES, (ring_attention, all_gather_attention, ulysses_attention), strict=True))


def check_context_parallel(model: Transformer, group: dist.ProcessGroup, method: str, order: str) -> None:
    """Raise ValueError for an unknown method or order, for heads that cannot be split over the ranks (ulysses), and for
    a model that is context parallel already.
    """
    calls = "ring_attention(q, k, v, group) and its siblings"
    need_transformer(model, "apply_context_parallel", f"{calls} work in any model's attention")
    if method not in METHODS or order not in ORDERS:
        known = f"methods are {', '.join(METHODS)}, orders {', '.join(ORDERS)}"
        raise ValueError(f"method {method!r}, order {order!r}: {known}")
    if "context_parallel" in model.applied:
        raise ValueError("the model is context parallel already")
    if method == "ulysses":
        for block in model.blocks:
            q_width, k_width = (getattr(block.attention, name).weight.shape[0] for name in ("q_proj", "k_proj"))
            check_heads(q_width // model.config.head_dim, k_width // model.config.head_dim, group.size())


# exercise 07.15
def fill_positions(model: nn.Module, args: tuple, kwargs: dict, group: dist.ProcessGroup, order: str) -> tuple:
    """Pass a `Transformer` the positions of the local tokens if the caller passes none: a forward pre-hook.
    Raises ValueError for hidden states without positions.
    """
    require_positions(model, args, kwargs)
    x, positions = forward_inputs(args, kwargs)
    if positions is None:
        positions = local_positions(x.shape[1], group, order, x.device)
    return (x, positions), {}


# exercise 07.15
def apply_context_parallel(
    model: Transformer,
    group: dist.ProcessGroup | None = None,
    method: str = "ring",
    order: str = "zigzag",
    attention: AttentionBlock = FUSED_BLOCK,
) -> Transformer:
    """Make a `Transformer` work on this rank's shard of each sequence, in place; return the model.

    Inputs and targets: shard_sequence(full, group, order). method: one of METHODS; attention: computes a block.
    Average the gradients over all ranks of `group`, as over a data-parallel group: wrap the model in DataParallel or
    ZeRO over the data-parallel and context-parallel ranks together (otherwise the ranks drift; find_diverged_params
    detects it). Call it after apply_tensor_parallel and before apply_recompute, whose mode "selective" would only
    repeat the communication: no scores are kept here.

    Raises ValueError, and changes nothing, if `check_context_parallel` refuses the model or the settings.
    """
    group = group_or_world(group)
    check_context_parallel(model, group, method, order)
    model.applied["context_parallel"] = group
    for block in model.blocks:
        block.attention.core = functools.partial(METHODS[method], group=group, attention=attention, order=order)
    fill = functools.partial(fill_positions, group=group, order=order)
    model.register_forward_pre_hook(fill, with_kwargs=True)
    return model


# exercise 07.16
def exchange_ratio(
    tokens: int,
    heads: int,
    kv_heads: int,
    bandwidth: float,
    peak: float,
    element_bytes: int = 2,
    causal: bool = True,
) -> float:
    """Return the time of a ring step's send over the time of the attention that overlaps it; up to 1 it is hidden.

    tokens: s/n, local tokens of one sequence (the batch cancels); bandwidth: bytes per second to the next rank; peak:
    floating-point operations per second. For forward; zig-zag if causal. (Liu et al. 2023, §3, with grouped heads and a
    causal mask.)
    """
    ratio = element_bytes * kv_heads / (heads * tokens) * peak / bandwidth
    return ratio if causal else ratio / 2


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the program's options. An unknown or invalid option exits with status 2; nothing else is touched."""
    parser = single_gpu.training_parser("context_parallel", "Train with context, tensor and data parallelism.")
    parser.add_argument("--cp", type=int, help="context-parallel ranks; by default all ranks divided by --tp")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks, with sequence parallelism")
    parser.add_argument("--method", default="ring", choices=list(METHODS), help="how attention communicates")
    parser.add_argument("--order", default="zigzag", choices=list(ORDERS), help="how the sequence is split")
    single_gpu.add_micro_batch(parser)
    parser.add_argument("--recompute", default="none", choices=["none", "full"])
    args = single_gpu.parse(parser, argv)
    if args.tp < 1 or args.cp is not None and args.cp < 1:
        parser.error("--cp and --tp must be 1 or more")
    try:
        check_degree(PRESETS[args.preset], args.tp)
    except ValueError as error:
        parser.error(str(error))
    return args


def main(argv: list[str] | None = None) -> list[dict]:
    """Train as the options say. Rank 0 prints one line per step and writes the records to --out; tokens/s are per GPU:
    the tokens of its batch, divided by the ranks that share the batch.

    Returns the records. Needs the default process group. Raises ValueError if ranks, model or sequence cannot be split
    over --cp and --tp.
    """
    from torch.distributed.device_mesh import init_device_mesh

    from course_lib.data_parallel.replicas import DataParallel, parallel_accumulate
    from course_lib.recompute.modes import apply_recompute
    from course_lib.single_gpu.model import init_parameter
    from course_lib.tensor_parallel.shards import materialize
    from course_lib.zero.shards import clip_grad_norm_

    args, rank, world_size = options(argv), dist.get_rank(), dist.get_world_size()
    cp = args.cp or max(1, world_size // args.tp)
    shared = cp * args.tp
    if world_size % shared:
        raise ValueError(f"--cp {cp} times --tp {args.tp} does not divide the {world_size} ranks")
    device = device_type()
    mesh = init_device_mesh(device, (world_size // shared, cp, args.tp), mesh_dim_names=("dp", "cp", "tp"))
    cp_group, tp_group = mesh["cp"].get_group(), mesh["tp"].get_group()
    replicas = mesh["dp", "cp"]._flatten().get_group()  # ranks with the same parameters: gradients are averaged

    def build(config, seed):
        with torch.device("meta"):
            model = Transformer(config)
        if args.tp > 1:
            apply_tensor_parallel(model, tp_group)
            apply_sequence_parallel(model, tp_group, reduce_group=dist.group.WORLD)
        apply_context_parallel(model, cp_group, args.method, args.order)
        materialize(model, lambda name, tensor: init_parameter(name, tensor, config, seed))
        return DataParallel(apply_recompute(model, args.recompute), replicas)

    def step(dp, optimizer, inputs, targets, dtype=torch.float32, max_norm=1.0):
        def summed_loss(logits, targets):
            return vocab_parallel_cross_entropy(logits, targets, tp_group, dp.module.config.vocab, "sum")

        optimizer.zero_grad()
        shards = [shard_sequence(full, cp_group, args.order) for full in (inputs, targets)]
        micro_batches = zip(*(shard.split(args.micro_batch) for shard in shards), strict=True)
        step_loss = parallel_accumulate(dp, list(micro_batches), dtype, summed_loss)
        clip_grad_norm_(dp.parameters(), max_norm)
        optimizer.step()
        return step_loss

    return single_gpu.run(args, step, build, rank=rank, world_size=world_size, ranks_per_batch=shared)
