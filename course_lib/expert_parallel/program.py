"""Train a mixture of experts with expert, data and tensor parallelism.

launch_nb_torchrun.py notebooks/08_expert_parallel.ipynb --nproc-per-node 4 -- --experts 8 --ep 4
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist

from course_lib.data_parallel.replicas import DataParallel, parallel_accumulate
from course_lib.expert_parallel.mixture import apply_moe
from course_lib.expert_parallel.model import ExpertGroups, apply_expert_parallel
from course_lib.expert_parallel.router import SCORES, Routing, routers_of, take_counts, update_bias
from course_lib.expert_parallel.sizes import mixture_params
from course_lib.recompute.modes import apply_recompute
from course_lib.single_gpu import training as single_gpu
from course_lib.single_gpu.model import PRESETS, Transformer, init_parameter
from course_lib.tensor_parallel.model import apply_tensor_parallel, check_degree
from course_lib.tensor_parallel.shards import materialize
from course_lib.tensor_parallel.vocabulary import vocab_parallel_cross_entropy
from course_lib.zero.shards import clip_grad_norm_


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the program's options. An unknown or invalid option exits with status 2; nothing else is touched."""
    parser = single_gpu.training_parser(
        "expert_parallel", "Train a mixture of experts with expert, data and tensor parallelism."
    )
    parser.add_argument("--experts", type=int, default=8, help="experts per layer")
    parser.add_argument("--top-k", type=int, default=2, help="experts per token")
    parser.add_argument("--expert-hidden", type=int, help="width of an expert; default: the preset's MLP width")
    parser.add_argument("--shared", type=int, default=0, help="shared experts, which every token passes through")
    parser.add_argument("--score", default="softmax", choices=list(SCORES), help="of the router")
    parser.add_argument("--balance", type=float, default=0.01, help="coefficient of the balance loss")
    parser.add_argument("--z", type=float, default=0.0, help="coefficient of the router's z-loss")
    parser.add_argument(
        "--bias-rate", type=float, default=0.0, help="step of the routers' biases; 0: the biases stay 0"
    )
    parser.add_argument("--capacity", type=float, help="capacity of an expert over its even share; no limit by default")
    parser.add_argument("--ep", type=int, help="expert-parallel ranks; by default all ranks divided by --tp")
    parser.add_argument("--nodes", type=int, default=1, help="nodes of the expert-parallel ranks; above 1: two hops")
    parser.add_argument("--node-limit", type=int, help="nodes per token; all by default")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks, for the experts' matrices too")
    single_gpu.add_micro_batch(parser)
    parser.add_argument("--recompute", default="none", choices=["none", "selective", "full"])
    args = single_gpu.parse(parser, argv)
    args.node_limit = args.nodes if args.node_limit is None else args.node_limit
    sizes = args.tp, args.nodes, args.ep, args.expert_hidden
    if any(size is not None and size < 1 for size in sizes) or args.shared < 0:
        parser.error("--ep, --tp, --nodes and --expert-hidden must be 1 or more, --shared 0 or more")
    try:
        check_degree(PRESETS[args.preset], args.tp)
        Routing(args.experts, args.top_k, **routing_of(args))
    except ValueError as error:
        parser.error(str(error))
    return args


def routing_of(args: argparse.Namespace) -> dict:
    """Return the keyword arguments of Routing from the program's options."""
    return {name: getattr(args, name) for name in ("score", "capacity", "nodes", "node_limit")} | {
        "aux_loss_coeff": args.balance,
        "z_loss_coeff": args.z,
    }


def main(argv: list[str] | None = None) -> list[dict]:
    """Train as the options say. Rank 0 prints one line per step, and at the end how uneven the last step's choices
    were, and writes the records to --out. tokens/s are per GPU: its batch's, divided by the ranks that share it.

    Returns the records. Needs the default process group. Raises ValueError if the ranks or experts cannot be split.
    """
    args, rank, world_size = options(argv), dist.get_rank(), dist.get_world_size()
    groups = ExpertGroups.make(args.ep or max(1, world_size // args.tp), args.nodes, args.tp)
    sizes = args.experts, args.top_k, args.expert_hidden, args.shared
    counts = torch.zeros(0, 0)

    def build(config, seed):
        with torch.device("meta"):
            model = apply_moe(Transformer(config), *sizes, **routing_of(args))
        if args.tp > 1:
            apply_tensor_parallel(model, groups.tp)
        split = groups.tp if args.tp > 1 else None
        apply_expert_parallel(model, groups.exchange, groups.copies, groups.dp, split)
        materialize(model, lambda name, tensor: init_parameter(name, tensor, config, seed))
        if rank == 0:
            total, active = mixture_params(config, *sizes)
            model_text = f"{args.preset} with {args.experts} experts in place of each MLP, {args.top_k} per token"
            print(f"{model_text}: {total:,} parameters, {active:,} active; without:")
        return DataParallel(apply_recompute(model, args.recompute), groups.dp)

    def step(dp, optimizer, inputs, targets, dtype=torch.float32, max_norm=1.0):
        nonlocal counts

        def summed_loss(logits, targets):
            return vocab_parallel_cross_entropy(logits, targets, groups.tp, dp.module.config.vocab, "sum")

        optimizer.zero_grad()
        micro_batches = list(zip(inputs.split(args.micro_batch), targets.split(args.micro_batch), strict=True))
        for router in routers_of(dp.module):
            router.loss_weight = 1 / len(micro_batches)
        step_loss = parallel_accumulate(dp, micro_batches, dtype, summed_loss)
        clip_grad_norm_(dp.parameters(), max_norm)
        optimizer.step()
        counts = take_counts(dp.module)
        update_bias(dp.module, counts, args.bias_rate)
        return step_loss

    records = single_gpu.run(args, step, build, rank=rank, world_size=world_size, ranks_per_batch=args.tp)
    if rank == 0:
        uneven = counts.max(1).values / counts.float().mean(1)
        print("last step, busiest expert over its even share, by layer:", [round(each, 2) for each in uneven.tolist()])
    return records
