"""Bandwidth of collectives: timed by size, as nccl-tests defines it, and fitted by a latency and a bandwidth.

time = alpha + bytes / beta: alpha is the latency of a call, however small the tensor, beta the bandwidth for a
large one (Hockney 1994, "The communication challenge for MPP").
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from course_lib.collectives.devices import device_type
from course_lib.collectives.into_tensor import all_gather_into_tensor, reduce_scatter_tensor


# exercise 03.7
def bandwidths(collective: str, size: int, seconds: float, world_size: int) -> tuple[float, float]:
    """Return the algorithm and the bus bandwidth, in bytes per second, of a collective on `size` bytes.

    The definitions follow nccl-tests (doc/PERFORMANCE.md). collective: all_reduce, reduce_scatter, all_gather,
    all_to_all, broadcast or reduce. Raises ValueError for any other.
    """
    n = world_size
    each_shard_once = (n - 1) / n
    factors = {
        "all_reduce": 2 * each_shard_once,
        "reduce_scatter": each_shard_once,
        "all_gather": each_shard_once,
        "all_to_all": each_shard_once,
        "broadcast": 1,
        "reduce": 1,
    }
    if collective not in factors:
        raise ValueError(f"no bus bandwidth is defined for {collective!r}")
    return size / seconds, size / seconds * factors[collective]


def run_collective(collective: str, tensor: torch.Tensor, shard: torch.Tensor, group=None) -> None:
    """All-reduce `tensor`, [N·k], or all-gather it from the ranks' `shard`s, [k], or reduce-scatter it to `shard`."""
    if collective == "all_reduce":
        dist.all_reduce(tensor, group=group)
    elif collective == "all_gather":
        all_gather_into_tensor(tensor, shard, group=group)
    elif collective == "reduce_scatter":
        reduce_scatter_tensor(shard, tensor, group=group)
    else:
        raise ValueError(f"the sweep knows all_reduce, all_gather and reduce_scatter, not {collective!r}")


def time_collective(collective: str, size: int, group=None) -> dict:
    """Time a collective on `size` bytes of float32, rounded down to equal shards. Return the same record on all ranks:
    collective, ranks, bytes, seconds, algbw, busbw (bytes per second).
    """
    n, device = dist.get_world_size(group), torch.device(device_type(group))
    tensor = torch.zeros(max(1, size // (4 * n)) * n, device=device)
    shard, seconds = torch.zeros(tensor.numel() // n, device=device), []
    calls = 20 if device.type != "cpu" else max(1, min(4, 2**23 // tensor.nbytes))  # 20: as nccl-tests
    for _ in range(24 if tensor.nbytes < 2**20 else 4):  # the first one warms up; short ones need more
        dist.barrier(group)
        start = time.perf_counter()
        for _ in range(calls):
            run_collective(collective, tensor, shard, group)
        if device.type != "cpu":
            torch.accelerator.synchronize()
        seconds.append((time.perf_counter() - start) / calls)
    mean = torch.tensor(sorted(seconds[1:])[len(seconds) // 2 - 1] / n, device=device)
    dist.all_reduce(mean, group=group)
    algorithm, bus = bandwidths(collective, tensor.nbytes, mean.item(), n)
    measured = {"bytes": tensor.nbytes, "seconds": mean.item(), "algbw": algorithm, "busbw": bus}
    return {"collective": collective, "ranks": n} | measured


def sweep(collectives: list[str], sizes: list[int], group=None, on_record=lambda record: None) -> list[dict]:
    """Return the record of `time_collective` for each collective and size in bytes; pass each to `on_record`."""
    records = []
    for collective in collectives:
        for size in sizes:
            records.append(time_collective(collective, size, group))
            on_record(records[-1])
    return records


# exercise 03.8
def fit_alpha_beta(sizes: list[int], seconds: list[float]) -> tuple[float, float]:
    """Return alpha (seconds) and beta (bytes per second) of seconds = alpha + size / beta.

    They make the sum of the squared relative errors least. If all sizes are so small that alpha is all there is, beta
    is noise, and may be negative.
    """
    size, time_s = torch.tensor(sizes, dtype=torch.float64), torch.tensor(seconds, dtype=torch.float64)
    matrix = torch.stack([1 / time_s, size / 1e6 / time_s], dim=1)
    alpha, seconds_a_mb = (
        torch.linalg.lstsq(matrix, torch.ones(len(sizes), 1, dtype=torch.float64)).solution.flatten().tolist()
    )
    return alpha, 1e6 / seconds_a_mb
