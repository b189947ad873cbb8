"""Context parallelism: n ranks share a sequence, through the whole model; weights are whole on each.

Each rank has its own tokens (sequence_parallel.shards), zig-zag by default, so that causal attention is as much work on
all. Only attention looks across: by `method`, see `attention`. Activations fall as 1/n, states not at all; gradients
are averaged over the context-parallel ranks as over data-parallel ones. (The Ultra-Scale Playbook, chapter 5; Liu et
al. 2023; Llama 3 2024, §3.3.2.)
"""

from __future__ import annotations

import argparse
import functools

import torch
import torch.distributed as dist
from torch import nn

from course_lib.context_parallel.attention import all_gather_attention, check_heads, ring_attention, ulysses_attention
from course_lib.context_parallel.blocks import FUSED_BLOCK, AttentionBlock
from course_lib.sequence_parallel.model import apply_sequence_parallel, given, require_positions
from course_lib.sequence_parallel.shards import ORDERS, local_positions, shard_sequence
from course_lib.single_gpu import training as single_gpu
from course_lib.single_gpu.model import PRESETS, need_transformer
from course_lib.tensor_parallel.model import apply_tensor_parallel, check_degree
from course_lib.tensor_parallel.vocabulary import vocab_parallel_cross_entropy

METHODS = {"ring": ring_attention, "all_gather": all_gather_attention, "ulysses": ulysses_attention}


