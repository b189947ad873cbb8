"""Tensor parallelism: N ranks work on the same tokens, each with its shard of every matrix.

    tokens -> embedding (rows)  f*                                                  full hidden states
    a layer:  norm  f  q k v (columns: local heads) attention   o (rows)     f*     full hidden states
              norm  f  gate up (columns)            silu, *     down (rows)  f*     full hidden states
    norm      f  head (columns: local vocabulary)   loss from three elements per token

A rank keeps 1/N of the weights, gradients, optimizer states, and of the activations between f and f*. Norms and the
activations between f* and f are replicated: s b h (10 + 24/N) bytes per GPT layer, without attention scores
(Korthikanti et al. 2022, §4.2). It sends 2 all-reduces of [b, s, h] per layer in forward, which nothing hides, and 2 in
backward. (Shoeybi et al. 2019.)
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from course_lib.collectives.devices import device_type
from course_lib.collectives.groups import group_or_world
from course_lib.data_parallel.replicas import DataParallel, parallel_accumulate
from course_lib.recompute.modes import apply_recompute
from course_lib.single_gpu import training as single_gpu
from course_lib.single_gpu.model import (
    MLP,
    PRESETS,
    ModelConfig,
    Transformer,
    init_parameter,
    need_transformer,
)
from course_lib.single_gpu.placement import placement_of
from course_lib.tensor_parallel import by_hand, linear
from course_lib.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, replicas_of
from course_lib.tensor_parallel.partitioned_checkpoints import apply_partitioned_recompute
from course_lib.tensor_parallel.regions import copy_to_group
from course_lib.tensor_parallel.shards import leaves_empty_shard, materialize
from course_lib.tensor_parallel.vocabulary import VocabParallelEmbedding, vocab_parallel_cross_entropy
from course_lib.zero.shards import clip_grad_norm_


def check_degree(config: ModelConfig, tp: int) -> None:
    """Raise ValueError, which names the size at fault, if a model of these sizes cannot be split over `tp` ranks."""
    for name in ("heads", "ffn_hidden"):
        if getattr(config, name) % tp:
            raise ValueError(f"tp {tp} does not divide {name}, which is {getattr(config, name)}")
    if config.kv_heads % tp and tp % config.kv_heads:
        raise ValueError(f"tp {tp} and kv_heads, which is {config.kv_heads}: neither divides the other")
    if leaves_empty_shard(config.vocab, tp):
        raise ValueError(f"tp {tp} leaves a rank without a token of vocab, which is {config.vocab}")


class SplitNorm(nn.Module):
    """The weight and eps of `norm`, an nn.RMSNorm that each rank of the group applies to different rows."""

    def __init__(self, norm: nn.RMSNorm, group: dist.ProcessGroup):
        super().__init__()
        self.group, self.eps, self.weight = group, norm.eps, norm.weight


class HeadNorm(SplitNorm):
    """A norm of each local head of q or k (Qwen3); its weight's gradient is summed over the group."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [b, s, heads, d]; returns the same shape."""
        return F.rms_norm(x, self.weight.shape, copy_to_group(self.weight, self.group), self.eps)


def share_head_norms(model: Transformer, group: dist.ProcessGroup) -> None:
    """Replace each norm of q and k by a HeadNorm."""
    for block in model.blocks:
        attention: Any = block.attention
        if attention.q_norm is not None:
            attention.q_norm, attention.k_norm = (HeadNorm(n, group) for n in (attention.q_norm, attention.k_norm))


def check_model(model: Transformer, group: dist.ProcessGroup) -> None:
    """Raise ValueError if apply_tensor_parallel cannot split the model over `group`, TypeError if it is no
    `Transformer`.
    """
    layers = "ColumnParallelLinear(linear, group) and RowParallelLinear(linear, group)"
    need_transformer(model, "apply_tensor_parallel", f"{layers} work on any nn.Linear")
    check_degree(model.config, group.size())
    if any(placement_of(parameter).tensor_shard for parameter in model.parameters()):
        raise ValueError("the model is split already")


# exercise 06.9
def apply_tensor_parallel(
    model: Transformer, group: dist.ProcessGroup | None = None, chunks: int = 1, gather_logits: bool = False
) -> Transformer:
    """Split the matrices of a `Transformer` over the ranks of `group` (None: all ranks), in place; return the model.

    Every `MLP` in `block.modules()` is split: in notebook 08 `block.mlp` is a mixture that may hold one, or none. All
    ranks pass the model the same tokens, and have the same random state if it has dropout. It returns the local logits
    [b, s, v/N], for vocab_parallel_cross_entropy, or the full logits with gather_logits. chunks: see RowParallelLinear.
    The model may be on the meta device (then `shards.materialize` it). The weights of q, k, v, gate and up are used
    without calling their layers: hooks on these layers do not run. Collective over the default group if there are more
    ranks than K/V heads. Raises ValueError, and changes nothing, if the group's size does not fit the model or the
    model is split already.
    """
    group = group_or_world(group)
    check_model(model, group)
    model.applied["tensor_parallel"] = group
    config = model.config
    copies = group.size() // config.kv_heads
    replicas = replicas_of(group, copies) if copies > 1 else None
    share_head_norms(model, group)
    for block in model.blocks:
        attention = block.attention
        attention.q_proj = ColumnParallelLinear(attention.q_proj, group)
        attention.k_proj = ColumnParallelLinear(attention.k_proj, group, replicas)
        attention.v_proj = ColumnParallelLinear(attention.v_proj, group, replicas)
        attention.o_proj = RowParallelLinear(attention.o_proj, group, chunks)
        attention.project_layers = linear.project_together
        for mlp in [module for module in block.modules() if isinstance(module, MLP)]:  # a mixture may have none
            mlp.gate_proj = ColumnParallelLinear(mlp.gate_proj, group)
            mlp.up_proj = ColumnParallelLinear(mlp.up_proj, group)
            mlp.down_proj = RowParallelLinear(mlp.down_proj, group, chunks)
            mlp.project_layers = linear.project_together
    if model.embedding is not None:
        model.embedding = VocabParallelEmbedding(model.embedding, group)
    if model.head is not None:
        model.head = ColumnParallelLinear(model.head, group, gather_output=gather_logits)
        if config.tied and model.embedding is not None:
            model.head.weight = model.embedding.weight
    return model


