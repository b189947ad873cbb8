"""Labs of notebook 03: traffic in groups of ranks, all-reduces to compare, sweeps, pauses and barriers."""

from __future__ import annotations

import csv
import functools
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

import course_lib
from course_lib.collectives import bandwidth, rings
from course_lib.collectives.traffic import Traffic, count_traffic

MB = 10**6
SIZES = [4096 * 4**power for power in range(8)]  # bytes, 4 KiB to 64 MiB
SWEPT = ["all_reduce", "all_gather", "reduce_scatter"]
STEPS = 12  # of work, with a pause each


@functools.cache
def published_rows() -> list[dict[str, str]]:
    """Return the rows of data/collective_bandwidth.csv."""
    path = Path(course_lib.__file__).parents[1] / "data" / "collective_bandwidth.csv"
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def published(collective: str, column: str) -> list[float]:
    """Return a column of the published bandwidths of a collective, by number of nodes."""
    return [float(row[column]) for row in published_rows() if row["collective"] == collective]


def in_group(n: int, function: Callable, *args, first: int = 0):
    """Return function(group, *args) in a group of n ranks, from rank `first` on; None on the other ranks."""
    group = dist.new_group(list(range(first, first + n)))
    if dist.get_rank() not in range(first, first + n):
        return None
    result = function(group, *args)
    dist.barrier(
        group
    )  # waits for the other ranks, and for an isend or irecv of this rank that has not been waited for
    return result


def counted(group: dist.ProcessGroup, function: Callable, *args) -> tuple[object, Traffic]:
    """Return function(group, *args) and this rank's traffic.

    Raises AssertionError, with a message for learners, for a send or receive with a rank outside of the group.
    """
    with count_traffic() as traffic:
        try:
            result = function(group, *args)
        except (RuntimeError, ValueError) as error:
            last, n = traffic.records[-1:], dist.get_world_size(group)
            itself = last and last[0].collective in ("send", "recv") and last[0].peer == dist.get_rank()
            if not itself and not re.search(r"rank -?\d+ is not part of|[Ii]nvalid .*rank", str(error)):
                raise
            alone = "the group has one rank: there is no other rank to send to"
            stray = (
                "a rank sends to or receives from itself, or a rank outside of the group: pass group=group, "
                f"and ranks of the group, 0 to {n - 1}, as group_src= and group_dst="
            )
            raise AssertionError(alone if n == 1 else stray) from error
    return result, traffic


def among(n: int, function: Callable, *args) -> tuple[object, Traffic] | None:
    """Return `counted(group, function, *args)` in a group of the last n ranks; None on the other ranks."""
    return in_group(n, counted, function, *args, first=dist.get_world_size() - n)


