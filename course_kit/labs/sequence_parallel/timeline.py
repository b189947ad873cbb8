"""A clock for transfers and waits, and the timeline of a layer of a split model."""

from __future__ import annotations

import dataclasses
import threading
import time

import torch
import torch.distributed as dist

from course_kit.labs.sequence_parallel.models import split_model
from course_kit.typed import transformer_blocks
from course_lib.single_gpu.model import PRESETS, rope_angles

Span = tuple[str, str, float, float]  # lane, name, start, end; in ms


class Clock:
    """A context that notes each transfer ("network") and each wait for a transfer ("wait") as `spans`."""

    SENDS = {"all_reduce": "AR", "all_gather_into_tensor": "AG", "reduce_scatter_tensor": "RS"}
    SENDS |= {"all_gather_single": "AG", "reduce_scatter_single": "RS", "batch_isend_irecv": "K, V"}

    def __init__(self):
        self.spans: list[Span] = []

    def now(self) -> float:
        """Return the milliseconds since the clock was entered."""
        return 1e3 * (time.perf_counter() - self.zero)

    def sender(self, name: str):
        """Return a function of torch.distributed whose work is timed."""
        plain, word = self.plain[name], self.SENDS[name]

        def send(*args, async_op=False, **kwargs):
            several = name == "batch_isend_irecv"
            start, works = self.now(), plain(*args, **kwargs) if several else [plain(*args, async_op=True, **kwargs)]
            work = TimedWork(self, word, start, works)
            return [work] if several else work if async_op else work.wait()

        return send

    def __enter__(self) -> Clock:
        self.plain = {name: getattr(dist, name) for name in self.SENDS if hasattr(dist, name)}
        self.zero = time.perf_counter()
        for name in self.plain:
            setattr(dist, name, self.sender(name))
        return self

    def __exit__(self, *error) -> None:
        for name, plain in self.plain.items():
            setattr(dist, name, plain)


class TimedWork:
    """Works whose end is noted by a thread that waits for them."""

    def __init__(self, clock: Clock, word: str, start: float, works: list[dist.Work]):
        def watch() -> None:
            for work in works:
                work.wait()
            clock.spans.append(("network", word, start, clock.now()))

        self.clock, self.word, self.thread = clock, word, threading.Thread(target=watch)
        self.thread.start()

    def wait(self) -> None:
        """Wait for all works, and note the wait."""
        start = self.clock.now()
        self.thread.join()
        self.clock.spans.append(("wait", self.word, start, self.clock.now()))


def layer_timeline(
    group: dist.ProcessGroup, sequence_parallel: bool, batch: int = 4, seq: int = 128, repeats: int = 9
) -> list[Span]:
    """On a rank: the spans and phases of one layer in the fastest of some forwards and backwards."""
    config = dataclasses.replace(PRESETS["small"], layers=1)
    model, runs = split_model(config, group, sequence_parallel), []
    cos, sin = rope_angles(torch.arange(seq), config)
    local = seq // group.size() if sequence_parallel else seq
    x = torch.randn(batch, local, config.hidden, requires_grad=True)
    for _ in range(repeats):
        dist.barrier(group)
        with Clock() as clock:
            out = transformer_blocks(model)[0](x, cos, sin)
            clock.spans.append(("phase", "forward", 0, clock.now()))
            start = clock.now()
            out.backward(torch.ones_like(out))
            clock.spans.append(("phase", "backward", start, clock.now()))
        runs.append((clock.now(), clock.spans))
    return min(runs)[1]
