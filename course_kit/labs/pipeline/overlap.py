"""A forward and a backward of an MoE layer, in sequence and concurrently, over a slow link."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Iterator
from typing import cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from course_lib.expert_parallel.mixture import apply_moe
from course_lib.expert_parallel.model import apply_expert_parallel
from course_lib.pipeline.schedules import dualpipe
from course_lib.pipeline.simulation import simulate
from course_lib.pipeline.stages import StagePass, split_stages
from course_lib.single_gpu.model import ModelConfig, Transformer
from course_lib.tensor_parallel.shards import materialize

WAYS = ("one after the other", "at the same time")
Run = tuple[dict[str, float], list[tuple[str, float, float]]]  # ends of F and B; (F or B, start, end) of exchanges


class Done:
    """A work that has already been waited for."""

    def wait(self) -> bool:
        return True


@contextlib.contextmanager
def slow_link(s_per_mb: float, spans: list) -> Iterator[None]:
    """Make an all-to-all take `s_per_mb` longer, without a core; collect (thread, start, end) of each in `spans`."""
    all_to_all = dist.all_to_all_single

    def slow(output, *args, async_op=False, **kwargs):
        start = time.perf_counter()
        all_to_all(output, *args, async_op=True, **kwargs).wait()
        time.sleep(s_per_mb * output.numel() * output.element_size() / 1e6)
        spans.append((threading.current_thread().name, start, time.perf_counter()))
        return Done() if async_op else None

    with mock.patch.object(dist, "all_to_all_single", slow):
        yield


def mixture_layers(config: ModelConfig) -> list[nn.Module]:
    """Return the same layer twice, with four experts divided among all ranks, each layer with its own process group."""

    def init(name: str, tensor: torch.Tensor) -> None:
        nn.init.normal_(tensor, std=0.05)

    layers = []
    for _ in range(2):
        with torch.device("meta"):
            stage = split_stages(apply_moe(Transformer(config), 4, 2), 3)[1]
        apply_expert_parallel(cast(Transformer, stage), dist.new_group(range(dist.get_world_size())))
        torch.manual_seed(0)
        layers.append(materialize(stage, init))
    return layers


def forward_and_backward(config: ModelConfig, tokens: int, s_per_mb: float, repeats: int = 3) -> dict[str, list[Run]]:
    """On a rank, for both ways: the ends of F and B, and the exchanges, of each repeat, in ms."""
    torch.set_num_threads(1)
    layers = mixture_layers(config)
    spans: list[tuple[str, float, float]] = []
    runs: dict[str, list[Run]] = {way: [] for way in WAYS}
    x = torch.randn(2, tokens // 2, config.hidden)
    for way in WAYS * repeats:
        with slow_link(s_per_mb, spans):
            before = StagePass(layers[1], x, lambda out: out)
            ends: dict[str, float] = {}

            def backward(before: StagePass = before, ends: dict[str, float] = ends) -> None:
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
        runs[way].append(({kind: 1e3 * (end - zero) for kind, end in ends.items()}, exchanges))
    return runs


Spans = dict[str, tuple[float, float]]  # of F and B: start and end


def median_repeats(results: list[dict[str, list[Run]]]) -> dict[str, tuple[Spans, list[tuple[str, float, float]]]]:
    """Return, for both ways, rank 0's spans of F and B and its exchanges in the median repeat, in ms. results: by rank.

    A repeat takes as long as its slowest rank.
    """
    medians = {}
    for way in WAYS:
        lasted = [
            max(max(ends.values()) for ends, _ in repeat)
            for repeat in zip(*(each[way] for each in results), strict=True)
        ]
        ends, exchanges = results[0][way][lasted.index(statistics.median_high(lasted))]
        starts = {"F": 0.0, "B": ends["F"] if way == WAYS[0] else 0.0}
        medians[way] = {kind: (starts[kind], ends[kind]) for kind in "FB"}, exchanges
    return medians


def overlap_saves(medians: dict[str, tuple[Spans, list[tuple[str, float, float]]]]) -> str:
    """Return the times of a pair, one after the other and at the same time, and what that makes of DualPipe's cost."""
    apart, overlapped = (max(end for _, end in medians[way][0].values()) for way in WAYS)
    ratio = overlapped / apart
    costs = [float(simulate(dualpipe(8, 20), t_pair=each).cost) for each in (3, 3 * ratio)]
    return (
        f"t_F + t_B {apart:.0f} ms, t_FB {overlapped:.0f} ms: {ratio:.2f}\n"
        f"DualPipe, p = 8, m = 20: cost {costs[0]:.1f} without overlap, {costs[1]:.1f} at this t_FB (all times 1)"
    )