def values(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a rank's tensor: integers, so that sums are exact in any order; int64 values that do not fit a float."""
    numbers = torch.arange(numel) % 7 + 10 * rank
    return numbers * (2**54 + 1) if dtype == torch.int64 else numbers.to(dtype)


def star_all_reduce(group: dist.ProcessGroup, tensor: torch.Tensor) -> None:
    """Replace `tensor` by the sum over the group, computed on rank 0."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    if rank == 0:
        for other in range(1, n):
            received = torch.empty_like(tensor)
            dist.recv(received, group_src=other, group=group)
            tensor.add_(received)
        for other in range(1, n):
            dist.send(tensor, group_dst=other, group=group)
    else:
        dist.send(tensor, group_dst=0, group=group)
        dist.recv(tensor, group_src=0, group=group)


def tree_all_reduce(group: dist.ProcessGroup, tensor: torch.Tensor) -> None:
    """Replace `tensor` by the sum over the group: along the tree to rank 0, and back by `tree_broadcast`."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    have = 2 ** math.ceil(math.log2(n)) // 2
    while have:
        if have <= rank < 2 * have:
            dist.send(tensor, group_dst=rank - have, group=group)
        elif rank < have and rank + have < n:
            received = torch.empty_like(tensor)
            dist.recv(received, group_src=rank + have, group=group)
            tensor.add_(received)
        have //= 2
    rings.tree_broadcast(tensor, 0, group)


def ring_all_reduce(group: dist.ProcessGroup, tensor: torch.Tensor) -> None:
    """Replace `tensor` by the sum over the group, with the library's ring."""
    rings.ring_all_reduce(tensor, group)


def two_level_traffic(nodes: list[list[int]], tensor: torch.Tensor) -> tuple[int, int]:
    """Return the bytes that this rank sends inside its node, and across nodes, in a two-level all-reduce.

    nodes: the ranks of each node, the same number in each.
    """
    across_nodes = [list(ranks) for ranks in zip(*nodes, strict=True)]
    groups = {tuple(members): dist.new_group(members) for members in [*nodes, *across_nodes]}
    inside, across = (next(tuple(each) for each in lists if dist.get_rank() in each) for lists in (nodes, across_nodes))
    with count_traffic() as traffic:
        rings.two_level_all_reduce(tensor, groups[inside], groups[across])
    return traffic.select(group=inside).bytes, traffic.select(group=across).bytes


State = list[list[set[int]]]  # the ranks whose values are summed in each chunk, by rank and chunk


def ring_states(n: int) -> list[State]:
    """Return the state of each rank's chunks at the start and after each step of a ring (reduce-scatter,
    all-gather).
    """
    state = [[{rank} for _ in range(n)] for rank in range(n)]
    states = [state]
    for step in range(1, 2 * n - 1):
        new = [[set(chunk) for chunk in row] for row in state]
        for rank in range(n):
            chunk = sent_chunk(n, rank, step)
            new[(rank + 1) % n][chunk] |= state[rank][chunk]
        state = new
        states.append(state)
    return states


def sent_chunk(n: int, rank: int, step: int) -> int:
    """Return the chunk that a rank sends in a step, from 1: n - 1 steps of reduce-scatter, then n - 1 of all-gather."""
    return (rank - (step if step < n else step - n)) % n


def timed_sweep(group: dist.ProcessGroup) -> list[dict]:
    """Return the records of `sweep` for three collectives over SIZES, the same on all ranks of the group."""
    return bandwidth.sweep(SWEPT, SIZES, group)


def series(records: list[dict], collective: str, *keys: str) -> list[list]:
    """Return columns of a sweep's records of one collective, by size."""
    rows = [record for record in records if record["collective"] == collective]
    return [[row[key] for row in rows] for key in keys]


class Fit(NamedTuple):
    """Measured bus bandwidths of a collective by message size, and what is fitted to its times."""

    sizes: list[float]  # bytes
    busbw: list[float]  # bytes per second
    alpha: float  # seconds
    beta: float  # bytes per second, of the algorithm's bandwidth


def fits_of(records: dict[int, list[dict]]) -> dict[int, dict[str, Fit]]:
    """Return the fits of the swept collectives, by number of ranks."""
    results: dict[int, dict[str, Fit]] = {}
    for n, of_n in records.items():
        for collective in SWEPT:
            sizes, seconds, busbw = series(of_n, collective, "bytes", "seconds", "busbw")
            fit = Fit(sizes, busbw, *bandwidth.fit_alpha_beta(sizes, seconds))
            results.setdefault(n, {})[collective] = fit
    return results


def compare_with_gloo(group: dist.ProcessGroup, size: int, repeats: int) -> dict[str, float]:
    """Return the median seconds of our ring, of gloo's all-reduce, and of gloo's once more; compare the sums first."""
    ours, theirs = (values(dist.get_rank(), size // 4) for _ in range(2))
    rings.ring_all_reduce(ours, group)
    dist.all_reduce(theirs, group=group)
    assert torch.equal(ours, theirs)
    tensor = torch.zeros(size // 4)
    contestants: tuple[tuple[str, Callable[[], object]], ...] = (
        ("ring", lambda: rings.ring_all_reduce(tensor, group)),
        ("gloo", lambda: dist.all_reduce(tensor, group=group)),
        ("gloo again", lambda: dist.all_reduce(tensor, group=group)),
    )
    seconds: dict[str, list[float]] = {name: [] for name, _ in contestants}
    for _ in range(repeats):
        for name, run in contestants:
            dist.barrier(group)
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {name: float(np.median(each)) for name, each in seconds.items()}


def pause_s(rank: int, step: int) -> float:
    """Return the seconds that a step takes on a rank: in each step one rank has a hiccup."""
    return 0.040 if step % 4 == rank else 0.005


def last_done_ms(barrier: bool) -> float:
    """Return the ms until the last of four ranks is done, from the pauses alone: its own, or each step's longest
    pause.
    """
    pauses_ms = [[1000 * pause_s(rank, step) for step in range(STEPS)] for rank in range(4)]
    return sum(map(max, zip(*pauses_ms, strict=True))) if barrier else max(map(sum, pauses_ms))


def hiccups(group: dist.ProcessGroup, barrier: bool) -> list[tuple[float, float]]:
    """Return (start, end) of this rank's work in each step, in seconds, with or without a barrier after each step."""
    rank, spans = dist.get_rank(group), []
    dist.barrier(group)
    begin = time.perf_counter()
    for step in range(STEPS):
        start = time.perf_counter() - begin
        time.sleep(pause_s(rank, step))
        spans.append((start, time.perf_counter() - begin))
        if barrier:
            dist.barrier(group)
    return spans
