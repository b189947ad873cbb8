"""Train with data parallelism: gradients averaged in buckets, or in the two simplest ways.

launch_nb_torchrun.py notebooks/04_data_parallel.ipynb --nproc-per-node 4 -- --batch 4
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from course_lib.data_parallel import naive
from course_lib.data_parallel.buckets import MODES
from course_lib.data_parallel.replicas import DataParallel, find_diverged_params, parallel_accumulate
from course_lib.single_gpu import training as single_gpu
from course_lib.single_gpu.model import ModelConfig, Transformer


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the program's options. Has no side effects; an invalid option ends the program with status 2."""
    parser = single_gpu.training_parser("data_parallel", "Train with data parallelism.")
    parser.add_argument("--mode", default="bucket", choices=list(MODES), help="naive, overlap: without DataParallel")
    parser.add_argument("--bucket-mb", type=float, help="MB of gradients per bucket (25, or 1 per rank if more)")
    single_gpu.add_micro_batch(parser)
    parser.add_argument("--reduce-fp32", action="store_true", help="send and add gradients in float32")
    parser.add_argument("--check-every", type=int, default=100, help="steps between checks of the replicas; 0: never")
    args = single_gpu.parse(parser, argv)
    if args.mode != "bucket" and (args.bucket_mb is not None or args.reduce_fp32):
        parser.error(f"--bucket-mb and --reduce-fp32 are of buckets: --mode {args.mode} has none")
    if args.bucket_mb is not None and not args.bucket_mb > 0 or args.check_every < 0:
        parser.error("--bucket-mb must be above 0, and --check-every 0 or more")
    return args


def main(argv: list[str] | None = None) -> list[dict]:
    """Train with these options. Rank 0 prints one line per step (its own tokens/s), and writes the file of --out.

    Modes naive and overlap train the plain model, with the functions of `naive`; all ranks build it from the same seed.
    Returns the records. Needs the default process group. Raises RuntimeError if the replicas have diverged.
    """
    args, rank, world_size = options(argv), dist.get_rank(), dist.get_world_size()
    count = 0
    finish_overlap: Callable[[], None] | None = None

    def step(model, optimizer, inputs, targets, dtype=torch.float32, max_norm=1.0):
        nonlocal count
        count += 1
        optimizer.zero_grad()
        micro_batches = list(zip(inputs.split(args.micro_batch), targets.split(args.micro_batch), strict=True))
        if args.mode == "bucket":
            step_loss = parallel_accumulate(model, micro_batches, dtype)
        else:
            step_loss = naive.averaged_backward(model, micro_batches, dtype, finish_overlap)
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        replica = getattr(model, "module", model)
        if args.check_every and count % args.check_every == 0 and (names := find_diverged_params(replica)):
            raise RuntimeError(f"step {count}: the ranks have different values of {', '.join(names[:3])}")
        return step_loss

    def build(config: ModelConfig, seed: int) -> nn.Module:
        nonlocal finish_overlap
        model, reduce_dtype = Transformer(config, seed), torch.float32 if args.reduce_fp32 else None
        if args.mode == "bucket":
            return DataParallel(model, bucket_mb=args.bucket_mb, reduce_dtype=reduce_dtype)
        finish_overlap = naive.overlap_gradients(model) if args.mode == "overlap" else None
        return model

    return single_gpu.run(args, step, build, rank=rank, world_size=world_size)
