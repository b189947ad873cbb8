"""A forward and a backward of a layer of experts, in turn and at the same time, over a link that is slowed down."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from course_lib.expert_parallel.mixture import apply_moe
from course_lib.expert_parallel.model import apply_expert_parallel
from course_lib.pipeline.stages import StagePass, split_stages
from course_lib.single_gpu.model import ModelConfig, Transformer
from course_lib.tensor_parallel.shards import materialize

WAYS = ("one after the other", "at the same time")
Round = tuple[dict[str, float], list[tuple[str, float, float]]]  # ends of F and B; (F or B, start, end) of exchanges


class Done:
    """Stands for a transfer that has been waited for."""

    def wait(self) -> bool:
        return True


@contextlib.contextmanager
def slow_link(s_per_mb: float, spans: list) -> Iterator[None]:
    """Inside, an all-to-all takes so much longer, on no core; (thread, start, end) of each goes to `spans`."""
    plain = dist.all_to_all_single

    def slow(output, *args, async_op=False, **kwargs):
        start = time.perf_counter()
        plain(output, *args, async_op=True, **kwargs).wait()
        time.sleep(s_per_mb * output.numel() * output.element_size() / 1e6)
        spans.append((threading.current_thread().name, start, time.perf_counter()))
        return Done() if async_op else None

    dist.all_to_all_single = slow
    try:
        yield
    finally:
        dist.all_to_all_single = plain


def mixture_layers(config: ModelConfig) -> list[nn.Module]:
    """Two times the same layer, four experts spread over all ranks, each with a process group of its own."""
    layers = []
    for _ in range(2):
        with torch.device("meta"):
            stage = split_stages(apply_moe(Transformer(config), 4, 2), 3)[1]
        apply_expert_parallel(stage, dist.new_group(range(dist.get_world_size())))
        torch.manual_seed(0)
        layers.append(materialize(stage, lambda name, tensor: nn.init.normal_(tensor, std=0.05)))
    return layers


def forward_and_backward(config: ModelConfig, tokens: int, s_per_mb: float, rounds: int = 3) -> dict[str, list[Round]]:
    """On a rank, in both ways: of each round the ends of F and B, and the exchanges, in ms."""
    torch.set_num_threads(1)
    layers, spans, found = mixture_layers(config), [], {way: [] for way in WAYS}
    x = torch.randn(2, tokens // 2, config.hidden)
    for way in WAYS * rounds:
        with slow_link(s_per_mb, spans):
            before, ends = StagePass(layers[1], x, lambda out: out), {}

            def backward(before=before, ends=ends):
                before.backward(torch.ones_like(x))
                ends["B"] = time.perf_counter()

            spans.clear()
            dist.barrier()
            zero, other = time.perf_counter(), threading.Thread(target=backward, name="B")
            if way == "at the same time":
                other.start()
            StagePass(layers[0], x, lambda out: out)
            ends["F"] = time.perf_counter()
            if way == "one after the other":
                other.start()
            other.join()
        exchanges = [("B" if lane == "B" else "F", 1e3 * (a - zero), 1e3 * (b - zero)) for lane, a, b in spans]
        found[way].append(({kind: 1e3 * (end - zero) for kind, end in ends.items()}, exchanges))
    return found
