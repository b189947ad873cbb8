"""Train with ZeRO: sharded optimizer states, gradients or parameters.

launch_nb_torchrun.py notebooks/05_zero.ipynb --nproc-per-node 4 -- --stage 3 --batch 4
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from course_lib.collectives.devices import device_type
from course_lib.data_parallel.gradient_owner import GradientOwner
from course_lib.recompute.modes import IGNORED, accumulate
from course_lib.single_gpu import training as single_gpu
from course_lib.single_gpu.model import ModelConfig, Transformer, init_parameter
from course_lib.zero.optimizer import ZeroOptimizer
from course_lib.zero.sharded_models import fully_shard
from course_lib.zero.shards import clip_grad_norm_


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the program's options. Has no side effects; an invalid option ends the program with status 2."""
    parser = single_gpu.training_parser("zero", "Train with sharded states, gradients or parameters.")
    parser.add_argument("--stage", type=int, default=2, choices=[1, 2, 3], help="stage 0 is data_parallel")
    parser.add_argument("--bucket-mb", type=float, help="stages 1 and 2: MB of parameters per bucket (25, 1 per rank)")
    single_gpu.add_micro_batch(parser)
    parser.add_argument("--grad-fp32", action="store_true", help="send and add gradients in float32")
    parser.add_argument("--offload", action="store_true", help="stages 1 and 2: optimizer states on the host")
    parser.add_argument("--replicas", type=int, default=1, help="stage 3: groups of ranks, each with a full model")
    args = single_gpu.parse(parser, argv)
    if args.bucket_mb is not None and not args.bucket_mb > 0:
        parser.error("--bucket-mb must be above 0")
    if args.replicas < 1 or args.replicas > 1 and args.stage < 3:
        parser.error("--replicas must be 1 or more, and needs stage 3")
    if args.offload and args.stage == 3:
        parser.error("--offload needs stage 1 or 2")
    return args


def sharded_accumulate(
    model: nn.Module, sharding: GradientOwner, micro_batches: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> torch.Tensor:
    """Run `data_parallel.parallel_accumulate` for a sharded model.

    sharding: the ZeroOptimizer of the model, or the model that `fully_shard` has returned.
    """
    tokens = torch.stack([(targets != IGNORED).sum() for _, targets in micro_batches]).sum().float()
    dist.all_reduce(tokens, group=sharding.group)
    tokens = tokens.clamp(min=1) / sharding.group.size()
    with sharding.no_sync() if sharding.supports_no_sync else nullcontext():
        total = accumulate(model, micro_batches[:-1], tokens=tokens)
    total = (total + accumulate(model, micro_batches[-1:], tokens=tokens)) / sharding.group.size()
    sharding.finish()
    dist.all_reduce(total, group=sharding.group)
    return total


def main(argv: list[str] | None = None) -> list[dict]:
    """Train with these options. Rank 0 prints one line per step (its own tokens/s), and writes the file of --out.

    Returns the records. Needs the default process group. Raises ValueError if --replicas does not divide its ranks.
    With bf16, parameters are BF16 with master weights (stages 1 and 2), or gathered in BF16 (stage 3): all start from
    the same values.
    """
    args = options(argv)
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    reduce_dtype = torch.float32 if args.grad_fp32 else None
    mesh, ranks = None, dist.get_world_size()
    if ranks % args.replicas:
        raise ValueError(f"--replicas {args.replicas} does not divide the {ranks} ranks")
    if args.replicas > 1:
        device = device_type()
        shape = args.replicas, ranks // args.replicas
        mesh = init_device_mesh(device, shape, mesh_dim_names=("replica", "shard"))

    def build(config: ModelConfig, seed: int) -> nn.Module:
        if args.stage < 3:
            return Transformer(config, seed)
        with torch.device("meta"):
            model = Transformer(config)
        init = lambda name, tensor: init_parameter(name, tensor, config, seed)  # noqa: E731
        return fully_shard(model, mesh, compute_dtype=dtype, reduce_dtype=reduce_dtype, init=init)

    def make_optimizer(model, lr):
        if args.stage == 3:
            return single_gpu.adamw(model, lr)
        settings = {"stage": args.stage, "bucket_mb": args.bucket_mb, "offload": args.offload}
        settings |= {"compute_dtype": dtype, "grad_dtype": reduce_dtype, "lr": lr}
        settings |= {"param_groups": single_gpu.decay_groups(model)}
        return ZeroOptimizer(model, torch.optim.AdamW, **settings, **single_gpu.ADAMW)

    def step(model, optimizer, inputs, targets, _dtype=None, max_norm=1.0):
        optimizer.zero_grad()
        micro_batches = zip(inputs.split(args.micro_batch), targets.split(args.micro_batch), strict=True)
        step_loss = sharded_accumulate(model, model if args.stage == 3 else optimizer, list(micro_batches))
        if args.stage == 3:
            clip_grad_norm_(model.parameters(), max_norm)
        else:
            optimizer.clip_grad_norm_(max_norm)
        optimizer.step()
        return step_loss

    return single_gpu.run(args, step, build, make_optimizer, dist.get_rank(), dist.get_world_size())