def check_context_parallel(model: nn.Module, group: dist.ProcessGroup, method: str, order: str) -> None:
    """Raise ValueError for an unknown method or order, for heads that the ranks can't share (ulysses), and for a model
    that is context parallel already.
    """
    calls = "ring_attention(q, k, v, group) and its siblings"
    need_transformer(model, "apply_context_parallel", f"{calls} work in any model's attention")
    if method not in METHODS or order not in ORDERS:
        known = f"methods are {', '.join(METHODS)}, orders {', '.join(ORDERS)}"
        raise ValueError(f"method {method!r}, order {order!r}: {known}")
    for block in model.blocks:
        core = getattr(block.attention.core, "function", block.attention.core)  # of a Recomputed one
        if getattr(core, "func", None) in METHODS.values():
            raise ValueError("the model is context parallel already")
        if method == "ulysses":
            head_dim = model.config.head_dim
            check_heads(
                *(getattr(block.attention, name).weight.shape[0] // head_dim for name in ("q_proj", "k_proj")),
                group.size(),
            )


# exercise 07.15
def fill_positions(model: nn.Module, args: tuple, kwargs: dict, group: dist.ProcessGroup, order: str) -> tuple:
    """A forward pre-hook: gives a `Transformer` the positions of this rank's tokens, where the caller has given none.
    Raises ValueError for hidden states without positions.
    """
    require_positions(model, args, kwargs)
    x, positions = given(args, kwargs)
    if positions is None:
        positions = local_positions(x.shape[1], group, order, x.device)
    return (x, positions), {}


# exercise 07.15
def apply_context_parallel(
    model: nn.Module,
    group: dist.ProcessGroup | None = None,
    method: str = "ring",
    order: str = "zigzag",
    attention: AttentionBlock = FUSED_BLOCK,
) -> nn.Module:
    """Let a `Transformer` work on this rank's part of each sequence, in place; returns the model.

    Inputs and targets: shard_sequence(whole, group, order). method: one of METHODS; attention: what computes a block.
    Average the gradients over all ranks of `group`, as of a data-parallel group: wrap the model in DataParallel or ZeRO
    over the data-parallel and context-parallel ranks together (else they drift; find_diverged_params finds it). After
    apply_tensor_parallel, where there is any; before apply_recompute, whose mode "selective" would only repeat the
    exchange: no scores are kept here.

    Raises ValueError, and changes nothing, where `check_context_parallel` refuses the model or the settings.
    """
    group = group or dist.group.WORLD
    check_context_parallel(model, group, method, order)
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
    """Time in which the ring passes keys and values on over the time of the attention beside it; up to 1 it is hidden.

    tokens: a rank's of one sequence, s/n (the batch cancels); bandwidth: bytes a second to the next rank; peak:
    floating-point operations a second. For forward, zig-zag where causal. (Liu et al. 2023, §3, with grouped heads and
    a causal mask.)
    """
    ratio = element_bytes * kv_heads / (heads * tokens) * peak / bandwidth
    return ratio if causal else ratio / 2


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """The program's options. Touches nothing; an unknown or impossible one ends the program with status 2."""
    parser = single_gpu.training_parser("context_parallel", "Train with context, tensor and data parallelism.")
    parser.add_argument("--cp", type=int, help="ranks that share a sequence; all that --tp leaves by default")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share the matrices, with sequence parallelism")
    parser.add_argument("--method", default="ring", choices=list(METHODS), help="how attention looks across")
    parser.add_argument("--order", default="zigzag", choices=list(ORDERS), help="which tokens a rank has")
    parser.add_argument("--micro-batch", type=int, help="sequences at a time; all by default")
    parser.add_argument("--recompute", default="none", choices=["none", "full"])
    chosen = single_gpu.parse(parser, argv)
    chosen.micro_batch = chosen.batch if chosen.micro_batch is None else chosen.micro_batch
    if not 1 <= chosen.micro_batch <= chosen.batch:
        parser.error("--micro-batch must be 1 or more, and no more than --batch")
    if chosen.tp < 1 or chosen.cp is not None and chosen.cp < 1:
        parser.error("--cp and --tp must be 1 or more")
    try:
        check_degree(PRESETS[chosen.preset], chosen.tp)
    except ValueError as error:
        parser.error(str(error))
    return chosen


def main(argv: list[str] | None = None) -> list[dict]:
    """Train as the options say. Rank 0 prints one line a step and writes where --out says; tokens/s are those of its
    batch, divided by the ranks that share it.

    Returns the records. Needs the default process group. Raises ValueError where ranks, model or sequence can't be
    split over --cp and --tp.
    """
    from torch.distributed.device_mesh import init_device_mesh

    from course_lib.data_parallel.replicas import DataParallel, parallel_accumulate
    from course_lib.recompute.modes import apply_recompute
    from course_lib.single_gpu.model import Transformer, init_parameter
    from course_lib.tensor_parallel.shards import materialize
    from course_lib.zero.shards import clip_grad_norm_

    chosen, rank, world_size = options(argv), dist.get_rank(), dist.get_world_size()
    cp = chosen.cp or max(1, world_size // chosen.tp)
    shared = cp * chosen.tp
    if world_size % shared:
        raise ValueError(f"--cp {cp} times --tp {chosen.tp} does not divide the {world_size} ranks")
    device = "cpu" if dist.get_backend() == "gloo" else torch.accelerator.current_accelerator().type
    mesh = init_device_mesh(device, (world_size // shared, cp, chosen.tp), mesh_dim_names=("dp", "cp", "tp"))
    cp_group, tp_group = mesh["cp"].get_group(), mesh["tp"].get_group()
    replicas = mesh["dp", "cp"]._flatten().get_group()  # ranks with the same parameters: gradients are averaged

    def build(config, seed):
        with torch.device("meta"):
            model = Transformer(config)
        if chosen.tp > 1:
            apply_tensor_parallel(model, tp_group)
            apply_sequence_parallel(model, tp_group, reduce_group=dist.group.WORLD)
        apply_context_parallel(model, cp_group, chosen.method, chosen.order)
        materialize(model, lambda name, tensor: init_parameter(name, tensor, config, seed))
        return DataParallel(apply_recompute(model, chosen.recompute), replicas)

    def step(dp, optimizer, inputs, targets, dtype=torch.float32, max_norm=1.0):
        def summed_loss(logits, targets):
            return vocab_parallel_cross_entropy(logits, targets, tp_group, dp.module.config.vocab, "sum")

        optimizer.zero_grad()
        own = (shard_sequence(each, cp_group, chosen.order).split(chosen.micro_batch) for each in (inputs, targets))
        step_loss = parallel_accumulate(dp, list(zip(*own, strict=True)), dtype, summed_loss)
        clip_grad_norm_(dp.parameters(), max_norm)
        optimizer.step()
        return step_loss

    return single_gpu.run(chosen, step, build, rank=rank, world_size=world_size, ranks_per_batch=shared)
