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

import math
from collections.abc import Mapping, Sequence
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


def draw_roofline(
    ax, rooflines: Sequence[Roofline], points: Mapping[str, tuple[float, float, float | None]] | None = None
) -> None:
    """Draw attainable FLOP/s by intensity, both logarithmic: a line per roofline, and kernels on it.

    points: by name, FLOPs, bytes moved, and seconds. A kernel without seconds (None) is drawn hollow, on the first
    roofline: at its upper bound. Raises ValueError if there is no roofline, or a point is not positive.
    """
    points = points or {}
    if not rooflines:
        raise ValueError("no roofline to draw")
    for name, (flops, size, seconds) in points.items():
        if not (flops > 0 and size > 0 and (seconds is None or seconds > 0)):
            raise ValueError(f"{name}: {flops} FLOPs, {size} bytes, {seconds} s: each must be above 0")
    intensities = [flops / size for flops, size, _ in points.values()] + [line.ridge for line in rooflines]
    low, high = min(intensities) / 8, max(intensities) * 8
    for line, color in zip(rooflines, ("0.2", "#4C72B0", "#DD8452", "#55A868", "#C44E52"), strict=False):
        corners = [low, line.ridge, high]
        ax.plot(corners, [line.attainable(each) for each in corners], color=color, label=line.name)
        ax.plot(line.ridge, line.peak_flops, "|", color=color, markersize=11)
    lowest = min(line.attainable(low) for line in rooflines)
    for position, (name, (flops, size, seconds)) in enumerate(points.items()):
        intensity = flops / size
        reached = rooflines[0].attainable(intensity) if seconds is None else flops / seconds
        lowest = min(lowest, reached / 3)
        ax.plot(intensity, reached, "o", color="#C44E52", fillstyle="none" if seconds is None else "full", markersize=5)
        share = "" if seconds is None else f", {reached / rooflines[0].attainable(intensity):.0%}"
        left = intensity**2 < low * high  # the label is on the side with more room
        aside = {"textcoords": "offset points", "xytext": (7 if left else -7, -9 - 10 * (position % 2)), "fontsize": 8}
        aside["ha"] = "left" if left else "right"
        ax.annotate(f"{name}{share}", (intensity, reached), **aside)
    ax.set(xscale="log", yscale="log", xlim=(low, high))
    ax.set_ylim(lowest, 10 ** math.ceil(math.log10(1.5 * max(line.peak_flops for line in rooflines))))
    ax.set_xlabel("intensity, FLOP a byte moved", fontsize=8.5)
    ax.set_ylabel("FLOP/s", fontsize=8.5)
    ax.tick_params(labelsize=8)
    ax.grid(alpha=0.3)
    if any(line.name for line in rooflines):
        ax.legend(frameon=False, fontsize=8, loc="lower right")
    ax.spines[["top", "right"]].set_visible(False)