# exercise 06.15
def all_reduce_ratio(
    hidden: int, tp: int, bandwidth: float, peak: float, layer_params: int | None = None, element_bytes: int = 2
) -> float:
    """Return the time of a layer's two forward all-reduces over the time of its matmuls, on `tp` GPUs; the ratio of
    backward is half.

    bandwidth: bytes per second per GPU (bus bandwidth); peak: floating-point operations per second; layer_params: None
    for 12 h². The Ultra-Scale Playbook, appendix A3, for a full layer and in bytes.
    """
    weights = 12 * hidden**2 if layer_params is None else layer_params
    return 2 * element_bytes * hidden * (tp - 1) / weights * peak / bandwidth


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the program's options. An unknown or invalid option exits with status 2; nothing else is touched."""
    parser = single_gpu.training_parser("tensor_parallel", "Train with tensor and data parallelism.")
    parser.add_argument("--tp", type=int, help="tensor-parallel ranks; all ranks by default")
    parser.add_argument("--chunks", type=int, default=1, help="chunks in which row layers multiply and sum")
    single_gpu.add_micro_batch(parser)
    modes = ["none", "selective", "full", "partitioned"]
    parser.add_argument(
        "--recompute", default="none", choices=modes, help="partitioned: full, from partitioned checkpoints"
    )
    by_hand_help = (
        "train one MLP instead of the model, without autograd and in float32, beside the same MLP made of layers"
    )
    parser.add_argument("--by-hand", action="store_true", help=by_hand_help)
    args = single_gpu.parse(parser, argv)
    if args.chunks < 1 or args.tp is not None and args.tp < 1:
        parser.error("--chunks and --tp must be 1 or more")
    if args.by_hand and (args.tp, args.chunks, args.recompute, args.dataset) != (None, 1, "none", None):
        parser.error("--by-hand trains over all ranks on random inputs: no --tp, --chunks, --recompute or --dataset")
    try:
        check_degree(PRESETS[args.preset], args.tp or 1)
    except ValueError as error:
        parser.error(str(error))
    return args


def train_by_hand(args: argparse.Namespace, device: str) -> list[dict]:
    """Train one MLP of the preset's sizes by hand; rank 0 prints one line per step and writes the records to --out."""
    config, rank = PRESETS[args.preset], dist.get_rank()

    def on_step(record: dict) -> None:
        if rank == 0:
            print(
                f"step {record['step']:>5} | loss {record['loss']:.6f} by hand, {record['layers_loss']:.6f} in layers"
            )

    records = by_hand.train(
        config.hidden,
        config.ffn_hidden,
        args.batch * args.seq,
        args.steps,
        args.lr,
        args.seed,
        device=device,
        on_step=on_step,
    )
    if args.out and rank == 0:
        settings = {name: str(value) for name, value in vars(args).items()}
        args.out.write_text(json.dumps({"options": settings, "records": records}, indent=1))
    return records


def main(argv: list[str] | None = None) -> list[dict]:
    """Train as the options say. Rank 0 prints one line per step and writes the records to --out; tokens/s are per GPU:
    the tokens of its batch, divided by the ranks that share the batch.

    Returns the records. Needs the default process group. Raises ValueError if --tp does not divide the ranks or does
    not fit the model.
    """
    args, rank, world_size = options(argv), dist.get_rank(), dist.get_world_size()
    tp = args.tp or world_size
    if world_size % tp:
        raise ValueError(f"--tp {tp} does not divide the {world_size} ranks")
    device = device_type()
    if args.by_hand:
        return train_by_hand(args, device)
    mesh = init_device_mesh(device, (world_size // tp, tp), mesh_dim_names=("dp", "tp"))
    group = mesh["tp"].get_group()

    def build(config, seed):
        with torch.device("meta"):
            model = Transformer(config)
        apply_tensor_parallel(model, group, args.chunks)
        materialize(model, lambda name, tensor: init_parameter(name, tensor, config, seed))
        if args.recompute == "partitioned":
            apply_partitioned_recompute(model, group)
        else:
            apply_recompute(model, args.recompute)
        return DataParallel(model, mesh["dp"].get_group())

    def step(dp, optimizer, inputs, targets, dtype=torch.float32, max_norm=1.0):
        def summed_loss(logits, targets):
            return vocab_parallel_cross_entropy(logits, targets, group, dp.module.config.vocab, "sum")

        optimizer.zero_grad()
        micro_batches = zip(inputs.split(args.micro_batch), targets.split(args.micro_batch), strict=True)
        step_loss = parallel_accumulate(dp, list(micro_batches), dtype, summed_loss)
        clip_grad_norm_(dp.parameters(), max_norm)
        optimizer.step()
        return step_loss

    return single_gpu.run(args, step, build, rank=rank, world_size=world_size, ranks_per_batch=tp)
