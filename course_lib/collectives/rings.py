"""Collectives from send and receive: a tree broadcast, and the ring that makes an all-reduce of two halves.

N ranks, K bytes, latency alpha of a message, bandwidth beta of a link: the tree takes ceil(log2 N) (alpha + K / beta),
the ring all-reduce 2 (N-1) (alpha + K / (N beta)), and a rank sends 2 (N-1)/N K. `main` times PyTorch's own collectives
over sizes (see `bandwidth`); `count_traffic` counts the bytes sent (see `traffic`).
"""

from __future__ import annotations

import argparse
import json

import torch
import torch.distributed as dist

from course_lib.collectives.bandwidth import fit_alpha_beta, sweep
from course_lib.single_gpu.training import out_file


# exercise 03.3
def tree_broadcast(tensor: torch.Tensor, src: int = 0, group: dist.ProcessGroup | None = None) -> None:
    """Copy `tensor` of rank `src` of the group into `tensor` of every other rank, in ⌈log₂ N⌉ steps along a binomial
    tree.

    Uses dist.send and dist.recv alone, with group_dst= and group_src=.
    tensor: contiguous, any shape and dtype, the same on all ranks.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    index, have = (rank - src) % n, 1
    while have < n:
        if index < have and index + have < n:
            dist.send(tensor, group_dst=(rank + have) % n, group=group)
        elif have <= index < 2 * have:
            dist.recv(tensor, group_src=(rank - have) % n, group=group)
        have *= 2


def exchange(sent: torch.Tensor, received: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Send to the next rank of the group while receiving from the previous one; return when both are done.

    Both start as one batch. NCCL needs that: one after the other, a send and a receive can block each other.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    sending = dist.P2POp(dist.isend, sent, group=group, group_peer=(rank + 1) % n)
    receiving = dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % n)
    for work in dist.batch_isend_irecv([sending, receiving]):
        work.wait()


# exercise 03.4
def ring_reduce_scatter(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return this rank's shard of the sum over the group: shard r of N is the view
    `tensor.view(-1).tensor_split(N)[r]`.

    The rest of `tensor` serves as working memory; no other tensor is larger than a shard, and no more than two are held
    at a time. N-1 steps of `exchange`; sends the tensor less this rank's shard (Patarasuk and Yuan 2009, "Bandwidth
    optimal all-reduce algorithms"). tensor: any shape and dtype, the same on all ranks; contiguous.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    shards = tensor.view(-1).tensor_split(n)
    buffer = torch.empty_like(shards[0])  # the first shard is the largest
    for step in range(n - 1):
        partial, added = shards[(rank - step - 1) % n], shards[(rank - step - 2) % n]
        received = buffer[: added.numel()]
        exchange(partial, received, group)
        added.add_(received)
    return shards[rank]


# exercise 03.5
def ring_all_gather(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Fill in the other ranks' shards; on entry rank r of N has its own, `tensor.view(-1).tensor_split(N)[r]`.

    N-1 steps of `exchange`; sends every shard but the next rank's own, and makes no tensor larger than a shard. tensor:
    any shape and dtype, the same on all ranks; contiguous.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    shards = tensor.view(-1).tensor_split(n)
    for step in range(n - 1):
        exchange(shards[(rank - step) % n], shards[(rank - step - 1) % n], group)


CHUNK = 2**22  # elements


# exercise 03.6
def ring_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Replace `tensor` by the sum over the group, in chunks of CHUNK elements, each in 2(N-1) steps.

    Sends 2(N-1)/N of the tensor (Patarasuk and Yuan 2009); needs a buffer of a chunk's shard. tensor: any shape
    and dtype, the same on all ranks; contiguous.
    """
    for chunk in tensor.view(-1).split(CHUNK):
        ring_reduce_scatter(chunk, group)
        ring_all_gather(chunk, group)


# exercise 03.13
def two_level_all_reduce(
    tensor: torch.Tensor, inside: dist.ProcessGroup | None, across: dist.ProcessGroup | None
) -> None:
    """Replace `tensor` by the sum over all ranks of all nodes; one shard of it only goes across the nodes.

    inside: the group of this rank's node; across: of the ranks with the same index in each node. Makes no tensor
    larger than a shard, and sends no more inside the node than a reduce-scatter and an all-gather. tensor: any
    dtype, contiguous.
    """
    shard = ring_reduce_scatter(tensor, inside)
    ring_all_reduce(shard, across)
    ring_all_gather(tensor, inside)


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the program's options. Touches nothing; an unknown or impossible one ends the program with status 2."""
    parser = argparse.ArgumentParser(
        prog="collectives",
        description="Time collectives by size, as nccl-tests does.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    known = ["all_reduce", "all_gather", "reduce_scatter"]
    parser.add_argument("--collectives", nargs="+", default=known, choices=known)
    parser.add_argument("--min-kib", type=int, default=4, help="the smallest tensor")
    parser.add_argument("--max-kib", type=int, default=64 * 1024, help="the largest tensor")
    parser.add_argument("--factor", type=int, default=4, help="from one size to the next")
    parser.add_argument("--out", type=out_file, help="a JSON file for the records of all sizes")
    args = parser.parse_args(argv)
    if not 1 <= args.min_kib <= args.max_kib:
        parser.error("--min-kib must be 1 or more, and --max-kib no less than --min-kib")
    if args.factor < 2:
        parser.error("--factor must be 2 or more")
    return args


def describe(record: dict) -> str:
    """Return one line of the table."""
    speeds = "".join(f"{record[key] / 1e9:>14.3f}" for key in ("algbw", "busbw"))
    return f"{record['collective']:<16}{record['bytes']:>14,}{record['seconds'] * 1e6:>14,.0f}{speeds}"


def main(argv: list[str] | None = None) -> list[dict]:
    """Time collectives as the options say. Rank 0 prints a line for each size and a fit for each collective.

    Returns the records of `sweep`; rank 0 writes them to --out. Needs the default process group.
    """
    args = options(argv)
    sizes, size = [], 1024 * args.min_kib
    while size <= 1024 * args.max_kib:
        sizes.append(size)
        size *= args.factor
    prints = dist.get_rank() == 0
    if prints:
        print(f"{dist.get_world_size()} ranks, {dist.get_backend()}, float32")
        print(f"{'collective':<16}{'bytes':>14}{'µs':>14}{'algbw GB/s':>14}{'busbw GB/s':>14}")
    records = sweep(args.collectives, sizes, on_record=lambda record: print(describe(record)) if prints else None)
    for collective in args.collectives if prints and len(sizes) > 1 else []:
        points = [(record["bytes"], record["seconds"]) for record in records if record["collective"] == collective]
        alpha, beta = fit_alpha_beta([size for size, _ in points], [seconds for _, seconds in points])
        known = f"{beta / 1e9:.3f} GB/s" if beta > 0 else "not determined by these sizes: go larger"
        print(f"{collective}: alpha {alpha * 1e6:,.0f} µs, beta {known}")
    if args.out and prints:
        details = {"options": {k: str(v) for k, v in vars(args).items()}, "backend": dist.get_backend()}
        args.out.write_text(json.dumps(details | {"records": records}, indent=1))
    return records
