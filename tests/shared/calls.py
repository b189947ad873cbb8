"""What tests on several ranks ask of a call: peak memory, errors, operations; and a short text to train on."""

import collections
import contextlib
import functools
import gc
import inspect
import zlib
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib.single_gpu import training as single_gpu
from course_lib.single_gpu.data import corpus

beginning = functools.cache(corpus)


def short_corpus(characters: int = 200_000):
    """Inside, programs train on the beginning of the corpus: to find and read it takes longer than a short training."""
    return mock.patch.object(single_gpu, "corpus", lambda: beginning(characters))


def short_text(characters: int = 200_000):
    """Inside, course_lib.train trains on the beginning of the corpus, in documents of 5,000 bytes, without a cache."""
    from course_lib.train.streams import Shard, TokenStream  # not above: most tests need no training program

    tokens = np.frombuffer(beginning(characters).encode(), np.uint8)
    ends = np.append(np.arange(5_000, len(tokens), 5_000), len(tokens))
    stream = TokenStream("short text", [Shard(tokens, ends)], zlib.crc32(tokens), [])
    return mock.patch("course_lib.train.text.open_streams", lambda *of: ([stream], 256))


def peak_bytes(run) -> int:
    """Bytes at the peak above what was there before, by the allocator's own count: it needs no order of events, which
    clocks of two cores may give wrongly, and sees blocks that other threads free. Garbage is collected first: freed
    while `run` lasts, it would lower the count.
    """
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as log:
        first = torch.empty(1)
        run()
    nodes, events = list(log.profiler.kineto_results.experimental_event_tree()), []
    while nodes:
        node = nodes.pop()
        nodes += node.children
        if node.typed[0].name == "Allocation":
            events.append(node.typed[1])
    before = next(event.total_allocated for event in events if event.ptr == first.data_ptr())
    return max(event.total_allocated for event in events) - before


KEPT = {"sort_ranks": False} if "sort_ranks" in inspect.signature(dist.new_group).parameters else {}


class Operations(TorchDispatchMode):
    """Counts the operations that PyTorch dispatches meanwhile, each a launch or more on a GPU: `.count`, by name."""

    def __init__(self):
        super().__init__()
        self.count = collections.Counter()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.count[function.overloadpacket.__name__] += 1
        return function(*arguments, **(keywords or {}))


@contextlib.contextmanager
def as_rank(rank: int, size: int):
    """This process is a rank of so many that are not there: nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def new_group(*ranks: int) -> dist.ProcessGroup:
    """A group whose ranks stand in this order; sorted, where PyTorch knows no other (2.11)."""
    return dist.new_group(list(ranks), **KEPT)


def said(function) -> str:
    """The type and message of what a call raises."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
