"""Timed steps of a split model: all-reduces over a slow link, in a profile, and forwards without the link.

Ranks of one machine share its cores with their messages, so an all-reduce is fast and slows the matmuls down.
`over_a_link` makes it end when its bytes could have arrived over a link of a given bandwidth.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile, record_function

from course_kit.labs.tensor_parallel.models import batch_of, split_model
from course_kit.typed import override, transformer_blocks
from course_lib import tensor_parallel
from course_lib.recompute.profiling import Span, spans
from course_lib.single_gpu.model import PRESETS, ModelConfig
from course_lib.tensor_parallel import linear, regions

SHORT = dataclasses.replace(PRESETS["small"], layers=2)  # more layers show the same


def project_apart(x: torch.Tensor, layers: list[linear.ColumnParallelLinear]) -> tuple[torch.Tensor, ...]:
    """Compute project_together for layers without copies by f and PyTorch's linear layers, without overlap."""
    x = regions.copy_to_group(x, layers[0].group)
    return tuple(F.linear(x, layer.weight) for layer in layers)


class SlowWork:
    """A work that ends when its bytes could have arrived over the link; its wait() is "wait" in the profile."""

    def __init__(self, work: dist.Work, due: float):
        self.work, self.due = work, due

    def wait(self, *args) -> None:
        with record_function("wait"):
            self.work.wait(*args)
            time.sleep(max(0.0, self.due - time.perf_counter()))


def over_a_link(plain: Callable, gb_s: float = 0.25) -> Callable:
    """Return all_reduce over a link that takes one message at a time; the profile notes "link", begin and length."""
    free = 0.0  # when the link is free again

    def all_reduce(tensor, *args, async_op=False, **kwargs):
        nonlocal free
        now, seconds = time.perf_counter(), tensor.nbytes / (1e9 * gb_s)
        start = max(now, free)
        free = start + seconds
        with record_function(f"link {1e3 * (start - now)} {1e3 * seconds}"):  # ms from now, ms
            work = SlowWork(plain(tensor, *args, async_op=True, **kwargs), free)
        return work if async_op else work.wait()

    return all_reduce


def profiled(
    group: dist.ProcessGroup, kind: str | int, batch: int = 8, seq: int = 128, config: ModelConfig = SHORT
) -> list[Span] | None:
    """Return rank 0's spans of six steps over the slow link, None on other ranks.

    kind: "apart", "together" or the number of chunks.
    """
    model = split_model(config, group, chunks=kind if isinstance(kind, int) else 1)
    inputs, targets = batch_of(config, batch, seq)
    if kind == "apart":
        for block in transformer_blocks(model):
            override(block.attention, project_layers=project_apart)
            override(block.mlp, project_layers=project_apart)

    def step() -> None:
        dist.barrier(group)
        with record_function("forward"):
            logits = model(inputs)
            step_loss = tensor_parallel.vocab_parallel_cross_entropy(logits, targets, group, config.vocab)
        with record_function("backward"):
            step_loss.backward()

    with mock.patch.object(dist, "all_reduce", over_a_link(dist.all_reduce)):
        step()
        with profile(activities=[ProfilerActivity.CPU]) as prof:
            for _ in range(6):
                step()
    return spans(prof) if group.rank() == 0 else None


def steps_of(all_spans: list[Span]) -> Iterator[list[Span]]:
    """Yield the spans of each step, from time 0, shortest step first: "forward", "backward" and "wait" in the lane
    "compute", "sum" in the lane "network".
    """
    phases = [span for span in all_spans if span.name in ("forward", "backward")]
    steps = [(phases[i].start_ms, phases[i + 1].end_ms) for i in range(0, len(phases), 2)]
    for start, end in sorted(steps, key=lambda step: step[1] - step[0]):
        step = []
        for span in (span for span in all_spans if start <= span.start_ms < end):
            begins, ends = span.start_ms - start, span.end_ms - start
            if span.name.startswith("link"):
                _, later, long = span.name.split()
                begins += float(later)
                step.append(span._replace(name="sum", lane="network", start_ms=begins, end_ms=begins + float(long)))
            elif span.name in ("forward", "backward", "wait"):
                step.append(span._replace(lane="compute", start_ms=begins, end_ms=ends))
        yield step


def waiting_ms(step: list[Span], phase: str) -> tuple[float, float]:
    """Return the milliseconds that the rank waits for all-reduces in a phase, and the milliseconds of the phase."""
    span_of_phase = next(span for span in step if span.name == phase)
    waits = [
        s.end_ms - s.start_ms
        for s in step
        if s.name == "wait" and span_of_phase.start_ms <= s.start_ms <= span_of_phase.end_ms
    ]
    return sum(waits), span_of_phase.end_ms - span_of_phase.start_ms


def waiting_shares(all_spans: list[Span], phase: str) -> tuple[float, float]:
    """Return medians over the steps: the milliseconds of a phase, and the share of it in which the rank waits."""
    waits, lengths = np.array([waiting_ms(step, phase) for step in steps_of(all_spans)]).T
    return float(np.median(lengths)), float(np.median(waits / lengths))


def forward_times(
    group: dist.ProcessGroup,
    chunk_counts: tuple[int, ...],
    repeats: int = 7,
    batch: int = 4,
    seq: int = 128,
    config: ModelConfig = SHORT,
) -> np.ndarray:
    """On a rank: seconds of a forward without the slow link, [repeats, chunk counts], in alternation."""
    models = [split_model(config, group, chunks=chunks) for chunks in chunk_counts]
    inputs, _ = batch_of(config, batch, seq)
    times: list[list[float]] = []
    for _ in range(repeats):
        times.append([])
        for model in models:
            dist.barrier(group)
            start = time.perf_counter()
            model(inputs)
            times[-1].append(time.perf_counter() - start)
    return np.array(times[2:])
