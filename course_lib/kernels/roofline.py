"""Roofline: the ceiling that bounds a kernel, and how close the kernel is to it.

A kernel that does F floating-point operations and moves B bytes to and from memory has the intensity I = F / B. On a
machine with a peak of P FLOP/s and a bandwidth of W bytes/s it reaches at most

    attainable FLOP/s = min(P, I x W)        time >= max(F / P, B / W)

(Williams, Waterman, Patterson 2009, "Roofline: an insightful visual performance model for multicore architectures").
Left of the ridge, I = P / W, memory bounds the kernel: fewer FLOPs do not help, fewer bytes do, and fusing saves bytes.
An H100's ridge is at 295 FLOP per byte in BF16; a softmax does about 5 operations on each element of 4 bytes moved.

No program reaches the data sheet's ceilings. `measure_roofline` measures the two programs that come closest, a copy and
a large matmul, on the machine at hand.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from course_lib.kernels.gpus import GPU
from course_lib.kernels.timing import last_cache_bytes, time_kernel

ENOUGH_S = 10e-3  # a matmul of this duration is long enough to measure
LARGEST_SIDE = 16384  # of the matrices


@dataclass(frozen=True)
class Roofline:
    """The two ceilings of a machine."""

    peak_flops: float  # FLOP/s
    bytes_per_s: float
    name: str = ""

    def __post_init__(self):
        if not (self.peak_flops > 0 and self.bytes_per_s > 0):
            raise ValueError(f"ceilings {self.peak_flops} FLOP/s, {self.bytes_per_s} bytes/s: both are above 0")

    @property
    def ridge(self) -> float:
        """Return the intensity, in FLOP per byte, above which arithmetic is the bound."""
        return self.peak_flops / self.bytes_per_s

    def attainable(self, intensity: float) -> float:
        """Return the highest FLOP/s of a kernel with this intensity in FLOP per byte."""
        return min(self.peak_flops, intensity * self.bytes_per_s)

    def time(self, flops: float, bytes_moved: float) -> float:
        """Return the shortest time in seconds."""
        return max(flops / self.peak_flops, bytes_moved / self.bytes_per_s)

    def bound(self, flops: float, bytes_moved: float) -> str:
        """Return 'memory' or 'compute', whichever takes longer; 'compute' at the ridge."""
        return "memory" if flops < self.ridge * bytes_moved else "compute"


def roofline_of(gpu: GPU, dtype: torch.dtype = torch.bfloat16) -> Roofline:
    """Return the roofline of the data sheet. Raises ValueError for a dtype whose peak is not in it."""
    word = str(dtype).removeprefix("torch.")
    if word not in gpu.peak_flops:
        raise ValueError(f"{gpu.name} has no peak for {word}: it has {', '.join(gpu.peak_flops)}")
    return Roofline(gpu.peak_flops[word], gpu.bytes_per_s, f"{gpu.name}, {word}, data sheet")


def measure_copy(device: torch.device) -> float:
    """Return the bytes/s that a copy reads and writes, for a buffer eight times as large as the last cache."""
    source = torch.zeros(8 * last_cache_bytes(device), dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    seconds = time_kernel(lambda: target.copy_(source), device, repeats=7, warmup=5).median_s
    return 2 * source.nbytes / seconds


def measure_matmul(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of a square matmul, of the first size, from 256 by doubling, that takes 10 ms."""
    side, seconds = 128, 0.0
    while seconds < ENOUGH_S and side < LARGEST_SIDE:
        side *= 2
        a, b = torch.randn(2, side, side, device=device, dtype=torch.float32).to(dtype)
        out = torch.empty_like(a)

        def matmul(a=a, b=b, out=out):
            torch.mm(a, b, out=out)

        seconds = time_kernel(matmul, device, repeats=3, warmup=3, flush=False).median_s
    return 2 * side**3 / time_kernel(matmul, device, repeats=7, warmup=5, flush=False).median_s


def measure_roofline(device: torch.device | str | None = None, dtype: torch.dtype = torch.float32) -> Roofline:
    """Measure both ceilings on a device (this machine's accelerator, or its CPU), which should be idle."""
    device = torch.device(device or torch.accelerator.current_accelerator(check_available=True) or "cpu")
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "this CPU"
    word = str(dtype).removeprefix("torch.")
    return Roofline(measure_matmul(device, dtype), measure_copy(device), f"{where}, {word}, measured")
