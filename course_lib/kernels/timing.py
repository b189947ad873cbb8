"""The time of a kernel, measured correctly; and measured incorrectly on purpose.

Four traps:

1. A launch is asynchronous. The host puts the kernel into a queue (a stream) and continues; a Python timer around the
   call measures the launch, some 10 microseconds whatever the kernel does. Put events into the queue instead: the
   device itself records the time when it reaches them.
2. The first run compiles, tunes and allocates. Run until the times are steady before the first run that counts.
3. Caches are warm. A benchmark runs on the same tensors again and again, and finds them in L2 (50 MiB on an H100); a
   training step hardly does. Overwrite a buffer larger than the cache before each run, outside the timed part.
4. One run in many is disturbed (by another process, or a lower clock), and a mean includes it. Take the median, and
   report the spread.

On a GPU `triton.testing.do_bench` avoids all four traps, and is the function to use. `time_kernel` does the same in a
few lines, also on a CPU, and hides the launches of kernels that are shorter than their launch. A CPU works when it is
called, so trap 1 cannot be seen there: `Stream` is a queue with a worker, to show it.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

STEADY = 1.2  # warm: the slowest of the last three runs takes at most this times the fastest
FLUSHED_CACHES = 4  # bytes to overwrite, as a multiple of the cache
UNKNOWN_CACHE = 64 * 2**20  # bytes, if the system does not report it
HEAD_STARTS_S = (0.5e-3, 2e-3, 8e-3, 32e-3)  # launching from Python takes 0.1 ms (a kernel) to some ms (a layer)
CLOCK_HZ = 2e9  # no GPU's clock is much higher


@dataclass(frozen=True)
class Timing:
    """Seconds of each run in order, and their summary."""

    runs_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.runs_s)

    @property
    def low_s(self) -> float:
        """Return the 20th percentile."""
        return sorted(self.runs_s)[round(0.2 * (len(self.runs_s) - 1))]

    @property
    def high_s(self) -> float:
        """Return the 80th percentile."""
        return sorted(self.runs_s)[round(0.8 * (len(self.runs_s) - 1))]


def last_cache_bytes(device: torch.device) -> int:
    """Return the size of the last cache before memory: a GPU's L2, or a CPU's highest level as Linux reports it."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    sizes = [0]
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with contextlib.suppress(OSError, ValueError):
            size = file.read_text().strip()  # as in 32768K
            sizes.append(int(size.rstrip("KMG")) * 2 ** (10 * " KMG".find(size[-1])))
    return max(sizes) or UNKNOWN_CACHE


def flusher(device: torch.device) -> Callable[[], object]:
    """Return a function that empties the caches: it overwrites FLUSHED_CACHES times the size of the last one, and on a
    GPU reads it afterwards. Otherwise L2 would be full of lines that the timed kernel has to write back first.
    """
    cleared = torch.empty(FLUSHED_CACHES * last_cache_bytes(device), dtype=torch.uint8, device=device)
    if device.type == "cpu":
        return cleared.zero_
    return lambda: (cleared.zero_(), cleared.view(torch.int64).sum())


def time_once(run: Callable[[], object], device: torch.device, flush: Callable[[], object]) -> float:
    """Return the seconds of one run after a flush, by the device's own clock.

    On a GPU the host gets a head start: the device sleeps while `run` is being launched. Otherwise the device would
    reach the first event, find the queue empty, and count its wait for the host as the kernel's time. If the host took
    more than half of the head start, the run does not count, and the next one gets a longer head start.
    """
    if device.type == "cpu":
        flush()
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    for head_start_s in HEAD_STARTS_S:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush()
        torch.cuda._sleep(int(head_start_s * CLOCK_HZ))
        begin.record()
        start = time.perf_counter()
        run()
        host_s = time.perf_counter() - start
        end.record()
        end.synchronize()
        if 2 * host_s <= head_start_s:
            break
    return begin.elapsed_time(end) / 1e3


def time_kernel(
    run: Callable[[], object],
    device: torch.device | str | None = None,
    repeats: int = 25,
    warmup: int = 25,
    flush: bool = True,
) -> Timing:
    """Time `run()` on a device (this machine's accelerator, or its CPU): `repeats` runs, after at most `warmup` runs
    until times are steady. flush: from cold caches. On CUDA `run` launches on the current stream.

    Raises ValueError for other kinds of device, or fewer than one run.
    """
    device = torch.device(device or torch.accelerator.current_accelerator(check_available=True) or "cpu")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {device}: it must be cpu or cuda")
    if repeats < 1 or warmup < 1:
        raise ValueError(f"{repeats} runs after {warmup}: both are 1 or more")
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        flushing = flusher(device) if flush else int
        warm: list[float] = []
        while len(warm) < warmup and not (len(warm) >= 3 and max(warm[-3:]) <= STEADY * min(warm[-3:])):
            warm.append(time_once(run, device, flushing))
        return Timing(tuple(time_once(run, device, flushing) for _ in range(repeats)))


def launch_only_seconds(run: Callable[[], object]) -> float:
    """Fall into trap 1 on purpose: return the time of a Python timer around `run()` without a wait."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


class Event:
    """A mark in a stream; the stream's worker records the time when it reaches it."""

    def __init__(self, reached: Future):
        self._reached = reached

    def seconds_until(self, later: Event) -> float:
        """Return the seconds between two marks. Raises RuntimeError if the stream has not reached both: synchronize
        first.
        """
        if not (self._reached.done() and later._reached.done()):
            raise RuntimeError("the stream has not reached both events: call synchronize() first")
        return later._reached.result() - self._reached.result()


class Stream:
    """A CUDA stream without a GPU: one queue, and one thread that processes it in order.

    `launch` returns immediately, and the work runs elsewhere, as on a GPU; but the device is a thread of this process
    (PyTorch releases Python's lock while it computes). As in CUDA, an error is raised by the next `synchronize`, not by
    the launch that caused it, and results of work queued behind it are not valid.

        with Stream() as stream:
            start = stream.record_event()
            stream.launch(torch.mm, a, b)
            end = stream.record_event()
            stream.synchronize()
            print(start.seconds_until(end))
    """

    def __init__(self):
        self._worker = ThreadPoolExecutor(max_workers=1)
        self._queued: list[Future] = []

    def launch(self, work: Callable, *args) -> None:
        """Queue work(*args), and return immediately. Its result is dropped: like a kernel, it writes into its
        arguments.
        """
        self._queued.append(self._worker.submit(work, *args))

    def record_event(self) -> Event:
        """Queue a mark behind all work launched so far."""
        return Event(self._worker.submit(time.perf_counter))

    def synchronize(self) -> None:
        """Wait until the queue is empty. Raises the first error of its work."""
        self._worker.submit(int).result()  # last in the queue, so everything before it is done
        done, self._queued = self._queued, []
        for work in done:
            work.result()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error) -> None:
        self._worker.shutdown()
