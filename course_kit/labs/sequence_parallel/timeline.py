"""A clock for transfers and for the waits for them, and a layer of a split model under it."""

from __future__ import annotations

import dataclasses
import threading
import time

import torch
import torch.distributed as dist

from course_kit.labs.sequence_parallel.models import split_model
from course_lib.single_gpu.model import PRESETS, rope_angles

Span = tuple[str, str, float, float]  # lane, name, start, end; in ms


class Clock:
    """Notes each transfer ("network") and each wait for one ("wait") inside, as `spans`."""

    SENDS = {"all_reduce": "AR", "all_gather_into_tensor": "AG", "reduce_scatter_tensor": "RS"}
    SENDS |= {"all_gather_single": "AG", "reduce_scatter_single": "RS", "batch_isend_irecv": "K, V"}

    def __init__(self):
        self.spans: list[Span] = []

    def now(self) -> float:
        """Milliseconds since the clock was entered."""
        return 1e3 * (time.perf_counter() - self.zero)

    def sender(self, name: str):
        """A function of torch.distributed whose work is timed."""
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

    def __exit__(self, *error):
        for name, plain in self.plain.items():
            setattr(dist, name, plain)


class TimedWork:
    """Some works whose true end is noted, by a thread that waits for them."""

    def __init__(self, clock: Clock, word: str, start: float, works: list[dist.Work]):
        def watch():
            for work in works:
                work.wait()
            clock.spans.append(("network", word, start, clock.now()))

        self.clock, self.word, self.thread = clock, word, threading.Thread(target=watch)
        self.thread.start()

    def wait(self) -> None:
        """Wait for all of them, and note the wait."""
        start = self.clock.now()
        self.thread.join()
        self.clock.spans.append(("wait", self.word, start, self.clock.now()))


def layer_timeline(
    group: dist.ProcessGroup, sequence_parallel: bool, batch: int = 4, seq: int = 128, rounds: int = 9
) -> list[Span]:
    """On a rank: the spans of the shortest of some forwards and backwards of one layer, and its phases."""
    config = dataclasses.replace(PRESETS["small"], layers=1)
    model, found = split_model(config, group, sequence_parallel), []
    cos, sin = rope_angles(torch.arange(seq), config)
    own = seq // group.size() if sequence_parallel else seq
    x = torch.randn(batch, own, config.hidden, requires_grad=True)
    for _ in range(rounds):
        dist.barrier(group)
        with Clock() as clock:
            out = model.blocks[0](x, cos, sin)
            clock.spans.append(("phase", "forward", 0, clock.now()))
            start = clock.now()
            out.backward(torch.ones_like(out))
            clock.spans.append(("phase", "backward", start, clock.now()))
        found.append((clock.now(), clock.spans))
    return min(found)[1]
