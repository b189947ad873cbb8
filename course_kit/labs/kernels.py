"""Measurements of notebook 12: the loads of kernels, their speed on this machine, and the compiler's results."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from unittest import mock

import numpy as np
import torch

from course_kit.gpu.compiled import compile_launches
from course_kit.gpu.launches import Launch
from course_lib.kernels import gpus, matmul, thread_kernels
from course_lib.kernels.thread_blocks import Block, BlockTraffic, run_blocks
from course_lib.kernels.timing import time_kernel

SECTOR = 8  # elements of float32


def device() -> torch.device:
    """Return the device that kernels run on: the GPU, or the CPU if they are interpreted."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


@dataclass(frozen=True)
class CompiledLoop:
    """A function compiled by torch.compile on a CPU, and the time of one call, eager and compiled."""

    compile_s: float
    loop: str  # the generated C++
    eager_s: float
    compiled_s: float
    function: Callable[..., torch.Tensor]  # the compiled one


def compile_on_cpu(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> CompiledLoop:
    """Compile a chain of elementwise operations, and time it eager and compiled."""
    from torch._inductor.utils import run_and_get_code

    compiled = torch.compile(function)
    start = time.perf_counter()
    _, (code, *_) = run_and_get_code(compiled, *inputs)
    compile_s = time.perf_counter() - start
    eager_s, compiled_s = (
        time_kernel(functools.partial(run, *inputs), "cpu", repeats=7, warmup=5).median_s
        for run in (function, compiled)
    )
    loop = code[code.index("        for(") :].split("inductor_cpu")[0]
    return CompiledLoop(compile_s, loop, eager_s, compiled_s, compiled)


def rates_by_size(run: Callable[[torch.Tensor], torch.Tensor], sizes: Sequence[int]) -> list[float]:
    """Return the GB/s of an elementwise function on this CPU, for each number of float32 elements, from warm caches."""
    rates = []
    for numel in sizes:
        x = torch.randn(numel)
        seconds = time_kernel(functools.partial(run, x), "cpu", repeats=9, warmup=5, flush=False).median_s
        rates.append(2 * x.nbytes / seconds / 1e9)
    return rates


def strided_copy(block: Block, source: torch.Tensor, target: torch.Tensor, stride: int) -> None:
    """Copy every stride-th element of source to target, one per thread."""
    block.store(target, block.x, block.load(source, block.x * stride))


def sectors_by_stride(strides: Sequence[int]) -> dict[int, int]:
    """Return the sectors that one request of a warp loads, counted, for strides in elements of float32."""
    source, target = torch.zeros(32 * max(strides)), torch.zeros(32)
    return {s: run_blocks(strided_copy, (1,), (32,), source, target, s).sectors("load") for s in strides}


def first_loads(kernel: Callable, threads: tuple[int, ...], n: int = 32) -> list[np.ndarray]:
    """Return the elements of a and of b that the 32 lanes of warp 0 load for k = 0 in a matmul of [n, n] matrices."""
    seen, count = [], Block.count

    def watch(block: Block, kind: str, array: torch.Tensor, index) -> np.ndarray:
        at = count(block, kind, array, index)
        seen.append(at[:32])
        return at

    with mock.patch.object(Block, "count", watch):
        run_blocks(kernel, (1, 1), threads, *torch.randn(3, n * n).unbind(0), n)
    return seen[:2]


def loaded_map(elements: np.ndarray, n: int = 32) -> np.ndarray:
    """Return a map [n, n] of a row-major matrix: 2 for the loaded elements, 1 for the rest of their sectors, else 0."""
    counts = np.zeros(n * n)
    counts.reshape(-1, SECTOR)[np.unique(elements // SECTOR)] = 1
    counts[elements] = 2
    return counts.reshape(n, n)


def loaded_maps(kernel: Callable, threads: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Return `loaded_map` of a and of b for the first loads of warp 0."""
    return {name: loaded_map(elements) for name, elements in zip("ab", first_loads(kernel, threads), strict=True)}


def fetch_times(
    gpu: gpus.GPU, groups: Sequence[int], side: int = 8192, tile: int = 128
) -> tuple[dict[int, float], float]:
    """Return the microseconds that a wave's strips of a and b take from HBM, by rows in a group, and those of its
    matmuls at the data sheet's peak, for matrices of `side` in BF16.
    """
    tiles, running = side // tile, gpu.sms
    strips = {group: matmul.strips_per_wave(tiles, tiles, group, running) for group in groups}
    fetch_us = {group: 1e6 * n * tile * side * 2 / gpu.bytes_per_s for group, n in strips.items()}
    return fetch_us, 1e6 * running * 2 * tile * tile * side / gpu.peak_flops["bfloat16"]


def ladder_traffic(n: int) -> dict[str, BlockTraffic]:
    """Return the traffic of each kernel of `thread_kernels.LADDER` for a matmul of [n, n] matrices."""
    traffic = {}
    for name, (kernel, threads) in thread_kernels.LADDER.items():
        a, b, c = torch.randn(3, n * n).unbind(0)
        traffic[name] = run_blocks(kernel, (n // thread_kernels.TILE,) * 2, threads, a, b, c, n)
    return traffic


def configuration_table(side: int = 512) -> str:
    """Return registers, spills, shared memory and warps of every configuration of matmul, for an A100 and an H100."""
    a, b, c = (torch.zeros(side, side, dtype=torch.bfloat16) for _ in range(3))
    args = (a, b, c, side, side, side, side, 1, side, 1)
    configurations = matmul.CONFIGURATIONS
    launches = [Launch(matmul.matmul_kernel.fn, (1,), args, each.all_kwargs()) for each in configurations]
    columns = "registers, spilled bytes, shared KiB, warps on an SM"
    lines = [f"{'tile m x n x k':>16s} {'warps':>6s} {'stages':>7s}   {columns}"]
    compiled = zip(configurations, compile_launches(launches, 80), compile_launches(launches, 90), strict=True)
    for each, *made in compiled:
        k = each.kwargs
        line = f"{k['block_m']:>6d} x {k['block_n']} x {k['block_k']:<3d} {each.num_warps:>5d} {each.num_stages:>7d}"
        for one, gpu in zip(made, (gpus.GPUS["A100"], gpus.GPUS["H100"]), strict=True):
            room = gpus.occupancy(gpu, 32 * one.num_warps, one.registers, one.shared_bytes)
            line += (
                f"   sm_{one.capability}: {one.registers:3d}, {one.spilled_bytes:3d}, "
                f"{one.shared_bytes / 1024:5.0f}, {room.warps_per_sm:2d}"
            )
        lines.append(line)
    return "\n".join(lines)
