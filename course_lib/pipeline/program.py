"""Train with pipeline and data parallelism: 1F1B, or any other schedule by its name.

launch_nb_torchrun.py notebooks/09_pipeline.ipynb --nproc-per-node 4 -- --pp 2 --schedule zb-h1
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn

from course_lib.collectives.devices import device_type
from course_lib.data_parallel.replicas import DataParallel
from course_lib.pipeline.norm import clip_grad_norm_
from course_lib.pipeline.runner import PipelineRunner
from course_lib.pipeline.schedules import SCHEDULES, num_stages, schedule_by_name
from course_lib.pipeline.stages import split_layers, split_stages
from course_lib.recompute.modes import apply_recompute
from course_lib.single_gpu import training as single_gpu
from course_lib.single_gpu.model import PRESETS, Transformer, init_parameter
from course_lib.tensor_parallel.shards import materialize


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the program's options. Touches nothing; an unknown or impossible one ends the program with status 2."""
    parser = single_gpu.training_parser("pipeline", "Train with pipeline and data parallelism.")
    parser.add_argument("--schedule", default="1f1b", choices=[*SCHEDULES, "interleaved"])
    parser.add_argument("--pp", type=int, help="ranks per pipeline; all by default")
    parser.add_argument("--virtual", type=int, default=2, help="interleaved: stages per rank")
    parser.add_argument("--run", type=int, help="interleaved: micro-batches in a row; pp (depth first) by default")
    parser.add_argument("--micro-batches", type=int, help="per step; --batch by default")
    parser.add_argument("--recompute", default="none", choices=["none", "selective", "full"])
    args = single_gpu.parse(parser, argv)
    args.micro_batches = args.batch if args.micro_batches is None else args.micro_batches
    if args.micro_batches < 1 or args.batch % args.micro_batches:
        parser.error("--micro-batches must divide --batch")
    if args.pp is not None:
        try:
            schedule = schedule_by_name(args.schedule, args.pp, args.micro_batches, args.virtual, args.run)
            split_layers(PRESETS[args.preset].layers, num_stages(schedule))
        except ValueError as error:
            parser.error(str(error))
    return args


def main(argv: list[str] | None = None) -> list[dict]:
    """Train as the options say. Rank 0 prints one line per step and writes the records to --out. tokens/s count
    a pipeline's batch, divided by its ranks.

    Returns the records. Needs the default process group. Raises ValueError if --pp does not divide the ranks, or the
    schedule refuses these sizes.
    """
    args, rank, world_size = options(argv), dist.get_rank(), dist.get_world_size()
    pp = args.pp or world_size
    if world_size % pp:
        raise ValueError(f"--pp {pp} does not divide the {world_size} ranks")
    dp_group, group = dist.init_device_mesh(device_type(), (world_size // pp, pp)).get_all_groups()
    schedule = schedule_by_name(args.schedule, pp, args.micro_batches, args.virtual, args.run)
    runner = None

    def build(config, seed):
        nonlocal runner
        with torch.device("meta"):
            stages = split_stages(Transformer(config), num_stages(schedule))
        local = {action.stage: stages[action.stage] for action in schedule[group.rank()]}
        materialize(
            nn.ModuleList(local.values()), lambda name, each: init_parameter(name.split(".", 1)[1], each, config, seed)
        )
        for stage in local.values():
            apply_recompute(stage, args.recompute)
        runner = PipelineRunner(local, schedule, group, dp_group=dp_group)
        runner.stages.config = config
        return DataParallel(runner.stages, dp_group)

    def step(dp, optimizer, inputs, targets, dtype=torch.float32, max_norm=1.0):
        optimizer.zero_grad()
        loss = runner.step(inputs, targets, dtype, no_sync=dp.no_sync)
        dp.finish()
        clip_grad_norm_(runner, max_norm)
        optimizer.step()
        dist.all_reduce(loss)
        return loss / dp_group.size()

    return single_gpu.run(args, step, build, rank=rank, world_size=world_size, ranks_per_batch=pp)
