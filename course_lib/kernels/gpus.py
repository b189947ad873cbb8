"""A runnable model of a GPU: how blocks fit onto it, and how many bytes must be in flight to keep its memory busy.

A GPU is a row of streaming multiprocessors (SMs); an H100 has 132. An SM runs warps of 32 threads in lockstep, and
switches to another warp whenever one waits: this hides the latency of memory, so an SM needs many warps. A kernel is a
grid of blocks. A block lives on one SM from start to end, and occupies warps, registers and shared memory of the SM for
all that time. Occupancy is the share of an SM's warps that are resident at once:

    warps of a block       = ceil(threads / 32)
    registers of a warp    = ceil(32 x registers of a thread / 256) x 256
    blocks by registers    = 4 x floor(65536 / 4 / registers of a warp) // warps of a block   (each quarter has its own)
    shared memory of block = ceil((bytes + 1024 reserved by CUDA) / 128) x 128
    blocks on an SM        = the minimum over the limits of warps, blocks, registers and shared memory

(cuda_occupancy.h of the CUDA toolkit.) Blocks that do not fit wait. A grid runs in waves of SMs x blocks per SM; one
block more than a wave takes as long as a second wave. Memory with a given latency delivers its bandwidth only while
bandwidth x latency bytes are in flight (Little's law; Volkov 2016, "Understanding Latency Hiding on GPUs").

    occupancy(GPUS["H100"], threads_per_block=256, registers_per_thread=64)    # 4 blocks, half the warps: registers
    waves(GPUS["H100"], blocks=600, blocks_per_sm=4)                           # 2 waves, the second 14% full
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from course_lib.single_gpu.devices import hardware, read_table

WARP = 32  # threads
GIB = 2**30


@dataclass(frozen=True)
class GPU:
    """The resources of a GPU, and the units in which it allocates them. Every figure has its source in course_lib/data:
    memory and tensor-core peaks in hardware.csv, the others in gpu_resources.csv. None: not published.
    """

    name: str
    compute_capability: tuple[int, int]
    sms: int
    cores_per_sm: int  # each one float32 multiply-add per clock
    threads_per_block: int  # at most
    warps_per_sm: int
    blocks_per_sm: int
    registers_per_sm: int  # of 32 bits
    max_registers_per_thread: int
    register_granularity: int  # a warp's registers come in multiples of it
    sub_partitions: int  # of an SM: each has its own scheduler, and its part of the registers
    l1_bytes_per_sm: int  # L1 and shared memory together
    shared_bytes_per_sm: int
    shared_bytes_per_block: int  # at most, for a kernel that requests more than the default 48 KiB
    reserved_shared_bytes: int  # of every block, for CUDA
    shared_granularity: int
    shared_bytes_per_clock: int  # of an SM
    l2_bytes: int
    l2_bytes_per_clock: float | None
    memory_bytes: float
    bytes_per_s: float  # of memory
    memory_latency_s: float | None  # of a read on an idle GPU; under load it is two or three times as long
    clock_hz: float  # the highest
    peak_flops: Mapping[str, float] = field(hash=False)  # dense, by dtype: float32 on the cores, others on tensor cores


def read_resources() -> dict[str, dict[str, str]]:
    """Return the figures of gpu_resources.csv: by GPU or compute capability, then by quantity."""
    values: dict[str, dict[str, str]] = {}
    for row in read_table("gpu_resources.csv"):
        values.setdefault(row["of"], {})[row["quantity"]] = row["value"]
    return values


def load_gpus() -> dict[str, GPU]:
    """Return the GPUs of gpu_resources.csv, with memory and peaks from hardware.csv."""
    resources, sheets = read_resources(), hardware()
    shared = {name: values for name, values in resources.items() if name.startswith("compute capability")}
    gpus = {}
    for name, row_of in resources.items():
        if name in shared:
            continue
        sheet = sheets[row_of["hardware_csv"]]
        common = {
            key: int(value) for key, value in shared[f"compute capability {row_of['compute_capability']}"].items()
        }
        major, minor = row_of["compute_capability"].split(".")
        clock, sms = 1e6 * float(row_of["clock_mhz"]), int(row_of["sms"])
        tensor = {"bfloat16": sheet["bf16_dense_tflops"], "float16": sheet["bf16_dense_tflops"]}
        tensor |= {"float8_e4m3fn": sheet["fp8_dense_tflops"]} if sheet["fp8_dense_tflops"] else {}
        gpus[name] = GPU(
            **common,
            name=row_of["hardware_csv"],
            compute_capability=(int(major), int(minor)),
            sms=sms,
            l2_bytes=int(row_of["l2_bytes"]),
            l2_bytes_per_clock=float(row_of["l2_bytes_per_clock"]) if "l2_bytes_per_clock" in row_of else None,
            memory_bytes=float(sheet["hbm_gb"]) * GIB,
            bytes_per_s=float(sheet["hbm_tb_s"]) * 1e12,
            memory_latency_s=float(row_of["memory_latency_ns"]) * 1e-9 if "memory_latency_ns" in row_of else None,
            clock_hz=clock,
            peak_flops={dtype: float(tflops) * 1e12 for dtype, tflops in tensor.items()}
            | {"float32": 2 * sms * common["cores_per_sm"] * clock},
        )
    return gpus


GPUS = load_gpus()


def format_size(size: float) -> str:
    """Return bytes in the largest unit of which there is at least one."""
    power = min(int(math.log2(size) // 10), 3)
    return f"{size / 2 ** (10 * power):,.4g} {('bytes', 'KiB', 'MiB', 'GiB')[power]}"


@dataclass(frozen=True)
class Occupancy:
    """The occupancy of an SM by a kernel. limited_by: each of warps, blocks, registers, shared memory that would have
    to grow, or be used less, for one more block.
    """

    blocks_per_sm: int
    warps_per_sm: int
    fraction: float  # of the SM's warps
    limited_by: tuple[str, ...]


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple that is not below the value."""
    return -(-value // multiple) * multiple


def blocks_by_registers(gpu: GPU, warps: int, registers_per_thread: int) -> int:
    """Return how many blocks of `warps` warps an SM's registers allow; 0 if not even one starts.

    A warp lives in one of the SM's quarters and has its registers there, so the remainder of a quarter is lost. The
    check at the start of a block counts as if its warps were spread evenly over the quarters.
    """
    of_warp = round_up(WARP * registers_per_thread, gpu.register_granularity)
    if of_warp * round_up(warps, gpu.sub_partitions) > gpu.registers_per_sm:
        return 0
    return gpu.registers_per_sm // gpu.sub_partitions // of_warp * gpu.sub_partitions // warps


# exercise 12.1
def occupancy(gpu: GPU, threads_per_block: int, registers_per_thread: int, shared_bytes: int = 0) -> Occupancy:
    """Return how many blocks of a kernel fit on an SM, by the rules of CUDA's own calculator (cuda_occupancy.h).

    shared_bytes: static and dynamic, per block. limited_by of the result names every limit that allows no more blocks.
    A kernel whose block needs more registers than an SM has gets 0 blocks: CUDA would refuse to start it. Raises
    ValueError for figures that no kernel can have on this GPU.
    """
    for what, value, least, most in (
        ("threads of a block", threads_per_block, 1, gpu.threads_per_block),
        ("registers of a thread", registers_per_thread, 1, gpu.max_registers_per_thread),
        ("bytes of shared memory", shared_bytes, 0, gpu.shared_bytes_per_block),
    ):
        if not least <= value <= most:
            raise ValueError(f"{value} {what}: on {gpu.name} they are {least} to {most}")
    warps = -(-threads_per_block // WARP)
    shared = round_up(shared_bytes + gpu.reserved_shared_bytes, gpu.shared_granularity)
    limits = {
        "warps": gpu.warps_per_sm // warps,
        "blocks": gpu.blocks_per_sm,
        "registers": blocks_by_registers(gpu, warps, registers_per_thread),
        "shared memory": gpu.shared_bytes_per_sm // shared,
    }
    blocks = min(limits.values())
    limited_by = tuple(name for name, limit in limits.items() if limit == blocks)
    return Occupancy(blocks, blocks * warps, blocks * warps / gpu.warps_per_sm, limited_by)


@dataclass(frozen=True)
class Waves:
    """The waves of a grid. Blocks of equal length start and end at the same time."""

    count: int
    tail: float  # the busy fraction of the last wave, 0 to 1
    efficiency: float  # the mean over all waves


def waves(gpu: GPU, blocks: int, blocks_per_sm: int) -> Waves:
    """Return the waves in which a grid of `blocks` blocks runs, `blocks_per_sm` of them on each SM at a time. Raises
    ValueError if either is below 1.
    """
    if blocks < 1 or blocks_per_sm < 1:
        raise ValueError(f"{blocks} blocks, {blocks_per_sm} on an SM: both are 1 or more")
    at_once = gpu.sms * blocks_per_sm
    count = -(-blocks // at_once)
    return Waves(count, (blocks - (count - 1) * at_once) / at_once, blocks / (count * at_once))


def bytes_in_flight(gpu: GPU, latency_s: float) -> float:
    """Return the bytes that must be in flight on the full GPU at every moment for its memory to deliver its bandwidth:
    bandwidth x latency (Little's law).
    """
    if not latency_s > 0:
        raise ValueError(f"a latency of {latency_s} s: it is above 0")
    return gpu.bytes_per_s * latency_s


def loads_per_thread(gpu: GPU, latency_s: float, fraction: float, load_bytes: int) -> float:
    """Return how many loads each thread must have in flight to reach the bandwidth, with this occupancy and this number
    of bytes per load (4 for one float32, 16 for the widest). Below 1 some threads may wait at any time; above, a thread
    must start loads before it uses the first.
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"an occupancy of {fraction}: it is above 0, and 1 at most")
    if load_bytes not in (1, 2, 4, 8, 16):
        raise ValueError(f"a load of {load_bytes} bytes: a thread's loads have 1, 2, 4, 8 or 16")
    threads = gpu.sms * gpu.warps_per_sm * WARP * fraction
    return bytes_in_flight(gpu, latency_s) / (threads * load_bytes)
