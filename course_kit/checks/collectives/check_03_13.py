"""Check of exercise 03.13: `two_level_all_reduce` sums in two groups, with one shard across the nodes."""

from __future__ import annotations

import torch
import torch.distributed as dist

from course_kit.checks.collectives.watched import RANKS, SECONDS, Made
from course_kit.labs.collectives import counted, values
from course_kit.ranks import shared
from course_lib.collectives import rings
from course_lib.collectives.traffic import Traffic

CASES = (  # the ranks of each node, elements, dtype
    ([[0, 1], [2, 3]], 1000, torch.float32),
    ([[0, 2], [1, 3]], 2001, torch.bfloat16),
    ([[0, 1, 2, 3]], 7, torch.int64),
    ([[0], [1], [2], [3]], 9, torch.float32),
)
Members = tuple[int, ...]


def two_level_trial(nodes: list[list[int]], numel: int, dtype: torch.dtype) -> tuple[str, Traffic, Members, Members]:
    """Return what is wrong with the result, what this rank sent, and the ranks of its two groups."""
    rank, local = dist.get_rank(), next(node for node in nodes if dist.get_rank() in node)
    groups = {tuple(members): dist.new_group(members) for members in [*nodes, *map(list, zip(*nodes, strict=True))]}
    positions = tuple(node[local.index(rank)] for node in nodes)
    tensor = values(rank, numel, dtype)

    def all_reduce(inside: dist.ProcessGroup) -> None:
        rings.two_level_all_reduce(tensor, inside, groups[positions])

    with Made() as made:
        _, bytes_sent = counted(groups[tuple(local)], all_reduce)
    dist.barrier()
    right = torch.equal(tensor, torch.stack([values(r, numel, dtype) for r in range(RANKS)]).sum(0))
    wrong = "" if right else "does not have the sum in `tensor`"
    return wrong or made.too_much(tensor.tensor_split(len(local))[0].nbytes), bytes_sent, tuple(local), positions


def check() -> None:
    """Assert sums, memory, groups, bytes inside and across the nodes, and steps, for four ways to make nodes."""
    ranks = shared(RANKS)
    for nodes, numel, dtype in CASES:
        with ranks.within(SECONDS):
            outcomes = ranks(two_level_trial, nodes, numel, dtype)
        for rank, (wrong, bytes_sent, inside, across) in enumerate(outcomes):
            what = f"nodes {nodes}, {numel} elements in {dtype}, rank {rank}"
            assert {record.group for record in bytes_sent.records} <= {inside, across}, (
                f"{what}: use the two groups alone"
            )
            assert not wrong, f"{what} {wrong}"
            local, position = torch.empty(numel, dtype=dtype).tensor_split(len(inside)), inside.index(rank)
            shard = local[position]
            twice = 2 * sum(part.nbytes for part in local) - shard.nbytes - local[(position + 1) % len(inside)].nbytes
            stayed = bytes_sent.select(group=inside).bytes if len(inside) > 1 else 0
            assert stayed <= twice, (
                f"{what}: {stayed} bytes travel inside the node, {twice} are enough: reduce-scatter, then all-gather"
            )
            parts = [part.nbytes for part in shard.tensor_split(len(nodes))]
            position = across.index(rank)
            ring = 2 * sum(parts) - parts[position] - parts[(position + 1) % len(nodes)]
            enough = max(ring, 2 * (len(nodes) - 1) * shard.nbytes // len(nodes))  # or as an all-reduce is booked
            crossed = bytes_sent.select(group=across).bytes if len(nodes) > 1 else 0
            assert crossed <= enough, f"{what}: {crossed} bytes go across nodes, {enough} are enough: one shard only"
            steps = 2 * (len(inside) - 1) + 2 * (len(nodes) - 1)
            assert bytes_sent.select("send").calls <= steps, (
                f"{what}: {bytes_sent.select('send').calls} sends, {steps} are enough"
            )
